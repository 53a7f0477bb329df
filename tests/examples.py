"""The number of random examples of a property test."""

import os


def examples(number: int) -> int:
    """Return `number` times LIGHTNING_DILATED_EXAMPLES, at least 1: `@settings(max_examples=examples(100))`.

    The factor is 1 by default and 0.1 with `pytest -m fast` (tests/conftest.py); 10 searches longer.
    """
    return max(1, round(number * scale()))


def scale() -> float:
    """Return the factor, for tests that count features of their examples: fewer examples have fewer."""
    return float(os.environ.get("LIGHTNING_DILATED_EXAMPLES", "1"))
