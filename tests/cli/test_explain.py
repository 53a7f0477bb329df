"""`explain`: numbers of a recipe or of given sizes, a fix for each problem, and errors."""

from pathlib import Path

import pytest
import yaml

import lightning_dilated as ld
from lightning_dilated import LongNetLM
from lightning_dilated.cli.recipe import class_of, with_length
from lightning_dilated.ext.explain import command as explain_command

from .test_recipes import RECIPES, SIZES, WRITTEN

pytestmark = pytest.mark.full

WALLS = ["--segments", 16, 32, "--dilations", 1, 2, "--seq-len", 100, "--heads", 4, "--depth", 3]


def value(result, name):
    (line,) = (line for line in result.out.splitlines() if line.strip().startswith(name))
    return line.strip().removeprefix(name).strip()


def test_of_a_recipe(cli):
    result = cli("explain", "--config", "quickstart.yaml").ok()
    length = WRITTEN["data"]["init_args"]["seq_len"]
    sizes = {k: v for k, v in SIZES.items() if k not in ("optimizer", "lr_scheduler")}
    plan = LongNetLM(**sizes, max_seq_len=length).explain(length)
    head_dim = SIZES["dim"] // SIZES["num_heads"]
    assert f"{length:,} tokens, 4 heads of {head_dim}, 4 layers, causal" in result.out
    assert value(result, "walls") == value(result, "dead residues") == "none" and "no problems" in result.out
    assert "256 to 4,095 tokens back        100% seen in one step, by 2.0 heads of all layers" in result.out
    assert value(result, "rotary range") == "base 100000 serves 8,210 tokens (all layers)"
    assert value(result, "layers to full reach") == f"{plan.layers_to_full_reach} (100.0% in 4)"
    assert value(result, "keys per row").startswith(f"{plan.keys_per_row:,.1f}, dense 2,048.5")
    assert value(result, "forward FLOPs").startswith(
        f"{plan.flops(head_dim):.3g} a layer, {4 * plan.flops(head_dim):.3g} "
    )


def test_dense_heads_without_positions(cli, tmp_path):
    options = {"pattern": {"hybrid": {"local": 8}}, "dim": 16, "num_heads": 2, "global_rotary": False}
    recipe = {"model": {"class_path": "LongNetLM", "init_args": options}}
    (tmp_path / "dense.yaml").write_text(yaml.safe_dump(recipe))
    result = cli("explain", "--config", "dense.yaml", "--seq_len", "4096")
    assert "no positions (dense heads)" in result.out and "no problems" in result.out, result.err


def complete(path):
    """Return whether a recipe sets both a pattern and a length."""
    config = yaml.safe_load(path.read_text())
    return "pattern" in config["model"].get("init_args", {}) and "seq_len" in config["data"].get("init_args", {})


@pytest.mark.parametrize("recipe", filter(complete, RECIPES), ids=lambda path: path.stem)
def test_of_every_recipe(cli, recipe):
    """`explain` handles the model class of every recipe, and no recipe of this package has walls."""
    result = cli("explain", "--config", recipe)
    assert result.code == 0 and value(result, "walls").startswith("none"), result.out + result.err


def test_the_command_line_wins(cli):
    walls = ["--segments", 256, 1024, 4096, "--dilations", 1, 2, 4, "--depth", 1]
    result = cli("explain", "--config", "quickstart.yaml", *walls, "--seq_len", 8192, "--heads", 2, "--no-causal")
    assert "8,192 tokens, 2 heads of 32, 1 layers, both directions" in result.out
    assert value(result, "walls") == "1, the first at position 4,096"
    assert value(result, "dead residues") == "branches[2]: 2 of 4"
    problems = [line for line in result.out.splitlines() if line.startswith("  problem: ")]
    assert (
        len(problems) == 3
        and "Add a branch with a segment of at least 8192" in problems[0]
        and "dilation rate" in problems[1]
    )
    assert "from a distance of 256 tokens on, one layer shows a query none of the tokens there" in problems[2]


