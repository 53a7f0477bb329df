"""A wrong command line exits with status 2, and one message names the cause and the remedy without a traceback."""

import os
import re

import pytest
import torch

from lightning_dilated._extensions import COMMANDS

from .conftest import DATA, TINY

pytestmark = pytest.mark.full

PATTERN = "--model.pattern"
# name: (arguments after `fit` and the tiny recipe, patterns that standard error must match)
FIT = {
    # misspelled
    "key of the model": (
        ["--model.dimm", "8"],
        ["dimm", "Did you mean 'dim'", "fit --model.help LongNetLM` lists the keys of LongNetLM, .*fit --help`"],
    ),
    "key of the data": (
        ["--data.seqlen", "8"],
        ["seqlen", "Did you mean 'seq_len'", "fit --data.help ByteDataModule` lists the keys"],
    ),
    "key of the trainer": (["--trainer.max_stepz", "3"], [r"trainer\.max_stepz", "--help"]),
    "group": (["--trainr.max_steps", "3"], [r"trainr\.max_steps", "Did you mean '--trainer.max_steps'", "--help"]),
    "key without its group": (["--max_steps", "3"], ["Did you mean '--trainer.max_steps'", "--help"]),
    "key of the pattern": (
        [PATTERN, '{"segment_lengts": [8], "dilation_rates": [1]}'],
        ["segment_lengts", "Did you mean 'segment_lengths'"],
    ),
    "hybrid and segments": (
        [PATTERN + ".segment_lengths", "[8]"],
        ["pattern names hybrid and segment_lengths: give hybrid alone"],
    ),
    "key of a branch": (
        [PATTERN, '{"branches": [{"segment": 8, "dilation_rate": 1}]}'],
        [r"branches\[0\]", "segment_length"],
    ),
    "key of the optimizer": (
        ["--model.optimizer.lrr", "1"],
        ["lrr", "optimizer", "Did you mean 'lr'", "Keys of AdamW: lr, .*weight_decay"],
    ),
    "model class": (["--model", "lightning_dilated.LongNet"], ["LongNet'", "Did you mean 'LongNetLM'"]),
    "data class": (["--data", "lightning_dilated.data.Bytes"], ["Bytes"]),
    "optimizer class": (["--model.optimizer", "torch.optim.Adan"], ["Adan"]),
    "callback": (["--trainer.callbacks+=RunReprt"], ["RunReprt"]),
    "strategy": (["--trainer.strategy", "ring_dilatedd"], ["ring_dilatedd"]),
    # wrong type or value
    "dim a word": (["--model.dim", "wide"], ["dim", "int", "wide"]),
    "half a head": (["--model.num_heads", "2.5"], ["num_heads", "int", "2.5"]),
    "norm": (["--model.norm", "batchnorm"], ["norm", "rmsnorm", "layernorm", "batchnorm"]),
    "precision": (["--trainer.precision", "float7"], ["precision", "bf16-mixed", "float7"]),
    "seed": (["--seed_everything", "abc"], ["seed_everything", "abc"]),
    "seq_len a word": (["--data.seq_len", "long"], ["seq_len", "int", "long"]),
    "not a DilatedModule": (["--model", "torch.nn.Linear"], ["DilatedModule", "torch.nn.Linear"]),
    "pattern a word": ([PATTERN, "longnet"], ["pattern", "longnet"]),
    "lists of unequal length": (
        [PATTERN, '{"segment_lengths": [8, 16], "dilation_rates": [1]}'],
        ["segment_lengths has 2", "equally long"],
    ),
    "segment of 0": ([PATTERN, '{"branches": [[0, 1]]}'], [r"branches\[0\]: segment_length must be at least 1, got 0"]),
    "heads do not divide": (["--model.dim", "30"], ["num_heads=4", "dim=30"]),
    "no layers": (["--model.depth", "0"], ["depth must be at least 1"]),
    "dropout": (["--model.dropout", "1.5"], ["dropout", r"\[0, 1\)", "1.5"]),
    "bytes_per_token": (["--model.bytes_per_token", "0"], ["bytes_per_token must be a number in"]),
    "val_fraction": (["--data.val_fraction", "2"], ["data.val_fraction must be a number in", "got 2.0"]),
    "batch larger than the data": (["--data.batch_size", "1000"], ["data.batch_size", "lower"]),
    # values that fail only when the model is built or the run begins
    "engine": (["--model.engine", "fast"], ["engine must be one of", "fast"]),
    "engine of another device": (["--model.engine", "flash"], ["engine='flash'", "not on cpu", "Use engine="]),
    "odd head dim": (["--model.dim", "12"], ["head_dim must be even"]),
    "ffn_dim": (["--model.ffn_dim", "0"], ["ffn_dim must be at least 1"]),
    "rotary_base": (["--model.rotary_base", "0.5"], ["rotary base must be above 1"]),
    "warm-up longer than the run": (
        ["--model.lr_scheduler.warmup_steps", "5000", "--model.lr_scheduler.total_steps", "300"],
        ["warmup_steps=5000", r"must be below total_steps=\d+"],
    ),
    "vocabulary smaller than the data's": (["--model.vocab_size", "100"], ["vocab_size", "256"]),
    "validation rarer than the epoch": (
        ["--trainer.val_check_interval", "1000", "--trainer.check_val_every_n_epoch", "1"],
        ["val_check_interval", "1000"],
    ),
    "a GPU that is not there": (["--trainer.accelerator", "cuda"], ["accelerator", "cpu"]),
    # options in the wrong place (an optimizer at the top level would get the parameters from before sharding)
    "optimizer at the top": (["--optimizer", "torch.optim.SGD"], ["--optimizer"]),
    "a word too many": (["stray"], ["stray"]),
    "a glob that the shell expanded": (
        ["--data.paths", "empty.txt", "short.txt"],
        ["unrecognized arguments: short.txt", r'Quote a glob.*--data\.paths "\*\.txt"'],
    ),
    # missing data
    "missing file": (["--data.paths", "nowhere.txt"], ["nowhere.txt does not exist", "data.paths"]),
    "missing files": (["--data.paths", "no/**/*.txt"], [r"no/\*\*/\*\.txt matches no regular file", "data.paths"]),
    "empty file": (["--data.paths", "empty.txt"], ["empty", "data.paths"]),
    "short file": (["--data.paths", "short.txt"], ["30 bytes", "data.seq_len", "pass more data"]),
}


