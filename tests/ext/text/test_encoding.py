"""Text files to tokens: equal to encoding the whole text, with documents for TokenDataModule, and refusals."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_dilated.data import TokenDataModule, encode_files
from lightning_dilated.ext.text import encode_files as tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="the extra tokenizers is not installed")
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers  # noqa: E402

END = "<|end|>"
TEXT = "The quick brown fox jumps over the lazy dog; naïve cafés, 東京 and 🦊🦊!\n\n  It's 1,024 steps…   away.\r\n" * 8


def trained(kind: str = "bytes", size: int = 400, special: tuple[str, ...] = (END,)) -> "tokenizers.Tokenizer":
    """Train a tiny BPE: "bytes" like GPT-2, "marked" with marks for spaces like Llama, others without word splits."""
    bpe = tokenizers.Tokenizer(models.BPE(unk_token=None))
    alphabet = []
    if kind == "bytes":
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
    elif kind == "marked":
        bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    elif kind == "composed":
        bpe.normalizer = normalizers.NFD()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([TEXT, "ab ac ad ", "a" * 64], trainer)
    return bpe


@pytest.fixture
def saved(tmp_path: Path) -> str:
    trained().save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def write(folder: Path, **texts: str) -> list[str]:
    for name, text in texts.items():
        (folder / name).write_bytes(text.encode())
    return [str(folder / name) for name in texts]


@pytest.mark.parametrize("kind", ["bytes", "marked", "composed", "plain"])
def test_pieces_give_the_tokens_of_the_whole_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The text has words in random order, blanks, long runs and special tokens. Pieces of 300 characters cut words."""
    monkeypatch.setattr(tokenizer, "PIECE", 300)
    monkeypatch.setattr(tokenizer, "OVERLAP", 128)
    trained_tokenizer, draw = trained(kind), random.Random(0)
    trained_tokenizer.save(str(tmp_path / "t.json"))
    words = [*TEXT.split(" "), "\n", "\n\n\n", " " * 7, END, "aaa", "\t", "naïve" * 5]
    texts = {f"{i}.txt": " ".join(draw.choices(words, k=draw.choice([1, 40, 300, 900]))) for i in range(12)}
    texts["run.txt"] = "ab " * 50 + "a" * 5001 + " ac" * 500
    texts["blank.txt"] = "ab" + " " * 3333 + "ac" * 500
    encoded = encode_files(tmp_path / "t.json", write(tmp_path, **texts), tmp_path / "out.bin")
    got = np.fromfile(tmp_path / "out.bin", np.uint16).tolist()
    end = trained_tokenizer.token_to_id(END)
    want = [[*trained_tokenizer.encode(text, add_special_tokens=False).ids, end] for text in texts.values()]
    assert got == [x for ids in want for x in ids]
    assert encoded.tokens == len(got) and encoded.documents == got.count(end) > encoded.files == len(texts)
    assert encoded.bytes_per_token == sum(len(x.encode()) for x in texts.values()) / len(got)


def test_what_pieces_disagree_on_is_encoded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pairing of quotes depends on all earlier text, and quotes are everywhere, so no cut is possible."""
    monkeypatch.setattr(tokenizer, "PIECE", 300)
    monkeypatch.setattr(tokenizer, "OVERLAP", 128)
    bpe, draw = trained("plain"), random.Random(0)
    bpe.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex('"[^"]*"'), "isolated")
    bpe.train_from_iterator(['"ab" ab "ac" a" " "b'] * 9, trainers.BpeTrainer(vocab_size=60, show_progress=False))
    bpe.save(str(tmp_path / "t.json"))
    text = "".join(f'{draw.choice(["ab ", "ac", "a"]) * draw.randint(1, 9)}"' for _ in range(300))
    encoded = encode_files(tmp_path / "t.json", write(tmp_path, a=text), tmp_path / "a.bin", documents=False)
    assert np.fromfile(encoded.path, np.uint16).tolist() == bpe.encode(text).ids


def test_pieces_are_joined_far_from_their_ends() -> None:
    """Pieces join at the first token of the overlap's middle half, if ids and positions in this half agree."""
    count, quarter = tokenizer.OVERLAP, tokenizer.OVERLAP // 4

    def piece(begin: int, size: int, changed: int | None = None, longer: int = 0) -> tokenizer._Piece:
        starts = np.arange(size)
        ids = starts + begin
        if changed is not None:
            ids[changed] = -1
        return tokenizer._Piece("a", begin, "", False, ids, np.stack([starts, starts + 1 + longer], 1))

    left, right = piece(0, 9000), 9000 - count
    assert tokenizer._seam(left, piece(right, 9000)) == (right + quarter, quarter)
    for changed, joined in [(quarter - 1, True), (quarter, False), (3 * quarter - 1, False), (3 * quarter, True)]:
        assert (tokenizer._seam(left, piece(right, 9000, changed)) is not None) == joined
    assert tokenizer._seam(left, piece(right, 9000, longer=1)) is None


