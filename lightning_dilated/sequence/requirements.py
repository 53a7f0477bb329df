"""What attention over a sharded sequence asks of its ranks, in integers: documents, the parts a rank computes alone, and
the wants: for each query row of a rank, the key rows that other shards hold.

Closed forms of the strided layout: which rows of a rank others read, and how many pairs a rank computes.

A rank holds every T-th position, so every segment reaches over all ranks, and a rank has as many parts as a branch has
segments. Segments whose starts are equal modulo T lie alike to the ranks: one of them stands for all. The rows of a branch
whose rate divides its segment length are one progression over the whole document, and the causal rows that nobody reads, at
the end of each segment, are progressions whose step is the segment length.

Shape letters: N tokens, H query heads, K kv heads, R ranks, w segment length, r dilation rate, o offset, T = R *
members.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import count_rows, place, segment_bounds, segments_of
from lightning_dilated.sequence.ranges import Holed, clip, intersect, union
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


#: the last row of a segment (with the rows of a head in it) that is taken, None where none is
Until = Callable[[Segment, int, range], "int | None"]


@dataclass(frozen=True)
class Alike:
    """`count` segments that lie alike to the ranks, each `period` positions after the one before."""

    segment: Segment
    count: int
    period: int


@dataclass(frozen=True)
class Repeated:
    """A range of positions, and its `count` translations by multiples of `period`."""

    rows: range
    count: int
    period: int

    def within(self, held: range) -> Iterator[range]:
        """The elements that lie in `held`, whose step divides the period."""
        rows = intersect(self.rows, held)
        if self.count <= len(rows):
            yield from (range(rows.start + x, rows.stop + x, rows.step) for x in self._shifts)
        else:
            yield from (range(p, p + self._shifts.stop, self.period) for p in rows)

    @property
    def _shifts(self) -> range:
        return range(0, self.count * self.period, self.period)


@dataclass(frozen=True)
class Taken:
    """The rows of one branch and offset that are taken: `whole` without `skipped`, and `loose` ones."""

    whole: range
    skipped: tuple[Repeated, ...]
    loose: tuple[Repeated, ...]


def serves(problem: Problem) -> bool:
    """Whether neighbours lie on different ranks or members."""
    return problem.shard.layout == "strided" and _total(problem) > 1


def _total(problem: Problem) -> int:
    return problem.shard.ranks * problem.shard.members


def alike(problem: Problem, document: Document, branch: int) -> list[Alike]:
    """The segments of a branch in a document: a short first one, whole ones by their starts modulo T, a short last one."""
    length, total = document.stop - document.start, _total(problem)
    width, shift = place(problem.pattern.branches[branch], length)
    turns = total // math.gcd(width, total)
    out = []
    for start, count, size, index in segments_of(width, shift, length):
        for i in range(min(turns, count)):
            at = document.start + start + i * width
            segment = Segment(document, branch, at, at + size, at - index)
            out.append(Alike(segment, -(-(count - i) // turns), turns * width))
    return out


def pairs(problem: Problem, rank: int, owner: bool = False) -> int:
    """(query, key) pairs of a rank's queries, or (`owner`) of the segments and heads that a switch has it compute."""
    found = 0
    for group, rows, heads in _groups(problem):
        if owner:
            heads = [h for h in heads if owner_of(problem, group.segment, h) == rank]
            pieces = (rows,) if heads else ()
        else:
            pieces = problem.shard.ranges(rank)
        each = sum(_pairs(rows, intersect(rows, piece), problem.causal) for piece in pieces)
        found += group.segment.document.samples * group.count * len(heads) * each
    return found


def _groups(problem: Problem) -> Iterator[tuple[Alike, range, list[int]]]:
    """(segments, the rows of the first of them, the heads that use these rows)."""
    for document in problem.documents:
        for branch in range(len(problem.pattern.branches)):
            offsets = _heads_of(problem, branch).values()
            for group in alike(problem, document, branch):
                for heads in offsets:
                    yield group, residues(problem, group.segment, heads[0]), heads


def _heads_of(problem: Problem, branch: int) -> dict[int, list[int]]:
    """{offset: heads of the window that a branch serves with it}."""
    out: dict[int, list[int]] = {}
    for head in served(problem, branch):
        offset = problem.pattern.offset(problem.pattern.branches[branch], head, problem.num_heads, problem.num_kv_heads)
        out.setdefault(offset, []).append(head)
    return out


