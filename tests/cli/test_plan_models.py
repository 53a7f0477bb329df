"""`plan` for slide models, from recipes: token counts, options, and refusals."""

import pytest
import yaml

from lightning_dilated.ext.planning.counting.footprint import footprint
from lightning_dilated.ext.planning.counting.model_specs import counted_model_of
from lightning_dilated.ext.planning.memory import memory
from lightning_dilated.ext.planning.plan_request import parser, resolve_request
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.memory.settings import MemorySettings

pytestmark = pytest.mark.full

GIB = 2**30
BLOCK = ["--policy", "block"]
SIZES = {"dim": 64, "depth": 2, "num_heads": 4, "segment_lengths": [64, 128], "dilation_rates": [1, 2]}
LABELLED = {"class_path": "SlideEncoder", "init_args": {**SIZES, "task": "classification", "num_classes": 2}}
SLIDES = {"class_path": "SlidePretrainer", "init_args": {**SIZES, "max_wsi_size": None, "decoder_dim": 32}}


def parsed(*argv):
    return resolve_request(parser().parse_args(list(map(str, argv))))


@pytest.fixture
def recipe(tmp_path):
    """Return a function that writes a recipe with a model and data, and returns the recipe's path."""

    def write(model, data=None):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({"model": model, "trainer": {"strategy": "ring_dilated"}, "data": data}))
        return path

    return write


def test_slide_pretraining(cli):
    far = ["--segments", 64, "64K", "--dilations", 1, 4, "--gpus", 2]
    result = cli("plan", "--config", "slide_pretrain.yaml", *BLOCK, *far, "--tokens", "64K", "--gpu", "A100").ok()
    out = " ".join(result.out.split())
    assert "model: SlidePretrainer, 382K parameters, 3 blocks of 96, 4 heads of 24, 32-true" in out
    assert "decoder: 1 x 48, heads of 12" in out and "a token is a row of a slide: a tile, or the class token's" in out
    assert "65,536 tokens, 32,768 a rank" in out and "of all 4 layers" in out
    assert "the mean number of tiles is hidden, mask_ratio=0.75" in out
    assert "the recipe's batches have 2 on each data rank" in out


def test_labelled_slides(cli, recipe):
    path = recipe(LABELLED)
    result = cli("plan", "--config", path, *BLOCK, "--tokens", "1M").ok()
    out = " ".join(result.out.split())
    assert "model: SlideEncoder" in out and "a token is a row of a slide: a tile, or the class token's" in out
    plan = footprint(counted_model_of(parsed("--config", path).model, memory=MemorySettings("block")))
    peak = memory(plan, 1 << 20, Setup("ring_dilated")).peak / GIB
    (row,) = (line for line in result.out.splitlines() if line.startswith("* block  "))
    assert float(row.split()[3]) == pytest.approx(peak, abs=0.05)


def test_a_recipes_longest_slide(recipe):
    slides = {"class_path": "lightning_dilated.data.SlideDataModule", "init_args": {"paths": "x", "max_tiles": 999}}
    x = parsed("--config", recipe(SLIDES, slides))
    assert (x.tokens, x.batch) == (1000, 1)
    slides["init_args"] = {"paths": "x", "batch_size": 4}
    x = parsed("--config", recipe(SLIDES, slides))
    assert (x.tokens, x.batch) == (None, 4)
    assert parsed("--config", recipe(LABELLED)).tokens is None  # the default length of text data does not apply


def test_sizes_of_options(recipe):
    config = {
        **SLIDES,
        "init_args": {k: v for k, v in SLIDES["init_args"].items() if "_" not in k} | {"max_wsi_size": 1 << 16},
    }
    x = parsed(
        "--config", recipe(config), "--segments", 32, 256, "--dilations", 1, 4, "--dim", 128, "--heads", 8, "--depth", 3
    )
    assert [(b.segment_length, b.dilation_rate) for b in x.model.pattern.branches] == [(32, 1), (256, 4)]
    assert (x.model.dim, x.model.num_heads, x.model.depth, x.model.decoder_depth) == (128, 8, 3, 2)
    x = parsed("--config", recipe(LABELLED), "--geometric", 64, "--tokens", 256)
    assert len(x.model.pattern.branches) == 3 and x.model.pattern.offsets == "blocked"


@pytest.mark.parametrize("more, options, says", [
    ({}, ["--vocab", 8], "--vocab 8: a SlidePretrainer has no vocab_size. Leave the option out."),
    ({}, ["--kv_heads", 2], "--kv_heads 2: a SlidePretrainer has no num_kv_heads"),
    ({}, ["--residual_dtype", "bfloat16"], "--residual_dtype bfloat16: a SlidePretrainer has no residual_dtype"),
    ({}, ["--geometric", 64, "--tokens", "1K", "--offsets", "blocked"], "the offsets of a SlidePretrainer are fixed"),
    ({"class_path": "SlideEncoder"}, [], "this SlideEncoder has no task"),
    ({"task": "regression", "freeze_encoder": True}, [], "leave freeze_encoder out of the recipe"),
])  # fmt: skip
def test_refused(cli, recipe, more, options, says):
    config = SLIDES
    if more:
        own = {k: v for k, v in more.items() if k != "class_path"}
        config = {"class_path": "SlideEncoder", "init_args": {**SIZES, **own}}
    result = cli("plan", "--config", recipe(config), *options)
    assert result.code == 2 and says in " ".join(result.err.split()) and result.out == "", result.err


def test_low_rank_updates(cli, recipe):
    pytest.importorskip("peft")
    config = {**LABELLED, "init_args": {**LABELLED["init_args"], "lora_rank": 2}}
    result = cli("plan", "--config", recipe(config), "--tokens", "1M").ok()
    assert "head_chunks" not in result.out
    model = parsed("--config", recipe(config)).model
    model.configure_model()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert f"({trained / 1e3:.3g}K trained)" in result.out
