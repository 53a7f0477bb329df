"""gather: each owner sends a row to every rank that needs it. It serves any pattern and layout.

The flat form is one all-to-all. In the hierarchical form, a row enters each other node once; the ranks of the node then
spread it over their faster links.
"""

from __future__ import annotations

from lightning_dilated.sequence.exchange.program import Message, Program, Round, Volume, node_of, origins, rows_for
from lightning_dilated.sequence.requirements import Problem, partners


def program(problem: Problem, rank: int, per_node: int) -> Program:
    step = Round()
    for peer in partners(problem, rank):
        step.receive(peer, rows_for(problem, [rank], peer))
        step.send(peer, rows_for(problem, [peer], rank))
    return Program([step])


def volume(problem: Problem, rank: int, per_node: int) -> Volume:
    needs = origins(problem, [rank])
    total = Volume(rounds=2, messages=2 * len(needs.ranks - {rank}))
    own_rows = needs.held_by([rank])
    near = needs.held_by(node_of(rank, per_node, problem.shard.ranks)) - own_rows
    total.add_rows(False, near)
    total.add_rows(True, needs.total - near - own_rows)
    return total


def hierarchical_why_not(problem: Problem, per_node: int) -> str | None:
    """Return the reason why the ranks do not form several whole nodes, or None."""
    ranks = problem.shard.ranks
    if per_node == 1:
        return "needs several ranks a node"
    if ranks <= per_node:
        return f"needs several nodes, and the {ranks} ranks share one node of {per_node}"
    if ranks % per_node:
        return f"needs whole nodes, and {per_node} ranks a node do not divide {ranks}"
    return None


def hierarchical_program(problem: Problem, rank: int, per_node: int) -> Program:
    """Return two rounds: owners send rows to the ranks with the same number in other nodes, which spread them there."""
    ranks = problem.shard.ranks
    node, number = divmod(rank, per_node)
    mates = range(node * per_node, (node + 1) * per_node)
    between, within = Round(), Round()
    for other_node in range(ranks // per_node):
        twin = other_node * per_node + number
        there = range(other_node * per_node, (other_node + 1) * per_node)
        if other_node != node:
            between.send(twin, rows_for(problem, there, rank))
            between.receive(twin, rows_for(problem, mates, twin))
    for mate in mates:
        within.send(mate, _relayed(problem, rank, mate, per_node))
        within.receive(mate, _relayed(problem, mate, rank, per_node))
    return Program([between, within])


def _relayed(problem: Problem, carrier: int, receiver: int, per_node: int) -> Message:
    """Return the rows that `carrier` passes to a rank of its node: its own, and rows that it received for the node."""
    twins = range(carrier % per_node, problem.shard.ranks, per_node)
    owners = [carrier] if carrier == receiver else [carrier, *(x for x in twins if x != carrier)]
    return [rows for owner in owners for rows in rows_for(problem, [receiver], owner)]


def hierarchical_volume(problem: Problem, rank: int, per_node: int) -> Volume:
    """Return what a rank receives on average over its node."""
    mates = node_of(rank, per_node, problem.shard.ranks)
    joint = origins(problem, mates)
    nodes = {x // per_node for x in joint.ranks} - {rank // per_node}
    total = Volume(rounds=4, messages=2 * (len(nodes) + per_node - 1))
    total.add_rows(True, (joint.total - joint.held_by(mates)) / per_node)
    needs = origins(problem, [rank])
    inside, own_rows = needs.held_by(mates), needs.held_by([rank])
    total.add_rows(False, inside - own_rows + (needs.total - inside) * (per_node - 1) / per_node)
    return total
