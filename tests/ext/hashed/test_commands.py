"""Hashed heads in commands and files: explain, plan, recipes, folders of models; and models that refuse them."""

import pytest
import torch
import yaml
from torch import nn

import lightning_dilated as ld
from lightning_dilated.cli.main import main
from lightning_dilated.ext.explain.advice import advice
from lightning_dilated.ext.explain.explanation import explain
from lightning_dilated.ext.export.export import export
from lightning_dilated.ext.float8 import float8
from lightning_dilated.memory.settings import MemorySettings

from ...models import SIZES, loader, tiny, trainer

SEGMENTS = ld.DilatedPattern.longnet([16], [1])
READS = "queries of the last 1 kv head(s) read up to 3 x 5 rows by learned code, anywhere before them"
HASHED = {"layers": [1], "latest": 5, "probes": 3}


def lm(hashed=None, pattern=SEGMENTS, **options):
    return ld.LongNetLM(pattern, **{**SIZES, **options}, hashed=hashed)


# -- explain -----------------------------------------------------------------------------------------------------------
def test_explain_counts_the_heads_that_follow_the_pattern():
    """Hashed heads have no keys of the pattern; they are neither uncovered rows nor zeros in the mean of keys."""
    plain, some = lm().explain(64), lm(HASHED).explain(64)
    assert plain.pattern_heads == 4 and some.pattern_heads == 3.5 and plain.beyond is None
    assert some.keys_per_row == plain.keys_per_row == 8.5 and some.uncovered == 0
    assert some.pairs == pytest.approx(plain.pairs * 7 / 8)
    assert some.dense_pairs == plain.dense_pairs * 7 / 8
    assert f"in layer(s) 1, {READS}" in some.beyond and "walls do not stop them" in str(some)
    assert "in all layers, queries" in lm({}).explain(64).beyond
    halves = lm(HASHED, num_kv_heads=2).explain(64)  # with grouped queries, a kv head has two query heads
    assert halves.pattern_heads == 3 and halves.keys_per_row == 8.5


def test_other_uncovered_rows_stay():
    """In a layer with hashed heads, another head without a branch is reported."""
    pattern = ld.DilatedPattern([ld.Branch(16, 1, heads=(0, 1))])
    assert explain([pattern], 64, 4, 2, True).uncovered == 0.5
    assert explain([pattern], 64, 4, 2, True, hashed=(0, 1)).uncovered == pytest.approx(3 / 7)
    assert lm(HASHED, pattern).explain(64).uncovered == pytest.approx(3 / 7)


def test_advice_says_that_walls_do_not_stop_them():
    plain, some = advice(lm(), 64), advice(lm(HASHED), 64)
    assert "3 wall(s)" in plain and "3 wall(s)" in some and f"But in layer(s) 1, {READS}" in some
    assert "one layer shows a query none of the tokens there" in plain and "one layer shows" not in some
    both = advice(lm(HASHED, recurrence={}), 64)
    assert "all layers reach everything through a memory" in both and READS in both
    assert advice(lm(HASHED, ld.DilatedPattern.dense()), 64) is None


@pytest.mark.full
def test_the_commands(tmp_path, capsys):
    """`explain` and `plan` read a recipe with hashed heads; `--segments` replaces its patterns and these heads."""
    sizes = {**SIZES, "pattern": {"branches": [[16, 1]]}, "hashed": HASHED}
    model = {"class_path": "LongNetLM", "init_args": sizes}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({"model": model}))
    recipe = ["--config", str(tmp_path / "x.yaml")]
    main(["explain", *recipe, "--seq_len", "64"])
    said = capsys.readouterr().out
    assert f"in layer(s) 1, {READS}" in said and "rows without any key  none" in said and "8.5, dense 32.5" in said
    main(["explain", *recipe, "--seq_len", "64", "--depth", "4"])
    said = capsys.readouterr().out
    assert f"in layer(s) 1, {READS}" in said and "8.5, dense 32.5" in said and "4 layers" in said
    with pytest.raises(SystemExit):
        main(["explain", *recipe, "--seq_len", "64", "--depth", "1"])
    assert "hashed layers=[1] must be below the model's depth, 1" in capsys.readouterr().err
    main(["explain", *recipe, "--seq_len", "64", "--segments", "16", "--dilations", "1"])
    assert "learned code" not in capsys.readouterr().out
    main(["plan", *recipe, "--tokens", "16K", "--no-compile"])
    said = capsys.readouterr().out
    assert "hashed heads: layer(s) 1" in said and "FLOPs of lookups a token" in said and "head_chunks" not in said


