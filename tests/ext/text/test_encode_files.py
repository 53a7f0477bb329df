"""Characters without a token: an error if they would be dropped silently, and a count if they become unknown tokens."""

from pathlib import Path

import numpy as np
import pytest

from lightning_dilated.data import encode_files
from lightning_dilated.ext.text import encode_files as tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="the extra tokenizers is not installed")
from tokenizers import models, normalizers, pre_tokenizers, trainers  # noqa: E402


def write(folder: Path, **texts: str) -> list[str]:
    for name, text in texts.items():
        (folder / name).write_bytes(text.encode())
    return [str(folder / name) for name in texts]


def test_characters_without_a_token_are_not_left_out(tmp_path: Path) -> None:
    """A BPE of upper-case bases raises on a genome with repeats in lower case."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.train_from_iterator(["ACGTACGGTA" * 20], trainers.BpeTrainer(vocab_size=20, show_progress=False))
    bpe.save(str(tmp_path / "t.json"))
    with pytest.raises(ValueError, match=r"a.txt holds 'c' \(U\+0063\), 'g' \(U\+0067\), .*silently drop"):
        encode_files(tmp_path / "t.json", write(tmp_path, **{"a.txt": "ACGTcgC"}), tmp_path / "a.bin", documents=False)
    encoded = encode_files(tmp_path / "t.json", write(tmp_path, b="ACGT\nACG"), tmp_path / "b.bin", documents=False)
    got = np.fromfile(encoded.path, np.uint16).tolist()
    assert got == bpe.encode("ACGT\nACG").ids and encoded.tokens == len(got)
    assert "".join(map(bpe.id_to_token, got)) == "ACGTACG"


AFFIXED = {
    "end of a word": ("axb ax", r"a.txt holds 'x' \(U\+0078\), which the tokenizer would"),
    "inside a word": ("ab a<s>b<", r"a.txt holds '<' \(U\+003C\), which the token"),  # "<s>" is a token, "<" is not
    "all there": ("ab ax\nb<s>x", None),
    "a word at cuts": ("c" * 2000 + "x b", None),  # c has a token, but not at the end of words
}


@pytest.mark.parametrize("name", AFFIXED)
def test_what_is_left_out_depends_on_the_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With a BPE suffix for word ends, x has a token only at word ends. Pieces of 300 characters split words."""
    monkeypatch.setattr(tokenizer, "PIECE", 300)
    monkeypatch.setattr(tokenizer, "OVERLAP", 128)
    text, says = AFFIXED[name]
    vocabulary = {x: i for i, x in enumerate(["a", "b", "c", "a</w>", "b</w>", "x</w>"])}
    bpe = tokenizers.Tokenizer(models.BPE(vocabulary, [], end_of_word_suffix="</w>"))
    bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    bpe.add_special_tokens(["<s>"])
    bpe.save(str(tmp_path / "t.json"))
    files = write(tmp_path, **{"a.txt": text})
    if says:
        with pytest.raises(ValueError, match=says):
            encode_files(tmp_path / "t.json", files, tmp_path / "a.bin", documents=False)
        return
    encoded = encode_files(tmp_path / "t.json", files, tmp_path / "a.bin", documents=False)
    got = np.fromfile(encoded.path, np.uint16).tolist()
    assert got == bpe.encode(text).ids and len(got) == len("".join(text.replace("<s>", "S").split()))


