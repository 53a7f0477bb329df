"""head_size="auto": the costs of each size, expected choices, and the same choice on all ranks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence.head_size import head_prices, in_groups, plan_in_groups, trade_bytes
from lightning_dilated.sequence.links import Links
from lightning_dilated.sequence.planner import make_problem, plan

from ..examples import examples
from .cases import cases

DENSE, GEOMETRIC = DilatedPattern.dense(), DilatedPattern.geometric(2048, 1 << 20)


def dense(**options):
    return make_problem(DENSE, 1 << 20, 16, ranks=8, **options)


#: (problem, ranks per node, expected size)
CHOICES = {
    "dense, causal, balanced": (dense(causal=True, layout="zigzag"), 8, 8),
    "the same on nodes of 4": (dense(causal=True, layout="zigzag"), 4, 4),
    "dense: the switch moves less": (dense(), 8, 1),
    "few kv heads: keys are cheaper than tokens": (make_problem(DENSE, 1 << 20, 12, 2, ranks=8), 8, 1),
    "dilated: few rows cross": (make_problem(GEOMETRIC, 1 << 20, 12, ranks=8), 8, 1),
    "4 ranks wait for those with more of 6 heads": (
        make_problem(DENSE, 1 << 18, 6, ranks=4, causal=True, layout="zigzag"),
        4,
        1,
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_auto(name):
    problem, per_node, want = CHOICES[name]
    plans = [plan_in_groups(problem, rank, ranks_per_node=per_node) for rank in range(problem.shard.ranks)]
    assert {x.head_size for x in plans} == {want}
    chosen = plans[0]
    assert min(chosen.head_prices, key=lambda x: x.total).head_size == want
    assert f"head_size: {want}\n" in str(chosen)
    assert all(f"  {x.head_size:<6}{x}" in str(chosen) for x in chosen.head_prices)


def test_what_is_not_priced():
    problem = make_problem(DENSE, 1 << 16, 3, ranks=12, causal=True)
    prices, reasons = head_prices(problem, ranks_per_node=6)
    assert [x.head_size for x in prices] == [1, 2, 3]
    assert dict(reasons) == {
        4: "does not divide the 6 ranks of a node",
        6: "more ranks than the 3 heads",
        12: "these and larger groups would reach over nodes of 6 ranks",
    }
    narrow = plan_in_groups(make_problem(DilatedPattern.dense(64), 4096, 4, ranks=4), 0)
    assert narrow.head_size == 1 and "head_size: 1\n  1     no segment crosses a shard" in str(narrow)
    packed = plan_in_groups(make_problem(DENSE, 4096, 4, ranks=4, cu_seqlens=[0, 1000, 4096]), 0)
    assert packed.head_size == 1 and "documents differ from batch to batch" in str(packed)


def test_a_named_exchange_limits_the_sizes():
    prices, reasons = head_prices(make_problem(DilatedPattern.geometric(96, 768), 768, 6, ranks=6), "butterfly")
    # size 2 leaves 3 ranks, not a power of two; size 6 leaves one rank, which exchanges nothing
    assert [(x.head_size, x.exchange) for x in prices] == [(3, "butterfly"), (6, None)]
    assert "exchange='butterfly' cannot serve this call: needs a power of two of ranks, not 6" in dict(reasons)[1]
    with pytest.raises(ValueError, match="exchange='butterfly' cannot serve this call"):
        plan_in_groups(make_problem(DENSE, 513, 1, ranks=3), 0, "butterfly")


def test_links_decide():
    problem = dense(causal=True, layout="zigzag")
    slow_rounds = Links(round=1.0)
    assert plan_in_groups(problem, 0, links=slow_rounds).head_size == 1  # trading tokens for heads takes 8 collectives
    assert plan_in_groups(problem, 0).head_size == 8


@given(
    cases(longest=32, ranks=8, members=1), st.sampled_from([1, 2, 4, 8]), st.sampled_from(["auto", "gather", "ring"])
)
@settings(max_examples=examples(60))
def test_every_rank_chooses_alike(case, per_node, exchange):
    for problem in case.problems():
        if problem.shard.ranks % per_node:
            continue
        plans = [
            plan_in_groups(problem, rank, exchange, ranks_per_node=per_node) for rank in range(problem.shard.ranks)
        ]
        assert len({(x.head_size, x.exchange, x.head_prices) for x in plans}) == 1
        size = plans[0].head_size
        assert per_node % size == 0
        for rank, chosen in enumerate(plans):
            assert chosen.problem == in_groups(problem, size, rank % size)
        assert plans[0].exchange == plan(in_groups(problem, size), exchange, ranks_per_node=per_node).exchange


def test_traded_bytes_of_an_even_trade():
    """The bytes equal Ulysses': each of 4 ranks receives 3/4 of its share of q, k, v and outputs."""
    problem = make_problem(DENSE, 64, 8, ranks=4)
    x = trade_bytes(problem, 4, 0, samples=2, head_dim=16, element_size=2)
    tokens, heads = 2 * 48, 2
    assert x.forward == tokens * heads * 3 * 16 * 2 + 2 * 16 * 6 * (16 * 2 + 4)
    assert x.backward == tokens * heads * (2 * 16 * 2 + 4) + 2 * 16 * 3 * 6 * 16 * 4
