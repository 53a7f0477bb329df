"""switch: the rows of q, k and v of one (segment, head) go to one rank, which computes it whole; the outputs come back.

Segments inside a shard stay where they are. The owners take turns by head and branch, so that causal work is balanced too,
and heads need not divide the ranks. With one segment over everything this is Ulysses.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dilated.sequence.exchange.count import Count, held, node_of, sources, total
from lightning_dilated.sequence.exchange.program import Message, Piece, Round, count
from lightning_dilated.sequence.problem import Document, Problem, Want, attended_pads, residues, served, wide_segments
from lightning_dilated.sequence.progressions import intersect, union


@dataclass
class Switched:
    """A rank's part: kv rows and query rows that move, and the problems that it owns; outputs go the queries' way back."""

    keys: Round
    queries: Round
    tasks: list[Want]


def why_not(problem: Problem, per_node: int) -> str | None:
    """None: the switch serves everything."""
    return None


def owned(problem: Problem, rank: int) -> list[tuple[int, Want]]:
    """(owner, task) of every wide segment and head that holds positions of a rank."""
    segments = dict.fromkeys(s for piece in problem.shard.ranges(rank) for s in wide_segments(problem, piece))
    out = []
    for segment in segments:
        holders = problem.shard.holders(segment.start, segment.stop)
        for head in served(problem, segment.branch):
            rows = residues(problem, segment, head)
            if rows:
                owner = holders[(segment.branch * problem.num_heads + head) % len(holders)]
                pads = attended_pads(problem, segment, head)
                task = Want(segment.document, segment.branch, head, rows, (rows,), problem.causal, pads=pads)
                out.append((owner, task))
    return out


def program(problem: Problem, rank: int, per_node: int) -> Switched:
    """Who sends which rows of k, v and q to whom, and what this rank then computes."""
    tasks = owned(problem, rank)
    mine = [task for owner, task in tasks if owner == rank]
    keys, queries = Round(), Round()
    for peer in range(problem.shard.ranks):
        theirs = [task for owner, task in tasks if owner == peer]
        keys.send(peer, _rows(problem, theirs, rank, problem.group))
        keys.receive(peer, _rows(problem, mine, peer, problem.group))
        queries.send(peer, _rows(problem, theirs, rank, 1))
        queries.receive(peer, _rows(problem, mine, peer, 1))
    return Switched(keys, queries, mine)


def _rows(problem: Problem, tasks: list[Want], source: int, group: int) -> Message:
    """The rows of tasks that a rank holds, none twice; `group` query heads share one.

    Sender and receiver list the tasks in orders of their own, so the message is put in the order of documents and heads.
    """
    found: dict[tuple[Document, int], set[range]] = {}
    for task in tasks:
        for piece in problem.shard.ranges(source):
            found.setdefault((task.document, task.head // group), set()).add(intersect(task.queries, piece))
    return [Piece(*key, rows) for key in sorted(found) for rows in union(found[key])]


def rows(problem: Problem, rank: int, per_node: int) -> Count:
    """What a rank receives: rows of the problems it owns, and what comes home for the rows it gave away."""
    tasks, mates = owned(problem, rank), node_of(rank, per_node, problem.shard.ranks)
    found = Count(rounds=7, messages=3 * len({owner for owner, _ in tasks} - {rank}))
    for group, units in ((problem.group, 2), (1, 1)):
        mine: dict[tuple[Document, int], set[range]] = {}
        for owner, task in tasks:
            if owner == rank:
                mine.setdefault((task.document, task.head // group), set()).add(task.queries)
        needs = {key: union(x) for key, x in mine.items()}
        found.messages += 2 * len(sources(problem, needs) - {rank})
        own, inside = held(problem, needs, [rank]), held(problem, needs, mates)
        found.kept += units * total(needs)
        for far, n in ((False, inside - own), (True, total(needs) - inside)):
            found.add("forward", far, own=units * n)
            if group == 1 and units == 1:
                found.add("backward", far, own=2 * n, numbers=n)
        for owner in {x for x, _ in tasks} - {rank}:
            given = count(_rows(problem, [task for x, task in tasks if x == owner], rank, group))
            if units == 1:
                found.add("forward", owner not in mates, wide=given, numbers=given)
            found.add("backward", owner not in mates, wide=units * given)
    return found
