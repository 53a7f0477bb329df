"""switch: the rows of q, k and v of one (segment, head) go to one rank, which computes it whole; the outputs come back.

Segments inside a shard stay where they are. The owners take turns by head and branch, so that causal work is balanced too,
and heads need not divide the ranks. With one segment over everything this is Ulysses.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dilated.sequence import strided
from lightning_dilated.sequence.exchange.cost import Count, Origins, node_of
from lightning_dilated.sequence.exchange.program import Message, Piece, Round, count, message_of
from lightning_dilated.sequence.ranges import intersect, union
from lightning_dilated.sequence.requirements import (
    Document,
    Problem,
    Want,
    attended_pads,
    residues,
    served,
    wide_segments,
)


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
    theirs: dict[int, list[Want]] = {}
    for owner, task in tasks:
        theirs.setdefault(owner, []).append(task)
    keys, queries = Round(), Round()
    for peer in range(problem.shard.ranks):
        for step, group in ((keys, problem.group), (queries, 1)):
            step.send(peer, _rows(problem, theirs.get(peer, []), peer, rank, group))
            step.receive(peer, _rows(problem, mine, rank, peer, group))
    return Switched(keys, queries, mine)


def _rows(problem: Problem, tasks: list[Want], owner: int, source: int, group: int) -> Message:
    """The rows of an owner's tasks that a rank holds, none twice; `group` query heads share one.

    Sender and receiver list the tasks in orders of their own, so the message is put in the order of documents and heads.
    """
    if strided.serves(problem):
        return message_of(dict(sorted(strided.owned(problem, owner, group, source).items())))
    found: dict[tuple[Document, int], set[range]] = {}
    for task in tasks:
        for piece in problem.shard.ranges(source):
            found.setdefault((task.document, task.head // group), set()).add(intersect(task.queries, piece))
    return [Piece(*key, rows) for key in sorted(found) for rows in union(found[key])]


def rows(problem: Problem, rank: int, per_node: int) -> Count:
    """What a rank receives: rows of the problems it owns, and what comes home for the rows it gave away."""
    mates = node_of(rank, per_node, problem.shard.ranks)
    found = Count(rounds=7, messages=0)
    for group, units in ((problem.group, 2), (1, 1)):
        needs, given = (_strided_count if strided.serves(problem) else _count)(problem, rank, group)
        found.messages += 2 * len(needs.ranks - {rank}) + (3 * len(given) if group == 1 and units == 1 else 0)
        own, inside = needs.of([rank]), needs.of(mates)
        found.kept += units * needs.total
        for far, n in ((False, inside - own), (True, needs.total - inside)):
            found.add("forward", far, own=units * n)
            if group == 1 and units == 1:
                found.add("backward", far, own=2 * n, numbers=n)
        for owner, n in given.items():
            if units == 1:
                found.add("forward", owner not in mates, wide=n, numbers=n)
            found.add("backward", owner not in mates, wide=units * n)
    return found


def _count(problem: Problem, rank: int, group: int) -> tuple[Origins, dict[int, int]]:
    """(rows of what a rank owns, {other owner: rows that the rank gives away})."""
    tasks: dict[int, list[Want]] = {}
    for owner, task in owned(problem, rank):
        tasks.setdefault(owner, []).append(task)
    mine: dict[tuple[Document, int], set[range]] = {}
    for task in tasks.pop(rank, []):
        mine.setdefault((task.document, task.head // group), set()).add(task.queries)
    needs = Origins.listed(problem, {key: union(x) for key, x in mine.items()})
    return needs, {owner: count(_rows(problem, x, owner, rank, group)) for owner, x in tasks.items()}


def _strided_count(problem: Problem, rank: int, group: int) -> tuple[Origins, dict[int, int]]:
    rows = lambda owner, source: strided.size(strided.owned(problem, owner, group, source))  # noqa: E731
    ranks = range(problem.shard.ranks)
    given = {owner: n for owner in ranks if owner != rank and (n := rows(owner, rank))}
    return Origins.counted([rows(rank, source) for source in ranks]), given
