"""Checks of plain values: most take (value, name, limits), and return the value or raise an error that names it."""

from __future__ import annotations

import math
import operator
import os
import re
import stat
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

#: stores that an address may name; fsspec has others, and some of them interpret the files that they read
STORES = ("file", "local", "s3", "s3a", "gs", "gcs", "hf", "http", "https", "memory")
_ADDRESS = re.compile(r"([^/\\:]{2,})(::[^/]*)?://")
_CHAIN = "interpret the file that it reads: name the file itself, by one address"


def is_address(path: object) -> bool:
    """Return whether a path names a store, as s3://bucket/key does."""
    return isinstance(path, str) and _ADDRESS.match(path) is not None


def store_of(address: str) -> str:
    """Return the name of an address's store, in lower case; "" for a path."""
    match = _ADDRESS.match(address)
    return match[1].lower() if match else ""


def check_address(path: object) -> None:
    """Raise ValueError for an address outside `STORES` and for a chain of addresses; accept paths."""
    if not is_address(path):
        return
    address = str(path)
    if "::" in address:
        raise ValueError(f"{address} is a chain of addresses (::), which could {_CHAIN}")
    if store_of(address) not in STORES:
        raise ValueError(
            f"{address}: files are not read from {store_of(address)}://, but from {', '.join(STORES)}: copy the file to one "
            "of these stores, or to this machine"
        )


def refuse_special(path: str | os.PathLike[str]) -> None:
    """Raise ValueError for a fifo, socket or device, because reading it may never end; accept missing files."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError(f"{path} is neither a regular file nor a directory (a fifo, socket or device?): name a file")


def check_input(path: object) -> None:
    """Raise ValueError for a path or address that Lightning could not read safely.

    Lightning also passes local paths to fsspec, which reads `::` in a path as a chain.
    """
    check_address(path)
    if is_address(path) and store_of(str(path)) in ("file", "local"):
        refuse_special(str(path).partition("://")[2])
    if isinstance(path, (str, os.PathLike)) and not is_address(path):
        if "::" in str(path):
            raise ValueError(f"{path} is a chain of addresses (::), which could {_CHAIN}")
        refuse_special(path)


def text_of(path: str | os.PathLike[str], encoding: str | None = None) -> str:
    """Return the text of a local file; raise OSError, UnicodeDecodeError, or ValueError for a fifo or device."""
    refuse_special(path)
    with open(path, encoding=encoding) as file:
        return file.read()


def integer(value: Any, name: str, minimum: int | None = None, hint: str = "", most: int | None = None) -> int:
    """Return `value` as a plain int of at least `minimum` and at most `most`.

    Raises: TypeError for other types (bool included), ValueError outside the limits.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got the bool {value!r}.{hint}")
    try:
        result = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}.{hint}") from None
    if minimum is not None and result < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {result}.{hint}")
    if most is not None and result > most:
        raise ValueError(f"{name} must be at most {most:,}, got {result:,}.{hint}")
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
    """Return `value` as a finite float with least <= value <= most and above < value < below.

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
    """Return `value`; raise TypeError if it is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return value


def one_of(value: Any, name: str, allowed: Iterable[str], hint: str = "") -> str:
    """Return `value`; raise ValueError if it is not one of the allowed words."""
    allowed = tuple(allowed)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.{hint}")
    return value


def known_keys(keys: Iterable[Any], what: str, allowed: Iterable[str]) -> None:
    """Raise ValueError for a key that `what` does not allow, and suggest the most similar allowed key."""
    allowed = list(allowed)
    for key in keys:
        if key not in allowed:
            nearest = get_close_matches(str(key), allowed, n=1)
            suggestion = f" Did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(f"{what} has no key {key!r}.{suggestion} Allowed keys: {', '.join(allowed)}.")
