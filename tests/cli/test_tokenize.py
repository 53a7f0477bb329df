"""`tokenize`, then `fit` with the printed options, then `generate` as text, and the errors of each."""

import io
import shlex
import sys
from pathlib import Path

import pytest
import torch

from lightning_dilated.ext.decoding import command as generate
from lightning_dilated.ext.decoding.load import load_language_model
from lightning_dilated.ext.text.tokenizer import decoded

from .conftest import TRAINER, Result, run_in

tokenizers = pytest.importorskip("tokenizers", reason="the extra tokenizers is not installed")
from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: E402

pytestmark = pytest.mark.full

V, END, SENTENCE = 270, "<|end|>", "The naïve fox naps; 東京 🦊. "
SIZES = [*("--data.seq_len", "64", "--data.val_fraction", "0.2", "--data.test_fraction", "0", "--data.val_limit", "2")]
PATTERN = ["--model.pattern", '{"segment_lengths": [16, 64], "dilation_rates": [1, 4]}']


def trained(kind: str = "bytes", size: int = V) -> "tokenizers.Tokenizer":
    bpe = tokenizers.Tokenizer(models.BPE(unk_token=None if kind == "bytes" else "<unk>"))
    split, decoder = (
        (pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel())
        if kind == "bytes"
        else (pre_tokenizers.Metaspace(), decoders.Metaspace())
    )
    bpe.pre_tokenizer, bpe.decoder = split, decoder
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else []
    special = [END] if kind == "bytes" else [END, "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([SENTENCE * 3], trainer)
    return bpe


def write(folder: Path) -> None:
    trained().save(str(folder / "tokenizer.json"))
    (folder / "a.txt").write_text(SENTENCE * 60)
    (folder / "b.txt").write_text(SENTENCE[::-1] * 20)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Result]:
    """Results of `tokenize`, and of a tiny quickstart `fit` with the arguments that it printed."""
    folder = tmp_path_factory.mktemp("tokens")
    write(folder)
    result = run_in(folder, "tokenize", "--tokenizer", "tokenizer.json", "--out", "train.bin", "a.txt", "b.txt").ok()
    arguments = shlex.split(result.out.splitlines()[-1].removeprefix("train on it: "))
    sizes = ["--model.dim", "16", "--model.depth", "1", *PATTERN, *SIZES, *TRAINER]
    fitted = run_in(folder, "fit", "--config", "quickstart.yaml", *arguments, *sizes)
    return result, fitted


CKPT = Path("runs") / "quickstart" / "version_0" / "checkpoints" / "last.ckpt"


def test_what_is_printed_trains(made):
    result, fitted = made
    tokens = (result.folder / "train.bin").stat().st_size // 2
    size = sum((result.folder / name).stat().st_size for name in ("a.txt", "b.txt"))
    first, second, _ = result.out.splitlines()
    assert first == f"train.bin: {tokens:,} tokens (uint16) of 2 files, 2 documents"
    assert second == f"bytes per token: {size / tokens:.4f} ({size:,} bytes of text)"
    assert fitted.code == 0, fitted.err[-2000:]
    model = load_language_model(fitted.folder / CKPT, V)
    assert model.vocab_size == trained().get_vocab_size() == V and model.bytes_per_token == round(size / tokens, 4)


def test_generate_prints_text(made):
    folder, tokenizer, prompt = made[0].folder, trained(), "naïve 東 "
    arguments = (
        "generate",
        "--ckpt_path",
        CKPT,
        "--tokenizer",
        "tokenizer.json",
        "--prompt",
        prompt,
        "--temperature",
        0,
    )
    result = run_in(folder, *map(str, arguments), "--max_new_tokens", "40").ok()
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    tokens = load_language_model(folder / CKPT, V).generate(ids, 40, temperature=0)[0].tolist()
    assert result.out == tokenizer.decode(tokens, skip_special_tokens=False) + "\n"
    assert run_in(folder, *map(str, arguments), "--max_new_tokens", "40", "--stream").out == result.out
    stop = next(x for x in tokens[ids.shape[1] :] if tokenizer.decode([x]).isascii())
    stopped = run_in(folder, *map(str, arguments), "--stop", tokenizer.id_to_token(stop)).out
    upto = tokens[: tokens.index(stop, ids.shape[1]) + 1]
    assert stopped == tokenizer.decode(upto, skip_special_tokens=False) + "\n"


