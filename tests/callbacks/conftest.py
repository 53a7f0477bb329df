"""Two gloo ranks for the callbacks that need them."""

from collections.abc import Iterator

import pytest

from ..distributed.pool import Pool


@pytest.fixture(scope="package")
def pool() -> Iterator[Pool]:
    """Two ranks; a Trainer takes all of them."""
    made = Pool(2)
    yield made
    made.close()