def test_what_is_left_out_is_seen_around_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A character without a token is found at every position, even where two pieces overlap."""
    monkeypatch.setattr(tokenizer, "PIECE", 60)
    monkeypatch.setattr(tokenizer, "OVERLAP", 32)
    bpe = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    bpe.save(str(tmp_path / "t.json"))
    for at in range(150):
        files = write(tmp_path, a="a" * at + "x" + "a" * (149 - at))
        with pytest.raises(ValueError, match="a holds 'x'"):
            encode_files(tmp_path / "t.json", files, tmp_path / "a.bin", documents=False)


@pytest.mark.parametrize("affix", ["end_of_word_suffix", "continuing_subword_prefix"])
def test_a_trained_affix_is_no_reason_to_refuse(tmp_path: Path, affix: str) -> None:
    """In "box fox bof", x occurs only at word ends and b only at word starts, so only these forms have tokens."""
    mark = {"end_of_word_suffix": "</w>", "continuing_subword_prefix": "##"}[affix]
    bpe = tokenizers.Tokenizer(models.BPE(**{affix: mark}))
    bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    bpe.train_from_iterator(["box fox bof"], trainers.BpeTrainer(**{affix: mark}, show_progress=False))
    bpe.save(str(tmp_path / "t.json"))
    encoded = encode_files(tmp_path / "t.json", write(tmp_path, a="box fox"), tmp_path / "a.bin", documents=False)
    assert np.fromfile(encoded.path, np.uint16).tolist() == bpe.encode("box fox").ids
    with pytest.raises(ValueError, match=r"b holds 'b' \(U\+0062\), which the tokenizer would"):
        encode_files(tmp_path / "t.json", write(tmp_path, b="box fob"), tmp_path / "b.bin", documents=False)


@pytest.mark.parametrize("affix", ["end_of_word_suffix", "continuing_subword_prefix"])
def test_tokens_of_all_bytes_do_not_do_where_an_affix_is_needed(tmp_path: Path, affix: str) -> None:
    alphabet = {x: i for i, x in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    bpe = tokenizers.Tokenizer(models.BPE(alphabet, [], **{affix: "##"}))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.save(str(tmp_path / "t.json"))
    with pytest.raises(ValueError, match="holds 'b'"):
        encode_files(tmp_path / "t.json", write(tmp_path, a="ab"), tmp_path / "a.bin", documents=False)


def test_what_is_left_out_depends_on_the_normaliser(tmp_path: Path) -> None:
    """The letter e and the accent have tokens, but their NFC form has none."""
    bpe = tokenizers.Tokenizer(models.BPE({"e": 0, "\u0301": 1}, []))
    bpe.normalizer = normalizers.NFC()
    bpe.save(str(tmp_path / "t.json"))
    with pytest.raises(ValueError, match=r"a holds 'e' \(U\+0065\), which the tokenizer would silently drop"):
        encode_files(tmp_path / "t.json", write(tmp_path, a="eee\u0301e"), tmp_path / "a.bin", documents=False)


BYTES = {f"<0x{x:02X}>": x for x in range(256)}
FALLBACK = {
    "all bytes": (BYTES, "é", None),
    "all but one": ({k: v for k, v in BYTES.items() if k != "<0xA9>"}, "é", "holds 'é'"),
}


@pytest.mark.parametrize("name", FALLBACK)
def test_falling_back_to_bytes_takes_all_of_them(tmp_path: Path, name: str) -> None:
    vocabulary, text, says = FALLBACK[name]
    tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True)).save(str(tmp_path / "t.json"))
    arguments = tmp_path / "t.json", write(tmp_path, a=text), tmp_path / "a.bin"
    if says:
        with pytest.raises(ValueError, match=says):
            encode_files(*arguments, documents=False)
    else:
        assert encode_files(*arguments, documents=False).tokens == 2


UNKNOWN = {
    "Unigram": models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -1.5)], unk_id=0),
    "WordPiece": models.WordPiece({"<unk>": 0, "a": 1, "##a": 2}, unk_token="<unk>"),
    "BPE": models.BPE({"a": 1, "b": 2, "<unk>": 0}, [], unk_token="<unk>"),
}


@pytest.mark.parametrize(
    ("kind", "text", "want"), [("Unigram", "abzzab", 1), ("WordPiece", "a z aa", 1), ("BPE", "abzzab", 2)]
)
def test_unknown_tokens_are_counted(tmp_path: Path, kind: str, text: str, want: int) -> None:
    bpe = tokenizers.Tokenizer(UNKNOWN[kind])
    if kind == "WordPiece":
        bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    bpe.save(str(tmp_path / "t.json"))
    encoded = encode_files(tmp_path / "t.json", write(tmp_path, a=text), tmp_path / "a.bin", documents=False)
    assert encoded.unknown == want == bpe.encode(text).ids.count(0)
