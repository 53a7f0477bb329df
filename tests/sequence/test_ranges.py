"""Ranges of integers as sets: every function against Python sets, or against residues where sets would be too large."""

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.sequence.ranges import Holed, clip, intersect, join, remove, size, subtract, union

from ..examples import examples

HUGE = 1 << 40


@st.composite
def ranges(draw, reach: int = 40, step: int = 12):
    """Draw a range, which may be empty. Its stop need not be a multiple of the step."""
    start = draw(st.integers(-reach, reach))
    return range(start, start + draw(st.integers(-3, 3 * reach)), draw(st.integers(1, step)))


@st.composite
def huge_ranges(draw):
    """Draw a range around 2^40 with a step near 2^20. Some steps are coprime."""
    start = draw(st.integers(-HUGE, HUGE))
    step = (1 << draw(st.integers(18, 20))) + draw(st.sampled_from([0, 0, 1, -1, 7]))
    return range(start, start + draw(st.integers(0, 2 * HUGE)), step)


def elements(pieces) -> list[int]:
    """Return all elements in order."""
    return [x for piece in pieces for x in piece]


def disjoint(pieces) -> bool:
    """Return whether all elements are different."""
    return len(set(elements(pieces))) == len(elements(pieces))


@given(ranges(), st.integers(-60, 200), st.integers(-60, 200))
@settings(max_examples=examples(75))
def test_clip(a, start, stop):
    got = clip(a, start, stop)
    assert list(got) == [x for x in a if start <= x < stop]
    assert got.step == a.step  # the step stays, even if a single element is left


@given(ranges(), ranges())
@settings(max_examples=examples(125))
def test_intersect(a, b):
    got = intersect(a, b)
    assert list(got) == sorted(set(a) & set(b))
    assert not got or got.step == math.lcm(a.step, b.step)


@given(ranges(), ranges())
@settings(max_examples=examples(125))
def test_subtract(a, b):
    pieces = subtract(a, b)
    assert sorted(elements(pieces)) == sorted(set(a) - set(b))
    assert all(pieces)
    # the difference of two ranges of a billion rows must not consist of a million pieces
    shared = intersect(a, b)
    period = shared.step // a.step if shared else 1
    assert len(pieces) <= min(period, len(shared)) + 2


@given(st.lists(ranges(), max_size=4), st.lists(ranges(), max_size=4))
@settings(max_examples=examples(75))
def test_remove(pieces, taken):
    whole = union(pieces)  # `remove` requires disjoint ranges
    left = remove(whole, taken)
    assert sorted(elements(left)) == sorted(set(elements(pieces)) - set(elements(taken)))


@given(st.lists(ranges(), max_size=6))
@settings(max_examples=examples(75))
def test_union(pieces):
    out = union(pieces)
    assert disjoint(out) and all(out)
    assert set(elements(out)) == set(elements(pieces))
    assert size(out) == len(set(elements(pieces)))
    # the order of pieces may differ between sender and receiver, and a piece may occur twice
    assert union(reversed(pieces + pieces)) == out


@given(st.lists(ranges(), max_size=8), st.lists(ranges(), max_size=8))
@settings(max_examples=200)
def test_remove_keeps_what_others_take(pieces, taken):
    """`remove` equals removing the ranges one after the other, in any order."""
    whole, left = union(pieces), set(elements(pieces)) - set(elements(taken))
    for order in (taken, taken[::-1]):
        got = remove(whole, order)
        assert disjoint(got) and set(elements(got)) == left and all(got)


@given(st.lists(st.tuples(ranges(), st.lists(ranges(), max_size=3)), max_size=5))
@settings(max_examples=300)
def test_holed(parts):
    holed, want = Holed([]), set()
    for rows, without in parts:
        holes = union(intersect(rows, x) for x in without)
        holed.add(rows, holes)
        want |= set(rows) - set(elements(holes))
        assert disjoint(holed.pieces) and disjoint(holed.holes)
        assert set(elements(holed.holes)) <= set(elements(holed.pieces))
        got = holed.ranges()
        assert disjoint(got) and set(elements(got)) == want and len(holed) == len(want)


def test_union_joins_what_continues():
    """Adjacent segments of a long sequence are joined to one range, which absorbs sparser ranges."""
    segments = [range(first, first + 64, 2) for first in range(0, 64 << 10, 64)]
    assert union([*segments, *(x[::4] for x in segments)]) == [range(0, (64 << 10) - 1, 2)]