def test_of_given_sizes(cli):
    result = cli("explain", *WALLS, "--causal")
    assert result.code == 0 and value(result, "walls") == "3, the first at position 32"
    assert value(result, "layers to full reach").startswith("never")
    assert "causal" in result.out and "both directions" in cli("explain", *WALLS).out
    assert value(cli("explain", *WALLS, "--offsets", "blocked", "--heads", 1), "dead residues") == "branches[1]: 1 of 2"


def test_a_model_of_another_class(cli, tmp_path):
    model = {"class_path": "LongNetMLM", "init_args": {**SIZES, "mask_span": 3}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({"model": model, "data": {"init_args": {"seq_len": 512}}}))
    result = cli("explain", "--config", "own.yaml")
    assert "512 tokens" in result.out and "both directions" in result.out, result.err


REFUSED = {
    "nothing": ([], "explain needs --segments and --dilations, --seq_len, --heads, --depth, or a recipe"),
    "half": (["--segments", 16], "--segments and --dilations belong together"),
    "no depth": (WALLS[:-2], "explain needs --depth, or a recipe"),
    "heads": ([*WALLS, "--heads", 0], "num_heads must be at least 1"),
    "pattern": (["--segments", 16, "--dilations", 0], "dilation_rate must be at least 1"),
    "no recipe": (["--config", "nowhere.yaml"], "no such file, and no recipe of that name"),
    "no model": (["--config", "empty.yaml"], "has no model with a class_path"),
    "no class": (["--config", "unknown.yaml"], "class_path nowhere.Model cannot be imported"),
    "no pattern": (["--config", "other.yaml"], "has no pattern to explain"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(cli, tmp_path, name):
    argv, says = REFUSED[name]
    (tmp_path / "empty.yaml").write_text("trainer: {}\n")
    (tmp_path / "unknown.yaml").write_text("model: {class_path: nowhere.Model}\n")
    (tmp_path / "other.yaml").write_text("model: {class_path: lightning_dilated.DilatedModule}\n")
    result = cli("explain", *argv)
    assert result.code == 2 and says in result.err and result.out == "", result.err


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, 512),
        ({"rotary_base": None}, 512),
        ({"rotary_base": "length"}, 512),
        ({"rotary_base": ["none", "length"]}, 512),
        ({"rotary_base": 1e5}, None),
        ({"rotary_base": ["none", 1e5]}, None),
        ({"max_seq_len": 64, "rotary_base": "length"}, 64),
    ],
    ids=str,
)
def test_models_whose_base_follows_the_length_are_made_for_the_data(given, expected):
    assert with_length(LongNetLM, given, 512).get("max_seq_len") == expected
    assert with_length(LongNetLM, given, None) == given


class Nested:
    class Model(LongNetLM):
        """A nested class: the dotted path of jsonargparse allows it."""


def test_class_of():
    assert class_of(Path("r.yaml"), f"{__name__}.Nested.Model", "lightning_dilated") is Nested.Model
    assert class_of(Path("r.yaml"), "LongNetLM", "lightning_dilated") is LongNetLM
    for wrong in ("LongNet", "no such.Model", "lightning_dilated.LongNetLM.nothing", ".Model", None):
        with pytest.raises(ValueError, match=r"--config r\.yaml: class_path .* cannot be imported"):
            class_of(Path("r.yaml"), wrong, "lightning_dilated")


def test_recurrences_of_another_depth():
    """With --depth, the layers of a recipe repeat, and the table names existing layers only."""
    pattern, layers = ld.DilatedPattern.dense(8), (ld.Recurrence(), None, ld.Recurrence(), None)
    sizes = explain_command.Sizes((pattern,), 16, 2, None, 2, recurrences=layers)
    lines = explain_command.table(sizes, explain_command.explain((pattern,), 16, 2, 2, True, None))
    assert any("layer(s) 0 reach everything" in line for line in lines)