if torch.cuda.is_available():
    del FIT["a GPU that is not there"]


def refused(result, texts):
    """Assert status 2 and that standard error matches all `texts`, without a traceback.

    A failure shows only the last line: a parser's usage would fill pages and hide the missing patterns.
    """
    last = result.err.strip().splitlines()[-1] if result.err.strip() else "nothing"
    if "Traceback" in result.err:
        pytest.fail(f"a traceback, ending in {last}")
    missing = [text for text in texts if not re.search(text, result.err)]
    if result.code != 2 or missing:
        pytest.fail(f"exit {result.code}, and nothing about {missing}; it ends in {last[:300]}")


@pytest.mark.parametrize("name", FIT)
def test_fit(cli, tmp_path, name):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("abc" * 10)
    argv, texts = FIT[name]
    refused(cli("fit", *TINY, *argv), texts)


@pytest.mark.parametrize("name", ["key of the model", "dim a word", "key of the trainer", "a word too many"])
def test_the_message_fits_a_screen(cli, name):
    """A misspelled key is the most common mistake, so its message must not come after pages of options."""
    lines = len(cli("fit", *TINY, *FIT[name][0]).err.splitlines())
    assert lines <= 24


CONFIGS = {
    "missing": (None, ["nothere.yaml: no such file", "quickstart.yaml"]),
    "not yaml": ("model: [unclosed\n", ["line 1|line 2"]),
    "a list": ("- a\n- b\n", ["- a"]),
    "misspelt key": ("trainer: {max_stepz: 3}\n", ["max_stepz"]),
    "top-level optimizer": ("optimizer: {class_path: torch.optim.SGD}\n", ["optimizer"]),
    "pattern of a branch too few": (
        "model: {init_args: {pattern: {segment_lengths: [8], dilation_rates: []}}}\n",
        ["segment_lengths has 1", "dilation_rates 0"],
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config(cli, tmp_path, name):
    text, texts = CONFIGS[name]
    if text is not None:
        (tmp_path / "nothere.yaml").write_text(text)
    refused(cli("fit", *TINY, "--config", "nothere.yaml"), texts)


@pytest.mark.parametrize("command, share", [("validate", "val"), ("test", "test"), ("predict", "test")])
def test_a_split_that_is_left_out(cli, fitted, command, share):
    """An evaluation without data must not look like a success."""
    result = cli(command, *TINY, f"--data.{share}_fraction", 0, "--ckpt_path", fitted.ckpt)
    refused(result, [rf"data\.{share}_fraction"])


COMMANDS = {
    "unknown": (["fitt"], ["no command 'fitt'", f"Commands: fit, predict, test, validate, {', '.join(COMMANDS)}."]),
    "option first": (["--seed", "3"], ["--config"]),
    "fit without a model": (["fit"], ["fit needs a model", "--config RECIPE.yaml"]),
    "validate without a model": (["validate", *DATA], ["validate needs a model", "--ckpt_path"]),
    "--ckpt_path without a value": (["validate", "--ckpt_path"], ["--ckpt_path"]),
    "--config without a value": (["fit", "--config"], ["--config", "expected one argument"]),
    "model without its pattern": (["fit", "--model", "LongNetLM"], ["required: pattern"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_command(cli, name):
    argv, texts = COMMANDS[name]
    refused(cli(*argv), texts)


# -- checkpoints -------------------------------------------------------------------------------------------------------
def cut(share):
    return lambda path, ckpt: path.write_bytes(ckpt.read_bytes()[: int(share * ckpt.stat().st_size)])


REMEDY = "cut short or of another kind; use an earlier one"
FILES = {
    "missing": (lambda path, ckpt: None, ["no such file", "Pass a .ckpt that fit wrote"]),
    "empty": (lambda path, ckpt: path.touch(), [REMEDY]),
    "cut at the start": (cut(0.05), [REMEDY]),
    "cut in the middle": (cut(0.5), [REMEDY]),
    "cut at the end": (cut(0.999), [REMEDY]),
    "a text": (lambda path, ckpt: path.write_text("hello world\n" * 9), [REMEDY]),
    "tensors": (
        lambda path, ckpt: torch.save({"a": torch.ones(2)}, path),
        ["not a Lightning checkpoint", "state_dict"],
    ),
    "one tensor": (lambda path, ckpt: torch.save(torch.ones(2), path), ["not a Lightning checkpoint"]),
    "a folder": (lambda path, ckpt: path.mkdir(), ["folder|directory|no such file"]),
}


@pytest.mark.parametrize("command", ["fit", "validate", "validate alone", "generate"])
@pytest.mark.parametrize("name", FILES)
def test_checkpoint(cli, fitted, tmp_path, name, command):
    make, texts = FILES[name]
    make(tmp_path / "x.ckpt", fitted.ckpt)
    arguments = {"generate": ["--prompt", "a"], "validate alone": DATA}.get(command, TINY)
    texts = ["--ckpt_path"] if (name, command) == ("a folder", "validate alone") else [r"x\.ckpt", *texts]
    refused(cli(command.split()[0], *arguments, "--ckpt_path", "x.ckpt"), texts)


class Trap:
    """Creates a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("caught",)


@pytest.mark.parametrize(
    "argv",
    [["validate", *TINY], ["validate", *DATA], ["generate", "--prompt", "a"]],
    ids=["recipe", "alone", "generate"],
)
def test_no_code_in_a_checkpoint_is_run(cli, tmp_path, argv):
    torch.save({"state_dict": {}, "hyper_parameters": {"x": Trap()}}, tmp_path / "x.ckpt")
    refused(cli(*argv, "--ckpt_path", "x.ckpt"), [r"x\.ckpt", REMEDY])
    assert not (tmp_path / "caught").exists()


def test_checkpoint_of_a_foreign_module(cli, fitted, tmp_path):
    """The error names the class that is not imported, and explains how to load it."""
    stored = torch.load(fitted.ckpt, weights_only=True)
    stored["hyper_parameters"]["_class_path"] = "elsewhere.Model"
    torch.save(stored, tmp_path / "x.ckpt")
    refused(cli("generate", "--ckpt_path", "x.ckpt", "--prompt", "a"), [r"elsewhere\.Model", "load_from_checkpoint"])


def test_checkpoint_of_another_class_than_the_recipe(cli, fitted, tmp_path, monkeypatch):
    """The error names both classes instead of the first keyword that one of them does not accept."""
    (tmp_path / "other_module.py").write_text(
        "import lightning_dilated as ld\n\nclass Other(ld.DilatedModule):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "other.yaml").write_text("model: {class_path: other_module.Other}\n")
    result = cli("validate", "--config", "other.yaml", *DATA, "--ckpt_path", fitted.ckpt)
    refused(result, [r"last\.ckpt", "LongNetLM", r"other_module\.Other"])


def test_resuming_on_other_data(cli, fitted, tmp_path):
    """The change of data is detected before the first new step and reported like any other wrong setting."""
    (tmp_path / "text.txt").write_bytes(b"other " * 900)
    refused(cli("fit", *TINY, "--trainer.max_steps", "5", "--ckpt_path", fitted.ckpt), ["num_samples", "the same data"])


def test_checkpoint_of_another_vocabulary(cli, fitted, tmp_path):
    stored = torch.load(fitted.ckpt, weights_only=True)
    stored["hyper_parameters"]["vocab_size"] = 11
    for name in ("embedding.weight", "head.weight"):
        stored["state_dict"][name] = stored["state_dict"][name][:11].clone()
    torch.save(stored, tmp_path / "x.ckpt")
    refused(cli("generate", "--ckpt_path", "x.ckpt", "--prompt", "a"), ["vocab_size 11", r"bytes \(vocab_size 256\)"])


# -- generate ----------------------------------------------------------------------------------------------------------
GENERATE = {
    "no prompt": ([], ["--prompt"]),
    "empty prompt": (["--prompt", ""], ["--prompt is empty", "at least one"]),
    "nothing on standard input": (["--prompt", "-"], ["--prompt is empty"]),
    "negative bytes": (["--max_new_bytes", "-1"], ["--max_new_bytes must be at least 0, got -1"]),
    "bytes a word": (["--max_new_bytes", "many"], ["--max_new_bytes", "'many'"]),
    "temperature below 0": (["--temperature", "-1"], ["temperature must be a number in .0, inf., got -1"]),
    "temperature nan": (["--temperature", "nan"], ["temperature must be a number in .0, inf., got nan"]),
    "top_k": (["--top_k", "0"], ["top_k must be at least 1, got 0"]),
    "top_p": (["--top_p", "1.5"], [r"top_p must be a number in \(0, 1\], got 1.5"]),
    "seed": (["--seed", str(2**70)], ["--seed"]),
    "a GPU that is not there": (["--device", "cuda"], ["no CUDA device", "Leave --device out"]),
    "a device that is none": (["--device", "gpu"], ["--device gpu", "cpu"]),
    "unknown option": (["--promt", "a"], ["--promt"]),
}


if torch.cuda.is_available():
    del GENERATE["a GPU that is not there"]


@pytest.mark.parametrize("name", GENERATE)
def test_generate(cli, fitted, name):
    argv, texts = GENERATE[name]
    prompt = [] if "prompt" in name or "standard" in name else ["--prompt", "a"]
    refused(cli("generate", "--ckpt_path", fitted.ckpt, *prompt, *argv), texts)


def test_traceback_on_demand(cli, monkeypatch):
    """With the environment variable that the help names, an error shows its traceback."""
    monkeypatch.setenv("LIGHTNING_DILATED_TRACEBACK", "1")
    result = cli("fit", *TINY, "--model.dim", "30")
    assert result.code == 1 and "Traceback" in result.err and "longnet/lm.py" in result.err


def test_nothing_is_written_by_a_refused_run(cli, tmp_path):
    cli("fit", *TINY, "--model.dim", "30")
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt"}


# -- bench -------------------------------------------------------------------------------------------------------------
BENCH = {"nothing": ([], ["what"]), "something else": (["memory"], ["links"])}


@pytest.mark.parametrize("name", BENCH)
def test_bench(cli, name):
    argv, texts = BENCH[name]
    refused(cli("bench", *argv), texts)


# -- classes that a checkpoint names -----------------------------------------------------------------------------------
def evil_checkpoint(folder, fitted, monkeypatch, **hparams):
    """Write a checkpoint with additional hyperparameters, and next to it a module that leaves a mark when imported."""
    (folder / "evilmod.py").write_text("import pathlib\npathlib.Path(__file__).with_name('mark').touch()\nX = dict\n")
    monkeypatch.syspath_prepend("")
    stored = torch.load(fitted.ckpt, weights_only=True)
    stored["hyper_parameters"].update(hparams)
    torch.save(stored, folder / "evil.ckpt")
    return "evil.ckpt"


EVIL_WAYS = {
    "validate": ["validate", *DATA],
    "test": ["test", *DATA],
    "predict": ["predict", *DATA],
    "fit": ["fit", *TINY, "--trainer.max_steps", "4"],
    "generate": ["generate", "--prompt", "a", "--max_new_bytes", "1"],
    "evaluate": ["evaluate", "--task", "needle", "--out", "out"],
    "score": ["score", "--vcf", "x.vcf", "--fasta", "x.fa", "--out", "x.csv"],
    "export": ["export", "--out", "x.onnx"],
    "consolidate": ["consolidate", "evil.ckpt", "--out", "out"],
}


@pytest.mark.parametrize("name", ["validate", "generate", "fit"])
def test_optimizers_of_a_checkpoint_are_not_read(cli, fitted, tmp_path, monkeypatch, name):
    """`fit` uses the optimizer of the recipe; validate and generate need no optimizer."""
    evil = {"class_path": "evilmod.X"}
    ckpt = evil_checkpoint(tmp_path, fitted, monkeypatch, optimizer=evil, lr_scheduler=evil)
    cli(*EVIL_WAYS[name], "--ckpt_path", ckpt).ok()
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", EVIL_WAYS)
def test_no_command_calls_what_a_checkpoint_names(cli, fitted, tmp_path, monkeypatch, name):
    called = []
    monkeypatch.setattr(os, "system", called.append)
    system = {"class_path": "os.system", "init_args": {"command": "true"}}
    value = {"class_path": "torch.optim.SGD", "init_args": {"lr": system}}
    for hparams in ({"pattern": value}, {"recurrence": [value]}, {"init_args": {"pattern": value}}):
        ckpt = evil_checkpoint(tmp_path, fitted, monkeypatch, **hparams)
        words = [] if name == "consolidate" else ["--ckpt_path", ckpt]
        result = cli(*EVIL_WAYS[name], *words)
        if name == "fit" and "pattern" in hparams:  # the recipe's pattern is used
            assert result.code == 0, result.err
        else:
            refused(result, [r"evil\.ckpt", "does not decide which class|not the name of a hyperparameter"])
    assert not called and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["validate", "generate"])
def test_other_classes_of_a_checkpoint_are_not_imported(cli, fitted, tmp_path, monkeypatch, name):
    ckpt = evil_checkpoint(tmp_path, fitted, monkeypatch, engine={"class_path": "evilmod.X"})
    result = cli(*EVIL_WAYS[name], "--ckpt_path", ckpt)
    refused(result, [r"evil\.ckpt names evilmod\.X \(engine\)", "a file does not decide", "give engine yourself"])
    ckpt = evil_checkpoint(tmp_path, fitted, monkeypatch, engine="evilmod.X")
    refused(cli(*EVIL_WAYS[name], "--ckpt_path", ckpt), [r"engine must be one of.*evilmod\.X"])
    assert not (tmp_path / "mark").exists()


def test_text_in_place_of_a_pattern_is_refused(cli, fitted, tmp_path, monkeypatch):
    """A parser would open such text as a file or an address, and instantiate the class named there."""
    (tmp_path / "evil.txt").write_text("class_path: evilmod.X\n")
    said = {
        "evil.txt": r"evil\.ckpt names evilmod\.X \(pattern\)",  # a class that the file names
        "memory://evil": r"evil\.ckpt has pattern='memory://evil'",
        "evilmod.X": r"evil\.ckpt has pattern='evilmod\.X'",
    }
    for text, words in said.items():
        ckpt = evil_checkpoint(tmp_path, fitted, monkeypatch, pattern=text)
        refused(cli("validate", *DATA, "--ckpt_path", ckpt), [words, "give pattern yourself"])
    assert not (tmp_path / "mark").exists()


def test_the_recipes_own_value_takes_the_place_of_a_class(cli, fitted, tmp_path, monkeypatch):
    pattern = str(torch.load(fitted.ckpt, weights_only=True)["hyper_parameters"]["pattern"]).replace("'", '"')
    ckpt = evil_checkpoint(tmp_path, fitted, monkeypatch, pattern={"class_path": "evilmod.X"})
    cli("validate", *DATA, "--ckpt_path", ckpt, "--model.pattern", pattern.replace("None", "null")).ok()


def test_the_class_of_a_checkpoint_is_not_imported(cli, fitted, tmp_path, monkeypatch):
    """The class of a checkpoint is imported only if the command line names it."""
    ckpt = evil_checkpoint(tmp_path, fitted, monkeypatch, _class_path="evilmod.LongNetLM")
    refused(
        cli("validate", *DATA, "--ckpt_path", ckpt), [r"evil\.ckpt names evilmod\.LongNetLM", "import evilmod before"]
    )
    assert not (tmp_path / "mark").exists()
