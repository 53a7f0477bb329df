"""Dropout against the formula with explicit masks, its statistics, and the quantities that determine a mask."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.attention import dilated_attention
from lightning_dilated.attention.backends import math as math_engine
from lightning_dilated.attention.dropout import Dropout
from lightning_dilated.pattern import Branch, DilatedPattern

from ..examples import examples
from .reference import GRADIENTS, close, close_lse, gradients, leaves
from .strategies import Case, cases

PATTERN = DilatedPattern([(6, 1), Branch(12, 3, shift=5), (None, 2)])
CASE = Case(PATTERN, 2, 25, 4, 2, 8, causal=True)


def drawn_seed() -> int:
    """Return the seed that the next call of dilated_attention draws from torch's generator."""
    state = torch.get_rng_state()
    seed = int(torch.randint(2**62, (), dtype=torch.int64))
    torch.set_rng_state(state)
    return seed


def by_masks(case, q, k, v, dropout):
    """Return (out, lse) by (N, N) masks: keep * c * exp(s) v / (1-p), summed, over the sum without dropout."""
    group = case.heads // case.kv_heads
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    s = torch.einsum("bphd,bjhd->bhpj", q, k.repeat_interleave(group, 2)) * scale
    weighted = torch.zeros_like(s)
    at = torch.arange(case.seq_len)
    for i, branch in enumerate(case.pattern.branches):
        alone = DilatedPattern([branch], case.pattern.offsets, case.pattern.offset_heads, case.pattern.padding)
        mask = dropout.keep(
            i, torch.arange(case.batch)[:, None, None, None], torch.arange(case.heads)[:, None, None], at[:, None], at
        )
        weighted = weighted + mask * case.but(pattern=alone).counts()[0]
    c, n_pad = case.counts()
    z = (c * s.exp()).sum(-1) + n_pad
    weights = weighted * s.exp() / (1 - dropout.p) / torch.where(z > 0, z, 1.0)[..., None]
    return torch.einsum("bhpj,bjhd->bphd", weights, v.repeat_interleave(group, 2)), z.log()


@pytest.mark.parametrize("padding", ["masked", "attended"])
@pytest.mark.parametrize("p", [0.5, 0.1, 0.9, 1e-9])
def test_formula(p, padding):
    @settings(max_examples=examples(40))
    @given(cases(padding=padding, longest=40))
    def check(case):
        if case.refused():
            return
        q, k, v, grad = case.tensors()
        again = leaves(q, k, v)
        want, want_lse = by_masks(case, *again, Dropout(p, drawn_seed()))
        out, lse = case.run(q, k, v, dropout=p, return_lse=True)
        close(f"out of {case}", out, want, 1e-10)
        close_lse(f"lse of {case}", lse, want_lse, 1e-10)  # dropout does not change the denominator
        got = gradients(out, (q, k, v), grad)
        for name, a, b in zip(GRADIENTS, got, gradients(want, again, grad), strict=True):
            close(f"{name} of {case}", a, b, 1e-10)

    check()


def test_low_precision():
    q, k, v, _ = CASE.tensors(torch.bfloat16)
    want, _ = by_masks(CASE, *(x.double() for x in (q, k, v)), Dropout(0.3, drawn_seed()))
    close("out", CASE.run(q, k, v, dropout=0.3), want, 1e-2)


def test_seeds():
    q, k, v, _ = CASE.tensors()
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append((CASE.run(q, k, v, dropout=0.3), CASE.run(q, k, v, dropout=0.3)))
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][0], runs[0][1]) and not torch.equal(runs[0][0], runs[2][0])


