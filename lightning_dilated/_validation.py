"""Checks of plain constructor values, with messages that name the option and say what is allowed."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any


def whole_number(name: str, value: object, minimum: int) -> int:
    """Return `value` if it is an int of at least `minimum`.

    Raises: TypeError for other types (bool included), ValueError below the minimum.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        kind = type(value).__name__
        raise TypeError(f"{name} is {value!r} ({kind}); it must be a whole number of at least {minimum}")
    if value < minimum:
        raise ValueError(f"{name} is {value}; it must be a whole number of at least {minimum}")
    return value


def fraction(name: str, value: object) -> float:
    """Return `value` as a float if it lies in [0, 1).

    Raises: TypeError if it is not a number (or a bool), ValueError outside [0, 1).
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it must be a number from 0 to below 1")
    if not (math.isfinite(value) and 0 <= value < 1):
        raise ValueError(f"{name} is {value}; it must be a number from 0 to below 1 (0 leaves the split out)")
    return float(value)


def share(name: str, value: object) -> float:
    """Return `value` as a float if it lies in [0, 1]; TypeError or ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it must be a number from 0 to 1")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; it must be a number from 0 to 1")
    return float(value)


def flag(name: str, value: object) -> bool:
    """Return `value` if it is a bool; TypeError otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it must be true or false")
    return value


def file_suffixes(name: str, value: object) -> list[str] | None:
    """Return a list of file name endings, each with its leading dot, or None.

    Raises: TypeError if it is not a list of strings, ValueError if the list or an entry is empty.
    """
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{name} is {value!r}; it must be a list of file name endings such as ['.txt', '.md'], or null")
    if not value or not all(item.strip(".") for item in value):
        raise ValueError(f"{name} is {value!r}; name at least one ending such as '.txt', or leave it out for all files")
    return [item if item.startswith(".") else f".{item}" for item in value]


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """Return `value` if it is one of the allowed words; ValueError otherwise."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
    return value


def integer(value: Any, name: str, minimum: int, hint: str = "") -> int:
    """`value` as a plain int of at least `minimum`; anything else raises with the name of the culprit."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got the bool {value!r}.{hint}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}.{hint}") from None
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}.{hint}")
    return number


def known_keys(given: Mapping[str, Any], allowed: Iterable[str], what: str) -> None:
    """Raise for a key that `what` does not have, with the nearest one that it has."""
    allowed = list(allowed)
    for key in given:
        if key not in allowed:
            near = get_close_matches(str(key), allowed, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{what} has no key {key!r}.{hint} Allowed keys: {', '.join(allowed)}.")
