"""Every recipe parses and its model builds. Names, paths, several configs and overrides work as documented."""

import csv
import importlib
import math
import random
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.trainer.connectors.logger_connector.result import warning_cache

from lightning_dilated import DilatedPattern, LongNetLM, LongNetMLM
from lightning_dilated.cli.lightning_cli import with_checkpoint
from lightning_dilated.cli.recipe import recipe_folders
from lightning_dilated.data import write_synthetic_slides
from lightning_dilated.models.transformer import position_advice

from .conftest import DATA, LOG, TINY

pytestmark = pytest.mark.full

EVERY = sorted(path for folder in recipe_folders()[-1:] for path in folder.rglob("*.yaml"))
#: recipes for `fit` that need the extra transformers: tests/ext/transformers runs them
OF_TRANSFORMERS = [path for path in EVERY if "integrations.transformers" in path.read_text()]
#: all other recipes for `fit`; generate.yaml is for `generate`
RECIPES = [x for x in EVERY if "trainer" in yaml.safe_load(x.read_text()) and x not in OF_TRANSFORMERS]
QUICKSTART = next(path for path in RECIPES if path.name == "quickstart.yaml")
WRITTEN = yaml.safe_load(QUICKSTART.read_text())
STEPS, SIZES = WRITTEN["trainer"]["max_steps"], WRITTEN["model"]["init_args"]
LENGTH = WRITTEN["data"]["init_args"]["seq_len"]
each = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


def printed(result):
    """Return the config that --print_config prints."""
    assert result.code == 0, result.err
    return yaml.safe_load(result.out)


@each
def test_parses(cli, recipe):
    config = printed(cli("fit", "--config", recipe, "--print_config"))
    assert set(config) >= {"seed_everything", "trainer", "model", "data"}


@each
def test_model_and_data_can_be_made(recipe):
    """Parsing only checks types. A pattern that does not fit the number of heads fails when the model is built."""
    config = yaml.safe_load(recipe.read_text())
    for part in ("model", "data"):
        module, _, name = config[part]["class_path"].rpartition(".")
        init_args = {
            k: v for k, v in config[part].get("init_args", {}).items() if k not in ("optimizer", "lr_scheduler")
        }
        instance = getattr(importlib.import_module(module), name)(**init_args)
        if part == "model":
            instance.configure_model()
            assert sum(p.numel() for p in instance.parameters()) > 0


@each
def test_says_how_to_run_it(recipe):
    """The comment at the top of a recipe contains its command, for use in a checkout."""
    head = [line for line in recipe.read_text().splitlines() if line.startswith("#")]
    assert any(f"lightning-dilated fit --config recipes/{recipe.name}" in line for line in head)


@each
def test_schedule_ends_with_the_run(recipe):
    """A cosine schedule must have the run's number of steps (the default), or it would end too early or never."""
    config = yaml.safe_load(recipe.read_text())
    schedule = config["model"]["init_args"].get("lr_scheduler")
    if schedule is not None:
        steps = config["trainer"]["max_steps"]
        assert (
            steps > schedule["init_args"]["warmup_steps"] and schedule["init_args"].get("total_steps", steps) == steps
        )


def test_quickstart_shows_what_the_package_is_for():
    """Layers have different patterns, the sequence is longer than a local segment, and no warning appears."""
    model = LongNetLM(**{k: v for k, v in SIZES.items() if k not in ("optimizer", "lr_scheduler")}, max_seq_len=LENGTH)
    assert len(set(model.patterns)) >= 2 and LENGTH >= 4096
    assert not model.explain(LENGTH).hints and not position_advice(model, LENGTH)


def test_every_other_recipe_is_for_generate():
    assert [path.name for path in EVERY if path not in RECIPES + OF_TRANSFORMERS] == ["generate.yaml"]