def test_no_dropout_draws_nothing():
    q, k, v, _ = CASE.tensors()
    before = torch.get_rng_state()
    CASE.run(q, k, v, dropout=0.0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("budget", [1, 7, 64, 300])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_tiles(budget, dropout, monkeypatch):
    """The result and the mask do not depend on the tiles into which the math engine splits the scores."""
    case = CASE.but(layout="fused")
    q, k, v, grad = case.tensors()

    def run():
        torch.manual_seed(4)
        out, lse = case.run(q, k, v, dropout=dropout, engine="math", return_lse=True)
        return out, lse, *gradients(out, (q, k, v), grad)

    want = run()
    sizes = []
    tiles = math_engine._tiles
    monkeypatch.setattr(math_engine, "_tiles", lambda *a: (sizes.append(1) or tile for tile in tiles(*a)))
    run()
    whole = len(sizes)
    monkeypatch.setattr(math_engine, "SCORE_BUDGET", budget)
    got = run()
    assert len(sizes) - whole > whole  # the smaller budget did split the scores
    for name, a, b in zip(("out", "lse", *GRADIENTS), got, want, strict=True):
        close(name, a.masked_fill(a == -torch.inf, 0), b.masked_fill(b == -torch.inf, 0), 1e-13)


def run_with_seed(case, q, k, v, seed=6):
    torch.manual_seed(seed)
    return case.run(q, k, v, dropout=0.5)


def test_mask_is_keyed_by_global_positions():
    one = Case(PATTERN, 1, 12, 2, 2, 8)
    q, k, v, _ = one.tensors()
    alone = run_with_seed(one, q, k, v)
    twice = [torch.cat([x, x], 1) for x in (q, k, v)]
    packed = run_with_seed(one.but(seq_len=24, documents=(0, 12, 24)), *twice)
    assert torch.equal(packed[:, :12], alone) and not torch.allclose(packed[:, 12:], alone)
    padded = run_with_seed(one.but(seq_len=24, lengths=(12,)), *twice)
    assert torch.equal(padded[:, :12], alone)
    empty_first = run_with_seed(one.but(documents=(0, 0, 12)), q, k, v)
    assert torch.equal(empty_first, alone)


def test_mask_differs_by_sample_head_and_branch():
    # every sample and head has equal inputs, so only the masks can make outputs differ
    q, k, v = torch.randn(3, 1, 16, 1, 8, dtype=torch.float64).expand(3, 2, 16, 3, 8)
    pattern = DilatedPattern([Branch(None, 1)])
    torch.manual_seed(0)
    out = dilated_attention(q, k, v, pattern, dropout=0.5)
    flat = out.transpose(1, 2).flatten(0, 1)
    assert all(not torch.allclose(flat[i], flat[j]) for i in range(6) for j in range(i))
    torch.manual_seed(0)
    twice = dilated_attention(q, k, v, DilatedPattern([Branch(None, 1)] * 2), dropout=0.5)
    assert not torch.allclose(twice, out)


def keeps(p=0.3, seed=1234, branches=2, samples=2, heads=4, n=128):
    """Draw keep masks: (branch, sample, head, n, n) bool."""
    a = [torch.arange(m) for m in (branches, samples, heads, n, n)]
    shape = lambda x, i: x.view([-1 if j == i else 1 for j in range(5)])  # noqa: E731
    return Dropout(p, seed).keep(*(shape(x, i) for i, x in enumerate(a)))


@pytest.mark.parametrize("p", [0.02, 0.3, 0.5, 0.97])
@pytest.mark.parametrize("axis", range(5), ids=["branch", "sample", "head", "query", "key"])
def test_keep_rate(axis, p):
    """For each axis, the mean chi-square over the axis' entries is 1, within 5 standard deviations."""
    mask = keeps(p).double()
    counts = mask.sum([i for i in range(5) if i != axis])
    n = mask.numel() / len(counts)
    chi = ((counts - n * (1 - p)) ** 2 / (n * p * (1 - p))).mean().item()
    assert abs(chi - 1) < 5 * math.sqrt(2 / len(counts)), chi
    assert abs(mask.mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / mask.numel())


@pytest.mark.parametrize("lag", [1, 2, 16, 64])
@pytest.mark.parametrize("axis", [3, 4], ids=["query", "key"])
def test_neighbours_are_independent(axis, lag):
    x = keeps().double() - 0.7
    a, b = x.narrow(axis, 0, 128 - lag), x.narrow(axis, lag, 128 - lag)
    assert abs((a * b).mean() / 0.21) < 5 / math.sqrt(a.numel())


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["branch", "sample", "head"])
def test_branches_samples_and_heads_are_independent(axis):
    x = keeps().double() - 0.7
    a, b = x.select(axis, 0), x.select(axis, 1)
    assert abs((a * b).mean() / 0.21) < 5 / math.sqrt(a.numel())


@pytest.mark.parametrize(
    "other", [1235, 1234 + 2**32, 1234 + 2**40, 1234 ^ 2**61], ids=["low", "bit 32", "high", "top"]
)
def test_seeds_are_independent(other):
    # every one of the 62 bits of a drawn seed must change the mask
    a, b = keeps().double() - 0.7, keeps(seed=other).double() - 0.7
    assert abs((a * b).mean() / 0.21) < 5 / math.sqrt(a.numel())


@given(st.integers(0, 2**40), st.integers(0, 2**40))
@settings(max_examples=examples(50))
def test_positions_beyond_32_bits(p, j):
    at = lambda p, j: Dropout(0.5, 3).keep(0, torch.tensor(0), torch.tensor(0), p + torch.arange(64), torch.tensor(j))  # noqa: E731
    assert not torch.equal(at(p, j), at(p + 2**32, j)) and not torch.equal(at(p, j), at(p, j + 2**32))


def test_expectation():
    """The mean output over many masks approaches the output without dropout."""
    case = Case(PATTERN, 64, 20, 2, 2, 4, causal=True)
    q, k, v = (x.detach()[:1].expand(64, -1, -1, -1) for x in case.tensors()[:3])
    want = case.run(q, k, v)[0]
    outs = torch.cat([case.run(q, k, v, dropout=0.3) for _ in range(32)])
    spread = outs.std(0) / math.sqrt(len(outs))
    assert ((outs.mean(0) - want).abs() <= 5 * spread + 1e-12).all()
    assert (spread > 0).any()
