"""Every command on a tiny model: its output and files, from a recipe, from a checkpoint alone, and resumed."""

import csv
import io
import logging
import shlex
import sys
import warnings
from pathlib import Path

import pytest
import torch

import lightning_dilated as ld
from lightning_dilated._extensions import COMMANDS as EXTENSIONS
from lightning_dilated.cli.errors import PROG
from lightning_dilated.cli.lightning_cli import DilatedCLI
from lightning_dilated.cli.main import HELP, quiet
from lightning_dilated.cli.recipe import find_recipe
from lightning_dilated.ext.decoding.command import print_bytes

from ..models import trainer
from .conftest import DATA, LOG, MODEL, TINY

pytestmark = pytest.mark.full

COMMANDS = {*DilatedCLI.subcommands(), *EXTENSIONS}


def test_lightnings_own_bar_shows_no_epoch_behind_the_last(cli):
    """Lightning's bar is used if a recipe has no bar. In a run limited by steps it must not show "Epoch 0/-2"."""
    result = cli("fit", *TINY, "--trainer.callbacks", "null", "--trainer.enable_progress_bar", "true")
    assert result.code == 0 and "Epoch 0" in result.out and "/-2" not in result.out, result.err


# -- help --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]], ids=["nothing", "-h", "--help"])
def test_help_fits_a_screen(cli, argv):
    result = cli(*argv)
    lines = result.out.splitlines()
    assert result.code == 0 and len(lines) <= 30 and max(map(len, lines)) <= 80
    assert len(COMMANDS) == 15
    for command in COMMANDS:
        assert any(line.split()[:1] == [command] for line in lines), command


@pytest.mark.parametrize("line", [x.strip() for x in HELP.splitlines() if x.strip().startswith(f"{PROG} ")])
def test_commands_of_the_help_parse(cli, line):
    """Commands in the help parse verbatim, also outside the checkout."""
    argv = shlex.split(line)[1:]
    result = cli(*argv, *(["--print_config"] if "--print_config" not in argv else []))
    assert result.code == 0 and "class_path: lightning_dilated.LongNetLM" in result.out, result.err


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_of_a_command(cli, command):
    result = cli(command, "--help")
    assert result.code == 0 and command in result.out
    own = {
        "bench": "links",
        "explain": "--segments",
        "tokenize": "--out",
        "verify": "--devices",
        "consolidate": "--out",
        "plan": "--host_memory",
        "score": "--vcf",
        "evaluate": "--depths",
        "folds": "--out",
    }
    assert own.get(command, "--ckpt_path") in result.out


def test_version(cli):
    assert cli("--version").out == f"lightning-dilated {ld.__version__}\n"


# -- fit ---------------------------------------------------------------------------------------------------------------
def test_fit_writes_its_run(fitted):
    names = {path.name for path in fitted.log.rglob("*") if path.is_file()}
    assert {"config.yaml", "metrics.csv", "loss.png", "pattern.png", "last.ckpt"} <= names
    for word in ("bits per byte", "bigram of the training bytes", "run folder:", "checkpoint:", "keys a row"):
        assert word in fitted.result.words, word
    with (fitted.log / "metrics.csv").open() as file:
        logged = set(next(csv.reader(file)))
    assert {"train_loss", "val_loss", "train_bits_per_byte", "val_bits_per_byte", "step"} <= logged


def test_fit_resumes(cli, fitted):
    """Three steps and two resumed steps equal five steps bit by bit."""
    whole = cli("fit", *TINY, "--trainer.max_steps", 5, "--trainer.val_check_interval", 1).ok()
    cli("fit", *TINY, "--trainer.max_steps", 5, "--trainer.val_check_interval", 1, "--ckpt_path", fitted.ckpt).ok()
    runs = whole.folder / LOG.parent
    a, b = (torch.load(runs / v / "checkpoints" / "last.ckpt", weights_only=True) for v in ("version_0", "version_1"))
    assert a["global_step"] == b["global_step"] == 5
    assert all(torch.equal(x, b["state_dict"][name]) for name, x in a["state_dict"].items())


