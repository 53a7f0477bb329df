"""Rotary and xPos against their formulas in complex float64, at positions near and far; dense heads without positions."""

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.attention import MultiheadDilatedAttention
from lightning_dilated.attention.oracle import oracle
from lightning_dilated.attention.rotary import GAMMA, Rotary
from lightning_dilated.pattern import Branch, DilatedPattern

from ..examples import examples
from ..pattern.strategies import documents, head_counts, patterns
from .reference import close

D, BASE, SCALE_BASE = 8, 10000.0, 512.0
KINDS = {"rotary": None, "xpos": SCALE_BASE}


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64)


def scores(table, q, k):
    """Return (B, H, N, N) scores of rotated q and k."""
    q, k = table.rotate(q, k)
    return torch.einsum("bphd,bjhd->bhpj", q, k)


def formula(q, k, positions, scale_base):
    """The papers' formula: channel pair i is a complex number, rotated by its angle and scaled by distance (xPos)."""
    q, k = (torch.complex(*x.chunk(2, -1)) for x in (q, k))
    distance = (positions[:, None] - positions[None, :]).double()[..., None]
    channel = torch.arange(0, D, 2, dtype=torch.float64) / D
    turn = torch.polar(torch.ones(()).double(), distance * BASE**-channel)
    if scale_base is not None:
        turn = turn * ((channel + GAMMA) / (1 + GAMMA)) ** (distance / scale_base)
    return torch.einsum("bphd,bjhd,pjd->bhpj", q, k.conj(), turn).real


