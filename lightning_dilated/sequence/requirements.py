"""Requirements of attention over a sharded sequence: the call as a `Problem`, and each rank's row requests.

A row request lists query rows of a rank, and the key rows that they see on other shards. All numbers are integers.

Shape letters: N tokens, H query heads, R ranks, w segment length, r dilation rate, o offset.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import head_rows, padded_keys, segment_at, segment_width
from lightning_dilated.sequence.ranges import clip, intersect, union


@dataclass(frozen=True, order=True)
class Document:
    """The tokens [start, stop) of the global sequence in samples `sample`, ..., `sample` + `samples` - 1."""

    sample: int
    samples: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Problem:
    """One call of attention over a sharded sequence, the same on all ranks.

    `documents` are the documents that no rank holds alone. `heads` = (first, stop) are the query heads that this rank
    computes (all, or its window in a head-parallel group). In a stream of chunks, pieces of chunks replace ranks.
    """

    pattern: DilatedPattern
    num_heads: int
    num_kv_heads: int
    causal: bool
    shard: Any  # a Shard, or pieces of chunks
    documents: tuple[Document, ...]
    heads: tuple[int, int]

    @property
    def group(self) -> int:
        """Number of query heads that share a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_heads(self) -> tuple[int, int]:
        """(first, stop) of the kv heads that `heads` read."""
        first, stop = self.heads
        return first // self.group, -(-stop // self.group)

    def offset(self, branch: int, head: int) -> int:
        """Return the residue that a head uses in a branch."""
        return self.pattern.offset(self.pattern.branches[branch], head, self.num_heads, self.num_kv_heads)


#: disjoint rows by (document, kv head)
RowsByHead = dict[tuple[Document, int], list[range]]


@dataclass(frozen=True)
class BranchSegment:
    """The positions [start, stop) of one segment of a branch in a document; `first` is the position of its index 0."""

    document: Document
    branch: int
    start: int
    stop: int
    first: int


