"""The closed forms of the strided layout equal the definition and the programs, and need less than N^2 operations."""

import sys
import time
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence import strided
from lightning_dilated.sequence.exchange import EXCHANGES, all_to_all, program
from lightning_dilated.sequence.exchange.all_to_all import compile_switch
from lightning_dilated.sequence.exchange.program import Program, origins, rows_for
from lightning_dilated.sequence.exchange.run import compile_program
from lightning_dilated.sequence.links import Links
from lightning_dilated.sequence.planner import joint_pairs, make_problem, plan, price, rank_pairs
from lightning_dilated.sequence.requirements import row_requests

from ..examples import examples
from .cases import Case, cases

STRIDED = cases(longest=48, ranks=7, members=2, layouts=("strided",), fewest=2)
FIVE = DilatedPattern.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
#: r divides neither w nor T, w is not a multiple of T, segments are short or shifted
ODD = DilatedPattern([(1000, 3), (2047, 1), (37, 2)]), FIVE.shifted(), DilatedPattern([(5792, 2), (30001, 8)])


def rows_of(held: strided.RowsByDocumentHead) -> Counter:
    """Return {(document, head, position): number of occurrences}."""
    return Counter((*key, p) for key, parts in held.items() for x in parts for piece in x.ranges() for p in piece)


@given(STRIDED, st.data())
@settings(max_examples=examples(200))
def test_rows_that_readers_need(case: Case, data):
    readers = data.draw(st.sets(st.integers(0, case.shard.ranks - 1), min_size=1))
    held = case.held()
    for problem in case.problems():
        visible = case.rows_seen(problem)
        needed = set().union(*(visible[r] for r in readers))
        for source in range(case.shard.ranks):
            read = strided.rows_read(problem, frozenset(readers), source)
            rows = rows_of(read)
            assert all(n == 1 for n in rows.values())
            assert set(rows) == {x for x in needed if x[2] in held[source]}
            assert strided.row_count(read) == sum(key[0].samples for key in rows)
            message = rows_for(problem, sorted(readers), source)
            assert Counter((x.document, x.head, p) for x in message for p in x.rows) == rows


