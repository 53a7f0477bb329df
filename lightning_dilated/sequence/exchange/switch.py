"""switch: the rows of q, k and v of one (segment, head) go to one rank, which computes it whole; the outputs come back.

Segments inside a shard stay where they are. The owners take turns by head and branch, so that causal work is balanced too,
and heads need not divide the ranks. With one segment over everything this is Ulysses.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dilated.sequence.exchange.program import Message, Piece, Round
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
