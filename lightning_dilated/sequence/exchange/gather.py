"""gather: each row goes from its owner to every rank that needs it, all in one all-to-all; any pattern, any layout."""

from __future__ import annotations

from lightning_dilated.sequence.exchange.program import Piece, Program, Round, merged, pieces_of
from lightning_dilated.sequence.problem import Problem, needed


def why_not(problem: Problem, per_node: int) -> str | None:
    """None: gather serves everything."""
    return None


def program(problem: Problem, rank: int, per_node: int) -> Program:
    """One round."""
    step = Round()
    mine = needed(problem, rank)
    for peer in range(problem.shard.ranks):
        step.receive(peer, pieces_of(problem, mine, peer))
        step.send(peer, pieces_of(problem, needed(problem, peer), rank))
    return Program([step])


def hierarchical_why_not(problem: Problem, per_node: int) -> str | None:
    """None, or why there are no nodes to speak of."""
    ranks = problem.shard.ranks
    if per_node == 1:
        return "needs several ranks a node"
    if ranks <= per_node:
        return f"needs several nodes, and the {ranks} ranks share one of {per_node}"
    if ranks % per_node:
        return f"needs whole nodes, and {per_node} ranks a node do not divide {ranks}"
    return None


def hierarchical_program(problem: Problem, rank: int, per_node: int) -> Program:
    """Two rounds: a row enters each other node once, at the rank that has its owner's number there; then it is spread."""
    ranks = problem.shard.ranks
    node, number = divmod(rank, per_node)
    mates = range(node * per_node, (node + 1) * per_node)
    between, within = Round(), Round()
    for other in range(ranks // per_node):
        twin = other * per_node + number
        there = range(other * per_node, (other + 1) * per_node)
        if other != node:
            between.send(twin, merged(pieces_of(problem, needed(problem, x), rank) for x in there))
            between.receive(twin, merged(pieces_of(problem, needed(problem, x), twin) for x in mates))
    for mate in mates:
        within.send(mate, _handed(problem, rank, mate, per_node))
        within.receive(mate, _handed(problem, mate, rank, per_node))
    return Program([between, within])


def _handed(problem: Problem, carrier: int, receiver: int, per_node: int) -> list[Piece]:
    """What a rank hands to a rank of its node: its own rows, and those that entered the node with it."""
    twins = range(carrier % per_node, problem.shard.ranks, per_node)
    owners = [carrier] if carrier == receiver else [carrier, *(x for x in twins if x != carrier)]
    return [piece for owner in owners for piece in pieces_of(problem, needed(problem, receiver), owner)]
