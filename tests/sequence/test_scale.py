"""Programs of 64, 512 and 4096 ranks (ring: 32), exact as sets, with small segments: S = 16 rows, 32 tokens, 4 heads.

Loops that share no code with the package compute the rows that a rank needs. With 512 and 4096 ranks, only slow tests
execute all ranks. The other tests check a sample of ranks and some of their peers.
"""

import random

import pytest

from lightning_dilated.sequence.exchange import EXCHANGES, all_to_all
from lightning_dilated.sequence.exchange.program import Program, Round
from lightning_dilated.sequence.requirements import Problem

from .play import all_programs, check_agreed, check_kept, from_others, geometric, held_rows, play, rows_in, rows_of

pytestmark = pytest.mark.full

KEYS, LOCAL, HEADS, PER_NODE = 16, 32, 4, 8


def problem_of(ranks: int, causal: bool) -> Problem:
    """Return a problem with branches (16, 1), (32, 2), ... up to the whole sequence."""
    return geometric(KEYS, LOCAL, ranks, HEADS, causal)


def needs(problem: Problem, rank: int) -> set[tuple]:
    """Return the remote rows that the queries of a rank see."""
    (document,) = problem.documents
    start, stop = rank * LOCAL, (rank + 1) * LOCAL
    out, width = set(), KEYS
    while width <= document.stop:
        for head in range(HEADS):
            rate = width // KEYS
            queries = [p for p in range(start, stop) if p % rate == head % rate]
            for first in {p // width * width for p in queries}:
                rows = range(first + head % rate, first + width, rate)
                last = max(p for p in queries if p // width * width == first)
                out |= {
                    (document, 0, head, p) for p in rows if not start <= p < stop and (p <= last or not problem.causal)
                }
        width *= 2
    return out


def check_all(exchange: str, ranks: int, causal: bool) -> None:
    """Execute the programs of all ranks. Gather must bring exactly the needed rows, other exchanges at least these."""
    problem = problem_of(ranks, causal)
    programs = all_programs(problem, EXCHANGES[exchange].program, PER_NODE)
    arrived = play(problem, programs)
    check_kept(problem, arrived)
    for rank, rounds in enumerate(arrived):
        got, want = {row for rows in rounds for row in rows}, needs(problem, rank)
        assert got == want if exchange == "gather" else got >= want


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("exchange", ["gather", "butterfly", "hierarchical_gather", "hierarchical_butterfly"])
def test_64_ranks(exchange, causal):
    check_all(exchange, 64, causal)


@pytest.mark.slow
@pytest.mark.parametrize("exchange, causal", [("butterfly", True), ("hierarchical_butterfly", False), ("gather", True)])
def test_512_ranks(exchange, causal):
    check_all(exchange, 512, causal)


@pytest.mark.slow  # a minute each; gather and switch would take ten minutes or more
@pytest.mark.parametrize("exchange", ["butterfly", "hierarchical_butterfly"])
def test_4096_ranks(exchange):
    check_all(exchange, 4096, causal=False)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["gather", "hierarchical_gather"])
def test_512_ranks_full(exchange):
    check_all(exchange, 512, causal=False)


def rounds_of(program) -> list[Round]:
    """Return all rounds of a program, also of a switch."""
    return program.rounds if isinstance(program, Program) else [program.keys, program.queries]


class Sample:
    """Some ranks of an exchange, with the programs of these ranks and their peers, which are built on demand."""

    def __init__(self, exchange: str, ranks: int, causal: bool, seed: int = 0):
        self.problem, self.exchange, self.programs = problem_of(ranks, causal), exchange, {}
        self.random = random.Random(seed)
        # the first rank, the last rank before the middle, the last rank, and a random rank
        self.ranks = [0, ranks // 2 - 1, ranks - 1, self.random.randrange(ranks)]

    def program(self, rank: int):
        if rank not in self.programs:
            self.programs[rank] = EXCHANGES[self.exchange].program(self.problem, rank, PER_NODE)
        return self.programs[rank]

    def check_messages(self, rank: int, peers: int) -> None:
        """Check that messages with some peers agree on both sides, and that a sender has the rows of its messages."""
        rounds = rounds_of(self.program(rank))
        for number, step in enumerate(rounds):
            for peer in self.random.sample(
                sorted(set(step.sends) | set(step.receives)), k=min(peers, len(step.receives))
            ):
                theirs = rounds_of(self.program(peer))
                for a, b in ((rank, peer), (peer, rank)):
                    sends, receives = (rounds_of(self.program(x))[number] for x in (a, b))
                    assert sends.sends.get(b) == receives.receives.get(a)
                before = rows_in(m for x in theirs[:number] for m in x.receives.values())
                have = held_rows(self.problem, peer).union(before)
                assert have.issuperset(rows_of(step.receives.get(peer, [])))


@pytest.mark.parametrize("ranks", [512, 4096])
@pytest.mark.parametrize("exchange", ["gather", "butterfly", "hierarchical_gather", "hierarchical_butterfly"])
def test_sample(exchange, ranks):
    sample = Sample(exchange, ranks, causal=True)
    for rank in sample.ranks:
        sample.check_messages(rank, peers=1)
        got = rows_in(m for step in sample.program(rank).rounds for m in step.receives.values())
        assert len(got) == len(set(got))
        want = needs(sample.problem, rank)
        if exchange == "gather":
            assert set(got) == want
        assert set(got) >= want
        if "butterfly" in exchange:
            assert len(got) == HEADS * KEYS // 2 * (ranks.bit_length() - 1)


@pytest.mark.parametrize("ranks", [512, 4096])
def test_sample_of_switch(ranks):
    sample = Sample("switch", ranks, causal=True)
    for rank in sample.ranks:
        sample.check_messages(rank, peers=1)
        program = sample.program(rank)
        got = set(rows_in(program.keys.receives.values()))
        assert got == {(t.document, 0, t.head, p) for t in program.tasks for p in t.queries}
        for task in program.tasks:  # a task has a whole segment that is wider than a rank
            width = KEYS << task.branch
            rate, first = width // KEYS, task.queries[0] // width * width
            assert width > LOCAL
            assert task.queries == range(first + task.head % rate, first + width, rate)
    # all ranks with parts of a segment must name the same owner
    owners: dict = {}
    for rank in sample.ranks:
        for owner, tasks in all_to_all.tasks_by_owner(sample.problem, rank).items():
            for task in tasks:
                assert owners.setdefault((task.branch, task.head, task.queries), owner) == owner


def test_64_ranks_of_switch():
    problem = problem_of(64, causal=False)
    programs = all_programs(problem, EXCHANGES["switch"].program)
    for side in ("keys", "queries"):
        check_agreed([getattr(x, side) for x in programs])
    tasks = [(t.branch, t.head, t.queries) for x in programs for t in x.tasks]
    want = {
        (branch, head, range(first + head % (1 << branch), first + width, 1 << branch))
        for branch, width in enumerate(KEYS << i for i in range(len(problem.pattern.branches)))
        if width > LOCAL
        for first in range(0, 64 * LOCAL, width)
        for head in range(HEADS)
    }
    assert len(tasks) == len(set(tasks)) and set(tasks) == want


@pytest.mark.parametrize("ranks", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_ranks_of_the_ring(ranks):
    problem = problem_of(ranks, causal=True)
    programs = all_programs(problem, EXCHANGES["ring"].program)
    arrived = play(problem, programs)
    for rank in range(ranks):
        want = needs(problem, rank)
        used = [row for step in programs[rank].returns for m in step.sends.values() for row in rows_of(m)]
        assert len(used) == len(set(used)) and set(used) == want
        assert want <= {row for rows in arrived[rank] for row in rows}


@pytest.mark.slow  # half a minute for two ranks, because each computes what every rank needs from every other
def test_512_ranks_of_the_ring():
    problem = problem_of(512, causal=True)
    make = EXCHANGES["ring"].program
    one, two = make(problem, 200, 1), make(problem, 201, 1)
    for a, b in zip(one.rounds, two.rounds, strict=True):
        assert a.sends.get(201) == b.receives.get(200)
    assert needs(problem, 201) <= {row for step in two.rounds for row in from_others(step, 201)}
