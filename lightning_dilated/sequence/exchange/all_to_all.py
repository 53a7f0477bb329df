"""All-to-all exchanges of tokens for heads: `switch`, by (segment, head), and head-parallel groups of neighbours.

switch: the owner of a (segment, head) receives the rows of q, k and v, computes the attention and returns the outputs.
The ranks that hold a segment own its heads in turn, which balances causal work. Any number of heads works with any
number of ranks. One segment for all tokens is Ulysses (arXiv 2309.14509). The rows of segments inside a shard do not
move.
Head-parallel groups: each rank gets all tokens of the group for its window of heads. Windows may be uneven; if query
heads of two windows share a kv head, both ranks get the kv head, and its gradients are summed.
Shape letters: B samples, L tokens of a rank, G tokens of the group, H heads, D head dim, M ranks of the group; an owner
holds m query rows (m, D) and n key rows (n, 2, D).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_dilated.pattern.rows import window_band
from lightning_dilated.sequence import strided
from lightning_dilated.sequence.exchange.program import (
    Message,
    Origins,
    Round,
    RowSet,
    Volume,
    count,
    node_of,
    strided_message,
)
from lightning_dilated.sequence.exchange.row_ops import Batch, LocalRows, Packing, ReceivedRows, batches, pair, take
from lightning_dilated.sequence.exchange.transport import Block, Posted, PostedBlocks, Wire, joined
from lightning_dilated.sequence.ranges import intersect, union
from lightning_dilated.sequence.requirements import (
    BranchSegment,
    Document,
    Problem,
    RowRequest,
    segment_padding,
    segment_rows,
    served,
    wide_segments,
)

Windows = Sequence[tuple[int, int]]


def windows(num_heads: int, num_kv_heads: int, members: int) -> list[tuple[int, int]]:
    """Return the query heads (first, stop) of each member, as even as possible; whole kv groups if there are enough."""
    unit = num_heads // num_kv_heads if num_kv_heads >= members else 1
    share, remainder = divmod(num_heads // unit, members)
    cuts = itertools.accumulate((share + (i < remainder) for i in range(members)), initial=0)
    return [(a * unit, b * unit) for a, b in itertools.pairwise(cuts)]


@dataclass
class HeadGroup:
    """Ranks, including this rank, that exchange tokens for heads; `lengths` are their numbers of tokens."""

    wire: Wire
    lengths: tuple[int, ...]

    def to_heads(self, tensors: Sequence[Tensor], cuts: Sequence[Windows]) -> list[Tensor]:
        """Exchange (B, L, H, D) tensors of one dtype and D for (B, G, own window, D); `cuts`: each tensor's windows."""
        batch, length, _, dim = tensors[0].shape
        rank, widths = self.wire.rank, [[b - a for a, b in cut] for cut in cuts]
        parts = [
            x[:, :, slice(*cut[peer])].reshape(-1, dim)
            for peer in range(len(self.lengths))
            for x, cut in zip(tensors, cuts, strict=True)
        ]
        sends = {i: batch * length * sum(w[i] for w in widths) for i in range(len(self.lengths))}
        receives = {i: batch * n * sum(w[rank] for w in widths) for i, n in enumerate(self.lengths)}
        rows = self.wire.post(torch.cat(parts), sends, receives, what="tokens for heads").wait()
        sizes = [batch * n * w[rank] for n in self.lengths for w in widths]
        pieces = rows.split(sizes)
        return [
            torch.cat(
                [p.view(batch, n, w[rank], dim) for p, n in zip(pieces[i :: len(widths)], self.lengths, strict=True)], 1
            )
            for i, w in enumerate(widths)
        ]

    def to_tokens(self, x: Tensor, cut: Windows, heads: int) -> Tensor:
        """Exchange (B, G, own window, D) for (B, L, heads, D); heads that several ranks hold are summed."""
        batch, _, width, dim = x.shape
        parts = [part.reshape(-1, dim) for part in x.split(list(self.lengths), 1)]
        length, widths = self.lengths[self.wire.rank], [b - a for a, b in cut]
        sends = {i: batch * n * width for i, n in enumerate(self.lengths)}
        receives = {i: batch * length * w for i, w in enumerate(widths)}
        rows = self.wire.post(torch.cat(parts), sends, receives, what="heads for tokens").wait()
        out = x.new_zeros(batch, length, heads, dim)
        for part, (a, b) in zip(rows.split([batch * length * w for w in widths]), cut, strict=True):
            out[:, :, a:b] += part.view(batch, length, b - a, dim)
        return out


@dataclass
class AllToAllProgram:
    """A rank's part of a switch: kv rows and query rows that move, and its tasks. Outputs return the same way."""

    keys: Round
    queries: Round
    tasks: list[RowRequest]


