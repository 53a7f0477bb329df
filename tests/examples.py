"""How many random examples a property test tries."""

import os


def examples(number: int) -> int:
    """`number` times LIGHTNING_DILATED_EXAMPLES, at least 1: `@settings(max_examples=examples(100))`.

    The factor is 1 by default and 0.1 with `pytest -m fast` (tests/conftest.py); 10 searches longer.
    """
    return max(1, round(number * scale()))


def scale() -> float:
    """The factor. A test that counts what its examples hold asks for it: few examples hold less."""
    return float(os.environ.get("LIGHTNING_DILATED_EXAMPLES", "1"))
