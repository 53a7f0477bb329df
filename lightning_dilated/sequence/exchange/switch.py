"""switch: the rows of q, k and v of one (segment, head) go to one rank, which computes it whole; the outputs come back.

Segments inside a shard stay where they are. The owners take turns by head and branch, so that causal work is balanced too,
and heads need not divide the ranks. With one segment over everything this is Ulysses.

Running a switch: q, k, v rows go to the owners of their (segment, head), outputs and gradients come back.

Shape letters: B samples, L local tokens, H query heads, D head dim, an owner holds m query rows (m, D) and n key rows
(n, 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dilated.sequence import requirements
from lightning_dilated.sequence.exchange.program import (
    Count,
    Message,
    Origins,
    Piece,
    Round,
    count,
    message_of,
    node_of,
)
from lightning_dilated.sequence.exchange.row_ops import Batch, Own, Packing, Store, batches, pair, take
from lightning_dilated.sequence.exchange.transport import Posted, Wire
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
    if requirements.serves(problem):
        return message_of(dict(sorted(requirements.owned(problem, owner, group, source).items())))
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
        needs, given = (_strided_count if requirements.serves(problem) else _count)(problem, rank, group)
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
    rows = lambda owner, source: requirements.size(requirements.owned(problem, owner, group, source))  # noqa: E731
    ranks = range(problem.shard.ranks)
    given = {owner: n for owner in ranks if owner != rank and (n := rows(owner, rank))}
    return Origins.counted([rows(rank, source) for source in ranks]), given


@dataclass
class Way:
    """Rows from this rank's tensors to their owners: flat numbers in the order of the messages."""

    rows: Tensor
    sends: dict[int, int]
    receives: dict[int, int]


@dataclass
class CompiledSwitch:
    """A rank's part of a switch with its indices on a device; query numbers in `batches` are those of the received rows."""

    keys: Way
    queries: Way
    batches: list[Batch]


def compile_switch(problem: Problem, rank: int, program: Switched, device: torch.device) -> CompiledSwitch:
    """The indices of a rank's switch."""
    pieces = problem.shard.ranges(rank)
    stores = Store(), Store()
    ways = []
    for step, store, heads in zip(
        (program.keys, program.queries), stores, (problem.kv_heads, problem.heads), strict=True
    ):
        ways.append(_way(step, Own(pieces, heads), device))
        for message in step.receives.values():
            store.add(message)
    found = batches(problem, program.tasks, stores[1], stores[0])
    return CompiledSwitch(*ways, [batch.to(device) for batch in found])


def _way(step: Round, own: Own, device: torch.device) -> Way:
    packing = Packing.of([p for message in step.sends.values() for p in message], own, Store())
    rows = torch.empty_like(packing.own)
    rows[slice(None) if packing.own_at is None else packing.own_at] = packing.own
    counts = ({p: count(m) for p, m in messages.items()} for messages in (step.sends, step.receives))
    return Way(rows.to(device), *counts)


class SwitchRun:
    """One call's rows under way. `kept` holds the owner's rows in the backward; they are then not moved again."""

    def __init__(self, compiled: CompiledSwitch, wire: Wire, kept: Tensor | None = None):
        self.compiled, self.wire = compiled, wire
        self.kept, self._sums = kept, "outputs" if kept is None else "gradients"
        self._posted: list[Posted] = []

    def post(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Send the rows of q, k and v to their owners."""
        keys, queries = self.compiled.keys, self.compiled.queries
        self._posted = [
            self._out(keys, pair(k, v, keys.rows), "rows"),
            self._out(queries, take(q, queries.rows), "queries"),
        ]

    def arrived(self) -> tuple[Tensor, Tensor]:
        """(query rows (m, D), key rows (n, 2, D)) that this rank owns."""
        if self.kept is None:
            rows, queries = (posted.wait() for posted in self._posted)
            self.kept = torch.cat([rows.flatten(0, 1), queries])
        n = 2 * sum(self.compiled.keys.receives.values())
        return self.kept[n:], self.kept[:n].unflatten(0, (-1, 2)) if n else self.kept.new_empty(
            0, 2, self.kept.shape[1]
        )

    def _out(self, way: Way, rows: Tensor, what: str) -> Posted:
        return self.wire.post(rows, way.sends, way.receives, what=what)

    def to_owners(self, x: Tensor, other: Tensor | None = None) -> Posted:
        """Rows of a (B, L, H, *) tensor, or of two side by side, to the owners of their queries."""
        rows = self.compiled.queries.rows
        found = take(x, rows)[:, None] if other is None else pair(x, other, rows)
        return self._out(self.compiled.queries, found, "outputs")

    def home(self, rows: Tensor, keys: bool = False) -> Posted:
        """Rows that belong to received queries (or keys), back to where those came from."""
        way = self.compiled.keys if keys else self.compiled.queries
        return self.wire.post(rows, way.receives, way.sends, what=self._sums)

    def by_peer(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(flat numbers, rows) of each peer's share of what came home; within one no number occurs twice."""
        way = self.compiled.queries
        sizes = list(way.sends.values())
        return list(zip(way.rows.split(sizes), rows.split(sizes), strict=True))
