"""One branch of a dilated pattern: a segment length, a dilation rate, a shift, and the heads it serves."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any


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


#: so that sums of positions, and products of rates with strides, stay within 64 bits
LARGEST = {"segment_length": 1 << 62, "dilation_rate": 1 << 40}


@dataclass(frozen=True)
class Branch:
    """One branch: global position p lies in segment (p + shift) // segment_length at index (p + shift) % segment_length,
    and head h uses the positions whose index % dilation_rate equals the head's offset.

    Args:
        segment_length: w, in tokens; None means one segment that holds the whole sequence.
        dilation_rate: r >= 1. It need not divide w.
        shift: t with 0 <= t < w; the first segment then holds only w - t tokens.
        heads: the query heads that this branch serves; None means all of them.
        offset: one offset in [0, r) for every head of the branch; None leaves it to the pattern's rule.

    Raises:
        TypeError, ValueError: naming the argument, what was given and what is allowed.
    """

    segment_length: int | None
    dilation_rate: int
    shift: int = 0
    heads: tuple[int, ...] | None = None
    offset: int | None = None

    def __post_init__(self) -> None:
        fix = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731 - frozen dataclass
        if self.segment_length is not None:
            fix("segment_length", integer(self.segment_length, "segment_length", 1))
        fix("dilation_rate", integer(self.dilation_rate, "dilation_rate", 1, " Use 1 for no dilation."))
        for name, largest in LARGEST.items():
            if (getattr(self, name) or 0) > largest:
                raise ValueError(f"{name} must be at most 2^{largest.bit_length() - 1}, got {getattr(self, name)}.")
        fix("shift", integer(self.shift, "shift", 0))
        if self.segment_length is None and self.shift:
            raise ValueError(f"shift={self.shift} has no meaning without segments: give segment_length, or shift=0.")
        if self.segment_length is not None and self.shift >= self.segment_length:
            raise ValueError(
                f"shift must be below segment_length={self.segment_length}, got {self.shift}; "
                f"a shift acts modulo the segment, so shift={self.shift % self.segment_length} is the same cut."
            )
        if self.heads is not None:
            fix("heads", self._checked_heads(self.heads))
        if self.offset is not None:
            fix("offset", integer(self.offset, "offset", 0))
            if self.offset >= self.dilation_rate:
                raise ValueError(f"offset must be below dilation_rate={self.dilation_rate}, got {self.offset}.")

    @staticmethod
    def _checked_heads(heads: Any) -> tuple[int, ...]:
        if isinstance(heads, (str, bytes, Mapping)) or not isinstance(heads, Iterable):
            raise TypeError(f"heads must be a list of query heads such as range(0, 4), or None for all; got {heads!r}.")
        numbers = tuple(sorted(integer(h, "each entry of heads", 0) for h in heads))
        if not numbers:
            raise ValueError(
                "heads is empty, so the branch would serve nobody: name at least one head, or None for all."
            )
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"heads names a head twice: {list(numbers)}. A head sees a branch once.")
        return numbers

    def to_dict(self) -> dict[str, Any]:
        """Plain values for YAML and JSON, without the fields that are at their defaults."""
        out: dict[str, Any] = {"segment_length": self.segment_length, "dilation_rate": self.dilation_rate}
        if self.shift:
            out["shift"] = self.shift
        if self.heads is not None:
            out["heads"] = list(self.heads)
        if self.offset is not None:
            out["offset"] = self.offset
        return out

    @classmethod
    def of(cls, value: Any, name: str = "branch") -> Branch:
        """A Branch from a Branch, a mapping of its fields, or a (segment_length, dilation_rate) pair."""
        if isinstance(value, Branch):
            return value
        if isinstance(value, Mapping):
            names = [f.name for f in fields(cls)]
            known_keys(value, names, name)
            missing = [n for n in ("segment_length", "dilation_rate") if n not in value]
            if missing:
                raise ValueError(f"{name} lacks {' and '.join(missing)}: {dict(value)!r}.")
            return _named(name, cls, **value)
        if isinstance(value, (tuple, list)) and len(value) == 2:
            return _named(name, cls, *value)
        raise TypeError(f"{name} must be a Branch, a mapping or a (segment_length, dilation_rate) pair, got {value!r}.")

    def __repr__(self) -> str:
        parts = [str(self.segment_length), str(self.dilation_rate)]
        parts += [f"shift={self.shift}"] if self.shift else []
        parts += [f"heads={_ranges(self.heads)}"] if self.heads is not None else []
        parts += [f"offset={self.offset}"] if self.offset is not None else []
        return f"Branch({', '.join(parts)})"


def _named(name: str, make: Any, *args: Any, **kwargs: Any) -> Branch:
    """Call `make`, and put the branch's name in front of what it complains of."""
    try:
        return make(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def _ranges(heads: tuple[int, ...]) -> str:
    """`range(a, b)` where the heads are consecutive, else the list."""
    if len(heads) > 2 and heads == tuple(range(heads[0], heads[-1] + 1)):
        return f"range({heads[0]}, {heads[-1] + 1})"
    return str(list(heads))
