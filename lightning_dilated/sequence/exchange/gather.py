"""gather: each row goes from its owner to every rank that needs it, all in one all-to-all; any pattern, any layout."""

from __future__ import annotations

from lightning_dilated.sequence.exchange.program import Count, Program, Round, node_of, origins, rows_for
from lightning_dilated.sequence.requirements import Problem, partners


def why_not(problem: Problem, per_node: int) -> str | None:
    """None: gather serves everything."""
    return None


def program(problem: Problem, rank: int, per_node: int) -> Program:
    """One round."""
    step = Round()
    for peer in partners(problem, rank):
        step.receive(peer, rows_for(problem, [rank], peer))
        step.send(peer, rows_for(problem, [peer], rank))
    return Program([step])


def rows(problem: Problem, rank: int, per_node: int) -> Count:
    """What a rank receives."""
    needs = origins(problem, [rank])
    found = Count(rounds=2, messages=2 * len(needs.ranks - {rank}))
    own = needs.of([rank])
    near = needs.of(node_of(rank, per_node, problem.shard.ranks)) - own
    found.add_rows(False, near)
    found.add_rows(True, needs.total - near - own)
    return found