def _pairs(rows: range, queries: range, causal: bool) -> int:
    """Pairs of queries, which are some of the rows, with the rows (causal: those not after the query)."""
    n = len(queries)
    if not n or not causal:
        return n * len(rows)
    before, step = (queries.start - rows.start) // rows.step, queries.step // rows.step
    return n * (before + 1) + step * (n * (n - 1) // 2)


def owner_of(problem: Problem, segment: Segment, head: int) -> int:
    """The rank that a switch has compute a segment and head: the ranks that hold the segment take turns."""
    number = segment.branch * problem.num_heads + head
    if segment.stop - segment.start >= _total(problem):
        return number % problem.shard.ranks
    holders = problem.shard.holders(segment.start, segment.stop)
    return holders[number % len(holders)]


Rows = dict[tuple[Document, int], list[Holed]]


@functools.lru_cache(maxsize=16384)
def read(problem: Problem, readers: frozenset[int], source: int) -> Rows:
    """{(document, kv head): rows} that `source` holds and any of the ranks `readers` needs, `source` itself among them."""
    return _held(problem, source, _read(problem, readers))


@functools.lru_cache(maxsize=16384)
def owned(problem: Problem, owner: int, group: int, source: int) -> Rows:
    """{(document, head // group): rows} that `source` holds of what a switch has `owner` compute."""
    return _held(problem, source, _owned(problem, owner, group))


@functools.lru_cache(maxsize=1024)
def _read(problem: Problem, readers: frozenset[int]) -> dict[tuple[Document, int], list[Taken]]:
    members = frozenset(r * problem.shard.members + i for r in readers for i in range(problem.shard.members))

    def until(segment: Segment, head: int, rows: range) -> int | None:
        last = _last(rows, members, _total(problem))
        return rows[-1] if last is not None and not problem.causal else last

    return _taken(problem, until, problem.group, by_offset=True)


@functools.lru_cache(maxsize=1024)
def _owned(problem: Problem, owner: int, group: int) -> dict[tuple[Document, int], list[Taken]]:
    def until(segment: Segment, head: int, rows: range) -> int | None:
        return rows[-1] if rows and owner_of(problem, segment, head) == owner else None

    return _taken(problem, until, group, by_offset=False)


def _last(rows: range, members: frozenset[int], total: int) -> int | None:
    """The last of the rows that one of the members holds."""
    if len(members) == 1:
        both = intersect(rows, range(next(iter(members)), rows.stop, total))
        return both[-1] if both else None
    turns = total // math.gcd(rows.step, total)
    return next((p for p in rows[::-1][:turns] if p % total in members), None)


def _taken(problem: Problem, until: Until, group: int, by_offset: bool) -> dict[tuple[Document, int], list[Taken]]:
    """What is taken for every document and `group` of heads; `by_offset`: it is the same for heads of one offset."""
    out: dict[tuple[Document, int], list[Taken]] = {}
    for document in problem.documents:
        for branch in range(len(problem.pattern.branches)):
            for heads in _heads_of(problem, branch).values():
                made: dict[int, Taken] = {}
                for head in heads:
                    key = 0 if by_offset else head
                    if key not in made:
                        made[key] = _of_branch(problem, document, branch, head, until)
                    out.setdefault((document, head // group), []).append(made[key])
    return {key: list(dict.fromkeys(x for x in taken if x.whole or x.loose)) for key, taken in out.items()}


def _of_branch(problem: Problem, document: Document, branch: int, head: int, until: Until) -> Taken:
    width, _ = place(problem.pattern.branches[branch], document.stop - document.start)
    rate = problem.pattern.branches[branch].dilation_rate
    joins = width % rate == 0 and width >= math.lcm(rate, _total(problem))
    whole, skipped, loose = range(0), [], []
    for group in alike(problem, document, branch):
        rows = residues(problem, group.segment, head)
        last = until(group.segment, head, rows)
        taken = range(0) if last is None else clip(rows, rows.start, last + 1)
        if not joins or group.segment.stop - group.segment.start < width:
            loose.append(Repeated(taken, group.count, group.period))
        elif taken:  # then something is taken of each whole segment
            end = group.segment.stop + (group.count - 1) * group.period
            whole = range(min(rows.start, whole.start) if whole else rows.start, max(end, whole.stop), rate)
            skipped.append(Repeated(clip(rows, last + 1, rows.stop), group.count, group.period))
    return Taken(whole, tuple(x for x in skipped if x.rows), tuple(x for x in loose if x.rows))


def _held(problem: Problem, source: int, taken: dict[tuple[Document, int], list[Taken]]) -> Rows:
    """Those of the rows that a rank holds."""
    made: dict[tuple[int, ...], list[Holed]] = {}
    out = {}
    for key, branches in taken.items():
        same = tuple(id(x) for x in branches)
        if same not in made:
            made[same] = [_joined(branches, held) for held in problem.shard.ranges(source)]
        out[key] = made[same]
    return out


def _joined(branches: list[Taken], held: range) -> Holed:
    """The rows of all branches within one progression."""
    found = Holed(union(x for taken in branches for part in taken.loose for x in part.within(held)))
    wholes = [(intersect(x.whole, held), x) for x in branches]
    for rows, taken in sorted(wholes, key=lambda x: (x[0].step, x[0].start, x[0].stop)):
        found.add(rows, [x for part in taken.skipped for x in part.within(held)])
    return found


def size(rows: Rows) -> int:
    """How many rows these are, in all samples."""
    return sum(document.samples * len(x) for (document, _), found in rows.items() for x in found)
