"""Feed-forward, block and stack equal their formulas. Every combination of options trains every parameter.

Stochastic depth drops whole samples at the published rates, keeps the mean, and is reproducible by seed.
"""

import itertools

import pytest
import torch
from torch import nn

from lightning_dilated.attention import op
from lightning_dilated.attention.oracle import oracle
from lightning_dilated.models.blocks import (
    BlockOptions,
    FeedForward,
    TransformerBlock,
    default_hidden,
    drop_path_factors,
    drop_path_rates,
    make_norm,
)
from lightning_dilated.models.transformer import DilatedTransformer, init_weights
from lightning_dilated.pattern import DilatedPattern

from . import PATTERN

DIM = 16
CHOICES = {
    "norm": ["rmsnorm", "layernorm"],
    "ffn": ["swiglu", "gelu"],
    "bias": [False, True],
    "sub_layernorm": [False, True],
    "position_encoding": ["none", "rotary", "xpos"],
}
COMBINATIONS = [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]


def stack(depth=2, num_kv_heads=None, causal=True, dtype=torch.float64, hidden=None, **options):
    model = DilatedTransformer(
        DIM,
        [PATTERN] * depth,
        4,
        causal=causal,
        num_kv_heads=num_kv_heads,
        hidden=hidden,
        options=BlockOptions(**options),
    )
    return model.to(dtype)


@pytest.mark.parametrize("num_kv_heads", [None, 1], ids=["mha", "mqa"])
@pytest.mark.parametrize("options", COMBINATIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_every_parameter_learns(options, num_kv_heads):
    model = stack(num_kv_heads=num_kv_heads, **options)
    out = model(torch.randn(2, 20, DIM, dtype=torch.float64))
    (out * torch.randn_like(out)).sum().backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert out.shape == (2, 20, DIM) and out.isfinite().all() and not still


@pytest.mark.parametrize("norm", CHOICES["norm"])
@pytest.mark.parametrize("ffn", CHOICES["ffn"])
def test_block_is_its_formula(ffn, norm):
    block = TransformerBlock(DIM, 4, 24, PATTERN, causal=False, options=BlockOptions(norm=norm, ffn=ffn, bias=True))
    x = torch.randn(2, 20, DIM)
    y = x + block.attention(block.attention_norm(x))[0]
    z = block.ffn_norm(y)
    h = nn.functional.linear(z, block.ffn.fc1.weight, block.ffn.fc1.bias)
    if ffn == "swiglu":
        h = nn.functional.silu(nn.functional.linear(z, block.ffn.gate.weight, block.ffn.gate.bias)) * h
    else:
        h = nn.functional.gelu(h)
    torch.testing.assert_close(block(x), y + nn.functional.linear(h, block.ffn.fc2.weight, block.ffn.fc2.bias))
    centred = x - x.mean(-1, keepdim=True) if norm == "layernorm" else x
    want = centred / (centred.square().mean(-1, keepdim=True) + (1e-5 if norm == "layernorm" else 1e-6)).sqrt()
    torch.testing.assert_close(make_norm(norm, DIM)(x), want)


def test_stack_is_its_blocks():
    model, x, positions = stack(3), torch.randn(2, 20, DIM, dtype=torch.float64), 2 * torch.arange(20)
    want = x
    for block in model.blocks:
        want = block(want, positions=positions)
    torch.testing.assert_close(model(x, positions=positions), model.norm(want))
    assert not torch.allclose(model(x), model.norm(want))  # the default positions are 0, 1, ...


def test_layers_attend_by_their_own_pattern():
    """Each block of a hybrid equals the reference with the block's pattern."""
    patterns = DilatedPattern.hybrid(4, 4, local=6, global_every=2)
    model = DilatedTransformer(DIM, patterns, 4, causal=True, options=BlockOptions(position_encoding="none")).double()
    x = torch.randn(1, 20, DIM, dtype=torch.float64)
    for block, pattern in zip(model.blocks, patterns, strict=True):
        layer, normed = block.attention, block.attention_norm(x)
        q, k, v = nn.functional.linear(normed, layer.in_proj_weight).unflatten(-1, (3, 4, -1)).unbind(2)
        want = layer.out_proj(oracle(q, k, v, pattern, causal=True)[0].flatten(2))
        torch.testing.assert_close(layer(normed)[0], want)
        x = block(x)


def test_sub_layernorm_sits_before_fc2():
    ffn = FeedForward(DIM, 24, BlockOptions(ffn="gelu", sub_layernorm=True))
    x = torch.randn(3, DIM)
    want = ffn.fc2(nn.functional.layer_norm(nn.functional.gelu(ffn.fc1(x)), (24,)))
    torch.testing.assert_close(ffn(x), want)


@pytest.mark.parametrize("name", ["dropout", "attention_dropout"])
def test_dropout_in_training_only(name):
    model, x = stack(**{name: 0.3}), torch.randn(1, 20, DIM, dtype=torch.float64)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize(
    "dim, ffn, want", [(128, "gelu", 512), (128, "swiglu", 352), (768, "swiglu", 2048), (96, "swiglu", 256)]
)
def test_default_hidden(dim, ffn, want):
    assert default_hidden(dim, ffn) == want
    assert stack(1, ffn=ffn).blocks[0].ffn.fc2.in_features == default_hidden(DIM, ffn)


def test_init_weights():
    torch.manual_seed(0)
    model = DilatedTransformer(256, [PATTERN] * 2, 4, causal=True, options=BlockOptions(bias=True))
    init_weights(model, depth=8, dim=256)
    for name, p in model.named_parameters():
        if p.ndim >= 2:
            std = 0.039528 / (4 if name.endswith(("out_proj.weight", "fc2.weight")) else 1)  # sqrt(2 / 1280)
            assert p.std().item() == pytest.approx(std, rel=0.05), name
        else:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name


@pytest.mark.parametrize("options", [{}, {"position_encoding": "xpos", "sub_layernorm": True}], ids=["plain", "xpos"])
def test_blocks_compile_to_one_graph(options):
    """Each block is compiled separately, as in recipes. The rotary table is computed outside of the graph."""
    model, x = stack(**options), torch.randn(2, 20, DIM, dtype=torch.float64)
    want = model(x)
    grads = torch.autograd.grad(want.square().sum(), list(model.parameters()))
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    got = model(x)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got.square().sum(), list(model.parameters())), grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype, refuses", [(torch.float16, True), (torch.bfloat16, False)], ids=str)
def test_xpos_is_checked_for_the_dtype_under_autocast(dtype, refuses):
    """Under autocast, q and k are float16, so xPos overflows at much smaller positions than in float32."""
    model, x, far = (
        stack(1, position_encoding="xpos", dtype=torch.float32),
        torch.randn(1, 4, DIM),
        torch.arange(4) + 5000,
    )
    assert model(x, positions=far).isfinite().all()
    with torch.autocast("cpu", dtype):
        if refuses:
            with pytest.raises(ValueError, match=r"overflows torch\.float16"):
                model(x, positions=far)
        else:
            assert model(x, positions=far).isfinite().all()


