"""ring: rows travel from rank to rank until no later rank needs them; a rank holds the rows of one round at a time.

In the backward, the rows travel again, and each rank sends its part of a row's gradient directly to the row's owner.
"""

from __future__ import annotations

from lightning_dilated.sequence import strided
from lightning_dilated.sequence.exchange.program import (
    Message,
    Program,
    Round,
    Volume,
    count,
    node_of,
    origins,
    rows_for,
)
from lightning_dilated.sequence.requirements import Problem


def program(problem: Problem, rank: int, per_node: int) -> Program:
    """Return the rounds: round 0 copies own rows that own queries read; in round t, rows of rank - t arrive."""
    ranks = problem.shard.ranks
    own_rows = rows_for(problem, [rank], rank)
    rounds = [Round({rank: own_rows}, {rank: own_rows})] if own_rows else [Round()]
    for t in range(1, ranks):
        step = Round()
        step.send((rank + 1) % ranks, travelling(problem, (rank - t + 1) % ranks, t))
        step.receive((rank - 1) % ranks, travelling(problem, (rank - t) % ranks, t))
        rounds.append(step)
    return Program(rounds, [returning(problem, rank, t) for t in range(ranks)])


def travelling(problem: Problem, source: int, hops: int) -> Message:
    """Return the rows of `source` that travel for `hops` hops or more: the receiver or a later rank needs them."""
    ranks = problem.shard.ranks
    return rows_for(problem, [(source + x) % ranks for x in range(hops, ranks)], source)


def _arriving(problem: Problem, source: int, hops: int) -> int:
    """Return the number of rows in `travelling`."""
    if not problem.shard.interleaved:
        return count(travelling(problem, source, hops))
    readers = frozenset((source + x) % problem.shard.ranks for x in range(hops, problem.shard.ranks))
    return strided.row_count(strided.rows_read(problem, readers, source))


def returning(problem: Problem, rank: int, hops: int) -> Round:
    """Return the round that follows round `hops`: each rank sends the owner of that round's rows their gradients."""
    ranks = problem.shard.ranks
    owner, user = (rank - hops) % ranks, (rank + hops) % ranks
    step = Round()
    step.send(owner, rows_for(problem, [rank], owner))
    step.receive(user, rows_for(problem, [user], rank))
    return step


#: up to this number of ranks, `volume` counts all travelling rows; for more ranks, only rows that this rank needs
COUNTED = 16


def volume(problem: Problem, rank: int, per_node: int) -> Volume:
    """Return what a rank receives; with more than `COUNTED` ranks this is a lower bound."""
    ranks = problem.shard.ranks
    needs, mates = origins(problem, [rank]), node_of(rank, per_node, ranks)
    used = needs.total - needs.held_by([rank])
    hops = range(1, ranks) if ranks <= COUNTED else ()
    passing = sum(_arriving(problem, (rank - t) % ranks, t) for t in hops) if hops else used
    total = Volume(rounds=3 * (ranks - 1), messages=3 * (ranks - 1))
    for run in ("forward", "backward"):
        total.add(run, (rank - 1) % ranks not in mates, own=2 * passing)
    near = needs.held_by(mates) - needs.held_by([rank])
    total.add("backward", False, wide=2 * near)
    total.add("backward", True, wide=2 * (used - near))
    return total