@pytest.mark.full
@pytest.mark.parametrize(("options", "written"), [
    (["--model.hashed.layers", "[1]", "--model.hashed.heads", "2"], {"layers": [1], "heads": 2}),
    (["--model.hashed", '{"layers": [0, 1]}'], {"layers": [0, 1]}),
    ([], None),
])  # fmt: skip
def test_print_config(capsys, options, written):
    with pytest.raises(SystemExit):
        main(["fit", "--config", "quickstart.yaml", *options, "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]["hashed"] == written


# -- files -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("hashed", [ld.Hashed(layers=(1,), codes=3, soft_until=0), HASHED, {}, None], ids=str)
def test_a_folder_of_a_model_has_them(tmp_path, hashed):
    """config.json stores plain values, and the loaded model computes the same logits."""
    torch.manual_seed(0)
    model = tiny(SEGMENTS, hashed=hashed)
    loaded = ld.LongNetLM.from_pretrained(model.save_pretrained(tmp_path / "x")).eval()
    assert loaded.hashed == model.hashed and loaded.patterns == model.patterns
    tokens = torch.arange(40)[None] % 11
    assert torch.equal(loaded(tokens), model(tokens))


@pytest.mark.full
@pytest.mark.parametrize(("own", "same"), [
    ({**HASHED, "soft_until": 7, "agree": 0.5}, True), ({"latest": 5, "probes": 3, "layers": [0]}, False),
    ({**HASHED, "latest": 6}, False), (None, False),
])  # fmt: skip
def test_a_run_compares_what_the_heads_read(tmp_path, own, same):
    """A run may continue with other losses, but not with other rows."""
    tokens = torch.arange(20)[None] % 11
    data = loader({"tokens": tokens, "labels": tokens})
    run = trainer(max_steps=1)
    run.fit(lm(HASHED), data)
    run.save_checkpoint(tmp_path / "x.ckpt")
    again = trainer(max_steps=2)
    resume = lambda: again.fit(lm(own), data, ckpt_path=tmp_path / "x.ckpt", weights_only=True)  # noqa: E731
    if same:
        resume()
        assert again.global_step == 2
        return
    with pytest.raises(ValueError, match=r"was trained with hashed=.* other hashed heads, which give other results"):
        resume()


# -- refusals ----------------------------------------------------------------------------------------------------------
REFUSED = {
    "a masked model": (lambda: ld.LongNetMLM(SEGMENTS, **SIZES, hashed={}), "this model is not causal: leave hashed out"),
    "a layer": (
        lambda: ld.MultiheadDilatedAttention(16, 4, SEGMENTS, hashed={}),
        "this layer is not causal: leave hashed out",
    ),
    "graphs": (lambda: lm(HASHED, cuda_graphs=True), "cuda_graphs cannot record layers with .* hashed heads"),
    "head chunks": (
        lambda: setattr(tiny(hashed={}).transformer, "memory", MemorySettings("block", head_chunks=2)),
        "head_chunks=2 is not offered with hashed, which reads all heads",
    ),
    "torchscale": (
        lambda: ld.LongNetLM.from_torchscale({}, [4], [1], hashed={}),
        "a torchscale decoder has no hashed heads",
    ),
    "a missing layer": (lambda: lm({"layers": [2]}), r"hashed layers=\[2\] must be below the model's depth, 2"),
    "all heads": (lambda: lm({"heads": 4}), "hashed heads=4 leaves no other head"),
    "export": (lambda: export(tiny(hashed={}), "x.pt2", 8), "hashed heads cannot be exported"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, says = REFUSED[name]
    with pytest.raises(ValueError, match=says):
        call()


def test_slides_set_it_themselves():
    with pytest.raises(TypeError, match=r"SlideEncoder has no argument 'hashed'\. The class sets it itself"):
        ld.SlideEncoder(hashed={})


def test_float8_leaves_their_layers():
    layer = nn.Linear(32, 32)
    assert float8._serves(layer, "0.ffn.fc1") and not float8._serves(layer, "0.attention.hashed.query_code")
