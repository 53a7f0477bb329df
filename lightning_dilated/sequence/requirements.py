"""What attention over a sharded sequence asks of its ranks, in integers: documents, the parts a rank computes alone, and
the wants: for each query row of a rank, the key rows that other shards hold.

Shape letters: N tokens, H query heads, K kv heads, R ranks, w segment length, r dilation rate, o offset.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import count_rows, place, segment_bounds
from lightning_dilated.sequence.ranges import clip, intersect, union
from lightning_dilated.sequence.shard import Shard


@dataclass(frozen=True, order=True)
class Document:
    """The tokens [start, stop) of the global sequence in each of `samples` samples from `sample` on."""

    sample: int
    samples: int
    start: int
    stop: int


@dataclass(frozen=True)
class Problem:
    """One call of attention over a sharded sequence; equal on all ranks.

    `documents` are those that no rank holds alone; `heads` = (first, stop) are the query heads computed here (all of them,
    or the window of a head-parallel group).
    """

    pattern: DilatedPattern
    num_heads: int
    num_kv_heads: int
    causal: bool
    shard: Shard
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


@dataclass(frozen=True)
class Want:
    """Query rows of one head and branch, and key rows that they see: all of them, or (causal) those not after them.

    Within one `slot` of a branch no query row occurs twice. `pads` zero keys are attended beside the keys.
    """

    document: Document
    branch: int
    head: int
    queries: range
    keys: tuple[range, ...]
    causal: bool = False
    slot: int = 0
    pads: int = 0

    @property
    def pairs(self) -> int:
        """(query, key) pairs over the document's samples."""
        n = len(self.queries)
        return self.document.samples * (n * (n + 1) // 2 if self.causal else n * sum(map(len, self.keys)))


@dataclass(frozen=True)
class Segment:
    """The positions [start, stop) of one segment of a branch in a document; `first` is the position of its index 0."""

    document: Document
    branch: int
    start: int
    stop: int
    first: int


def straddling(documents: Sequence[Document], shard: Shard) -> tuple[Document, ...]:
    """The documents of a call that do not lie in one run of consecutive positions of one rank.

    For documents in rising order of their bounds (packed, or one of each sample) this looks at the cuts between shards only.
    """
    if shard.layout == "strided" and shard.ranks * shard.members > 1:
        return tuple(d for d in documents if d.stop > d.start)
    cuts = _cuts(shard)
    if len({d.sample for d in documents}) == 1:
        at = (bisect.bisect_right(documents, c, key=lambda d: d.start) - 1 for c in cuts)
        found = sorted({i for i, c in zip(at, cuts, strict=True) if documents[i].start < c < documents[i].stop})
        return tuple(documents[i] for i in found)
    return tuple(d for d in documents if bisect.bisect_right(cuts, d.start) < bisect.bisect_left(cuts, d.stop))


@functools.lru_cache(maxsize=64)
def _cuts(shard: Shard) -> list[int]:
    """Positions at which a new run of consecutive positions starts, without 0."""
    return sorted({piece.start for rank in range(shard.ranks) for piece in shard.ranges(rank)} - {0})


def residues(problem: Problem, segment: Segment, head: int) -> range:
    """The positions of a segment that a head uses: index mod r == o."""
    branch = problem.pattern.branches[segment.branch]
    offset = problem.pattern.offset(branch, head, problem.num_heads, problem.num_kv_heads)
    low = segment.first + offset
    return clip(range(low, segment.stop, branch.dilation_rate), segment.start, segment.stop)


def served(problem: Problem, branch: int) -> list[int]:
    """The query heads of the window that a branch serves."""
    heads = problem.pattern.branches[branch].heads
    return [h for h in range(*problem.heads) if heads is None or h in heads]


def wide_segments(problem: Problem, piece: range) -> Iterator[Segment]:
    """The segments that hold positions of a piece of a rank and reach beyond it."""
    for document in problem.documents:
        low, high = max(piece.start, document.start), min(piece.stop, document.stop)
        if low >= high:
            continue
        length = document.stop - document.start
        for i, branch in enumerate(problem.pattern.branches):
            width, shift = place(branch, length)
            inner = piece.step > 1  # of a strided piece every segment reaches beyond it
            starts = range(low - document.start, high - document.start, width) if inner else (low - document.start,)
            seen = set()
            for position in (*starts, high - 1 - document.start):
                start, stop, first = segment_bounds(width, shift, length, position)
                if first not in seen and (inner or start < low - document.start or stop > high - document.start):
                    seen.add(first)
                    yield Segment(document, i, *(x + document.start for x in (start, stop, first)))


def wants(problem: Problem, rank: int) -> Iterator[Want]:
    """Everything that a rank computes with rows beyond one run of its own consecutive positions."""
    for piece in problem.shard.ranges(rank):
        for segment in wide_segments(problem, piece):
            for head in served(problem, segment.branch):
                rows = residues(problem, segment, head)
                queries = intersect(rows, piece)
                if not queries:
                    continue
                if piece.step == 1:
                    after = range(0) if problem.causal else clip(rows, piece.stop, segment.stop)
                    keys = tuple(x for x in (clip(rows, segment.start, piece.start), after) if x)
                    if keys:
                        yield Want(segment.document, segment.branch, head, queries, keys)
                elif problem.causal:
                    yield from _triangles(segment, head, rows, queries)
                else:
                    pads = attended_pads(problem, segment, head)
                    yield Want(segment.document, segment.branch, head, queries, (rows,), pads=pads)


def _triangles(segment: Segment, head: int, rows: range, queries: range) -> Iterator[Want]:
    """Causal wants where queries and keys interleave: the keys as progressions with the queries' step, each a triangle."""
    ratio = queries.step // rows.step
    make = functools.partial(Want, segment.document, segment.branch, head)
    for i in range(min(ratio, len(rows))):
        keys = rows[i::ratio]
        ahead = (queries.start - keys.start) // queries.step  # keys up to index ahead + i are not after query i
        rest = queries[max(0, -ahead) :]
        if rest and ahead > 0:
            yield make(rest, (keys[:ahead],), slot=2 * i)
        keys = keys[max(0, ahead) :]
        n = min(len(rest), len(keys))
        if n:
            yield make(rest[:n], (keys[:n],), causal=True, slot=2 * i + 1)
        if n and len(rest) > n:
            yield make(rest[n:], (keys,), slot=2 * i + 1)


def attended_pads(problem: Problem, segment: Segment, head: int) -> int:
    """n_pad of a whole segment (0 unless padding="attended" and not causal)."""
    if problem.pattern.padding != "attended" or problem.causal:
        return 0
    branch = problem.pattern.branches[segment.branch]
    length = segment.document.stop - segment.document.start
    rows = residues(problem, segment, head)
    keys = count_rows(segment.start, segment.stop, branch.dilation_rate, rows.start) if rows else 0
    return -(-min(place(branch, length)[0], length) // branch.dilation_rate) - keys


@functools.lru_cache(maxsize=4096)
def needed(problem: Problem, rank: int) -> dict[tuple[Document, int], list[range]]:
    """{(document, kv head): disjoint rows} that a rank's wants read, its own rows among them where they interleave."""
    found: dict[tuple[Document, int], set[range]] = {}
    for want in wants(problem, rank):
        found.setdefault((want.document, want.head // problem.group), set()).update(want.keys)
    return {key: union(keys) for key, keys in found.items()}


def partners(problem: Problem, rank: int) -> list[int]:
    """The ranks that hold tokens of the documents of a rank, itself among them: nobody else has or needs rows of it."""
    found: set[int] = set()
    for document in problem.documents:
        if any(piece.start < document.stop and document.start < piece.stop for piece in problem.shard.ranges(rank)):
            found.update(problem.shard.holders(document.start, document.stop))
            if len(found) == problem.shard.ranks:
                break
    return sorted(found)


@functools.lru_cache(maxsize=1024)
def crosses(problem: Problem) -> bool:
    """Whether any segment reaches over a cut between shards; if not, no rank needs another."""
    if problem.shard.layout == "strided" and problem.shard.ranks * problem.shard.members > 1:
        return bool(problem.documents)
    for document in problem.documents:
        length = document.stop - document.start
        for cut in _cuts(problem.shard):
            if document.start < cut < document.stop:
                for branch in problem.pattern.branches:
                    width, shift = place(branch, length)
                    if (cut - document.start + shift) % width:
                        return True
    return False
