"""Closed forms of the strided layout: which rows of a rank others read, and how many pairs a rank computes.

A rank holds every T-th position, so every segment reaches over all ranks, and a rank has as many parts as a branch has
segments. Segments whose starts are equal modulo T lie alike to the ranks: one of them stands for all. The rows of a branch
whose rate divides its segment length are one progression over the whole document, and the causal rows that nobody reads, at
the end of each segment, are progressions whose step is the segment length.
Shape letters: N tokens, R ranks, T = R * members, w segment length, r dilation rate, o offset.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_dilated.pattern.rows import place, segments_of
from lightning_dilated.sequence.ranges import Holed, clip, intersect, union
from lightning_dilated.sequence.requirements import Document, Problem, Segment, residues, served

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
