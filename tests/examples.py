"""Numbers of random examples in property tests."""

import os
from collections.abc import Callable

import pytest


def examples(number: int) -> int:
    """Return `number` times LIGHTNING_DILATED_EXAMPLES, at least 1: `@settings(max_examples=examples(100))`.

    The factor is 1 by default, and 0.1 with `pytest -m fast` (tests/conftest.py). Set 10 to search longer.
    """
    return max(1, round(number * scale()))


def scale() -> float:
    """Return the factor. Tests that count features of their examples scale the expected counts by it."""
    return float(os.environ.get("LIGHTNING_DILATED_EXAMPLES", "1"))


def few_and_many(counts: dict[Callable, tuple[int, int]]) -> list:
    """Return (function, seed, number of examples) for each function: few examples, and many in a slow test."""
    few = [(function, 0, number) for function, (number, _) in counts.items()]
    return [
        *few,
        *(pytest.param(function, 1, number, marks=pytest.mark.slow) for function, (_, number) in counts.items()),
    ]
