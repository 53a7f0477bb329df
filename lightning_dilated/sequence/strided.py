"""Closed forms of the strided layout: the rows of a rank that other ranks read, and the pairs that a rank computes.

A rank holds every T-th position, so every segment extends over all ranks, and a rank has a piece of each segment.
Segments with equal starts modulo T look the same to the ranks, so that one segment represents them all. If a branch's
rate divides its segment length, the branch's rows form one progression over the whole document. In causal attention, no
reader needs the last rows of each segment; the unneeded rows form progressions with the segment length as step.

Shape letters: N tokens, R ranks, T = R * members, w segment length, r dilation rate, o offset.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_dilated.pattern.rows import segment_classes, segment_width
from lightning_dilated.sequence.ranges import Holed, clip, intersect, union
from lightning_dilated.sequence.requirements import BranchSegment, Document, Problem, segment_rows, served

#: rows of one rank by (document, head or kv head)
RowsByDocumentHead = dict[tuple[Document, int], list[Holed]]
#: (segment, head, the head's rows in it) -> the last row to take, or None to take no row
LastRow = Callable[[BranchSegment, int, range], "int | None"]


@dataclass(frozen=True)
class SegmentClass:
    """`number` segments that look the same to the ranks, `period` positions apart."""

    segment: BranchSegment
    number: int
    period: int


@dataclass(frozen=True)
class Repeated:
    """A range of positions and its translations by 0, `period`, ..., (number - 1) `period`."""

    rows: range
    number: int
    period: int

    def within(self, held: range) -> Iterator[range]:
        """Yield ranges of the positions that are in `held`; the step of `held` must divide the period."""
        rows = intersect(self.rows, held)
        if self.number <= len(rows):
            yield from (range(rows.start + x, rows.stop + x, rows.step) for x in self._shifts)
        else:
            yield from (range(p, p + self._shifts.stop, self.period) for p in rows)

    @property
    def _shifts(self) -> range:
        return range(0, self.number * self.period, self.period)


@dataclass(frozen=True)
class BranchRows:
    """Rows of one branch and offset: the rows of `whole` that are not in `skipped`, and the rows of `loose`."""

    whole: range
    skipped: tuple[Repeated, ...]
    loose: tuple[Repeated, ...]


def classes(problem: Problem, document: Document, branch: int) -> list[SegmentClass]:
    """Return classes of a branch's segments: a short first and last segment, and whole segments by start modulo T."""
    spec, total = problem.pattern.branches[branch], problem.shard.total
    width = segment_width(spec, document.length)
    turns = total // math.gcd(width, total)
    out = []
    for begin, number, tokens, index in segment_classes(width, spec.shift, document.length):
        for i in range(min(turns, number)):
            start = document.start + begin + i * width
            segment = BranchSegment(document, branch, start, start + tokens, start - index)
            out.append(SegmentClass(segment, -(-(number - i) // turns), turns * width))
    return out


def query_pairs(problem: Problem, rank: int) -> int:
    """Return the number of (query, key) pairs of a rank's queries."""
    total = 0
    for group, rows, heads in _classes_by_heads(problem):
        per_head = sum(_pairs(rows, intersect(rows, piece), problem.causal) for piece in problem.shard.ranges(rank))
        total += group.segment.document.samples * group.number * len(heads) * per_head
    return total


def owner_pairs(problem: Problem, rank: int) -> int:
    """Return the number of (query, key) pairs of the segments and heads that a rank owns in a switch."""
    total = 0
    for group, rows, heads in _classes_by_heads(problem):
        number = sum(owner_of(problem, group.segment, h) == rank for h in heads)
        total += group.segment.document.samples * group.number * number * _pairs(rows, rows, problem.causal)
    return total


def _classes_by_heads(problem: Problem) -> Iterator[tuple[SegmentClass, range, list[int]]]:
    """Yield (class of segments, the rows of its first segment, the heads that use these rows)."""
    for document in problem.documents:
        for branch in range(len(problem.pattern.branches)):
            offsets = _heads_by_offset(problem, branch).values()
            for group in classes(problem, document, branch):
                for heads in offsets:
                    yield group, segment_rows(problem, group.segment, heads[0]), heads


def _heads_by_offset(problem: Problem, branch: int) -> dict[int, list[int]]:
    """Return {offset: heads that a branch serves with it}."""
    out: dict[int, list[int]] = {}
    for head in served(problem, branch):
        out.setdefault(problem.offset(branch, head), []).append(head)
    return out


def _pairs(rows: range, queries: range, causal: bool) -> int:
    """Count (query, row) pairs; the queries are some of the rows. If causal, leave out rows after the query."""
    n = len(queries)
    if not n or not causal:
        return n * len(rows)
    before, step = (queries.start - rows.start) // rows.step, queries.step // rows.step
    return n * (before + 1) + step * (n * (n - 1) // 2)


def owner_of(problem: Problem, segment: BranchSegment, head: int) -> int:
    """Return the rank that owns a segment and head in a switch; the ranks that hold the segment alternate by head."""
    number = segment.branch * problem.num_heads + head
    if segment.stop - segment.start >= problem.shard.total:
        return number % problem.shard.ranks
    holders = problem.shard.holders(segment.start, segment.stop)
    return holders[number % len(holders)]


@functools.lru_cache(maxsize=16384)
def rows_read(problem: Problem, readers: frozenset[int], source: int) -> RowsByDocumentHead:
    """Return {(document, kv head): rows} that `source` holds and a reader needs; `source` may be a reader."""
    return _held(problem, source, _read_by(problem, readers))


@functools.lru_cache(maxsize=16384)
def rows_owned(problem: Problem, owner: int, group: int, source: int) -> RowsByDocumentHead:
    """Return {(document, head // group): rows} that `source` holds of the segments that `owner` owns in a switch."""
    return _held(problem, source, _owned_by(problem, owner, group))


@functools.lru_cache(maxsize=1024)
def _read_by(problem: Problem, readers: frozenset[int]) -> dict[tuple[Document, int], list[BranchRows]]:
    members = frozenset(r * problem.shard.members + i for r in readers for i in range(problem.shard.members))

    def last_row(segment: BranchSegment, head: int, rows: range) -> int | None:
        last = _last_of_members(rows, members, problem.shard.total)
        return rows[-1] if last is not None and not problem.causal else last

    return _branch_rows(problem, last_row, problem.group, by_offset=True)


@functools.lru_cache(maxsize=1024)
def _owned_by(problem: Problem, owner: int, group: int) -> dict[tuple[Document, int], list[BranchRows]]:
    def last_row(segment: BranchSegment, head: int, rows: range) -> int | None:
        return rows[-1] if rows and owner_of(problem, segment, head) == owner else None

    return _branch_rows(problem, last_row, group, by_offset=False)


def _last_of_members(rows: range, members: frozenset[int], total: int) -> int | None:
    """Return the last row that a member holds; None if no member holds a row."""
    if len(members) == 1:
        held = intersect(rows, range(next(iter(members)), rows.stop, total))
        return held[-1] if held else None
    turns = total // math.gcd(rows.step, total)
    return next((p for p in rows[::-1][:turns] if p % total in members), None)


def _branch_rows(
    problem: Problem, last_row: LastRow, group: int, by_offset: bool
) -> dict[tuple[Document, int], list[BranchRows]]:
    """Return the rows to take by document and head group; `by_offset`: heads of one offset take the same rows."""
    out: dict[tuple[Document, int], list[BranchRows]] = {}
    for document in problem.documents:
        for branch in range(len(problem.pattern.branches)):
            for heads in _heads_by_offset(problem, branch).values():
                by_head: dict[int, BranchRows] = {}
                for head in heads:
                    key = 0 if by_offset else head
                    if key not in by_head:
                        by_head[key] = _rows_of_branch(problem, document, branch, head, last_row)
                    out.setdefault((document, head // group), []).append(by_head[key])
    return {key: list(dict.fromkeys(x for x in rows if x.whole or x.loose)) for key, rows in out.items()}


def _rows_of_branch(problem: Problem, document: Document, branch: int, head: int, last_row: LastRow) -> BranchRows:
    spec = problem.pattern.branches[branch]
    width, rate = segment_width(spec, document.length), spec.dilation_rate
    joins = width % rate == 0 and width >= math.lcm(rate, problem.shard.total)
    whole, skipped, loose = range(0), [], []
    for group in classes(problem, document, branch):
        rows = segment_rows(problem, group.segment, head)
        last = last_row(group.segment, head, rows)
        taken = range(0) if last is None else clip(rows, rows.start, last + 1)
        if not joins or group.segment.stop - group.segment.start < width:
            loose.append(Repeated(taken, group.number, group.period))
        elif taken:  # then rows are taken from every whole segment
            end = group.segment.stop + (group.number - 1) * group.period
            whole = range(min(rows.start, whole.start) if whole else rows.start, max(end, whole.stop), rate)
            skipped.append(Repeated(clip(rows, last + 1, rows.stop), group.number, group.period))
    return BranchRows(whole, tuple(x for x in skipped if x.rows), tuple(x for x in loose if x.rows))


def _held(problem: Problem, source: int, rows: dict[tuple[Document, int], list[BranchRows]]) -> RowsByDocumentHead:
    joined: dict[tuple[int, ...], list[Holed]] = {}
    out = {}
    for key, branches in rows.items():
        same = tuple(id(x) for x in branches)
        if same not in joined:
            joined[same] = [_join_branches(branches, held) for held in problem.shard.ranges(source)]
        out[key] = joined[same]
    return out


def _join_branches(branches: list[BranchRows], held: range) -> Holed:
    """Join the rows of all branches inside one progression."""
    joined = Holed(union(x for rows in branches for part in rows.loose for x in part.within(held)))
    wholes = [(intersect(x.whole, held), x) for x in branches]
    for whole, rows in sorted(wholes, key=lambda x: (x[0].step, x[0].start, x[0].stop)):
        joined.add(whole, [x for part in rows.skipped for x in part.within(held)])
    return joined


def row_count(rows: RowsByDocumentHead) -> int:
    """Return the number of rows in all samples."""
    return sum(document.samples * len(x) for (document, _), parts in rows.items() for x in parts)