def rewritten(a: range, step: int, beyond: int) -> range:
    """Return a range of the same elements with a different stop and, for a single element, a different step."""
    if len(a) == 1:
        return range(a.start, a.start + 1 + beyond % step, step)
    return range(a.start, a[-1] + 1 + beyond % a.step, a.step) if a else a


@given(st.lists(ranges(reach=6, step=20), max_size=5), st.data())
@settings(max_examples=examples(125))
def test_union_depends_on_elements_only(pieces, data):
    # the receiver may have range(5, 9, 4) where the sender has range(5, 6, 3): the order of rows must not change
    other = [rewritten(x, data.draw(st.integers(1, 20)), data.draw(st.integers(0, 20))) for x in pieces]
    assert other == pieces
    assert elements(union(data.draw(st.permutations(other)))) == elements(union(pieces))


@given(st.lists(ranges(reach=6), max_size=8), st.data())
@settings(max_examples=examples(75))
def test_join(pieces, data):
    # split some ranges into adjacent ones, so that `union` has pieces to join
    cut = []
    for piece in pieces:
        at = data.draw(st.integers(0, len(piece)))
        cut += [piece[:at], piece[at:]]
    out = join(cut)
    assert elements(out) == elements(cut)
    assert all(out)
    assert not any(a.step == b.step and a[-1] + a.step == b[0] for a, b in pairwise(out))


def test_join_needs_equal_steps():
    assert join([range(0, 4, 2), range(4, 7, 3)]) == (range(0, 4, 2), range(4, 7, 3))
    assert join([range(0, 4), range(0), range(4, 9)]) == (range(0, 9),)


@given(st.lists(ranges(), max_size=5))
def test_size(pieces):
    assert size(pieces) == len(elements(pieces))


def crt_count(a: range, b: range) -> int:
    """Count the common elements of two ranges. If residues agree modulo the gcd, they occur once per lcm numbers."""
    if not a or not b or (a.start - b.start) % math.gcd(a.step, b.step):
        return 0
    common = math.lcm(a.step, b.step)
    # find a number with both residues: step through the residues of the range with the larger step
    big, small = (a, b) if a.step >= b.step else (b, a)
    k = (small.start - big.start) // math.gcd(a.step, b.step)
    n = small.step // math.gcd(a.step, b.step)
    one = big.start + big.step * (k * pow(big.step // math.gcd(a.step, b.step), -1, n) % n if n > 1 else 0)
    low, high = max(a[0], b[0]), min(a[-1], b[-1])
    return max(0, (high - one) // common - (low - 1 - one) // common)


@given(huge_ranges(), huge_ranges())
@settings(max_examples=examples(75))
def test_intersect_huge(a, b):
    got = intersect(a, b)
    assert len(got) == crt_count(a, b)
    for x in (*got[:3], *got[-3:]):
        assert x in a and x in b


@given(huge_ranges(), huge_ranges())
@settings(max_examples=examples(50))
def test_subtract_huge(a, b):
    shared, pieces = intersect(a, b), subtract(a, b)
    assert size(pieces) == len(a) - len(shared)
    period = shared.step // a.step if shared else 1
    assert len(pieces) <= min(period, len(shared)) + 2
    if len(pieces) < 30:  # this check is quadratic, and the elements were counted before
        assert not any(intersect(x, y) for x, y in combinations(pieces, 2))
    for piece in pieces[:20]:
        assert piece[0] in a and piece[-1] in a and not intersect(piece, b)


@given(huge_ranges(), huge_ranges())
@settings(max_examples=examples(25))
def test_union_huge(a, b):
    out = union([a, b])
    assert size(out) == len(a) + len(b) - len(intersect(a, b))


@pytest.mark.parametrize(
    "a, b, want",
    [
        (range(3, 3 + HUGE, 1 << 20), range(3 + (1 << 19), HUGE, 1 << 20), 0),  # residues differ
        (range(0, HUGE, 1 << 20), range(0, HUGE, (1 << 20) + 1), 1),  # coprime steps meet once per product
        (range(0, 1 << 62, 1 << 20), range(0, 1 << 62, (1 << 20) + 1), -(-(1 << 62) // ((1 << 20) * ((1 << 20) + 1)))),
        (range(-HUGE, HUGE, 1 << 20), range(-HUGE, HUGE, 1 << 10), 1 << 21),
        (range(0, HUGE, 1 << 20), range(HUGE, 2 * HUGE), 0),
    ],
    ids=["residues differ", "meet once", "meet at the product", "one holds the other", "apart"],
)
def test_intersect_huge_by_hand(a, b, want):
    assert len(intersect(a, b)) == len(intersect(b, a)) == want
