"""Dropout, low precision, strided inputs and empty batches on several ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dilated.attention import dilated_attention
from lightning_dilated.pattern import Branch, DilatedPattern

from ..attention.reference import error
from ..attention.strategies import LAYOUTS as STRIDES
from ..attention.strategies import Case
from .calls import alone, attend, compare, compare_rounded, positions, sequence
from .strategies import ANY, EXCHANGES, LAYOUTS, Sharded

#: (ranks, layout, exchange, head size, ranks per node), for every exchange and each layout that it supports
WAYS = [(r, layout, x, 1, None) for r in (2, 3, 4) for x in ANY for layout in LAYOUTS]
WAYS += [(r, layout, x, 2, None) for r in (2, 4) for x in ANY for layout in LAYOUTS]
WAYS += [(4, layout, "hierarchical_gather", 1, 2) for layout in LAYOUTS]
WAYS += [(2, "contiguous", "butterfly", 1, None), (4, "contiguous", "butterfly", 1, None)]
WAYS += [(4, "contiguous", "butterfly", 2, None), (4, "contiguous", "hierarchical_butterfly", 1, 2)]
#: for each exchange and layout, CI uses one number of ranks, in rotation; slow tests use all of them
SERVED = {
    (x, layout, size): ranks[(i + j) % len(ranks)]
    for size, ranks in ((1, (2, 3, 4)), (2, (2, 4)))
    for i, x in enumerate(ANY)
    for j, layout in enumerate(LAYOUTS)
}
LATER = {w for w in WAYS if w[2] in ANY and w[0] != SERVED[w[2], w[1], w[3]]}
every_way = pytest.mark.parametrize(
    "way", [pytest.param(w, id="-".join(map(str, w)), marks=[pytest.mark.slow] * (w in LATER)) for w in WAYS]
)

NESTED = Case(DilatedPattern.geometric(4, 32), 3, 32, 6, 3, 4)
MIXED = DilatedPattern([Branch(6, 1, heads=[0, 1, 4]), Branch(12, 3, shift=5), (None, 2), Branch(20, 4, offset=1)])
CALLS = {
    "causal": Case(MIXED, 2, 29, 5, 1, 4, causal=True),
    "lengths": Case(MIXED, 3, 29, 6, 2, 4, lengths=(29, 0, 20)),
    "documents": Case(MIXED, 1, 29, 6, 6, 4, causal=True, documents=(0, 3, 3, 20, 29)),
    "nested": NESTED,
    "nested, causal": NESTED.but(causal=True),
}


def calls_for(way: tuple) -> list[Sharded]:
    """Return the calls that an exchange supports."""
    served = {k: v for k, v in CALLS.items() if k.startswith("nested") or "butterfly" not in way[2]}
    return [Sharded(call, *way) for call in served.values()]


@every_way
def test_dropout(pool, way):
    """Rank 0's seed determines the mask by global sample, head and position. `attend` seeds other ranks differently."""
    cases = calls_for(way)
    first = WAYS.index(way)  # so that each exchange runs each call in some layout
    count = min(3 if way[2] == "hierarchical_gather" else 2, len(cases))
    for case in [cases[(first + i) % len(cases)] for i in range(count)]:
        results = pool.run(case.ranks, attend, case, torch.float64, 0.4)
        want = alone(case, dropout=0.4)
        compare(case, results, want, 1e-10)
        assert error(alone(case)["out"], want["out"].detach()) > 0.1  # dropout did change the result
        assert sum(r.sent[0] for r in results) > 0


def masks(rank: int, group: dist.ProcessGroup, seeds: list[int]) -> list[Tensor]:
    """Return the outputs of two calls on ranks that are seeded with seeds[rank]."""
    torch.manual_seed(seeds[rank])
    with sequence(group) as ours:
        x = torch.ones(1, 8, 1, 2).cumsum(1)[:, positions(ours, 8)]
        return [dilated_attention(x, x, x, DilatedPattern.dense(), dropout=0.5, sequence=ours) for _ in range(2)]


def test_dropout_follows_rank_0(pool):
    first, again, other = (
        [torch.cat(x, 1) for x in zip(*pool.run(2, masks, seeds), strict=True)] for seeds in ([3, 4], [3, 5], [7, 4])
    )
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])  # each call draws a new mask
    assert not torch.equal(first[0], other[0])


@every_way
def test_low_precision(pool, way):
    """Several ranks are as exact as one rank, because partial results and gradients are sent in fp32."""
    cases = calls_for(way)
    first = WAYS.index(way)  # so that each way runs all dtypes, and each call runs in all dtypes
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        case = cases[(first + i) % len(cases)]
        compare_rounded(case, pool.run(case.ranks, attend, case, dtype), dtype)


@every_way
def test_strides(pool, way):
    first, kinds = WAYS.index(way), STRIDES[1:]
    for strides in [kinds[(first + i) % len(kinds)] for i in range(2)]:  # so that each exchange runs all strides twice
        case = Sharded(calls_for(way)[0].call.but(layout=strides), *way)
        compare(case, pool.run(case.ranks, attend, case), alone(case), 1e-10)


def through_a_projection(
    rank: int, group: dist.ProcessGroup | None, x: Tensor, weight: Tensor, pattern: DilatedPattern, exchange: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (out, dx, dweight). q, k and v are views of one fused product. Without a group, one rank computes."""
    weight = weight.clone().requires_grad_()
    if group is None:
        return _project(x, weight, pattern, None)
    with sequence(group, exchange=exchange) as ours:
        return _project(x[:, positions(ours, x.shape[1])], weight, pattern, ours)


def _project(x, weight, pattern, sequence):
    x = x.clone().requires_grad_()
    q, k, v = (x @ weight).unflatten(-1, (3, 4, 4)).unbind(2)
    out = dilated_attention(q, k, v, pattern, causal=True, sequence=sequence).flatten(2).sin()
    return out.detach(), *torch.autograd.grad(out.square().sum(), (x, weight))


@pytest.mark.parametrize("exchange", [x for x in EXCHANGES if "hierarchical" not in x])
def test_fused_projection(pool, exchange):
    x, weight = torch.randn(2, 32, 16, dtype=torch.float64), torch.randn(16, 48, dtype=torch.float64) / 4
    pattern = DilatedPattern.geometric(4, 32)
    want = through_a_projection(0, None, x, weight, pattern, exchange)
    parts = pool.run(4, through_a_projection, x, weight, pattern, exchange)
    for i in range(2):
        torch.testing.assert_close(torch.cat([p[i] for p in parts], 1), want[i], rtol=0, atol=1e-10)
    torch.testing.assert_close(sum(p[2] for p in parts), want[2], rtol=0, atol=1e-10)


@every_way
def test_no_samples(pool, way):
    """With B = 0, no rank computes, sends or waits."""
    case = Sharded(NESTED.but(batch=0), *way)
    results = pool.run(case.ranks, attend, case)
    compare(case, results, alone(case), 0.0)
    assert all(r.sent == (0, 0) for r in results)


@pytest.mark.parametrize("scale", [0.0, -0.7, 30.0])
@pytest.mark.parametrize("exchange", ANY)
def test_scale(pool, exchange, scale):
    for layout in LAYOUTS:
        case = Sharded(CALLS["causal"].but(scale=scale), 3, layout, exchange)
        compare(case, pool.run(3, attend, case), alone(case), 1e-10)