# -- every recipe at a tiny size -----------------------------------------------------------------------------------------
SMALL = '{"segment_lengths": [16, 64], "dilation_rates": [1, 4]}'
SIZES_OF = ["--model.pattern", SMALL, "--model.dim", "16", "--model.depth", "2", "--model.num_heads", "4"]
SLIDES = ["--data.paths", "slides", "--model.dim", "16", "--model.depth", "1", "--model.feature_dim", "8"]
TEXT = ["--data.paths", "text.txt", "--data.seq_len", "64", "--data.batch_size", "1", "--data.val_limit", "2"]
CHUNKS = '[{"class_path": "lightning_dilated.callbacks.ActivationRecompute", "init_args": {"stream": 16}}]'
STREAMED = ["--trainer.callbacks", CHUNKS, "--trainer.limit_val_batches", "1", "--data.val_fraction", "0.2"]
EVERY_BATCH = ["--trainer.check_val_every_n_epoch", "null"]
#: options that make a recipe tiny; tests/strategy runs ring_4gpu, and most tests of this folder run the quickstart
TINY_RUNS = {
    "billion": [*TEXT, *SIZES_OF, "--model.compile_blocks", "false", *STREAMED],
    "bytes_context": [*TEXT, *SIZES_OF],
    "elastic": [*TEXT, *SIZES_OF, "--trainer.strategy.init_args.global_batch", "2", *EVERY_BATCH],
    "far_recall": ["--data.train_size", "128", "--data.val_size", "4", "--data.test_size", "0", "--model.depth", "2"],
    "genome_mlm": ["--data.paths", "genome.fa", *TEXT[2:], *SIZES_OF],
    "longest": [*TEXT, *SIZES_OF, "--model.num_heads", "8", "--model.compile_blocks", "false"],
    "regions": [*TEXT, *SIZES_OF, "--trainer.strategy.init_args.sequence_size", "1", *EVERY_BATCH],
    "slide_finetune": SLIDES,
    "slide_pretrain": [*SLIDES, "--model.decoder_dim", "16"],
}


def test_every_recipe_has_a_tiny_run():
    assert {path.stem for path in RECIPES} == {*TINY_RUNS, "quickstart", "ring_4gpu"}


@pytest.mark.parametrize("layout", ["auto", "chunked"])
def test_a_billion_on_several_gpus(cli, layout):
    """The two lines of options in the recipe's top comment are valid."""
    head = (RECIPES[0].parent / "billion.yaml").read_text()
    lines = [line.removeprefix("#").split() for line in head.splitlines() if line.startswith("#   --trainer.devices")]
    assert len(lines) == 2
    options = lines[layout == "chunked"]
    config = printed(cli("fit", "--config", "billion.yaml", *options, "--print_config"))["trainer"]
    strategy = config["strategy"]
    assert config["devices"] in (4, "4") and strategy["class_path"].endswith("RingDilatedStrategy")
    assert strategy["init_args"]["layout"] == layout
    assert strategy["init_args"]["sequence_size"] == (1 if layout == "auto" else "auto")


@pytest.mark.parametrize("name", TINY_RUNS)
def test_runs_tiny(cli, tmp_path, name):
    """A recipe trains two steps, validates with a finite loss, and causes no warning about averaging over ranks."""
    chosen = random.Random(0)
    (tmp_path / "genome.fa").write_text(">one\n" + "".join(chosen.choice("ACGT") for _ in range(4000)) + "\n")
    write_synthetic_slides(tmp_path / "slides", slides=10, tiles=(5, 20), features=8)
    trainer = ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--trainer.log_every_n_steps", "1"]
    trainer += ["--trainer.accelerator", "cpu", "--trainer.precision", "32-true", "--trainer.devices", "1"]
    warning_cache.clear()  # Lightning gives each advice only once per process
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = cli("fit", "--config", f"{name}.yaml", *TINY_RUNS[name], *trainer)
        warnings.warn("the last of those that are recorded", stacklevel=1)
    assert result.code == 0, result.err[-2000:]
    assert "the last of those" in str(caught[-1].message)
    assert not [x for x in caught if "sync_dist" in str(x.message) or "LeafSpec" in str(x.message)]
    (table,) = (tmp_path / "runs" / name).rglob("metrics.csv")
    rows = list(csv.DictReader(table.open()))
    losses = {key: [float(r[key]) for r in rows if r.get(key)] for key in ("train_loss", "val_loss")}
    assert len(losses["train_loss"]) == 2 and losses["val_loss"]
    assert all(math.isfinite(x) and x > 0 for values in losses.values() for x in values)