@pytest.mark.parametrize("scale_base", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("start", [0, 5, 1000])
def test_is_the_formula(scale_base, start):
    q, k, positions = rand(2, 9, 3, D), rand(2, 9, 3, D), start + 7 * torch.arange(9)
    table = Rotary(D, BASE, scale_base)(positions, torch.float64)
    torch.testing.assert_close(scores(table, q, k), formula(q, k, positions, scale_base), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale_base", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("shift", [1, 64, 4321])
def test_only_distances_matter(scale_base, shift):
    q, k, positions = rand(1, 20, 2, D), rand(1, 20, 2, D), torch.arange(20)
    rotary = Rotary(D, BASE, scale_base)
    here, there = (scores(rotary(p, torch.float64), q, k) for p in (positions, positions + shift))
    torch.testing.assert_close(here, there, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(here, torch.einsum("bphd,bjhd->bhpj", q, k))


@pytest.mark.parametrize("position", [1_000_000, 10_000_000, 2**31 + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_precise_far_away(position, dtype):
    """At such positions, angles in float32 are off by whole turns. A bfloat16 table is off by 0.4 % at any position."""
    table = Rotary(64, BASE)(torch.tensor([position, position + 1]), dtype)
    assert table.cos.dtype == torch.promote_types(dtype, torch.float32)
    for row, p in enumerate((position, position + 1)):
        for i in range(32):
            angle = p * BASE ** (-2 * i / 64)
            # fmod in float64 loses at most angle * 2^-53
            slack = 2e-7 + 2 * angle * 2**-53
            assert abs(table.cos[row, i].item() - math.cos(angle)) < slack
            assert abs(table.sin[row, i].item() - math.sin(angle)) < slack


def test_xpos_decays_with_the_distance():
    ones = torch.ones(1, 4096, 1, D, dtype=torch.float64)
    envelope = scores(Rotary(D, 1e12, SCALE_BASE)(torch.arange(4096), torch.float64), ones, ones)[0, 0, -1]
    # the nearest keys come last; with this base only the first channel pair rotates noticeably
    means = envelope.unflatten(0, (8, 512)).mean(1)
    assert (means.diff() > 0).all() and means[0] < 0.5 * means[-1]


@pytest.mark.parametrize("scale_base", KINDS.values(), ids=KINDS)
def test_keeps_dtype_and_gradients(scale_base):
    q = torch.randn(2, 5, 3, D, dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(2, 5, 1, D, dtype=torch.bfloat16)
    turned, other = Rotary(D, BASE, scale_base)(torch.arange(5), q.dtype).rotate(q, k)
    assert turned.dtype == other.dtype == torch.bfloat16 and other.shape == k.shape
    turned.sum().backward()
    assert q.grad.isfinite().all() and q.grad.dtype == torch.bfloat16


# -- in the layer ------------------------------------------------------------------------------------------------------
def layer(pattern, heads=2, kind="rotary", **options):
    return MultiheadDilatedAttention(
        heads * D, heads, pattern, position_encoding=kind, dtype=torch.float64, **options
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_positions_of_a_slice(kind):
    """Every second token, at its position in the whole sequence, attends like a branch of rate 2 over the sequence."""
    sparse = layer(DilatedPattern([Branch(None, 2, offset=0)]), kind=kind)
    dense = layer(DilatedPattern.dense(), kind=kind)
    dense.load_state_dict(sparse.state_dict())
    x, positions = rand(2, 40, 2 * D), torch.arange(0, 40, 2)
    want = sparse(x)[0][:, ::2]
    torch.testing.assert_close(dense(x[:, ::2], positions=positions)[0], want, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(dense(x[:, ::2])[0], want)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_are_counted_from_0(kind):
    module, x = layer(DilatedPattern.dense(8), kind=kind), rand(2, 20, 2 * D)
    positions = torch.arange(20)
    want = module(x)[0]
    assert torch.equal(module(x, positions=positions)[0], want)
    assert torch.equal(module(x, positions=positions.to(torch.int32).expand(2, 20))[0], want)
    assert torch.equal(module(x, positions=module.rotary(positions, x.dtype))[0], want)


def test_positions_of_each_sample():
    module, x = layer(DilatedPattern.dense()), rand(2, 10, 2 * D)
    positions = torch.stack([torch.arange(10), 3 * torch.arange(10)])
    got = module(x, positions=positions)[0]
    for i in range(2):
        torch.testing.assert_close(got[i : i + 1], module(x[i : i + 1], positions=positions[i])[0])
    assert not torch.allclose(got[1], module(x)[0][1])


# -- dense heads without positions -------------------------------------------------------------------------------------
@st.composite
def with_dense_heads(draw):
    """Draw (heads, kv heads, pattern): some kv heads are dense, and random branches serve the others."""
    heads, kv_heads = draw(head_counts(8))
    group = heads // kv_heads
    dense = draw(st.sets(st.integers(0, kv_heads - 1), min_size=1))
    whole, others = ([h for h in range(heads) if (h // group in dense) is x] for x in (True, False))
    random = draw(patterns(heads, kv_heads)) if others else None
    branches = random.branches if random else ()
    limited = [replace(b, heads=tuple(others)) for b in branches if b.heads is None or set(b.heads) & set(others)]
    order = draw(st.permutations([Branch(None, 1, heads=whole), *limited]))
    return heads, kv_heads, replace(random, branches=tuple(order)) if random else DilatedPattern(order)


def by_definition(module, x, **options):
    """Return the output of a layer: dense heads by their only branch, and rotary positions in all other heads."""
    heads, kv_heads = module.num_heads, module.num_kv_heads
    pattern, sizes = module.attention.pattern, (heads, kv_heads, kv_heads)
    q, k, v = (x @ module.in_proj_weight.T + module.in_proj_bias).unflatten(-1, (-1, D)).split(sizes, 2)
    turned = Rotary(D)(torch.arange(x.shape[1]), x.dtype).rotate(q, k)
    branches = [[b.to_dict() for b in pattern.branches if b.serves(h)] for h in range(heads)]
    undilated = {"segment_length": None, "dilation_rate": 1}
    dense = [[{n: v for n, v in b.items() if n != "heads"} for b in served] == [undilated] for served in branches]
    same = torch.tensor(dense)[:, None]
    q, k = (torch.where(y, *z) for y, z in ((same, (q, turned[0])), (same[:: heads // kv_heads], (k, turned[1]))))
    return module.out_proj(oracle(q, k, v, pattern, **options)[0].flatten(2))


@given(st.data())
@settings(max_examples=examples(40))
def test_dense_heads_without_positions(data):
    """The output and every gradient equal the definition's."""
    heads, kv_heads, pattern = data.draw(with_dense_heads())
    n, causal = data.draw(st.integers(1, 24)), data.draw(st.booleans())
    bounds = torch.tensor(data.draw(documents(n)), dtype=torch.int32) if data.draw(st.booleans()) else None
    module = layer(pattern, heads, num_kv_heads=kv_heads, causal=causal, global_rotary=False)
    torch.nn.init.normal_(module.in_proj_weight, std=0.3)
    x = rand(1, n, heads * D).requires_grad_()
    outputs = module(x, cu_seqlens=bounds)[0], by_definition(module, x, causal=causal, cu_seqlens=bounds)
    grad, inputs = rand(*x.shape), (x, *module.parameters())
    results = [(y, *torch.autograd.grad(y, inputs, grad)) for y in outputs]
    for got, want in zip(*results, strict=True):
        close(f"{pattern}, {heads} heads, {kv_heads} kv heads, {bounds}", got, want, 1e-9)


def test_a_shared_table_rotates_the_layer_s_own_heads():
    pattern = DilatedPattern([Branch(4, 1, heads=[0]), Branch(None, 1, heads=[1])])
    plain, module = layer(pattern), layer(pattern, global_rotary=False)
    module.load_state_dict(plain.state_dict())
    x = rand(1, 20, 2 * D)
    table = plain.table(x)
    assert torch.equal(module(x, positions=table)[0], module(x)[0])
    assert torch.equal(plain(x, positions=module.table(x))[0], plain(x)[0])
    assert not torch.allclose(module(x)[0], plain(x)[0])


# -- what is refused ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_xpos_refuses_overflow_with_a_remedy_that_works(dtype):
    far = 10_000_000
    with pytest.raises(ValueError, match=r"xPos .* overflows .* beyond position") as caught:
        Rotary(D, BASE, SCALE_BASE)(torch.tensor([0, far]), dtype)
    limit = int(re.search(r"beyond position (\d+)", str(caught.value))[1])
    remedy = int(re.search(r"xpos_scale_base to at least (\d+)", str(caught.value))[1])
    ones = torch.ones(1, 1, 1, D, dtype=dtype)
    for scale_base, position in ((SCALE_BASE, limit), (remedy, far)):
        turned = Rotary(D, BASE, scale_base)(torch.tensor([position]), dtype).rotate(ones, ones)
        assert all(x.isfinite().all() and (x != 0).all() for x in turned)
    with pytest.raises(ValueError, match="overflows"):
        Rotary(D, BASE, SCALE_BASE)(torch.tensor([limit + 1]), dtype)
    with pytest.raises(ValueError, match="overflows"):
        Rotary(D, BASE, remedy * 0.99)(torch.tensor([far]), dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_own_positions_are_not_read(kind):
    """Tensors on "meta" cannot be read. On a GPU, reading the layer's own positions would make the host wait."""
    module, x = layer(DilatedPattern.dense(8), kind=kind).to("meta"), torch.empty(2, 20, 2 * D, device="meta")
    assert module.table(x).cos.shape == (20, D // 2)
    if kind == "xpos":
        with pytest.raises(RuntimeError, match="meta"):  # positions that the caller gives must be read
            module.table(x, torch.arange(20, device="meta"))


def test_given_positions_are_read_before_they_are_sent():
    """Given positions are read on the CPU before they are copied to the device of x ("meta", which has no values)."""
    module, x = layer(DilatedPattern.dense(8), kind="xpos").half().to("meta"), torch.empty(1, 3, 2 * D, device="meta")
    assert module.table(x.half(), torch.tensor([0, 5, 9])).cos.shape == (3, D // 2)
    with pytest.raises(ValueError, match=r"overflows .* reaches 99999"):
        module.table(x.half(), torch.tensor([0, 99_999, 1]))


def test_own_positions_that_overflow():
    module = layer(DilatedPattern.dense(8), kind="xpos").half()
    with pytest.raises(ValueError, match=r"overflows .* reaches 99999"):
        module.table(torch.empty(1, 10, 2 * D, dtype=torch.float16, device="meta"), start=99_990)
    assert module.table(torch.empty(1, 10, 2 * D, dtype=torch.float16)).cos.shape == (10, D // 2)


def test_no_positions_at_all():
    assert Rotary(D, BASE, SCALE_BASE)(torch.arange(0)).cos.shape == (0, D // 2)


REFUSED = {
    "odd head dim": (lambda: Rotary(7), "head_dim must be even; got 7"),
    "base 1": (lambda: Rotary(D, 1), "rotary base must be above 1, got 1; 10000 is usual"),
    "base nan": (lambda: Rotary(D, math.nan), "rotary base must be above 1, got nan"),
    "no scale base": (lambda: Rotary(D, BASE, 0), "xpos_scale_base must be a positive number of tokens, got 0"),
    "positions too many": (
        lambda: layer(DilatedPattern.dense())(rand(2, 5, 2 * D), positions=torch.arange(6)),
        r"positions must be \(5,\) or \(2, 5\), got \(6,\)",
    ),
    "positions of another batch": (
        lambda: layer(DilatedPattern.dense())(rand(2, 5, 2 * D), positions=torch.zeros(3, 5, dtype=torch.int64)),
        r"positions must be \(5,\) or \(2, 5\), got \(3, 5\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        call()
