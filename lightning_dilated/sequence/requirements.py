"""What attention over a sharded sequence requires of its ranks: the call as a `Problem`, and each rank's row requests.

A row request names query rows of a rank and the key rows on other shards that they see. All of it is integers.

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
    """The tokens [start, stop) of the global sequence in each of `samples` samples from `sample` on."""

    sample: int
    samples: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Problem:
    """One call of attention over a sharded sequence; equal on all ranks.

    `documents` are those that no rank holds alone; `heads` = (first, stop) are the query heads computed here (all of them,
    or the window of a head-parallel group). Of a sequence computed chunk by chunk the pieces of chunks stand for ranks.
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
        """Query heads that share a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_heads(self) -> tuple[int, int]:
        """(first, stop) of the kv heads that `heads` read."""
        first, stop = self.heads
        return first // self.group, -(-stop // self.group)

    def offset(self, branch: int, head: int) -> int:
        """The residue that a head uses in a branch."""
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
    """Query rows of one head and branch, and the key rows that they see: all of them, or (causal) those not after them.

    Within one `slot` of a branch no query row occurs twice. `pads` zero keys are attended next to the keys. With a `band` =
    (lower, upper) query i sees key j where lower <= j - i <= upper, and every query sees a key.
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
        """(query, key) pairs over the document's samples."""
        n, m = len(self.queries), sum(map(len, self.keys))
        if self.band is not None:
            return self.document.samples * (_below(n, m, self.band[1]) - _below(n, m, self.band[0] - 1))
        return self.document.samples * (n * (n + 1) // 2 if self.causal else n * m)

    def cut(self, held: Sequence[range]) -> Iterator[RowRequest]:
        """The request for those of its keys that lie at the positions `held`: none, one, or in a band one for each run."""
        parts = [both for keys in self.keys for piece in held if (both := intersect(keys, piece))]
        if self.band is None:
            if parts:
                yield replace(self, keys=tuple(parts))
            return
        (keys,) = self.keys
        for number, part in enumerate(parts):
            at = keys.index(part[0])
            lower, upper = self.band[0] - at, self.band[1] - at  # for key j of the part
            first, stop = max(0, -upper), min(len(self.queries), len(part) - lower)  # queries that see one of them
            if first < stop:
                band, slot = (lower + first, upper + first), self.slot + 2 * number
                yield replace(self, queries=self.queries[first:stop], keys=(part,), band=band, slot=slot)


def _below(n: int, m: int, upper: int) -> int:
    """Pairs (i, j) of i < n and j < m with j - i <= upper: row i has i + upper + 1 of them, at least 0 and at most m."""
    first = min(n, max(0, -upper))  # the rows before have none
    full = min(n, max(first, m - upper - 1))  # the rows from here on have all m
    return (full - first) * (first + full + 1 + 2 * upper) // 2 + (n - full) * m


def straddling(documents: Sequence[Document], shard: Any) -> tuple[Document, ...]:
    """The documents of a call that do not lie in one run of consecutive positions of one rank.

    Documents must be in rising order of their bounds (packed, or one of each sample): then only cuts between shards are
    looked at.
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
    """Positions above 0 at which a new run of consecutive positions starts."""
    return sorted({piece.start for rank in range(shard.ranks) for piece in shard.ranges(rank)} - {0})


def segment_rows(problem: Problem, segment: BranchSegment, head: int) -> range:
    """The positions of a segment that a head uses."""
    rate = problem.pattern.branches[segment.branch].dilation_rate
    return head_rows(segment.start, segment.stop, segment.first, rate, problem.offset(segment.branch, head))


def served(problem: Problem, branch: int) -> list[int]:
    """The query heads of `problem.heads` that a branch serves."""
    return [h for h in range(*problem.heads) if problem.pattern.branches[branch].serves(h)]


def segment_padding(problem: Problem, segment: BranchSegment, rows: range) -> int:
    """n_pad of a segment for a head with these rows."""
    if problem.causal:
        return 0
    branch = problem.pattern.branches[segment.branch]
    return padded_keys(problem.pattern, branch, segment.document.length, len(rows))


def wide_segments(problem: Problem, piece: range) -> Iterator[BranchSegment]:
    """The segments that hold positions of a piece of a rank and reach beyond it."""
    for document in problem.documents:
        low, high = max(piece.start, document.start) - document.start, min(piece.stop, document.stop) - document.start
        if low >= high:
            continue
        for i, branch in enumerate(problem.pattern.branches):
            interleaved = piece.step > 1  # every segment reaches beyond such a piece
            starts = range(low, high, segment_width(branch, document.length)) if interleaved else (low,)
            seen = set()
            for position in (*starts, high - 1):
                segment = segment_at(branch, document.length, position)
                if segment not in seen and (interleaved or segment.start < low or segment.stop > high):
                    seen.add(segment)
                    yield BranchSegment(document, i, *(x + document.start for x in segment))


# -- row requests ------------------------------------------------------------------------------------------------------
def row_requests(problem: Problem, rank: int) -> Iterator[RowRequest]:
    """Everything that a rank computes with rows beyond one run of its own consecutive positions."""
    for piece in problem.shard.ranges(rank):
        yield from piece_requests(problem, piece)


def piece_requests(problem: Problem, piece: range) -> Iterator[RowRequest]:
    """Everything that the queries at these positions compute with rows at others."""
    for segment in wide_segments(problem, piece):
        for head in served(problem, segment.branch):
            rows = segment_rows(problem, segment, head)
            queries = intersect(rows, piece)
            if not queries:
                continue
            branch = problem.pattern.branches[segment.branch]
            if branch.width is not None:
                yield from _window_requests(problem, segment, head, (rows, queries), branch.width)
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
    problem: Problem, segment: BranchSegment, head: int, of: tuple[range, range], width: int
) -> Iterator[RowRequest]:
    """What the queries of a run of a rank's positions see of a window's rows outside of it; `of` = (rows, queries).

    The rows within `width` of the run's ends, and the queries that see any of them.
    """
    rows, queries = of
    request = functools.partial(RowRequest, segment.document, segment.branch, head)
    at = rows.index(queries[0])
    before = rows[max(0, at - width + 1) : at]
    some = queries[: width - 1]
    if before and some:  # query i lies len(before) - j + i rows after key j
        lower = len(before) - width + 1
        yield request(some, (before,), band=(lower, len(before)) if lower > 1 - len(some) else None)
    after = range(0) if problem.causal else rows[at + len(queries) : at + len(queries) + width - 1]
    some = queries[max(0, len(queries) - width + 1) :]
    if after and some:  # key j lies len(some) - i + j rows after query i
        upper = width - 1 - len(some)
        yield request(some, (after,), band=(-len(some), upper) if upper < len(after) - 1 else None, slot=1)


def _global_requests(
    problem: Problem, segment: BranchSegment, head: int, queries: range, tokens: int
) -> Iterator[RowRequest]:
    """What the queries of a run of a rank's positions see outside of it: the first `tokens` of a document all of it, causal
    what stands before; the others these tokens."""
    edge = min(segment.start + tokens, segment.stop)
    before, after = range(segment.start, queries.start), range(queries.stop, 0 if problem.causal else segment.stop)
    first, others = clip(queries, queries.start, edge), clip(queries, max(edge, queries.start), queries.stop)
    for slot, (some, seen) in enumerate(((first, (before, after)), (others, (clip(before, segment.start, edge),)))):
        keys = tuple(x for x in seen if x)
        if some and keys:
            yield RowRequest(segment.document, segment.branch, head, some, keys, slot=slot)


def _triangles(segment: BranchSegment, head: int, rows: range, queries: range) -> Iterator[RowRequest]:
    """Causal requests where queries and keys interleave: keys as progressions with the queries' step, each a triangle."""
    ratio = queries.step // rows.step
    request = functools.partial(RowRequest, segment.document, segment.branch, head)
    for i in range(min(ratio, len(rows))):
        keys = rows[i::ratio]
        ahead = (queries.start - keys.start) // queries.step  # keys up to index ahead + i are not after query i
        rest = queries[max(0, -ahead) :]
        if rest and ahead > 0:
            yield request(rest, (keys[:ahead],), slot=2 * i)
        keys = keys[max(0, ahead) :]
        n = min(len(rest), len(keys))
        if n:
            yield request(rest[:n], (keys[:n],), causal=True, slot=2 * i + 1)
        if n and len(rest) > n:
            yield request(rest[n:], (keys,), slot=2 * i + 1)


@functools.lru_cache(maxsize=4096)
def needed_rows(problem: Problem, rank: int) -> RowsByHead:
    """The rows that a rank's requests read, its own rows among them where they interleave."""
    keys: dict[tuple[Document, int], set[range]] = {}
    for request in row_requests(problem, rank):
        keys.setdefault((request.document, request.head // problem.group), set()).update(request.keys)
    return {key: union(rows) for key, rows in keys.items()}


def partners(problem: Problem, rank: int) -> list[int]:
    """The ranks that hold tokens of a rank's documents, itself among them: only these can exchange rows with it.

    Of a piece of a chunk: the other pieces of the chunk, whose ranks also hold earlier rows; its own rank's it has.
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
    """Whether any segment reaches over a cut between shards; if not, no rank needs another."""
    if problem.shard.interleaved:
        return bool(problem.documents)
    for document in problem.documents:
        for cut in _cuts(problem.shard):
            if document.start < cut < document.stop:
                for branch in problem.pattern.branches:
                    if (cut - document.start + branch.shift) % segment_width(branch, document.length):
                        return True
    return False
