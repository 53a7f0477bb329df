"""gather (flat and hierarchical) and ring on all ranks of any case, executed with sets.

Every message is expected, a rank sends only rows that it has, and all needed rows arrive, for every layout, packed
documents, samples, windows of heads and empty ranks.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.sequence.exchange import EXCHANGES, gather, ring
from lightning_dilated.sequence.exchange.program import count, merge, rows_held_by
from lightning_dilated.sequence.requirements import needed_rows
from lightning_dilated.sequence.shard import Shard

from ..examples import examples
from .cases import cases
from .play import (
    all_programs,
    check_agreed,
    check_enters_once,
    check_kept,
    from_others,
    geometric,
    held_rows,
    needed_by_definition,
    play,
    requested_rows,
    rows_in,
    rows_of,
)

ANY = cases(longest=32, ranks=16, members=2)


@given(ANY)
@settings(max_examples=examples(75))
def test_gather(case):
    for problem in case.problems():
        assert EXCHANGES["gather"].why_not(problem, 1) is None
        programs = all_programs(problem, gather.program)
        check_kept(problem, play(problem, programs))
        for rank, want in enumerate(needed_by_definition(case, problem)):
            (step,) = programs[rank].rounds
            got = Counter(from_others(step, rank))
            assert got.keys() == want  # exactly the rows of the definition
            assert not got or max(got.values()) == 1
            assert step.receives.get(rank, []) == step.sends.get(rank, [])


def check_ring(problem, programs, needs: list[set]) -> None:
    """Check that in round t a rank receives just the rows of rank - t that it or a later rank in the ring needs."""
    ranks = problem.shard.ranks
    own = [held_rows(problem, rank) for rank in range(ranks)]
    arrived = play(problem, programs)
    for rank in range(ranks):
        needed = requested_rows(problem, rank)
        for t, rows in enumerate(arrived[rank]):
            source = (rank - t) % ranks
            step = programs[rank].rounds[t]
            assert set(step.receives) <= {(rank - 1) % ranks if t else rank}
            assert set(step.sends) <= {(rank + 1) % ranks if t else rank}
            assert len(set(rows)) == len(rows)
            if t == 0:
                assert set(rows) == needed & own[rank]
                continue
            users = [(source + hops) % ranks for hops in range(t, ranks)]
            assert set(rows) == own[source].intersection(set().union(*(needs[user] for user in users)))
            assert set(rows) >= needed & own[source]  # all requested rows of this source arrive


def check_returns(problem, programs) -> None:
    """Check that the gradient of every used row is sent once, directly to the owner of the row."""
    ranks = problem.shard.ranks
    own = [held_rows(problem, rank) for rank in range(ranks)]
    for t in range(ranks):
        check_agreed([program.returns[t] for program in programs])
    for rank, program in enumerate(programs):
        assert not program.keep and len(program.returns) == len(program.rounds) == ranks
        sent = Counter()
        for t, step in enumerate(program.returns):
            there = set(rows_in(program.rounds[t].receives.values()))
            for owner, message in step.sends.items():
                assert own[owner].issuperset(rows_of(message))
                assert there.issuperset(rows_of(message))  # only rows of this round have gradients at this time
            sent.update(rows_in(step.sends.values()))
        assert sent == Counter(requested_rows(problem, rank))


@given(ANY)
@settings(max_examples=examples(75))
def test_ring(case):
    for problem in case.problems():
        assert EXCHANGES["ring"].why_not(problem, 1) is None
        programs = all_programs(problem, ring.program)
        check_ring(problem, programs, needed_by_definition(case, problem))
        check_returns(problem, programs)


@given(st.data())
@settings(max_examples=examples(75))
def test_hierarchical_gather(data):
    ranks = data.draw(st.sampled_from([4, 6, 8, 9, 12]))
    case = data.draw(cases(longest=32, ranks=ranks, fewest=ranks, members=2))
    per_node = data.draw(st.sampled_from([x for x in range(2, ranks) if ranks % x == 0]))
    for problem in case.problems():
        assert gather.hierarchical_why_not(problem, per_node) is None
        programs = all_programs(problem, gather.hierarchical_program, per_node)
        check_kept(problem, play(problem, programs))
        check_enters_once(problem, programs, per_node, needed_by_definition(case, problem))
        for rank, program in enumerate(programs):
            between, within = program.rounds
            for peer in (*between.sends, *between.receives):
                assert peer % per_node == rank % per_node and peer // per_node != rank // per_node
            for peer in (*within.sends, *within.receives):
                assert peer // per_node == rank // per_node


NO_NODES = {
    (4, 1): "several ranks a node",
    (4, 4): "share one node of 4",
    (4, 8): "share one node of 8",
    (6, 4): "do not divide 6",
}


@pytest.mark.parametrize("ranks, per_node", NO_NODES)
def test_hierarchical_gather_refuses(ranks, per_node):
    problem = geometric(keys=4, local=8, ranks=8, heads=1)
    problem = replace(problem, shard=Shard(64, ranks))
    assert NO_NODES[ranks, per_node] in gather.hierarchical_why_not(problem, per_node)


@given(ANY)
@settings(max_examples=examples(30))
def test_messages(case):
    problem = case.problem()
    ranks = range(problem.shard.ranks)
    for rank in ranks:
        needs = needed_rows(problem, rank)
        messages = [rows_held_by(problem, needs, source) for source in ranks]
        for source, message in zip(ranks, messages, strict=True):
            assert set(rows_of(message)) == requested_rows(problem, rank) & held_rows(problem, source)
            assert count(message) == len(rows_of(message)) == len(set(rows_of(message)))
        twice = merge([*messages, *messages])
        assert Counter(rows_of(twice)) == Counter(rows_in(messages))