@given(STRIDED)
@settings(max_examples=examples(150))
def test_rows_of_owners(case: Case):
    held = case.held()
    for problem in case.problems():
        for owner in range(case.shard.ranks):
            tasks = all_to_all.tasks_by_owner(problem, owner).get(owner, [])
            for group in {1, problem.group}:
                want = {(t.document, t.head // group, p) for t in tasks for p in t.queries}
                for source in range(case.shard.ranks):
                    rows = rows_of(strided.rows_owned(problem, owner, group, source))
                    assert all(n == 1 for n in rows.values())
                    assert set(rows) == {x for x in want if x[2] in held[source]}


@given(STRIDED)
@settings(max_examples=examples(150))
def test_pairs(case: Case):
    for problem in case.problems():
        for rank in range(case.shard.ranks):
            assert joint_pairs(problem, rank) == sum(want.pairs for want in row_requests(problem, rank))
            owned = sum(task.pairs for task in all_to_all.tasks_by_owner(problem, rank).get(rank, []))
            assert rank_pairs(problem, "switch", rank) == owned


@given(STRIDED)
@settings(max_examples=examples(100))
def test_messages_are_those_of_the_program(case: Case):
    for problem in case.problems():
        for rank in range(case.shard.ranks):
            (step,) = EXCHANGES["gather"].program(problem, rank, 1).rounds
            senders = step.receives.keys() - {rank}
            assert EXCHANGES["gather"].volume(problem, rank, 1).messages == 2 * len(senders)
            assert origins(problem, [rank]).ranks - {rank} == senders
            program = EXCHANGES["switch"].program(problem, rank, 1)
            owners, sources = (x.keys() - {rank} for x in (program.queries.sends, program.queries.receives))
            assert program.keys.receives.keys() - {rank} == sources
            assert EXCHANGES["switch"].volume(problem, rank, 1).messages == 2 * len(owners) + 2 * len(sources)


LATER = [pytest.param(*x, marks=pytest.mark.slow) for x in ((6, False), (8, True))]


@pytest.mark.parametrize("ranks, causal", [(6, True), (8, False), *LATER])
@pytest.mark.parametrize("pattern", ODD, ids=str)
def test_long_sequences_of_any_pattern(pattern, ranks, causal):
    """Rows and pairs of a sequence with many segments equal the sums over its requests."""
    problem = make_problem(pattern, 12_345, 3, ranks=ranks, layout="strided", causal=causal)
    for rank in (0, ranks - 1):
        want: Counter = Counter()
        for x in row_requests(problem, rank):
            want.update({(x.document, x.head, p): 1 for keys in x.keys for p in keys})
        rows: Counter = Counter()
        for source in range(ranks):
            rows.update(rows_of(strided.rows_read(problem, frozenset([rank]), source)))
        assert set(rows) == set(want) and max(rows.values()) == 1
        assert origins(problem, [rank]).total == len(rows)
        assert joint_pairs(problem, rank) == sum(x.pairs for x in row_requests(problem, rank))


def forget() -> None:
    """Clear caches that earlier tests filled."""
    for cached in (
        strided.rows_read,
        strided.rows_owned,
        strided._read_by,
        strided._owned_by,
        program._strided_origins,
        plan,
    ):
        cached.cache_clear()


def calls(work) -> int:
    """Count the calls of Python functions."""
    forget()
    total = 0

    def note(frame, event, arg):
        nonlocal total
        total += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return total


@pytest.mark.parametrize("causal", [False, True])
def test_a_plan_does_not_grow_with_the_tokens(causal):
    make = lambda n: make_problem(FIVE, n, 4, ranks=4, layout="strided", causal=causal)  # noqa: E731
    few, many = (calls(lambda n=n: plan(make(n))) for n in (1 << 17, 1 << 21))
    assert many < 2 * few


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("exchange", ["gather", "switch", "ring"])
def test_a_route_grows_with_the_tokens_only(exchange, causal):
    def route(n: int) -> None:
        problem = make_problem(FIVE, n, 2, ranks=4, layout="strided", causal=causal)
        program = EXCHANGES[exchange].program(problem, 1, 4)
        compiled = compile_program if isinstance(program, Program) else compile_switch
        compiled(problem, 1, program, torch.device("cpu"))

    few, many = (calls(lambda n=n: route(n)) for n in (1 << 15, 1 << 17))
    assert many < 1.5 * 4 * few


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks, per_node, seconds", [(8, None, 2), (128, 8, 10)])
@pytest.mark.parametrize("pattern", [FIVE, DilatedPattern.geometric(2048, 1 << 20)], ids=["five", "geometric"])
def test_seconds_of_a_million_tokens(pattern, ranks, per_node, seconds, causal):
    forget()
    problem = make_problem(pattern, 1 << 20, 12, ranks=ranks, layout="strided", causal=causal)
    begin = time.process_time()  # does not count the time of other processes
    chosen = plan(problem, ranks_per_node=per_node)
    assert time.process_time() - begin < seconds
    # a rank receives almost all rows, so this layout must have a high cost
    gathered = next(x for x in chosen.prices if x.exchange == "gather")
    assert gathered.forward > (1 << 20) * 12 * 2 * 64 * 2 * 0.8


def test_a_price_by_hand():
    """Dense, 64 tokens, 4 ranks, one head: a rank needs the other 48 rows, or if causal, only earlier ones."""
    full, causal = (
        make_problem(DilatedPattern.dense(), 64, 1, ranks=4, layout="strided", causal=x) for x in (False, True)
    )
    assert price(full, "gather", 4, 64, 2, Links()).forward == 48 * 2 * 64 * 2
    # the last query of rank 0 is at 60, so it needs none of 61, 62 and 63
    assert origins(causal, [0]).total == 61 and origins(causal, [3]).total == 64
    assert [origins(causal, [0]).held_by([r]) for r in range(4)] == [16, 15, 15, 15]
    assert origins(causal, [0, 1, 2]).total == 63