# -- which file a --config means ---------------------------------------------------------------------------------------
SPELLINGS = {
    "bare name": ["--config", "quickstart.yaml"],
    "as in the checkout": ["--config", "recipes/quickstart.yaml"],
    "short option": ["-c", "quickstart.yaml"],
    "with =": ["--config=quickstart.yaml"],
    "full path": ["--config", str(QUICKSTART)],
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_a_recipe_is_found_from_anywhere(cli, spelling):
    assert printed(cli("fit", *spelling, "--print_config"))["trainer"]["max_steps"] == STEPS


def test_a_file_of_ones_own_comes_first(cli, tmp_path):
    own = {**WRITTEN, "trainer": {"max_steps": 7}}
    (tmp_path / "quickstart.yaml").write_text(yaml.safe_dump(own))
    assert printed(cli("fit", "--config", "quickstart.yaml", "--print_config"))["trainer"]["max_steps"] == 7


# -- what wins ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def second(tmp_path):
    path = tmp_path / "second.yaml"
    path.write_text("trainer: {max_steps: 7, accelerator: cpu}\nmodel: {init_args: {dim: 64}}\n")
    return ["--config", str(path)]


FIRST = ["--config", "quickstart.yaml"]
ORDERS = {
    "recipe": (lambda s: FIRST, (STEPS, SIZES["dim"])),
    "recipe, second": (lambda s: [*FIRST, *s], (7, 64)),
    "recipe, second, command line": (lambda s: [*FIRST, *s, "--model.dim", "32"], (7, 32)),
    "command line, recipe, second": (lambda s: ["--model.dim", "32", *FIRST, *s], (7, 32)),
    "command line twice": (lambda s: [*FIRST, "--model.dim", "32", "--model.dim", "48"], (STEPS, 48)),
}


@pytest.mark.parametrize("name", ORDERS)
def test_the_later_one_wins(cli, second, name):
    argv, want = ORDERS[name]
    config = printed(cli("fit", *argv(second), "--print_config"))
    assert (config["trainer"]["max_steps"], config["model"]["init_args"]["dim"]) == want
    assert config["model"]["init_args"]["num_heads"] == SIZES["num_heads"]  # other values stay


# -- what a run writes down --------------------------------------------------------------------------------------------
def test_saved_config_is_the_run(fitted):
    config = yaml.safe_load((fitted.log / "config.yaml").read_text())
    assert config["trainer"]["max_steps"] == 3 and config["data"]["init_args"]["seq_len"] == 64
    model = config["model"]["init_args"]
    assert model["dim"] == 16 and model["pattern"] == SIZES["pattern"]
    assert model["optimizer"]["init_args"]["lr"] == SIZES["optimizer"]["init_args"]["lr"]


@pytest.mark.parametrize("source", ["--print_config", "config.yaml"])
def test_a_config_can_be_fitted_again(cli, fitted, tmp_path, source):
    text = cli("fit", *TINY, "--print_config").out if source == "--print_config" else None
    (tmp_path / "again.yaml").write_text(text or (fitted.log / "config.yaml").read_text())
    cli("fit", "--config", "again.yaml").ok()
    assert (tmp_path / LOG / "metrics.csv").read_text() == (fitted.log / "metrics.csv").read_text()


def test_package_finds_the_recipes_of_the_checkout():
    assert Path(__file__).resolve().parents[2] / "recipes" in recipe_folders()


# -- layers and positions ------------------------------------------------------------------------------------------------
def fitted(cli, *options):
    """Run a tiny fit. Return the saved hyperparameters, standard error, and the path of last.ckpt."""
    result = cli("fit", *TINY, *options).ok()
    (last,) = result.folder.rglob("last.ckpt")
    saved = torch.load(last, weights_only=True)["hyper_parameters"]
    return saved, result.err, last


def test_a_pattern_for_each_layer(cli):
    listed = '[{"segment_lengths": [16], "dilation_rates": [1]}, {"branches": [[null, 1]]}]'
    saved, *_ = fitted(cli, "--model.pattern", listed, "--model.rotary_base", '[10000, "none"]')
    assert [x["branches"][0]["segment_length"] for x in saved["pattern"]] == [16, None]
    assert saved["rotary_base"] == [10000, "none"] and saved["max_seq_len"] is None


def test_positions_are_made_for_the_data(cli):
    """max_seq_len is the length of the data unless the recipe sets it. The checkpoint stores it."""
    saved, said, last = fitted(cli)
    assert saved["max_seq_len"] == int(DATA[DATA.index("--data.seq_len") + 1]) and "rotary_base" not in said
    cli("validate", *TINY, "--data.seq_len", "32", "--ckpt_path", str(last)).ok()


def test_a_length_of_its_own(cli):
    assert fitted(cli, "--model.max_seq_len", "5000")[0]["max_seq_len"] == 5000


@pytest.mark.parametrize("kind", [LongNetLM, LongNetMLM])
def test_a_checkpoint_of_the_usual_base_keeps_it(kind, tmp_path):
    """A model without max_seq_len keeps its rotary base when a recipe with longer data evaluates it."""
    model = kind(DilatedPattern.dense(), dim=16, depth=2, num_heads=4)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_steps=0)
    trainer.strategy.connect(model)
    model.configure_model()
    trainer.save_checkpoint(tmp_path / "api.ckpt")
    model_class = ["--model", f"lightning_dilated.{kind.__name__}"]
    words = with_checkpoint(
        ["validate", "--config", str(QUICKSTART), *model_class, "--ckpt_path", str(tmp_path / "api.ckpt")]
    )
    assert "--model.rotary_base=10000.0" in words and "--model.max_seq_len=null" in words