# -- activation recomputation ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("policy, calls", [("block", 2), ("attention-kept", 1)])
def test_recomputed_gradients_are_the_plain_ones(policy, calls, compiled, monkeypatch):
    """Policy "block" runs the op twice and "attention-kept" once. Both passes draw the same dropout masks."""
    if compiled:  # torch's compiler draws other masks than eager mode
        options, causal = BlockOptions(), True
        torch._dynamo.reset()
    else:
        options, causal = BlockOptions(dropout=0.2, attention_dropout=0.3), False
    ran, real = [], op.run_forward
    monkeypatch.setattr(op, "run_forward", lambda *args: ran.append(args) or real(*args))
    block, grads = TransformerBlock(DIM, 4, 24, PATTERN, causal=causal, options=options), []
    x = torch.randn(2, 20, DIM)
    if compiled:
        block.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    for block.recompute in ("none", policy):
        ran.clear()
        torch.manual_seed(7)
        leaf = x.clone().requires_grad_()
        grads.append(torch.autograd.grad(block(leaf).square().sum(), [leaf, *block.parameters()]))
    assert len(ran) == calls
    for want, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)


# -- stochastic depth --------------------------------------------------------------------------------------------------
def dropping_stack(rate, depth=3):
    torch.manual_seed(0)
    return DilatedTransformer(16, [PATTERN] * depth, 4, causal=False, options=BlockOptions(drop_path=rate)).double()


def test_rates_rise_linearly():
    assert drop_path_rates(0.4, 5) == pytest.approx([0, 0.1, 0.2, 0.3, 0.4]) and drop_path_rates(0.4, 1) == [0]


def test_factors():
    x = torch.empty(20000, 1, 1)
    got = drop_path_factors(0.5, 3, x)
    assert got.shape == (3, 2, 20000, 1, 1)
    for layer, p in zip(got, (0.0, 0.25, 0.5), strict=True):
        assert set(layer.unique().tolist()) == ({1.0} if p == 0 else {0.0, torch.tensor(1 / (1 - p)).item()})
        assert layer.mean().item() == pytest.approx(1, abs=0.02) and (layer == 0).double().mean() == pytest.approx(
            p, abs=0.02
        )
    assert not torch.equal(got[2, 0], got[2, 1])  # attention and feed-forward of a sample are dropped independently
    assert drop_path_factors(0.0, 3, x) is None


def test_a_dropped_branch_adds_nothing():
    model, x = dropping_stack(0.999999999), torch.randn(2, 20, 16, dtype=torch.float64)
    want = model.blocks[0](x)  # the second layer drops half of the branches, the last layer all of them
    drops = drop_path_factors_of(model, x, seed=5)
    torch.manual_seed(5)
    got = model(x)
    for block, drop in zip(model.blocks[1:], drops[1:], strict=True):
        y = want + drop[0] * block.attention(block.attention_norm(want))[0]
        want = y + drop[1] * block.ffn(block.ffn_norm(y))
    torch.testing.assert_close(got, model.norm(want))
    assert not drops[2].any() and 0 < (drops[1] == 0).sum() < 4


def drop_path_factors_of(model, x, seed):
    torch.manual_seed(seed)
    return drop_path_factors(model.drop_path, len(model.blocks), x)


def test_in_training_only():
    model, x = dropping_stack(0.5), torch.randn(4, 20, 16, dtype=torch.float64)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