@pytest.mark.parametrize("model", ["--model", "--model.class_path"])
@pytest.mark.parametrize("spelling", ["LongNetLM", "lightning_dilated.LongNetLM"])
def test_fits_without_a_recipe(cli, model, spelling):
    pattern = ["--model.pattern", '{"segment_lengths": [8], "dilation_rates": [1]}']
    run = ["--trainer.max_steps", "1", "--trainer.limit_val_batches", "0", "--trainer.logger", "false"]
    result = cli("fit", model, spelling, *pattern, *MODEL, *DATA, *run)
    assert result.code == 0 and list(result.folder.rglob("*.ckpt")), result.err


# -- a checkpoint ------------------------------------------------------------------------------------------------------
def evaluate(ckpt, folder, stage):
    """Evaluate through the Python API, without the command line."""
    model = ld.LongNetLM.load_from_checkpoint(ckpt, weights_only=True)
    data = ld.data.ByteDataModule(str(folder / "text.txt"), seq_len=64, batch_size=2, val_fraction=0.02, val_limit=2)
    data.test_fraction = 0.02
    return getattr(trainer(), stage)(model, data, verbose=False)[0]


FRACTIONS = ["--data.val_fraction", "0.02", "--data.test_fraction", "0.02"]
CONFIGS = pytest.mark.parametrize("config", [True, False], ids=["with a recipe", "from the checkpoint alone"])


def arguments(config):
    return TINY if config else [*DATA, *FRACTIONS]


@CONFIGS
@pytest.mark.parametrize("stage, name", [("validate", "val"), ("test", "test")])
def test_evaluates(cli, fitted, stage, name, config):
    result = cli(stage, *arguments(config), "--ckpt_path", fitted.ckpt).ok()
    want = evaluate(fitted.ckpt, result.folder, stage)
    for metric in (f"{name}_loss", f"{name}_bits_per_byte", f"{name}_perplexity"):
        assert result.metric(metric) == pytest.approx(want[metric], rel=1e-6)


@CONFIGS
def test_predicts_a_csv(cli, fitted, config):
    """As the help promises, `predict` writes a CSV with bits per byte of every test sequence."""
    result = cli("predict", *arguments(config), "--ckpt_path", fitted.ckpt).ok()
    files = list(result.folder.rglob("predictions.csv"))
    assert len(files) == 1
    header, *lines = csv.reader(files[0].open())
    assert header == ["index", "tokens", "bits_per_byte", "file", "offset"]
    assert [line[:2] for line in lines] == [["0", "64"], ["1", "64"]]
    (file,) = {line[3] for line in lines}
    assert Path(file).is_file() and int(lines[1][4]) - int(lines[0][4]) == 64
    bits = sum(float(line[2]) for line in lines) / 2
    assert bits == pytest.approx(evaluate(fitted.ckpt, result.folder, "test")["test_bits_per_byte"], rel=1e-5)


def test_validates_nothing_but_a_checkpoint_as_one(cli):
    """Without --ckpt_path the weights are random, so the table must not say "of the checkpoint"."""
    result = cli("validate", *TINY)
    assert "of the checkpoint" not in result.words


@CONFIGS
def test_the_command_line_wins_over_the_checkpoint(cli, fitted, config):
    result = cli("validate", *arguments(config), "--ckpt_path", fitted.ckpt, "--model.bytes_per_token", 2).ok()
    want = result.metric("val_loss") / 0.6931472 / 2
    assert result.metric("val_bits_per_byte") == pytest.approx(want, rel=1e-6)


# -- generate ----------------------------------------------------------------------------------------------------------
def test_generates_what_python_does(cli, fitted):
    result = cli(
        "generate", "--ckpt_path", fitted.ckpt, "--prompt", "the é ", "--max_new_bytes", 40, "--temperature", 0
    )
    model = ld.LongNetLM.load_from_checkpoint(fitted.ckpt, weights_only=True)
    tokens = model.generate(torch.tensor([list("the é ".encode())]), 40, temperature=0)
    assert result.code == 0 and result.out == bytes(tokens[0].tolist()).decode(errors="replace") + "\n"


