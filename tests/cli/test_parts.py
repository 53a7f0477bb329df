"""An option can set one part of a mapping or list. The other parts keep their values."""

from pathlib import Path

import pytest
import yaml

from lightning_dilated.cli.parsing.settings import with_parts

from .conftest import TINY

RECIPE = """
model:
  class_path: LongNetLM
  init_args:
    pattern: {hybrid: {local: 256, global_every: 2}}
    optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.1}}
    config: {rope_parameters: {factor: 32.0, rope_type: yarn}, vocab_size: 5}
data:
  init_args:
    seq_len: {0: 128, 10: 256}
"""
LONGNET = ("--model.pattern", '{"segment_lengths": [64, 128], "dilation_rates": [1, 2], "offsets": "blocked"}')
BRANCHES = ("--model.pattern", '{"branches": [[64, 1], {"segment_length": 8, "dilation_rate": 1}]}')
#: name: (arguments, the option that they change, its expected value)
CASES = {
    "hybrid": (["--model.pattern.hybrid.local", "128"], "pattern", {"hybrid": {"local": 128, "global_every": 2}}),
    "hybrid, with =": (
        ["--model.init_args.pattern.hybrid.local=128", "--model.pattern.hybrid.global_heads=2"],
        "pattern",
        {"hybrid": {"local": 128, "global_every": 2, "global_heads": 2}},
    ),
    "a segment length": (
        [*LONGNET, "--model.pattern.segment_lengths.1", "256"],
        "pattern",
        {"segment_lengths": [64, 256], "dilation_rates": [1, 2], "offsets": "blocked"},
    ),
    "all dilation rates": (
        [*LONGNET, "--model.pattern.dilation_rates", "[1, 4]"],
        "pattern",
        {"segment_lengths": [64, 128], "dilation_rates": [1, 4], "offsets": "blocked"},
    ),
    "branches": (
        [*BRANCHES, "--model.pattern.branches.0.0", "32", "--model.pattern.branches.1.segment_length", "16"],
        "pattern",
        {"branches": [[32, 1], {"segment_length": 16, "dilation_rate": 1}]},
    ),
    "a layer of a list": (
        ["--model.pattern", '[{"branches": [[64, 1]]}, {"branches": [[8, 1]]}]', "--model.pattern.1.branches.0.0=16"],
        "pattern",
        [{"branches": [[64, 1]]}, {"branches": [[16, 1]]}],
    ),
    "another mapping": (
        ["--model.config.rope_parameters.factor", "4"],
        "config",
        {"rope_parameters": {"factor": 4, "rope_type": "yarn"}, "vocab_size": 5},
    ),
    "a part of a list that grew": (
        ["--model.rotary_base", "[1, 2]", "--model.rotary_base+", "5", "--model.rotary_base.0", "7"],
        "rotary_base",
        [7, 2, 5],
    ),
    "numbers as keys": (["--data.seq_len.10", "512"], "seq_len", {0: 128, 10: 512}),
}


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return str(path)


@pytest.mark.parametrize("name", CASES)
def test_other_parts_keep_their_values(recipe: str, name: str) -> None:
    argv, argument, value = CASES[name]
    option, _, text = with_parts(["fit", "--config", recipe, *argv])[-1].partition("=")
    assert option.endswith(f".{argument}") and yaml.safe_load(text) == value


def test_of_several_recipes_the_last_one_counts(recipe: str, tmp_path: Path) -> None:
    later = tmp_path / "later.yaml"
    later.write_text("model: {init_args: {pattern: {hybrid: {local: 64}}}}")
    argv = ["fit", "--config", recipe, f"--config={later}", "--model.pattern.hybrid.global_every=4"]
    assert yaml.safe_load(with_parts(argv)[-1].partition("=")[2]) == {"hybrid": {"local": 64, "global_every": 4}}


def test_without_a_recipe_a_pattern_begins_empty() -> None:
    assert with_parts(["fit", "--model.pattern.hybrid.local=8"]) == ["fit", "--model.pattern={hybrid: {local: 8}}"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--model.optimizer.lr", "1"],
        ["--model.optimizer.init_args.lr=1"],
        ["--data.paths", "a.txt", "b.txt", "--model.dim", "-1"],
        ["--model.unknown.part", "1"],
        [*LONGNET],
    ],
)
def test_other_arguments_are_the_parsers(recipe: str, argv: list[str]) -> None:
    assert with_parts(["fit", "--config", recipe, *argv]) == ["fit", "--config", recipe, *argv]


@pytest.mark.parametrize(
    "option, says",
    [
        ("--model.pattern.hybrid.local.x", "--model.pattern.hybrid.local is 256, which has no parts"),
        ("--model.pattern.3.branches", "is a list, whose parts are called 0 to 0; got '3'"),
        ("--model.pattern.branches+", "appends to a part of model.pattern: set all of it"),
    ],
)
def test_a_part_that_cannot_be(recipe: str, option: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    listed = ["--model.pattern=[{branches: [[8, 1]]}]"] if ".3." in option else []
    with pytest.raises(SystemExit):
        with_parts(["fit", "--config", recipe, *listed, option, "1"])
    assert says in capsys.readouterr().err


@pytest.mark.full
def test_the_run_has_the_changed_pattern(cli) -> None:
    argv = ["--model.pattern.hybrid.local", "32", "--print_config"]
    config = yaml.safe_load(cli("fit", *TINY, *argv).out)
    assert config["model"]["init_args"]["pattern"] == {"hybrid": {"local": 32, "global_every": 2}}
