"""Numbers of random examples in property tests."""

import os


def examples(number: int) -> int:
    """Return `number` times LIGHTNING_DILATED_EXAMPLES, at least 1: `@settings(max_examples=examples(100))`.

    The factor is 1 by default, and 0.1 with `pytest -m fast` (tests/conftest.py). Set 10 to search longer.
    """
    return max(1, round(number * scale()))


def scale() -> float:
    """Return the factor. Tests that count features of their examples scale the expected counts by it."""
    return float(os.environ.get("LIGHTNING_DILATED_EXAMPLES", "1"))