def test_generates_from_a_folder(cli, fitted, tmp_path):
    """`generate` reads config.json and model.safetensors, exported from a checkpoint of the command line."""
    ld.LongNetLM.load_from_checkpoint(fitted.ckpt, weights_only=True).save_pretrained(tmp_path / "saved")
    options = ("--prompt", "ab", "--max_new_bytes", 30, "--seed", 3)
    want = cli("generate", "--ckpt_path", fitted.ckpt, *options)
    assert cli("generate", "--ckpt_path", tmp_path / "saved", *options).out == want.out != ""


def test_generate_draws_by_seed(cli, fitted):
    arguments = ("generate", "--ckpt_path", fitted.ckpt, "--prompt", "ab", "--max_new_bytes", 30)
    sample = lambda *options: cli(*arguments, *options).out  # noqa: E731
    assert sample("--seed", 1) == sample("--seed", 1) != sample("--seed", 2)
    assert sample("--seed", 0) == sample() and sample().startswith("ab")
    assert sample("--top_k", 1) == sample("--temperature", 0) == sample("--top_p", 1e-9)


@pytest.mark.parametrize("options", [(), ("--max_new_bytes", 0), ("--top_k", 3)], ids=str)
def test_generate_streams_the_same_text(cli, fitted, options):
    """Streaming prints the same text, even invalid UTF-8 (likely in random bytes) and characters of several bytes."""
    arguments = ("generate", "--ckpt_path", fitted.ckpt, "--prompt", "the é ", "--max_new_bytes", 60, *options)
    assert cli(*arguments, "--stream").out == cli(*arguments).out


def test_generate_prints_as_it_goes(monkeypatch, capsys):
    printed = []
    monkeypatch.setattr("builtins.print", lambda text, **options: printed.append((text, options.get("flush", False))))
    print_bytes([b"a", "é".encode()[:1], "é".encode()[1:], b"\xff", b"\xc3"])
    assert printed == [("a", True), ("", True), ("é", True), ("\ufffd", True), ("", True), ("\ufffd", False)]


def test_generate_stops(cli, fitted):
    arguments = ("generate", "--ckpt_path", fitted.ckpt, "--prompt", "ab", "--max_new_bytes", 60, "--temperature", 0)
    free = cli(*arguments).out[2:-1]
    stop = next(c for c in free if c.isascii())
    for stop_text in (stop, f"\\x{ord(stop):02x}"):
        assert cli(*arguments, "--stop", stop_text).out == "ab" + free[: free.index(stop) + 1] + "\n"


def test_generate_refuses_devices(cli, fitted, tmp_path):
    (tmp_path / "x.yaml").write_text("devices: 2\n")
    for options in (("--devices", 2), ("--devices=2",), ("--config", tmp_path / "x.yaml")):
        result = cli("generate", "--ckpt_path", fitted.ckpt, "--prompt", "ab", *options)
        assert result.code == 2 and "generate --devices was taken out of lightning_dilated. " in result.err
        assert "Traceback" not in result.err


def test_generate_reads_standard_input(cli, fitted):
    result = cli("generate", "--ckpt_path", fitted.ckpt, "--prompt", "-", "--max_new_bytes", 5, stdin="abc\n")
    assert result.out == cli("generate", "--ckpt_path", fitted.ckpt, "--prompt", "abc\n", "--max_new_bytes", 5).out


# -- checkpoints made in Python ----------------------------------------------------------------------------------------
@pytest.fixture
def made(cli, tmp_path):
    """A checkpoint from Python, which has no settings of the command line."""
    model = ld.LongNetLM(ld.DilatedPattern.longnet([4, 8], [1, 2]), dim=16, depth=1, num_heads=4)
    run = trainer(max_steps=1)
    run.fit(model, ld.data.ByteDataModule(str(tmp_path / "text.txt"), seq_len=64, val_fraction=0, test_fraction=0))
    run.save_checkpoint(tmp_path / "made.ckpt")
    return tmp_path / "made.ckpt"


