"""Sets of positions as ranges of integers: intersection, difference and disjoint union, exact for any steps.

Rows of dilated attention are arithmetic progressions; as a range, a billion rows cost no more than ten.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@functools.lru_cache(maxsize=4096)
def _inverse(a: int, modulus: int) -> int:
    return pow(a, -1, modulus) if modulus > 1 else 0


def clip(a: range, start: int, stop: int) -> range:
    """Return the elements of `a` in [start, stop)."""
    low = a.start if a.start >= start else a.start + -((a.start - start) // a.step) * a.step
    return range(low, min(a.stop, stop), a.step)


def intersect(a: range, b: range) -> range:
    """Return the common elements, by the Chinese remainder theorem; empty if residues differ."""
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    if start >= stop:
        return range(0)
    if b.step == 1:
        return clip(a, start, stop)
    if a.step == 1:
        return clip(b, start, stop)
    common = math.gcd(a.step, b.step)
    apart, odd = divmod(b.start - a.start, common)
    if odd:
        return range(0)
    other = b.step // common
    first = a.start + a.step * (apart * _inverse(a.step // common, other) % other)
    step = a.step * other
    return clip(range(first + (a.start - first) // step * step, stop, step), start, stop)


def subtract(a: range, b: range) -> list[range]:
    """Return `a` without `b`, as disjoint ranges: before `b`, after `b`, and the residues of `a` that `b` lacks."""
    taken = intersect(a, b)
    if not taken:
        return [a] if a else []
    out = [clip(a, a.start, taken[0]), clip(a, taken[-1] + 1, a.stop)]
    period = taken.step // a.step
    if len(taken) > 1:
        inner = range(taken[0], taken[-1], a.step)
        if period <= len(taken):
            out += [inner[i::period] for i in range(1, period)]
        else:  # few elements are taken, so return the runs between them
            out += [inner[i + 1 : i + period] for i in range(0, len(inner), period)]
    return [x for x in out if x]


def remove(pieces: Iterable[range], taken: Iterable[range]) -> list[range]:
    """Return disjoint `pieces` without the elements of `taken`."""
    waiting = sorted((x for x in pieces if x), key=lambda x: x.start, reverse=True)
    done: list[range] = []
    active: list[range] = []
    for b in sorted((x for x in taken if x), key=lambda x: x.start):
        while waiting and waiting[-1].start < b.stop:
            active.append(waiting.pop())
        remaining: list[range] = []
        for a in active:
            if a[-1] < b.start:  # later ranges of `taken` start after `b` does
                done.append(a)
            else:
                remaining += subtract(a, b)
        active = remaining
    return done + active + waiting[::-1]


def union(pieces: Iterable[range]) -> list[range]:
    """Return disjoint ranges with the same elements; dense pieces come first, so that they absorb sparse ones.

    The result depends only on the elements, not on the order or form of the pieces, because sender and receiver of a
    message compute its rows independently.
    """
    out: list[range] = []
    by_step = sorted(_merged({_plain(x) for x in pieces if x}), key=lambda x: x.step)
    for _, same in itertools.groupby(by_step, key=lambda x: x.step):
        placed = _RangesByExtent(out)
        # the merged ranges of one step share no element
        out += [x for piece in same for x in remove([piece], placed.overlapping(piece))]
    return out


def _merged(pieces: Iterable[range]) -> list[range]:
    """Join ranges of one step and residue that overlap or continue each other; sort the result by step and start."""
    out: list[range] = []
    for piece in sorted(pieces, key=lambda x: (x.step, x.start % x.step, x.start, x.stop)):
        last = out[-1] if out else piece
        same = last.step == piece.step and (piece.start - last.start) % piece.step == 0
        if out and same and piece.start <= last[-1] + last.step:
            out[-1] = range(last.start, max(last.stop, piece.stop), last.step)
        else:
            out.append(piece)
    return sorted((_plain(x) for x in out), key=lambda x: (x.step, x.start, x.stop))


class _RangesByExtent:
    """Ranges sorted so that a search for overlapping ranges need not scan all of them."""

    def __init__(self, pieces: Iterable[range]) -> None:
        # grouped by length within a factor of two: few ranges of a group span one position unless they interleave
        self._sorted: dict[int, tuple[list[int], list[range], int]] = {}
        for piece in sorted(pieces, key=lambda x: x.start):
            extent = piece[-1] - piece.start
            starts, alike, longest = self._sorted.setdefault(extent.bit_length(), ([], [], 0))
            starts.append(piece.start)
            alike.append(piece)
            self._sorted[extent.bit_length()] = starts, alike, max(longest, extent)

    def overlapping(self, piece: range) -> list[range]:
        """Return all ranges that span some position of [piece.start, piece.stop)."""
        out: list[range] = []
        for starts, alike, longest in self._sorted.values():
            low, high = bisect.bisect_left(starts, piece.start - longest), bisect.bisect_left(starts, piece.stop)
            out += (x for x in alike[low:high] if x[-1] >= piece.start)
        return out


@dataclass
class Holed:
    """The elements of disjoint `pieces` that are in no hole. `holes` are disjoint, too, and inside the pieces."""

    pieces: list[range]
    holes: list[range] = field(default_factory=list)

    def __len__(self) -> int:
        return size(self.pieces) - size(self.holes)

    def add(self, rows: range, without: list[range]) -> None:
        """Add `rows` without the disjoint ranges `without`, which are inside `rows`."""
        if not rows:
            return
        shared = [intersect(a, b) for a in self.holes for b in without]
        fresh = remove(without, self.pieces)
        self.holes = [*remove(self.holes, [rows]), *(x for x in shared if x), *fresh]
        self.pieces = [*self.pieces, *remove([rows], self.pieces)]

    def ranges(self) -> list[range]:
        """Return the elements as disjoint ranges."""
        holes = [x for hole in self.holes for x in ([range(p, p + 1) for p in hole] if len(hole) <= SPLIT else [hole])]
        return remove(self.pieces, holes)


#: a hole of up to this many elements splits ranges before and after each element; a longer hole splits them by residue
SPLIT = 8192


def _plain(a: range) -> range:
    """Return the canonical form of a non-empty range: range(5, 6, 3) and range(5, 9, 4) are equal ranges."""
    return range(a.start, a[-1] + 1, a.step if len(a) > 1 else 1)


def join(pieces: Iterable[range]) -> tuple[range, ...]:
    """Join neighbouring ranges that continue each other, in their order; drop empty ranges."""
    out: list[range] = []
    for piece in pieces:
        if out and piece and out[-1].step == piece.step and out[-1][-1] + piece.step == piece.start:
            out[-1] = range(out[-1].start, piece.stop, piece.step)
        elif piece:
            out.append(piece)
    return tuple(out)


def size(pieces: Iterable[range]) -> int:
    return sum(map(len, pieces))


def common(pieces: Iterable[range], others: Sequence[range]) -> int:
    """Return the number of elements that disjoint `pieces` and disjoint `others` share."""
    return sum(len(intersect(a, b)) for a in pieces for b in others)
