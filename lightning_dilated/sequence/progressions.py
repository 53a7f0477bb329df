"""Sets of positions as ranges of integers: intersection, difference and disjoint union, exact for any steps.

Rows of dilated attention are arithmetic progressions; as ranges, a billion of them cost what ten do.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable


@functools.lru_cache(maxsize=4096)
def _inverse(a: int, modulus: int) -> int:
    return pow(a, -1, modulus) if modulus > 1 else 0


def clip(a: range, start: int, stop: int) -> range:
    """The elements of `a` in [start, stop)."""
    low = a.start if a.start >= start else a.start + -((a.start - start) // a.step) * a.step
    return range(low, min(a.stop, stop), a.step)


def intersect(a: range, b: range) -> range:
    """The elements of both, by the Chinese remainder theorem; empty where their residues differ."""
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
    """`a` without `b`, as disjoint ranges: before, after, and the residues of `a` that `b` does not take."""
    both = intersect(a, b)
    if not both:
        return [a] if a else []
    out = [clip(a, a.start, both[0]), clip(a, both[-1] + 1, a.stop)]
    period = both.step // a.step
    if len(both) > 1:
        inner = range(both[0], both[-1], a.step)
        if period <= len(both):
            out += [inner[i::period] for i in range(1, period)]
        else:  # few elements are taken: the stretches between them
            out += [inner[i + 1 : i + period] for i in range(0, len(inner), period)]
    return [x for x in out if x]


def remove(pieces: Iterable[range], taken: Iterable[range]) -> list[range]:
    """Disjoint `pieces` without everything in `taken`."""
    rest = list(pieces)
    for b in taken:
        rest = [x for a in rest for x in subtract(a, b)]
    return rest


def union(pieces: Iterable[range]) -> list[range]:
    """Disjoint ranges that hold the same elements; dense pieces come first, so that sparse ones vanish in them.

    The result depends on the sets of elements only, not on the order of the pieces or on how equal ranges are written:
    sender and receiver of a message find its rows apart.
    """
    out: list[range] = []
    for piece in sorted({_plain(x) for x in pieces if x}, key=lambda x: (x.step, x.start, x.stop)):
        out += remove([piece], out)
    return out


def _plain(a: range) -> range:
    """The one way to write a range that is not empty; range(5, 6, 3) and range(5, 9, 4) are equal in Python, too."""
    return range(a.start, a[-1] + 1, a.step if len(a) > 1 else 1)


def join(pieces: Iterable[range]) -> tuple[range, ...]:
    """The same elements in the same order, with neighbours that continue each other made one; empty ones left out."""
    out: list[range] = []
    for piece in pieces:
        if out and piece and out[-1].step == piece.step and out[-1][-1] + piece.step == piece.start:
            out[-1] = range(out[-1].start, piece.stop, piece.step)
        elif piece:
            out.append(piece)
    return tuple(out)


def size(pieces: Iterable[range]) -> int:
    """How many elements disjoint pieces hold."""
    return sum(map(len, pieces))