def test_recipe_generates_tokens(made):
    """With a tokenizer, max_new_bytes in generate.yaml counts tokens."""
    options = ("--config", "generate.yaml", "--ckpt_path", str(CKPT), "--tokenizer", "tokenizer.json")
    result = run_in(made[0].folder, "generate", *options, "--prompt", "fox", "--max_new_tokens", "5")
    assert result.code == 0 and result.out.startswith("fox")


REFUSED = {
    "another tokenizer": (["--tokenizer", "large.json"], ["vocab_size 270", "the tokenizer has 310 tokens"]),
    "no tokenizer": ([], ["vocab_size 270", "--tokenizer with the tokenizer.json"]),
    "not there": (["--tokenizer", "none.json"], ["none.json: no such file"]),
    "not one": (["--tokenizer", "a.txt"], ["a.txt cannot be read", "Pass a tokenizer.json"]),
    "stop": (["--tokenizer", "tokenizer.json", "--stop", "xyz"], ["--stop takes one token", "'xyz' is 3"]),
    "tokens of bytes": (["--max_new_tokens", "3"], ["--max_new_tokens goes with --tokenizer"]),
    "both counts": (
        ["--tokenizer", "tokenizer.json", "--max_new_bytes", "3", "--max_new_tokens", "0"],
        ["generate takes one of max_new_bytes and max_new_tokens, but has both (3 and 0)"],
    ),
    "both in a config": (
        ["--tokenizer", "tokenizer.json", "--config", "both.yaml"],
        ["--config both.yaml takes one of", "has both (3 and 4)"],
    ),
    "Latin-1": (
        ["--tokenizer", "tokenizer.json", "--prompt", "caf\udce9"],
        ["--prompt is not UTF-8 text: byte 0xe9 after 3 characters"],
    ),
    "Latin-1 of bytes": (["--prompt", "caf\udce9"], ["--prompt is not UTF-8 text: byte 0xe9 after 3 characters"]),
    "half a character": (["--prompt", "\ud83e"], ["--prompt is not UTF-8 text: half a character, U+D83E after 0"]),
    "stop in Latin-1": (["--tokenizer", "tokenizer.json", "--stop", "\udce9"], ["--stop is not UTF-8 text: byte 0xe9"]),
    "stop half": (["--tokenizer", "tokenizer.json", "--stop", r"\ud83e"], ["--stop takes one token", "is 0"]),
    "negative": (["--tokenizer", "tokenizer.json", "--max_new_tokens", "-1"], ["must be at least 0, got -1"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_generate_refuses(made, name):
    large = trained()
    large.add_tokens([f"more {x}" for x in range(310 - large.get_vocab_size())])
    large.save(str(made[0].folder / "large.json"))
    (made[0].folder / "both.yaml").write_text("max_new_bytes: 3\nmax_new_tokens: 4\n")
    argv, texts = REFUSED[name]
    result = run_in(made[0].folder, "generate", "--ckpt_path", str(CKPT), "--prompt", "fox", *argv)
    assert result.code == 2 and result.out == "" and "Traceback" not in result.err
    assert all(text in result.err for text in texts), result.err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # as in a UTF-8 locale, and as with LANG=C
def test_standard_input_is_text(made, monkeypatch, errors):
    piped = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", piped)
    says = {"strict": "byte 0xe9 at 3", "surrogateescape": "byte 0xe9 after 3"}[errors]
    with pytest.raises(ValueError, match=f"--prompt .*is not UTF-8 text: {says}.*iconv"):
        generate.run(["--ckpt_path", str(made[0].folder / CKPT), "--prompt", "-"])


@pytest.mark.parametrize(
    ("config", "argv", "count"),
    [
        ("", [], 256),
        ("max_new_bytes: 5", [], 5),
        ("max_new_bytes: 5", ["--max_new_tokens", "7"], 7),
        ("max_new_tokens: 5", ["--max_new_bytes", "7"], 7),
        ("max_new_tokens: 5", ["--temperature", "0"], 5),
    ],
)
def test_the_count_beside_a_config_wins(tmp_path, config, argv, count):
    (tmp_path / "g.yaml").write_text(f"prompt: a\nckpt_path: x\ntokenizer: t.json\n{config}\n")
    assert generate.count_of(generate.parsed(["--config", str(tmp_path / "g.yaml"), *argv])) == count


TOKENIZE = {
    "nothing": (["a.txt"], ["required: --tokenizer, --out"]),
    "not UTF-8": (
        ["--tokenizer", "tokenizer.json", "--out", "x.bin", "tokenizer.json", "bad.txt"],
        ["bad.txt", "byte 1 "],
    ),
    "there": (["--tokenizer", "tokenizer.json", "--out", "train.bin", "a.txt"], ["train.bin exists already"]),
    "end": (["--tokenizer", "tokenizer.json", "--out", "x.bin", "--eos_token", "</s>", "a.txt"], ["no token '</s>'"]),
}


@pytest.mark.parametrize("name", TOKENIZE)
def test_tokenize_refuses(made, name):
    (made[0].folder / "bad.txt").write_bytes(b"a\xff")
    argv, texts = TOKENIZE[name]
    result = run_in(made[0].folder, "tokenize", *argv)
    assert result.code == 2 and result.out == "" and not (made[0].folder / "x.bin").exists()
    assert all(text in result.err for text in texts), result.err


@pytest.mark.parametrize("command", ["tokenize", "generate"])
def test_without_the_library(made, monkeypatch, command):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    args = {"tokenize": ["--out", "x.bin", "a.txt"], "generate": ["--ckpt_path", str(CKPT), "--prompt", "a"]}[command]
    result = run_in(made[0].folder, command, "--tokenizer", "tokenizer.json", *args)
    assert (result.code, result.out) == (2, "") and "pip install 'lightning-dilated[tokenizers]'" in result.err


@pytest.mark.parametrize("kind", ["bytes", "marked"])
@pytest.mark.parametrize("prompt", ["The fox", "東", "naps; "])
def test_text_as_it_comes_is_the_text(kind, prompt):
    """A character of several tokens is printed once it is complete. Spaces are printed as in the middle of a text."""
    tokenizer = trained(kind)
    ids = tokenizer.encode(prompt).ids
    tokens = tokenizer.encode(SENTENCE * 2 + END + SENTENCE).ids
    parts = list(decoded(tokenizer, ids, tokens))
    assert len(parts) == len(tokens) + 1 and parts[-1] == "" and not any("\ufffd" in x for x in parts)
    want = tokenizer.decode(ids + tokens, skip_special_tokens=False)
    assert tokenizer.decode(ids) + "".join(parts) == want
    assert ("" in parts[:-1]) == (kind == "bytes")


def test_tokens_that_are_no_text_are_shown_as_such():
    """An incomplete character at the end, and a token beyond the vocabulary (models pad it), print as U+FFFD."""
    tokenizer = trained()
    half = tokenizer.encode("ß").ids[:1]
    assert "".join(decoded(tokenizer, [], half)) == "\ufffd"
    fox = tokenizer.encode(" fox").ids
    assert "".join(decoded(tokenizer, fox, [*fox, 9999, *fox, *half])) == " fox\ufffd fox\ufffd"
