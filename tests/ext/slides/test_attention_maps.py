"""SlideEncoder.attention_map equals the explicit softmax of each layer, in the order of the tiles, and its errors."""

from types import SimpleNamespace

import pytest
import torch

from lightning_dilated.pattern.rows import counts, pads

from .slides import encoder, slides

WAYS = {"masked": {}, "attended": {"padding": "attended"}, "mean pool": {"pool": "mean"}, "one branch": {}}
WAYS["global class token"] = {"global_class_token": True}
WAYS["one branch"] |= {"segment_lengths": [8], "dilation_rates": [2]}  # heads with offset 1 do not see the class token
same = lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=1e-12)  # noqa: E731


@torch.no_grad()
def explicit(model, features, coords):
    """Return [(H, N, N) by layer] for one slide by the definition: counts times exp of scores, over their sum."""
    captured = []
    model.transformer(model.tile_tokens(features, coords, None), watch=captured.append)
    weights = []
    for x, block in zip(captured, model.transformer.blocks, strict=False):
        a, heads = block.attention, block.attention.num_heads
        qkv = torch.nn.functional.linear(block.attention_norm(x), a.in_proj_weight, a.in_proj_bias)[0]
        q, k, _ = (y.unflatten(-1, (heads, -1)) for y in qkv.chunk(3, -1))
        e = torch.einsum("phd,jhd->hpj", q, k).div(q.shape[-1] ** 0.5).exp()
        e = e * counts(model.pattern, len(q), heads, False, heads)
        total = e.sum(-1) + pads(model.pattern, len(q), heads, False, heads)
        weights.append(e / torch.where(total > 0, total, 1)[..., None])
    return weights


@pytest.mark.parametrize("way", WAYS)
def test_equals_the_explicit_softmax(way):
    """Weights in a ragged batch equal the weights for each slide alone, in all layers and heads. Padding has weight 0."""
    model = encoder(depth=3, **WAYS[way]).eval()
    features, coords, tiles = slides(40, 23, 1)
    queries = [39, 0, 22]
    inputs = features, coords, tiles
    token = model.attention_map(*inputs, layer="all", heads="all")
    maps = model.attention_map(*inputs, layer="all", heads="all", queries=queries)
    assert token.shape == (3, 3, 4, 40) and maps.shape == (3, 3, 4, 3, 40) and token.dtype == torch.float64
    for b, n in enumerate(tiles.tolist()):
        for layer, want in enumerate(explicit(model, features[b : b + 1, :n], coords[b : b + 1, :n])):
            same(token[layer, b, :, :n], want[:, 0, 1:])
            for i, tile in enumerate(queries):
                same(maps[layer, b, :, i, :n], want[:, tile + 1, 1:] if tile < n else torch.zeros(4, n).double())
        assert (token[:, b, :, n:] == 0).all() and (maps[:, b, ..., n:] == 0).all()
    assert (token > 0).any() and not token.requires_grad
    same(model.attention_map(*inputs), token[-1].mean(1))
    same(model.attention_map(*inputs, layer=-3, heads="all"), token[0])
    same(model.attention_map(*inputs, layer=1, queries=torch.tensor(queries)), maps[1].mean(1))
    same(model.attention_map(*inputs, layer="all", queries=[2, 2])[:, :, 1], model.attention_map(
        *inputs, layer="all", queries=range(2, 3))[:, :, 0])  # fmt: skip


@pytest.mark.parametrize("padding", ["masked", "attended"])
def test_rows_lack_the_class_tokens_own_weight_and_that_of_pads(padding):
    """Segments begin at the class token, so it does not attend to pads, but the last tile does."""
    features, coords, _ = slides(40)
    model = encoder(padding=padding).eval()
    want = explicit(model, features, coords)[-1]
    missing = lambda **o: 1 - model.attention_map(features, coords, heads="all", **o)[0].sum(-1)  # noqa: E731
    same(missing(), want[:, 0, 0])
    of_pads = missing(queries=[39])[:, 0] - want[:, 40, 0]
    assert (of_pads > 0.01).all() if padding == "attended" else (of_pads.abs() < 1e-12).all()


def test_tiles_in_another_order_keep_their_weights_in_theirs():
    """The order of tiles inside a segment of rate 1 does not matter, so weights move with their tiles."""
    model = encoder(segment_lengths=[64], dilation_rates=[1]).eval()
    features, coords, _ = slides(30)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    same(model.attention_map(features[:, order], coords[:, order]), model.attention_map(features, coords)[:, order])


def test_compiled_blocks_are_run_as_they_are():
    features, coords, _ = slides(30)
    want = encoder().eval().attention_map(features, coords, layer="all")
    compiled = encoder(compile_blocks=True).eval()
    same(compiled.attention_map(features, coords, layer="all"), want)
    assert not any(m._forward_pre_hooks for m in compiled.modules())


def test_low_rank_updates_take_part():
    pytest.importorskip("peft")
    features, coords, _ = slides(30)
    model = encoder(task="classification", num_classes=2, lora_rank=2).eval()  # all weights are random, updates too
    got = model.attention_map(features, coords, layer="all", heads="all")
    model.merge_lora()
    torch.testing.assert_close(got, model.attention_map(features, coords, layer="all", heads="all"))


@pytest.mark.parametrize("precision", ["autocast", "bf16"])
def test_half_precision(precision):
    features, coords, _ = slides(30)
    want = encoder(dtype=torch.float32).eval().attention_map(features.float(), coords)
    model = encoder(dtype=torch.bfloat16 if precision == "bf16" else torch.float32).eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        got = model.attention_map(features.bfloat16(), coords)
    assert got.dtype == torch.float32 and not torch.equal(got, want)
    torch.testing.assert_close(got, want, rtol=0.1, atol=2e-3)


REFUSED = {
    "layer beyond": ({"layer": 2}, ValueError, "layer must be 'all' or a number from -2 to 1 .* got 2"),
    "layer below": ({"layer": -3}, ValueError, "got -3"),
    "layer of a bool": ({"layer": True}, ValueError, "got True"),
    "layer of a word": ({"layer": "last"}, ValueError, "got 'last'"),
    "heads": ({"heads": 0}, ValueError, "heads must be mean or all, got 0"),
    "tile beyond": ({"queries": [0, 9]}, ValueError, r"queries holds tile 9, but there are 9 tiles \(0\.\.8\)"),
    "negative tile": ({"queries": [-1]}, ValueError, r"queries\[0\] must be at least 0"),
    "one tile": ({"queries": 3}, TypeError, "queries must be a list of tiles such as"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    change, error, says = REFUSED[name]
    inputs = dict(zip(("features", "coords", "lengths"), slides(9, 5), strict=True))
    with pytest.raises(error, match=says):
        encoder().eval().attention_map(**{**inputs, **change})


def test_refused_in_training_mode_and_while_ranks_share_a_sequence(monkeypatch):
    features, coords, _ = slides(9)
    with pytest.raises(ValueError, match=r"call \.eval\(\)"):
        encoder().attention_map(features, coords)
    group = SimpleNamespace(ranks=2)
    monkeypatch.setattr("lightning_dilated.ext.slides.encoder.active_sequence", lambda: group)
    with pytest.raises(ValueError, match="attention_map takes whole slides on one rank"):
        encoder().eval().attention_map(features, coords)
