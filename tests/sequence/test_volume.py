"""The volume of an exchange is counted without listing messages, and equals the messages of its programs."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.exchange.program import Round, Volume, count
from lightning_dilated.sequence.requirements import Problem

from ..examples import examples
from .cases import cases
from .play import all_programs, nested_cases

ANY = cases(longest=32, ranks=8, members=2)
NODES = st.sampled_from([1, 2, 4, 8])


def received(rounds: list[Round], rank: int, per_node: int) -> Counter:
    """Count the rows that a rank receives from other ranks, near and far."""
    out = Counter()
    for step in rounds:
        for peer, message in step.receives.items():
            if peer != rank:
                out["near" if peer // per_node == rank // per_node else "far"] += count(message)
    return +out


def flipped(rounds: list[Round]) -> list[Round]:
    """Return the rounds with senders and receivers swapped."""
    return [Round(step.receives, step.sends) for step in rounds]


def units(volume: Volume, run: str, kind: str) -> Counter:
    """Return the near and far counts of one kind of units in a pass."""
    return +Counter({where: getattr(x, kind) for (name, where), x in volume.units.items() if name == run})


def times(factor: int, rows: Counter) -> Counter:
    """Multiply row counts by a factor."""
    return Counter({key: factor * n for key, n in rows.items()})


def check_forward(problem: Problem, exchange: str, per_node: int) -> None:
    """Check each rank's forward, and summed over ranks the gradients that return to their owners."""
    programs = all_programs(problem, EXCHANGES[exchange].program, per_node)
    volumes = [EXCHANGES[exchange].volume(problem, rank, per_node) for rank in range(problem.shard.ranks)]
    returned = Counter()
    for rank, (program, volume) in enumerate(zip(programs, volumes, strict=True)):
        rows = received(program.rounds, rank, per_node)
        assert units(volume, "forward", "own") == times(2, rows)
        assert not units(volume, "forward", "wide")
        back = flipped(program.rounds) if program.keep else program.returns
        returned += times(2, received(back, rank, per_node))
        assert units(volume, "backward", "own") == (Counter() if program.keep else times(2, rows))
        assert not program.keep or volume.kept == 2 * sum(rows.values())
    # gradients return from where rows were received, so only the sums over all ranks are equal
    assert sum((units(x, "backward", "wide") for x in volumes), Counter()) == returned


@given(ANY, st.sampled_from(["gather", "ring"]), NODES)
@settings(max_examples=examples(60))
def test_gather_and_ring(case, exchange, per_node):
    for problem in case.problems():
        check_forward(problem, exchange, per_node)


@given(nested_cases(ranks=(4, 8)), st.sampled_from([1, 2]))
@settings(max_examples=examples(30))
def test_butterfly(case, per_node):
    for problem in case.problems():
        check_forward(problem, "butterfly", per_node)
        if per_node > 1:
            check_forward(problem, "hierarchical_butterfly", per_node)


@given(cases(longest=32, ranks=6, fewest=6, members=2), st.sampled_from([2, 3]))
@settings(max_examples=examples(40))
def test_hierarchical_gather(case, per_node):
    # a rank reports an equal share of its node's rows, so only the sum over the node is exact
    for problem in case.problems():
        programs = all_programs(problem, EXCHANGES["hierarchical_gather"].program, per_node)
        for node in range(6 // per_node):
            mates = range(node * per_node, (node + 1) * per_node)
            rows, reported = Counter(), Counter()
            for rank in mates:
                rows += received(programs[rank].rounds, rank, per_node)
                volume = EXCHANGES["hierarchical_gather"].volume(problem, rank, per_node)
                reported += units(volume, "forward", "own")
            # far rows are exact; the rows that a rank carries for itself are unknown and estimated from its share
            assert abs(reported["far"] - 2 * rows["far"]) < 1e-6


@given(ANY, NODES)
@settings(max_examples=examples(60))
def test_switch(case, per_node):
    for problem in case.problems():
        for rank, program in enumerate(all_programs(problem, EXCHANGES["switch"].program)):
            volume = EXCHANGES["switch"].volume(problem, rank, per_node)
            keys, queries = (received([x], rank, per_node) for x in (program.keys, program.queries))
            keys_back, returned = (received(flipped([x]), rank, per_node) for x in (program.keys, program.queries))
            assert units(volume, "forward", "own") == times(2, keys) + queries
            assert units(volume, "forward", "wide") == units(volume, "forward", "numbers") == returned
            assert units(volume, "backward", "own") == times(2, queries)
            assert units(volume, "backward", "numbers") == queries
            assert units(volume, "backward", "wide") == returned + times(2, keys_back)
