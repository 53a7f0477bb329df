"""With exchange_memory, "auto" respects the limit, and errors list the memory of each exchange."""

import pytest

from lightning_dilated.ext.planning.counting.footprint import exchanged
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.ext.profiling.planned import moved
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.head_size import head_prices
from lightning_dilated.sequence.planner import (
    GIB,
    ExchangeMemoryError,
    held,
    make_problem,
    most_held,
    plan,
)
from lightning_dilated.sequence.shard import EXCHANGE_NAMES, check_exchange_memory

DENSE = make_problem(DilatedPattern.dense(), 4096, 8, ranks=4)
SIZES = {"head_dim": 16, "element_size": 2}


def most(exchange, problem=DENSE, per_node=4):
    return most_held(problem, exchange, per_node, 16, 2)


def test_gather_holds_what_arrives_and_its_gradients():
    for rank in range(4):
        forward, _ = moved(DENSE, "gather", rank, 4, 16, 2)
        assert held(DENSE, "gather", rank, 4, 16, 2) == forward.received * (2 + 4) // 2


def test_a_ring_holds_two_rounds_of_rows_and_the_gradients_of_one():
    """A ring's memory does not depend on the number of ranks, while a gather stores the whole sequence."""
    for ranks in (4, 8, 16):
        problem = make_problem(DilatedPattern.dense(), 1024 * ranks, 8, ranks=ranks)
        row = 1024 * 8 * 2 * 16
        assert most("ring", problem, ranks) == row * (2 + 2 + 4)
        assert most("gather", problem, ranks) == (ranks - 1) * row * (2 + 4)


def test_auto_keeps_to_it():
    sizes = {x: most(x) for x in EXCHANGES if not x.startswith("hier")}
    free = plan(DENSE, **SIZES)
    for name in sorted(sizes, key=sizes.get, reverse=True):
        bounded = plan(DENSE, **SIZES, exchange_memory=sizes[name])
        assert sizes[bounded.exchange] <= sizes[name]
        over = {x for x, n in sizes.items() if n > sizes[name]}
        assert {x for x, why in bounded.rejected if "more than exchange_memory_gib" in why} == over
        assert {p.exchange: p.held for p in bounded.prices} == sizes
        if sizes[free.exchange] <= sizes[name] and not over:
            assert bounded.exchange == free.exchange
    assert bounded.exchange == min(sizes, key=sizes.get)
    assert all(p.held is None for p in free.prices)  # without a limit, memory is not listed


def test_errors_say_the_least():
    least = min(EXCHANGES, key=lambda x: most(x) if not x.startswith("hier") else 10**12)
    assert least == "ring"
    with pytest.raises(ExchangeMemoryError, match="no exchange of this call holds as little") as error:
        plan(DENSE, **SIZES, exchange_memory=most("ring") - 1)
    words = str(error.value)
    assert "exchange_memory_gib=0.00195312 of other ranks' rows" in words
    assert "ring 0.001954, switch" in words and "Raise exchange_memory_gib to 0.001954, share the sequence" in words
    enough = check_exchange_memory(0.001954)
    assert plan(DENSE, **SIZES, exchange_memory=enough).exchange == "ring"
    with pytest.raises(ExchangeMemoryError, match=r"exchange='gather' does not hold .* Take exchange='auto' or 'ring'"):
        plan(DENSE, "gather", **SIZES, exchange_memory=most("gather") - 1)
    assert plan(DENSE, "gather", **SIZES, exchange_memory=most("gather")).exchange == "gather"


def test_packed_documents():
    """No costs are computed for packed documents. The choice is gather, or the first exchange within the limit."""
    problem = make_problem(DilatedPattern.dense(), 4096, 8, ranks=4, cu_seqlens=[0, 3000, 4096])
    assert plan(problem, **SIZES, exchange_memory=most("gather", problem)).exchange == "gather"
    below = plan(problem, **SIZES, exchange_memory=most("gather", problem) - 1)
    assert most(below.exchange, problem) < most("gather", problem)
    assert "more than exchange_memory_gib" in dict(below.rejected)["gather"]


def test_head_groups_hold_less():
    """Head groups of two store the rows of half the heads. Sizes that exceed the limit are omitted."""
    problem = make_problem(DilatedPattern.dense(), 4096, 8, ranks=4, layout="zigzag")
    bound = most("gather", problem) * 2 // 3
    prices, reasons = head_prices(problem, "gather", **SIZES, exchange_memory=bound)
    assert [x.head_size for x in prices] == [2, 4]
    assert "exchange='gather' does not hold as little" in dict(reasons)[1]


def test_planned_memory_is_that_of_the_exchange_taken():
    heads = 8, 8, 16
    setup = lambda bound: Setup("ring_dilated", 4, 4, exchange_memory=bound)  # noqa: E731
    exchange_of = lambda bound: exchanged(DilatedPattern.dense(), 4096, heads, False, 2, setup(bound))  # noqa: E731
    assert exchange_of(most("ring")).name == "ring" and exchange_of(most("ring")).kept == 0
    assert exchange_of(None).name == plan(DENSE, **SIZES).exchange


@pytest.mark.parametrize("value", [0, -1.0, "1", float("inf")])
def test_refused(value):
    with pytest.raises((TypeError, ValueError), match="exchange_memory_gib must be"):
        check_exchange_memory(value)


def test_in_bytes():
    assert check_exchange_memory(None) is None and check_exchange_memory(0.5) == GIB // 2


def test_names_of_all_exchanges():
    assert tuple(EXCHANGES) == EXCHANGE_NAMES