def test_python_checkpoint_alone(cli, made):
    result = cli("validate", *arguments(False), "--ckpt_path", made).ok()
    assert result.metric("val_loss") == pytest.approx(evaluate(made, result.folder, "validate")["val_loss"], rel=1e-6)
    assert cli("generate", "--ckpt_path", made, "--prompt", "ab").out.startswith("ab")


def test_python_checkpoint_beside_a_recipe(cli, made):
    """The error names sizes that differ between the checkpoint and the recipe."""
    result = cli("validate", *TINY, "--ckpt_path", made)
    assert result.code == 2 and "depth is 1 there and 2 here" in result.err and "Traceback" not in result.err


# -- a user's own module -----------------------------------------------------------------------------------------------
OWN = """
import lightning_dilated as ld

class Own(ld.LongNetLM):
    def __init__(self, pattern: dict, width: int = 4) -> None:
        super().__init__(pattern, dim=4 * width, depth=1, num_heads=4)
"""


def test_a_module_of_ones_own(cli, tmp_path, monkeypatch):
    (tmp_path / "own_module.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    model = ["--model", "own_module.Own", "--model.width", "2"]
    pattern = ["--model.pattern", '{"segment_lengths": [8], "dilation_rates": [1]}']
    run = ["--trainer.max_steps", "1", "--trainer.logger", "false", "--trainer.default_root_dir", str(tmp_path / "own")]
    assert cli("fit", *model, *pattern, *DATA, *run).code == 0
    (ckpt,) = (tmp_path / "own").rglob("*.ckpt")
    result = cli("validate", *DATA, "--ckpt_path", ckpt)
    assert result.code == 0 and result.metric("val_loss") > 0, result.err
    assert cli("generate", "--ckpt_path", ckpt, "--prompt", "ab").out.startswith("ab")


def test_workers_are_started_with_the_words_of_the_command(cli, fitted, monkeypatch):
    """A launcher repeats `sys.argv` with the recipe's full path. Each worker reads the checkpoint's settings itself."""
    words = ["--model.pattern.hybrid.local", "32", "--config", "quickstart.yaml", "--ckpt_path", str(fitted.ckpt)]
    started: list[list[str]] = []
    monkeypatch.setattr(DilatedCLI, "__init__", lambda self: started.append(sys.argv[1:]))
    cli("validate", *words)
    words[3] = find_recipe("quickstart.yaml")
    assert started == [["validate", *words]] and Path(words[3]).is_absolute()


def test_a_run_begins_quietly(fitted):
    """A run prints its layers and parameters, but neither Lightning's tips nor a FLOP count of zero."""
    said = fitted.result.out + fitted.result.err
    assert "all of them trained" in said and "DilatedTransformer" in said
    assert "FLOPs: 0" not in said and "Tip:" not in said


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_noise_of_others_is_left_out(command):
    lightning, lines = logging.getLogger("lightning.pytorch.utilities.rank_zero"), io.StringIO()
    handler = logging.StreamHandler(lines)
    lightning.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet(command)
        warnings.warn("The dirpath has changed from 'a' to 'b', therefore `kth_value` won't be reloaded", stacklevel=1)
        warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated, use `x` instead.", FutureWarning, stacklevel=1)
        warnings.warn("val_loss is nan", stacklevel=1)
    of_a_fit = ["The dirpath has changed from 'a' to 'b', therefore `kth_value` won't be reloaded"]
    assert [str(w.message) for w in caught] == (of_a_fit if command == "fit" else []) + ["val_loss is nan"]
    lightning.warning("\N{ELECTRIC LIGHT BULB} Tip: For seamless cloud logging, install something.")
    lightning.warning("GPU available: False")
    lightning.removeHandler(handler)
    assert lines.getvalue() == "GPU available: False\n"


def test_lightnings_summary_where_a_recipe_names_it(cli):
    """Lightning's ModelSummary in a recipe replaces ours and keeps its max_depth."""
    said = cli(
        *("fit", *TINY, "--trainer.max_steps", "1", "--trainer.callbacks+=lightning.pytorch.callbacks.ModelSummary"),
        *("--trainer.callbacks.max_depth", "2"),
    )
    assert said.code == 0 and "all of them trained" not in said.out, said.err
