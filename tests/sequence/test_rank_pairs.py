"""Pairs by rank sum to the pairs of segments that cross a cut, and "auto" considers the busiest rank."""

import pytest

from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import pairs as all_pairs
from lightning_dilated.sequence.links import Links
from lightning_dilated.sequence.planner import make_problem, plan, price, rank_pairs

DENSE = DilatedPattern.dense()


@pytest.mark.parametrize("exchange", ["gather", "switch", "ring"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "strided"])
@pytest.mark.parametrize(
    "pattern", [DENSE, DilatedPattern([(64, 4)]), DilatedPattern([(None, 3)], offsets="blocked")], ids=str
)
def test_all_ranks_together(pattern, layout, causal, exchange):
    problem = make_problem(pattern, 64, 4, ranks=4, layout=layout, causal=causal)
    assert sum(rank_pairs(problem, exchange, rank) for rank in range(4)) == all_pairs(pattern, 64, 4, 4, causal)


def test_by_hand():
    """Dense and causal over 4 ranks of 16 tokens: the queries of the last rank see 3 shards and half of their own."""
    contiguous, zigzag = (make_problem(DENSE, 64, 1, ranks=4, layout=x, causal=True) for x in ("contiguous", "zigzag"))
    assert [rank_pairs(contiguous, "gather", r) for r in range(4)] == [16 * 16 * r + 16 * 17 // 2 for r in range(4)]
    assert len({rank_pairs(zigzag, "gather", r) for r in range(4)}) == 1
    assert price(zigzag, "gather", 4, 64, 2, Links()).waiting == 0


@pytest.mark.parametrize(("layout", "waits"), [("contiguous", True), ("zigzag", False)])
def test_auto_weighs_the_busiest(layout, waits):
    """131,072 causal tokens on 4 ranks: the last contiguous shard has 7/4 of the mean pairs; switch spreads heads."""
    problem = make_problem(DENSE, 131072, 12, ranks=4, layout=layout, causal=True)
    prices = {p.exchange: p for p in plan(problem).prices}
    assert (prices["gather"].waiting > 0.03) == waits
    assert prices["switch"].waiting < 6e-3  # blocks of the switch are slower, but balanced
    assert plan(problem).exchange == ("switch" if waits else "gather")
    assert ("layout='zigzag' gives every rank" in str(plan(problem))) == waits
    packed = make_problem(DENSE, 131072, 12, ranks=4, layout=layout, causal=True, cu_seqlens=(0, 7, 131072))
    assert str(plan(problem, "ring")) and str(plan(packed))  # plans without costs can also be printed