def tasks_by_owner(problem: Problem, rank: int) -> dict[int, list[RowRequest]]:
    """Return {owner: tasks} for each head of each wide segment that contains positions of `rank`."""
    segments = dict.fromkeys(s for piece in problem.shard.ranges(rank) for s in wide_segments(problem, piece))
    tasks: dict[int, list[RowRequest]] = {}
    for segment in segments:
        holders = problem.shard.holders(segment.start, segment.stop)
        for head in served(problem, segment.branch):
            rows = segment_rows(problem, segment, head)
            if rows:
                owner = holders[(segment.branch * problem.num_heads + head) % len(holders)]
                tasks.setdefault(owner, []).extend(_segment_tasks(problem, segment, head, rows))
    return tasks


def _segment_tasks(problem: Problem, segment: BranchSegment, head: int, rows: range) -> Iterator[RowRequest]:
    """Yield an owner's tasks for a segment: all pairs of its rows, or only the pairs with a global token."""
    branch = problem.pattern.branches[segment.branch]
    request = partial(RowRequest, segment.document, segment.branch, head)
    if branch.tokens is None:
        pads, band = segment_padding(problem, segment, rows), window_band(branch, problem.causal)
        yield request(rows, (rows,), causal=problem.causal, pads=pads, band=band)
        return
    first, later = rows[: branch.tokens], rows[branch.tokens :]
    yield request(first, (first if problem.causal else rows,), causal=problem.causal)
    if later:
        yield request(later, (first,))


def program(problem: Problem, rank: int, per_node: int) -> AllToAllProgram:
    """Return the rows of k, v and q that this rank sends and receives, and the tasks that it computes."""
    tasks = tasks_by_owner(problem, rank)
    keys, queries = Round(), Round()
    for peer in range(problem.shard.ranks):
        for step, group in ((keys, problem.group), (queries, 1)):
            step.send(peer, _rows(problem, tasks.get(peer, []), peer, rank, group))
            step.receive(peer, _rows(problem, tasks.get(rank, []), rank, peer, group))
    return AllToAllProgram(keys, queries, tasks.get(rank, []))


