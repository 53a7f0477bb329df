"""gather: each row goes from its owner to every rank that needs it, all in one all-to-all; any pattern, any layout."""

from __future__ import annotations

from lightning_dilated.sequence.exchange.count import Count, held, node_of, sources, total
from lightning_dilated.sequence.exchange.program import Program, Round, pieces_of
from lightning_dilated.sequence.problem import Problem, needed, partners


def why_not(problem: Problem, per_node: int) -> str | None:
    """None: gather serves everything."""
    return None


def program(problem: Problem, rank: int, per_node: int) -> Program:
    """One round."""
    step = Round()
    mine = needed(problem, rank)
    for peer in partners(problem, rank):
        step.receive(peer, pieces_of(problem, mine, peer))
        step.send(peer, pieces_of(problem, needed(problem, peer), rank))
    return Program([step])


def rows(problem: Problem, rank: int, per_node: int) -> Count:
    """What a rank receives."""
    needs = needed(problem, rank)
    found = Count(rounds=2, messages=2 * len(sources(problem, needs) - {rank}))
    own = held(problem, needs, [rank])
    near = held(problem, needs, node_of(rank, per_node, problem.shard.ranks)) - own
    found.add_rows(False, near)
    found.add_rows(True, total(needs) - near - own)
    return found
