"""`lightning-dilated evaluate`: the rows of the callback, several tasks and models, and errors before any work."""

import csv
import json
import re
import subprocess
import sys

import pytest
import torch

import lightning_dilated as ld
from lightning_dilated.callbacks import AccuracyByDepth

from ..models import trainer

pytestmark = pytest.mark.full

SIZES = {"dim": 16, "depth": 2, "num_heads": 4, "tie_embeddings": False}
PATTERN = ld.DilatedPattern.longnet([64, 512], [1, 4])
GRID = ("--lengths", 700, 500, "--depths", 0, 100, "--samples", 3, "--distractors", 1, "--out", "out")
TOKENS = ("--form", "tokens", "--vocabulary", 2, "--fillers", 1, "--key_tokens", 2)


def saved(folder, kind=ld.LongNetLM, name="model", **options):
    torch.manual_seed(1)
    return kind(PATTERN, **{**SIZES, **options}).eval().save_pretrained(folder / name)


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_bytes_in_two_tasks(cli, tmp_path):
    saved(tmp_path)
    result = cli("evaluate", "--ckpt_path", "model", *GRID, "--task", "needle", "tracing", "needle", "--hops", 1).ok()
    rows = table(tmp_path / "out" / "accuracy_by_depth.csv")
    cells = [(n, d) for n in ("700", "500") for d in ("0.0", "100.0")]
    assert [(r["task"], r["length"], r["depth"]) for r in rows] == [
        (t, *x) for t in ("needle", "tracing") for x in cells
    ]
    assert {(r["samples"], r["split"]) for r in rows} == {("3", "test")}
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "accuracy_by_depth.csv", "accuracy_by_depth_needle.png", "accuracy_by_depth_tracing.png",
    }  # fmt: skip
    assert "needle: percent of right answers" in result.out and "tracing: percent of right answers" in result.out
    assert "written to out: accuracy_by_depth.csv, accuracy_by_depth_needle.png" in result.words


def test_a_checkpoint_of_tokens_has_the_rows_of_the_trainer(cli, tmp_path):
    data = ld.data.LongContextDataModule(
        "multi_key", [60, 90], [0, 100], 9, "tokens", vocabulary=2, fillers=1, key_tokens=2, distractors=1
    )
    torch.manual_seed(1)
    model = ld.LongNetLM(PATTERN, vocab_size=data.vocab_size, **SIZES)
    run = trainer(
        limit_val_batches=0, max_steps=40, callbacks=[AccuracyByDepth(tmp_path / "here")], default_root_dir=tmp_path
    )
    run.fit(model, data)
    run.save_checkpoint(tmp_path / "x.ckpt")
    run.test(model, data, verbose=False)
    arguments = ("--task", "multi_key", "--lengths", 60, 90, "--depths", 0, 100, "--samples", 9, "--distractors", 1)
    cli("evaluate", "--ckpt_path", "x.ckpt", *arguments, *TOKENS, "--batch_size", 4, "--out", "a/b").ok()
    want = [r for r in table(tmp_path / "here" / "accuracy_by_depth.csv") if r["split"] == "test"]
    rows = table(tmp_path / "a" / "b" / "accuracy_by_depth.csv")
    assert [r | {"step": 0} for r in rows] == [r | {"step": 0} for r in want]
    assert len({r["right"] for r in rows}) > 1


def test_above_the_model_length_is_warned_of(cli, tmp_path):
    saved(tmp_path, max_seq_len=600)
    with pytest.warns(UserWarning, match="the lengths go up to 700, above the 600 tokens"):
        assert cli("evaluate", "--ckpt_path", "model", *GRID).code == 0


def test_a_tokenizer(cli, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["The code of a thing is 12."] * 9, 270)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    saved(tmp_path, vocab_size=tokenizer.get_vocab_size())
    result = cli("evaluate", "--ckpt_path", "model", *GRID, "--tokenizer", "tokenizer.json").ok()
    saved(tmp_path, vocab_size=256, name="bytes")
    result = cli("evaluate", "--ckpt_path", "bytes", *GRID[:-1], "out2", "--tokenizer", "tokenizer.json")
    assert (
        result.code == 2
        and f"the model has 256 tokens, and the data (text in tokens of {'tokenizer.json'}" in result.err
    )