@dataclass(frozen=True)
class RowRequest:
    """Query rows of one head and branch, and the key rows that they see: all, or with `causal` keys 0 to i for query i.

    No query row occurs twice in one `slot` of a branch. Queries also attend to `pads` zero keys. With `band` = (lower,
    upper), query i sees key j if lower <= j - i <= upper, and every query must see a key.
    """

    document: Document
    branch: int
    head: int
    queries: range
    keys: tuple[range, ...]
    causal: bool = False
    slot: int = 0
    pads: int = 0
    band: tuple[int, int] | None = None

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs over the document's samples."""
        n, m = len(self.queries), sum(map(len, self.keys))
        if self.band is not None:
            return self.document.samples * (_below(n, m, self.band[1]) - _below(n, m, self.band[0] - 1))
        return self.document.samples * (n * (n + 1) // 2 if self.causal else n * m)

    def cut(self, held: Sequence[range]) -> Iterator[RowRequest]:
        """Yield requests for the keys at the positions `held`: at most one, or with a band one for each run of keys."""
        parts = [part for keys in self.keys for piece in held if (part := intersect(keys, piece))]
        if self.band is None:
            if parts:
                yield replace(self, keys=tuple(parts))
            return
        (keys,) = self.keys
        for number, part in enumerate(parts):
            at = keys.index(part[0])
            lower, upper = self.band[0] - at, self.band[1] - at  # for key j of the part
            first, stop = max(0, -upper), min(len(self.queries), len(part) - lower)  # queries that see some key
            if first < stop:
                band, slot = (lower + first, upper + first), self.slot + 2 * number
                yield replace(self, queries=self.queries[first:stop], keys=(part,), band=band, slot=slot)


def _below(n: int, m: int, upper: int) -> int:
    """Count pairs (i, j) of i < n and j < m with j - i <= upper: row i has i + upper + 1 pairs, limited to 0..m."""
    first = min(n, max(0, -upper))  # earlier rows have no pairs
    full = min(n, max(first, m - upper - 1))  # rows full, full + 1, ... have m pairs
    return (full - first) * (first + full + 1 + 2 * upper) // 2 + (n - full) * m


def straddling(documents: Sequence[Document], shard: Any) -> tuple[Document, ...]:
    """Return the documents of a call that are not inside one run of consecutive positions of one rank.

    Documents must be sorted by their bounds (packed, or one per sample), because only cuts of shards are looked up.
    """
    if shard.interleaved:
        return tuple(d for d in documents if d.stop > d.start)
    cuts = _cuts(shard)
    if len({d.sample for d in documents}) == 1:
        numbers = (bisect.bisect_right(documents, c, key=lambda d: d.start) - 1 for c in cuts)
        cut = sorted({i for i, c in zip(numbers, cuts, strict=True) if documents[i].start < c < documents[i].stop})
        return tuple(documents[i] for i in cut)
    return tuple(d for d in documents if bisect.bisect_right(cuts, d.start) < bisect.bisect_left(cuts, d.stop))


@functools.lru_cache(maxsize=64)
def _cuts(shard: Any) -> list[int]:
    """Return the positions above 0 at which a new run of consecutive positions starts."""
    return sorted({piece.start for rank in range(shard.ranks) for piece in shard.ranges(rank)} - {0})


def segment_rows(problem: Problem, segment: BranchSegment, head: int) -> range:
    """Return the positions of a segment that a head uses."""
    rate = problem.pattern.branches[segment.branch].dilation_rate
    return head_rows(segment.start, segment.stop, segment.first, rate, problem.offset(segment.branch, head))


def served(problem: Problem, branch: int) -> list[int]:
    """Return the query heads of `problem.heads` that a branch serves."""
    return [h for h in range(*problem.heads) if problem.pattern.branches[branch].serves(h)]


def segment_padding(problem: Problem, segment: BranchSegment, rows: range) -> int:
    """Return the number of zero keys (n_pad) of a head with these rows in a segment."""
    if problem.causal:
        return 0
    branch = problem.pattern.branches[segment.branch]
    return padded_keys(problem.pattern, branch, segment.document.length, len(rows))


def wide_segments(problem: Problem, piece: range) -> Iterator[BranchSegment]:
    """Yield the segments that contain positions of a rank's piece and extend beyond the piece."""
    for document in problem.documents:
        low, high = max(piece.start, document.start) - document.start, min(piece.stop, document.stop) - document.start
        if low >= high:
            continue
        for i, branch in enumerate(problem.pattern.branches):
            interleaved = piece.step > 1  # every segment reaches beyond such a piece
            starts = range(low, high, segment_width(branch, document.length)) if interleaved else (low,)
            listed = set()
            for position in (*starts, high - 1):
                segment = segment_at(branch, document.length, position)
                if segment not in listed and (interleaved or segment.start < low or segment.stop > high):
                    listed.add(segment)
                    yield BranchSegment(document, i, *(x + document.start for x in segment))


# -- row requests ------------------------------------------------------------------------------------------------------
def row_requests(problem: Problem, rank: int) -> Iterator[RowRequest]:
    """Yield a rank's requests for rows that are not in the query's run of consecutive positions on the rank."""
    for piece in problem.shard.ranges(rank):
        yield from piece_requests(problem, piece)


def piece_requests(problem: Problem, piece: range) -> Iterator[RowRequest]:
    """Yield the requests of the queries in `piece` for rows at other positions."""
    for segment in wide_segments(problem, piece):
        for head in served(problem, segment.branch):
            rows = segment_rows(problem, segment, head)
            queries = intersect(rows, piece)
            if not queries:
                continue
            branch = problem.pattern.branches[segment.branch]
            if branch.width is not None:
                yield from _window_requests(problem, segment, head, rows, queries, branch.width)
            elif branch.tokens is not None:
                yield from _global_requests(problem, segment, head, queries, branch.tokens)
            elif piece.step == 1:
                after = range(0) if problem.causal else clip(rows, piece.stop, segment.stop)
                keys = tuple(x for x in (clip(rows, segment.start, piece.start), after) if x)
                if keys:
                    yield RowRequest(segment.document, segment.branch, head, queries, keys)
            elif problem.causal:
                yield from _triangles(segment, head, rows, queries)
            else:
                pads = segment_padding(problem, segment, rows)
                yield RowRequest(segment.document, segment.branch, head, queries, (rows,), pads=pads)


def _window_requests(
    problem: Problem, segment: BranchSegment, head: int, rows: range, queries: range, width: int
) -> Iterator[RowRequest]:
    """Yield requests for rows that windows see beyond the ends of a run of queries, with the queries that see them."""
    request = functools.partial(RowRequest, segment.document, segment.branch, head)
    at = rows.index(queries[0])
    before = rows[max(0, at - width + 1) : at]
    near = queries[: width - 1]
    if before and near:  # query i is len(before) - j + i rows after key j
        lower = len(before) - width + 1
        yield request(near, (before,), band=(lower, len(before)) if lower > 1 - len(near) else None)
    after = range(0) if problem.causal else rows[at + len(queries) : at + len(queries) + width - 1]
    near = queries[max(0, len(queries) - width + 1) :]
    if after and near:  # key j is len(near) - i + j rows after query i
        upper = width - 1 - len(near)
        yield request(near, (after,), band=(-len(near), upper) if upper < len(after) - 1 else None, slot=1)


def _global_requests(
    problem: Problem, segment: BranchSegment, head: int, queries: range, tokens: int
) -> Iterator[RowRequest]:
    """Yield requests of a run of queries for rows outside of the run.

    The document's first `tokens` queries see all rows (causal: earlier rows). Later queries see these first tokens.
    """
    edge = min(segment.start + tokens, segment.stop)
    before, after = range(segment.start, queries.start), range(queries.stop, 0 if problem.causal else segment.stop)
    first, later = clip(queries, queries.start, edge), clip(queries, max(edge, queries.start), queries.stop)
    for slot, (subset, rows) in enumerate(((first, (before, after)), (later, (clip(before, segment.start, edge),)))):
        keys = tuple(x for x in rows if x)
        if subset and keys:
            yield RowRequest(segment.document, segment.branch, head, subset, keys, slot=slot)


def _triangles(segment: BranchSegment, head: int, rows: range, queries: range) -> Iterator[RowRequest]:
    """Yield causal requests of interleaved queries and keys: a triangle for each residue of keys mod the query step."""
    ratio = queries.step // rows.step
    request = functools.partial(RowRequest, segment.document, segment.branch, head)
    for i in range(min(ratio, len(rows))):
        keys = rows[i::ratio]
        ahead = (queries.start - keys.start) // queries.step  # keys up to index ahead + i are not after query i
        seeing = queries[max(0, -ahead) :]
        if seeing and ahead > 0:
            yield request(seeing, (keys[:ahead],), slot=2 * i)
        keys = keys[max(0, ahead) :]
        n = min(len(seeing), len(keys))
        if n:
            yield request(seeing[:n], (keys[:n],), causal=True, slot=2 * i + 1)
        if n and len(seeing) > n:
            yield request(seeing[n:], (keys,), slot=2 * i + 1)


@functools.lru_cache(maxsize=4096)
def needed_rows(problem: Problem, rank: int) -> RowsByHead:
    """Return the rows that a rank's requests read, including its own rows if rows interleave."""
    keys: dict[tuple[Document, int], set[range]] = {}
    for request in row_requests(problem, rank):
        keys.setdefault((request.document, request.head // problem.group), set()).update(request.keys)
    return {key: union(rows) for key, rows in keys.items()}


def partners(problem: Problem, rank: int) -> list[int]:
    """Return the ranks, including `rank`, that hold tokens of its documents: only these ranks exchange rows with it.

    For a piece of a chunk, return the other pieces of the chunk; their ranks also hold earlier rows.
    """
    if (peers := problem.shard.peers(rank)) is not None:
        return [peer for peer in peers if peer != rank]
    ranks: set[int] = set()
    for document in problem.documents:
        if any(piece.start < document.stop and document.start < piece.stop for piece in problem.shard.ranges(rank)):
            ranks.update(problem.shard.holders(document.start, document.stop))
            if len(ranks) == problem.shard.ranks:
                break
    return sorted(ranks)


@functools.lru_cache(maxsize=1024)
def crosses(problem: Problem) -> bool:
    """Return True if any segment crosses a cut between shards. Otherwise no rank needs rows of another rank."""
    if problem.shard.interleaved:
        return bool(problem.documents)
    for document in problem.documents:
        for cut in _cuts(problem.shard):
            if document.start < cut < document.stop:
                for branch in problem.pattern.branches:
                    if (cut - document.start + branch.shift) % segment_width(branch, document.length):
                        return True
    return False
