"""Doubling and halving for the largest number that fits; knows nothing of what is tried.

Shape letters: N tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_dilated.pattern.branch import integer


@dataclass(frozen=True)
class Tried:
    """What a search found: the most tokens that fit, the fewest that did not (None: never met), and how many were tried."""

    fits: int
    fails: int | None
    times: int


def longest(
    fits: Callable[[int], bool],
    start: int,
    multiple: int = 1,
    within: float = 0.03,
    most: int | None = None,
) -> Tried:
    """The largest multiple of `multiple` that fits, to a part of `within`: doubles (or halves) from `start`, then bisects.

    Args:
        fits: whether so many tokens fit; more never fit where fewer do not.
        start: first tried; rounded up to a multiple.
        multiple: of all that is tried.
        within: bound of the found gap, as a part of what fits; 0: to the last multiple.
        most: never try more.

    Raises:
        ValueError: for numbers that are not positive, or where even `multiple` tokens do not fit.
    """
    for name, value in (("start", start), ("multiple", multiple), ("most", most)):
        if value is not None:
            integer(value, name, 1)
    if not 0 <= within < 1:
        raise ValueError(f"within must be a part from 0 to below 1, got {within!r}.")
    limit = None if most is None else most // multiple
    if limit == 0:
        raise ValueError(f"most={most} is below {multiple}, the fewest tokens that can be tried.")
    low, high, times = 0, None, 0
    at = -(-start // multiple)
    at = at if limit is None else min(at, limit)
    while high is None or high - low > max(1, within * low):
        times += 1
        if fits(at * multiple):
            low = at
            if low == limit:
                break
        else:
            high = at
        if high is None:
            at = 2 * low if limit is None else min(2 * low, limit)
        else:
            at = (low + high) // 2 if low else max(1, high // 2)
        if high == 1:
            raise ValueError(
                f"not even {multiple:,} tokens fit: make the model smaller, or keep less for the backward."
            )
    return Tried(low * multiple, None if high is None else high * multiple, times)