def test_token_data_reads_it(tmp_path: Path, saved: str) -> None:
    """Sequences are the texts one after the other, and a document ends where a file ends."""
    texts = {"a.txt": TEXT[:200], "b.txt": "fox", "c.txt": TEXT[300:900]}
    encoded = encode_files(saved, write(tmp_path, **texts), tmp_path / "train.bin")
    assert (encoded.dtype, encoded.vocab_size, encoded.eos_token, encoded.documents) == (
        "uint16",
        trained().get_vocab_size(),
        0,
        3,
    )
    data = TokenDataModule(
        encoded.path, encoded.tokens - 1, encoded.vocab_size, dtype=encoded.dtype, eos_token=encoded.eos_token,
        val_fraction=0, test_fraction=0,
    )  # fmt: skip
    sample = data.dataset("train")[0]
    tokenizer, bounds = trained(), sample["cu_seqlens"].tolist()
    cut = [sample["tokens"][a:b].tolist() for a, b in itertools.pairwise(bounds)]
    assert [tokenizer.decode(ids) for ids in cut] == list(texts.values())
    assert (sample["labels"] == -100).nonzero()[:, 0].tolist() == [x - 1 for x in bounds[1:-1]]
    assert sample["tokens"].dtype == torch.int64


def test_documents_may_be_left_out_or_named(tmp_path: Path) -> None:
    trained(special=("<s>", "</s>")).save(str(tmp_path / "two.json"))
    files = write(tmp_path, a="fox", b="dog")
    plain = encode_files(tmp_path / "two.json", files, tmp_path / "plain.bin", documents=False)
    ended = encode_files(tmp_path / "two.json", files, tmp_path / "ended.bin", eos_token="</s>")
    assert (plain.documents, plain.eos_token, ended.documents, ended.eos_token) == (0, None, 2, 1)
    assert ended.tokens == plain.tokens + 2 and np.fromfile(ended.path, np.uint16)[-1] == 1


def test_a_large_vocabulary_is_written_as_uint32(tmp_path: Path) -> None:
    """One token id exceeds uint16. A vocabulary may have unused ids."""
    for top, kind in ((65535, "uint16"), (65536, "uint32")):
        vocabulary = {"[UNK]": 0, "fox": 7, "dog": top}
        bpe = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        bpe.pre_tokenizer = pre_tokenizers.Whitespace()
        bpe.save(str(tmp_path / f"{kind}.json"))
        file = write(tmp_path, a="dog fox cat")
        encoded = encode_files(tmp_path / f"{kind}.json", file, tmp_path / f"{kind}.bin", documents=False)
        assert (encoded.dtype, encoded.vocab_size, encoded.unknown) == (kind, top + 1, 1)
        assert np.fromfile(encoded.path, kind).tolist() == [top, 7, 0]


def test_truncation_and_templates_of_the_file_are_left_alone(tmp_path: Path) -> None:
    bpe = trained()
    bpe.enable_truncation(5)
    bpe.enable_padding(length=3000, pad_id=0, pad_token=END)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(f"{END} $A", special_tokens=[(END, 0)])
    bpe.save(str(tmp_path / "t.json"))
    encoded = encode_files(tmp_path / "t.json", write(tmp_path, a=TEXT), tmp_path / "a.bin", documents=False)
    assert trained().decode(np.fromfile(encoded.path, np.uint16).tolist(), skip_special_tokens=False) == TEXT