def _rows(problem: Problem, tasks: list[RowRequest], owner: int, source: int, group: int) -> Message:
    """Return the rows of an owner's tasks that `source` holds, each row once; `group` query heads share a row.

    The message is sorted by document and head, because sender and receiver list tasks in different orders.
    """
    if problem.shard.interleaved:
        return strided_message(dict(sorted(strided.rows_owned(problem, owner, group, source).items())))
    rows: dict[tuple[Document, int], set[range]] = {}
    for task in tasks:
        for piece in problem.shard.ranges(source):
            rows.setdefault((task.document, task.head // group), set()).add(intersect(task.queries, piece))
    return [RowSet(*key, x) for key in sorted(rows) for x in union(rows[key])]


# -- volume ------------------------------------------------------------------------------------------------------------
def volume(problem: Problem, rank: int, per_node: int) -> Volume:
    """Return what a rank receives: rows of its tasks, and results for the rows that it sent to other owners."""
    mates = node_of(rank, per_node, problem.shard.ranks)
    total = Volume(rounds=4, messages=0)
    for group, units in ((problem.group, 2), (1, 1)):
        queries = group == 1 and units == 1
        needs, sent = (_strided_counts if problem.shard.interleaved else _counts)(problem, rank, group)
        if queries:  # a rank that holds queries of a task also holds keys of it
            total.messages = 2 * len(needs.ranks - {rank}) + 2 * len(sent)
        own, inside = needs.held_by([rank]), needs.held_by(mates)
        total.kept += units * needs.total
        for far, n in ((False, inside - own), (True, needs.total - inside)):
            total.add("forward", far, own=units * n)
            if queries:
                total.add("backward", far, own=2 * n, numbers=n)
        for owner, n in sent.items():
            if units == 1:
                total.add("forward", owner not in mates, wide=n, numbers=n)
            total.add("backward", owner not in mates, wide=units * n)
    return total


def _counts(problem: Problem, rank: int, group: int) -> tuple[Origins, dict[int, int]]:
    """Return (origins of the rows of a rank's tasks, {other owner: number of rows that the rank sends to it})."""
    tasks = tasks_by_owner(problem, rank)
    own_rows: dict[tuple[Document, int], set[range]] = {}
    for task in tasks.pop(rank, []):
        own_rows.setdefault((task.document, task.head // group), set()).add(task.queries)
    needs = Origins.listed(problem, {key: union(x) for key, x in own_rows.items()})
    return needs, {owner: count(_rows(problem, x, owner, rank, group)) for owner, x in tasks.items()}


def _strided_counts(problem: Problem, rank: int, group: int) -> tuple[Origins, dict[int, int]]:
    rows = lambda owner, source: strided.row_count(strided.rows_owned(problem, owner, group, source))  # noqa: E731
    ranks = range(problem.shard.ranks)
    sent = {owner: n for owner in ranks if owner != rank and (n := rows(owner, rank))}
    return Origins.counted([rows(rank, source) for source in ranks]), sent


# -- running -----------------------------------------------------------------------------------------------------------
@dataclass
class OwnerRoute:
    """Rows that this rank sends to their owners, as flat numbers in the order of the messages."""

    rows: Tensor
    sends: dict[int, int]
    receives: dict[int, int]

    def block(self, rows: Tensor) -> Block:
        """Return a block that sends `rows` to their owners."""
        return Block(rows, self.sends, self.receives)


@dataclass
class CompiledSwitch:
    """A rank's part of a switch with its indices on a device; `queries` of `batches` are indices of received rows."""

    keys: OwnerRoute
    queries: OwnerRoute
    batches: list[Batch]


def compile_switch(problem: Problem, rank: int, program: AllToAllProgram, device: torch.device) -> CompiledSwitch:
    pieces = problem.shard.ranges(rank)
    keys, queries = ReceivedRows(), ReceivedRows()
    routes = []
    for step, store, heads in ((program.keys, keys, problem.kv_heads), (program.queries, queries, problem.heads)):
        routes.append(_route(step, LocalRows(pieces, heads), device))
        for message in step.receives.values():
            store.add(message)
    return CompiledSwitch(*routes, [x.to(device) for x in batches(problem, program.tasks, queries, keys)])


def _route(step: Round, local: LocalRows, device: torch.device) -> OwnerRoute:
    packing = Packing.of([rows for message in step.sends.values() for rows in message], local, ReceivedRows())
    rows = torch.empty_like(packing.own)
    rows[slice(None) if packing.own_at is None else packing.own_at] = packing.own
    return OwnerRoute(rows.to(device), *step.counts)


class SwitchRun:
    """Rows of one call in transit, to the owners and back. `kept`: rows that this owner received in the forward."""

    def __init__(self, compiled: CompiledSwitch, wire: Wire, kept: Tensor | None = None):
        self.compiled, self.wire, self.kept = compiled, wire, kept
        self._posted: PostedBlocks | None = None

    def post(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Send the rows of q, k and v to their owners."""
        keys, queries = self.compiled.keys, self.compiled.queries
        blocks = keys.block(pair(k, v, keys.rows)), queries.block(take(q, queries.rows))
        self._posted = self.wire.post_together(blocks, "rows")

    def arrived(self) -> tuple[Tensor, Tensor]:
        """Return (query rows (m, D), key rows (n, 2, D)) that this rank owns."""
        if self.kept is None:
            keys, queries = self._posted.wait()
            self.kept = joined([*keys, *queries], self._posted.blocks[1].rows)
            self._posted = None
        n = 2 * sum(self.compiled.keys.receives.values())
        keys = self.kept[:n].unflatten(0, (-1, 2)) if n else self.kept.new_empty(0, 2, self.kept.shape[1])
        return self.kept[n:], keys

    def to_owners(self, grad: Tensor, out: Tensor, lse: Tensor) -> PostedBlocks:
        """Send rows of grad and out (B, L, H, D) and of lse (B, H, L) to the owners of their queries."""
        queries = self.compiled.queries
        sides = pair(grad, out, queries.rows), take(lse.transpose(1, 2)[..., None], queries.rows)
        return self.wire.post_together([queries.block(x) for x in sides], "outputs")

    @staticmethod
    def at_owner(posted: PostedBlocks) -> tuple[Tensor, Tensor]:
        """Return ((m, 2, D) grad and out, (m, 1) lse) of the queries that this rank owns."""
        sides, lse = (joined(x, block.rows) for x, block in zip(posted.wait(), posted.blocks, strict=True))
        return sides, lse

    def sums(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return zeros for the gradients of the rows that `arrived` returns."""
        queries, keys = (torch.zeros_like(x, dtype=dtype) for x in self.arrived())
        return queries, keys

    def home(self, rows: Tensor) -> Posted:
        """Send outputs of received queries back to the ranks that sent the queries."""
        route = self.compiled.queries
        return self.wire.post(rows, route.receives, route.sends, what="outputs")

    def gradients_home(self, dq: Tensor, grads: Tensor) -> PostedBlocks:
        """Send gradients of received queries (m, D) and keys (n, 2, D) back to the ranks that sent the rows."""
        keys, queries = self.compiled.keys, self.compiled.queries
        blocks = Block(dq, queries.receives, queries.sends), Block(grads, keys.receives, keys.sends)
        return self.wire.post_together(blocks, "gradients")

    @staticmethod
    def at_home(posted: PostedBlocks) -> tuple[Tensor, Tensor]:
        """Return the gradients of the rows that this rank sent, in the shapes of `gradients_home`."""
        dq, grads = (joined(x, block.rows) for x, block in zip(posted.wait(), posted.blocks, strict=True))
        return dq, grads

    def by_peer(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return (flat numbers, rows) of each peer, from the rows that `home` received. A peer's numbers are distinct."""
        route = self.compiled.queries
        sizes = list(route.sends.values())
        return list(zip(route.rows.split(sizes), rows.split(sizes), strict=True))