@pytest.mark.parametrize("vocabulary", [256, 300])
def test_the_tokenizer_of_a_checkpoint(cli, tmp_path, vocabulary):
    """A checkpoint's tokenizer is used even if its vocabulary has 256 tokens, like bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[: vocabulary - 40]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    options = {"vocab_size": vocabulary, "initial_alphabet": alphabet, "show_progress": False}
    text = [f" {number}" for number in range(10000, 100000, 37)]
    tokenizer.train_from_iterator(text, tokenizers.trainers.BpeTrainer(**options))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    torch.manual_seed(1)
    model = ld.LongNetLM(PATTERN, vocab_size=vocabulary, **SIZES)
    model.tokenizer_files = {"tokenizer.json": tokenizer.to_str()}
    run = trainer(max_steps=0, default_root_dir=tmp_path)
    run.strategy.connect(model)
    model.configure_model()
    run.save_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    tables = []
    for extra in ((), ("--tokenizer", "tokenizer.json")):
        cli("evaluate", "--ckpt_path", "x.ckpt", *GRID[:-1], f"out{len(tables)}", *extra).ok()
        tables.append(table(tmp_path / f"out{len(tables)}" / "accuracy_by_depth.csv"))
    assert tables[0] == tables[1] and int(tables[0][0]["tokens"]) < 3 * len(" 12345")  # a token is longer than a byte


@pytest.mark.slow  # starts interpreters; the fast suite compares ranks in tests/strategy/test_evaluation.py
def test_two_devices_have_the_rows_of_one(tmp_path):
    saved(tmp_path)
    tables = []
    for devices in ("1", "2"):
        words = [*map(str, GRID[:-1]), f"out{devices}", "--task", "needle", "multi_key", "--devices", devices]
        argv = [sys.executable, "-m", "lightning_dilated", "evaluate", "--ckpt_path", "model", *words]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and done.stdout.count("written to") == 1, done.stderr
        tables.append(table(tmp_path / f"out{devices}" / "accuracy_by_depth.csv"))
    assert tables[0] == tables[1] and len(tables[0]) == 8


WRONG = [
    ("none.ckpt", (), "ckpt_path none.ckpt: no such file"),
    ("cut.ckpt", (), "ckpt_path cut.ckpt cannot be read as a checkpoint"),
    ("empty", (), "--ckpt_path empty is a folder without config.json.*consolidate"),
    ("masked", (), "masked holds a LongNetMLM, which does not predict the next token"),
    ("genome", (), "genome has a vocabulary of 5, so it does not read bytes: give --tokenizer.*or --form tokens"),
    ("genome", TOKENS, r"the model has 5 tokens, and the data \(tokens of their own.*has 7"),
    ("model", ("--lengths", 700, 100), "--lengths has 100, but a sample of needle with --distractors = 1 takes"),
    ("model", ("--lengths", 700, 700), "--lengths must be one or several different numbers"),
    ("model", ("--depths", 0, 120), r"--depths must be a number in \[0, 100\], got 120"),
    ("model", ("--samples", 0), "--samples must be at least 1, got 0"),
    ("model", ("--tokenizer", "none.json"), "tokenizer none.json: no such file"),
    ("model", ("--tokenizer", "empty"), "--tokenizer empty is a folder without tokenizer.json"),
    (
        "model",
        ("--form", "tokens", "--tokenizer", "x.json"),
        '--tokenizer is x.json, but --form "tokens" has a vocabulary',
    ),
    ("model", ("--task", "sorting"), "argument --task: invalid choice: 'sorting'"),
    ("model", ("--out", "text.txt"), "--out text.txt is a file; give a folder"),
    ("model", ("--out", "old"), "--out old holds accuracy_by_depth.csv of an earlier evaluation"),
    ("model", ("--device", "gpu7"), "--device gpu7: torch knows no such device"),
    ("model", ("--devices", 0), "--devices must be at least 1, got 0"),
    ("model", ("--distractors", 4000), "4001 different keys, but there are 2,500: lower --distractors"),
    ("model", ("--batch_size", 0), "--batch_size must be at least 1, got 0"),
    ("model", ("--precision", "12"), "Precision '12' is invalid"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    saved(folder)
    saved(folder, name="genome", vocab_size=5)
    saved(folder, ld.LongNetMLM, "masked")
    (folder / "cut.ckpt").write_bytes(b"PK\x03\x04 cut")
    for name in ("empty", "old"):
        (folder / name).mkdir()
    (folder / "old" / "accuracy_by_depth.csv").touch()
    return folder


@pytest.mark.parametrize("model, options, message", WRONG)
def test_misuse_is_one_line(cli, tmp_path, models, model, options, message):
    for file in models.iterdir():
        (tmp_path / file.name).symlink_to(file)
    result = cli("evaluate", "--ckpt_path", model, *GRID, *options)
    assert result.code == 2 and "Traceback" not in result.err, result.err
    assert len([line for line in result.err.splitlines() if "error:" in line]) == 1
    assert re.search(message, result.err.replace("\n", " ")), result.err
    assert not (tmp_path / "out").exists()


def test_transformers_without_transformers(cli, tmp_path, monkeypatch):
    """A folder of a transformers model is recognized by its config.json. The error names the missing extra."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    result = cli("evaluate", "--ckpt_path", "hf", *GRID)
    assert result.code == 2 and 'pip install "lightning-dilated[transformers]"' in result.err