def test_memory_does_not_grow_with_the_file(tmp_path: Path, saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest input to the tokenizer does not depend on the length of the file."""
    monkeypatch.setattr(tokenizer, "PIECE", 1000)
    monkeypatch.setattr(tokenizer, "OVERLAP", 256)
    texts, real = [], tokenizer._encoded

    def watched(tokenizer, pieces):
        for piece in real(tokenizer, pieces):
            texts.append(len(piece.text))
            yield piece

    monkeypatch.setattr(tokenizer, "_encoded", watched)
    encode_files(saved, write(tmp_path, a=TEXT * 200), tmp_path / "a.bin")
    assert max(texts) == 1256 and len(texts) > 100


# -- what is refused ---------------------------------------------------------------------------------------------------
BAD = {
    "no such tokenizer": (
        {"tokenizer": "none.json"},
        {},
        FileNotFoundError,
        "none.json: no such file. Pass a tokenizer",
    ),
    "no tokenizer": ({"tokenizer": "a"}, {"a": "{"}, ValueError, "a cannot be read .*EOF"),
    "another json": ({"tokenizer": "a"}, {"a": "{}"}, ValueError, "a cannot be read .*Pass a tokenizer.json"),
    "missing": ({"inputs": "gone.txt"}, {}, FileNotFoundError, "gone.txt does not exist; pass existing text files"),
    "no inputs": ({"inputs": []}, {}, ValueError, "inputs is an empty list"),
    "empty file": ({}, {"b.txt": b""}, ValueError, r"b.txt is empty: .* leave it out"),
    "Latin-1": ({}, {"b.txt": b"caf\xe9 x"}, ValueError, r"b.txt is not UTF-8 text: byte 3 .* is 0xe9"),
    "cut off": ({}, {"b.txt": "é".encode()[:1]}, ValueError, r"b.txt is not UTF-8 text: byte 0 .*unexpected end"),
    "far": ({}, {"b.txt": b"x" * 3_000_000 + b"\xff"}, ValueError, r"byte 3,000,000 \(counted from 0\) is 0xff"),
    "split": (
        {},
        {"b.txt": b"x" * ((1 << 20) - 1) + b"\xe2\x82x"},
        ValueError,
        r"byte 1,048,575 \(counted from 0\) is 0xe2",
    ),
    "suffix": ({"out": "a.npy"}, {}, ValueError, "let its name end in .bin"),
    "there": ({"out": "b.bin"}, {"b.bin": b"x"}, FileExistsError, "b.bin exists already"),
    "no folder": ({"out": "x/b.bin"}, {}, FileNotFoundError, "x does not exist; make it first"),
    "no such token": ({"eos_token": "</s>"}, {}, ValueError, r"no token '</s>' .*special tokens are <\|end\|>"),
    "both": ({"eos_token": END, "documents": False}, {}, ValueError, "documents are off"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_before_anything_is_written(tmp_path: Path, saved: str, name: str) -> None:
    options, files, error, says = BAD[name]
    for file, content in {"a.txt": TEXT, **files}.items():
        (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    before = sorted(tmp_path.iterdir())
    arguments = {"tokenizer": saved, "inputs": str(tmp_path / "*.txt"), "out": tmp_path / "out.bin"}
    paths = {k: v if k == "eos_token" or not isinstance(v, str) else str(tmp_path / v) for k, v in options.items()}
    with pytest.raises(error, match=says):
        encode_files(**{**arguments, **paths})
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("special", [(), ("<s>", "</s>")], ids=["none", "two"])
def test_which_token_ends_a_document_is_not_guessed(tmp_path: Path, special: tuple[str, ...]) -> None:
    trained(special=special).save(str(tmp_path / "t.json"))
    there = "its special tokens are <s>, </s>" if special else "it has no special tokens"
    with pytest.raises(ValueError, match=f"which token of .* ends a document.*{there}"):
        encode_files(tmp_path / "t.json", write(tmp_path, a="fox"), tmp_path / "a.bin")


def test_what_has_all_bytes_is_encoded_once(tmp_path: Path, saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, real = [], tokenizer._encodings
    monkeypatch.setattr(tokenizer, "_encodings", lambda *x: pieces.append(x) or real(*x))
    encode_files(saved, write(tmp_path, a=TEXT), tmp_path / "a.bin")
    trained("marked").save(str(tmp_path / "marked.json"))
    encode_files(tmp_path / "marked.json", write(tmp_path, a=TEXT), tmp_path / "b.bin")
    assert len(pieces) == 1 + 2


def test_half_a_character_is_not_left_out(tmp_path: Path) -> None:
    """The BPE lacks the second byte of ê (0xc3 0xaa), but has the first, because its training text contains é."""
    bpe = trained()
    bpe.model = models.BPE()
    bpe.train_from_iterator(["é and ü"], trainers.BpeTrainer(special_tokens=[END], show_progress=False))
    assert len(bpe.encode("ê").ids) == 1
    bpe.save(str(tmp_path / "t.json"))
    with pytest.raises(ValueError, match=r"a holds 'ê' \(U\+00EA\), which the tokenizer would"):
        encode_files(tmp_path / "t.json", write(tmp_path, a="and ê é ü"), tmp_path / "a.bin")
    assert encode_files(tmp_path / "t.json", write(tmp_path, b="and é ü" + END), tmp_path / "b.bin").documents == 2


def test_a_run_without_a_cut_is_named_and_nothing_stays(
    tmp_path: Path, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("PIECE", 300), ("OVERLAP", 128), ("LONGEST", 2000)):
        monkeypatch.setattr(tokenizer, name, value)
    file = write(tmp_path, **{"a.txt": "ab " * 200 + "a" * 5001})
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"a.txt: the tokenizer finds no place to cut the text after character 300"):
        encode_files(saved, file, tmp_path / "out.bin")
    assert sorted(tmp_path.iterdir()) == before


def test_without_the_library(saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"'lightning-dilated\[tokenizers\]'"):
        encode_files(saved, str(tmp_path), tmp_path / "out.bin")
