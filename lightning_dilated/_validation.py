"""Checks of plain values: each takes (value, name, limits) and returns the value, or raises an error that names it."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


def integer(value: Any, name: str, minimum: int | None = None, hint: str = "") -> int:
    """`value` as a plain int of at least `minimum`.

    Raises: TypeError for other types (bool included), ValueError below the minimum.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got the bool {value!r}.{hint}")
    try:
        result = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}.{hint}") from None
    if minimum is not None and result < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {result}.{hint}")
    return result


def real(
    value: Any,
    name: str,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
    hint: str = "",
) -> float:
    """`value` as a finite float with least <= value <= most and above < value < below.

    Raises: TypeError for other types (bool included), ValueError outside the limits.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}.{hint}")
    try:
        result = float(value)
    except OverflowError:  # an integer too large for a float
        result = math.inf
    if not (least <= result <= most and above < result < below):
        low = f"[{least:g}" if least > -math.inf else f"({above:g}"
        high = f"{most:g}]" if most < math.inf else f"{below:g})"
        raise ValueError(f"{name} must be a number in {low}, {high}, got {value!r}.{hint}")
    return result


def flag(value: Any, name: str) -> bool:
    """`value` if it is a bool; TypeError otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return value


def one_of(value: Any, name: str, allowed: Iterable[str], hint: str = "") -> str:
    """`value` if it is one of the allowed words; ValueError otherwise."""
    allowed = tuple(allowed)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.{hint}")
    return value


def known_keys(keys: Iterable[Any], what: str, allowed: Iterable[str]) -> None:
    """Raise ValueError for a key that `what` does not have, and suggest the nearest one that it has."""
    allowed = list(allowed)
    for key in keys:
        if key not in allowed:
            nearest = get_close_matches(str(key), allowed, n=1)
            suggestion = f" Did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(f"{what} has no key {key!r}.{suggestion} Allowed keys: {', '.join(allowed)}.")
