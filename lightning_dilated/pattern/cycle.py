"""Cycles: a short list of patterns that the layers of a model take in turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def in_turns(patterns: Sequence[Any], depth: int) -> tuple[Any, ...]:
    """The patterns of `depth` layers that take a list in turns."""
    return tuple(patterns[i % len(patterns)] for i in range(depth))


def shortest_cycle(patterns: Sequence[Any]) -> tuple[Any, ...]:
    """The shortest prefix of the list that gives it when repeated."""
    lengths = (n for n in range(1, len(patterns)) if all(x == patterns[i % n] for i, x in enumerate(patterns)))
    return tuple(patterns[: next(lengths, len(patterns))])
