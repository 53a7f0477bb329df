"""The hierarchical forms of gather and butterfly: between nodes each rank carries its share of the rows that its node needs,
and the ranks of a node spread them over their faster links."""

from __future__ import annotations

from lightning_dilated.sequence.exchange import butterfly as flat
from lightning_dilated.sequence.exchange.program import Count, Piece, Program, Round, count, node_of, origins, rows_for
from lightning_dilated.sequence.requirements import Problem


def gather_why_not(problem: Problem, per_node: int) -> str | None:
    """None, or why there are no nodes to speak of."""
    ranks = problem.shard.ranks
    if per_node == 1:
        return "needs several ranks a node"
    if ranks <= per_node:
        return f"needs several nodes, and the {ranks} ranks share one of {per_node}"
    if ranks % per_node:
        return f"needs whole nodes, and {per_node} ranks a node do not divide {ranks}"
    return None


def gather(problem: Problem, rank: int, per_node: int) -> Program:
    """Two rounds: a row enters each other node once, at the rank that has its owner's number there; then it is spread."""
    ranks = problem.shard.ranks
    node, number = divmod(rank, per_node)
    mates = range(node * per_node, (node + 1) * per_node)
    between, within = Round(), Round()
    for other in range(ranks // per_node):
        twin = other * per_node + number
        there = range(other * per_node, (other + 1) * per_node)
        if other != node:
            between.send(twin, rows_for(problem, there, rank))
            between.receive(twin, rows_for(problem, mates, twin))
    for mate in mates:
        within.send(mate, _handed(problem, rank, mate, per_node))
        within.receive(mate, _handed(problem, mate, rank, per_node))
    return Program([between, within])


def _handed(problem: Problem, carrier: int, receiver: int, per_node: int) -> list[Piece]:
    """What a rank hands to a rank of its node: its own rows, and those that entered the node with it."""
    twins = range(carrier % per_node, problem.shard.ranks, per_node)
    owners = [carrier] if carrier == receiver else [carrier, *(x for x in twins if x != carrier)]
    return [piece for owner in owners for piece in rows_for(problem, [receiver], owner)]


def gather_rows(problem: Problem, rank: int, per_node: int) -> Count:
    """What a rank of the node receives, on average over the node."""
    mates = node_of(rank, per_node, problem.shard.ranks)
    joint = origins(problem, mates)
    nodes = {x // per_node for x in joint.ranks} - {rank // per_node}
    found = Count(rounds=4, messages=2 * (len(nodes) + per_node - 1))
    found.add_rows(True, (joint.total - joint.of(mates)) / per_node)
    needs = origins(problem, [rank])
    inside, own = needs.of(mates), needs.of([rank])
    found.add_rows(False, inside - own + (needs.total - inside) * (per_node - 1) / per_node)
    return found


def butterfly_why_not(problem: Problem, per_node: int) -> str | None:
    """None, or the condition that fails."""
    if per_node == 1 or problem.shard.ranks <= per_node:
        return f"needs several nodes of several ranks, and has {problem.shard.ranks} ranks, {per_node} a node"
    if per_node & (per_node - 1):
        return f"needs a power of two of ranks a node, not {per_node}"
    return flat.why_not(problem, per_node)


def butterfly(problem: Problem, rank: int, per_node: int) -> Program:
    """Inside a node as `program`; above it, each rank carries one in `per_node` rows and the node spreads them."""
    rounds, inside = [], per_node.bit_length() - 1
    node, number = divmod(rank, per_node)
    for level in range(1, problem.shard.ranks.bit_length()):
        partner = rank ^ (1 << (level - 1))
        share = (number, per_node) if level > inside else (0, 1)
        step = Round()
        step.send(partner, flat.half(problem, rank, level, share))
        step.receive(partner, flat.half(problem, partner, level, share))
        rounds.append(step)
        if level > inside:
            rounds.append(_spread(problem, rank, partner, level, range(node * per_node, (node + 1) * per_node)))
    return Program(rounds)


def _spread(problem: Problem, rank: int, partner: int, level: int, mates: range) -> Round:
    """Every rank of a node hands the rows that it just received to the others."""
    step = Round()
    for mate in mates:
        if mate != rank:
            step.send(mate, flat.half(problem, partner, level, (rank % len(mates), len(mates))))
            step.receive(mate, flat.half(problem, partner, level, (mate % len(mates), len(mates))))
    return step


def butterfly_rows(problem: Problem, rank: int, per_node: int) -> Count:
    """What a rank receives."""
    levels, inside = problem.shard.ranks.bit_length() - 1, per_node.bit_length() - 1
    above = max(0, levels - inside)
    found = Count(rounds=2 * (levels + above), messages=2 * (levels + above * (per_node - 1)))
    for level in range(1, levels + 1):
        partner = rank ^ (1 << (level - 1))
        everything = count(flat.half(problem, partner, level))
        own = count(flat.half(problem, partner, level, (rank % per_node, per_node))) if level > inside else everything
        found.add_rows(level > inside, own)
        found.add_rows(False, everything - own)
    return found
