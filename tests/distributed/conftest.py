"""One pool of four gloo ranks for the whole folder."""

from collections.abc import Iterator

import pytest

from .pool import Pool


@pytest.fixture(scope="package")
def pool() -> Iterator[Pool]:
    """Four ranks; a call takes the first R of them."""
    pool = Pool()
    yield pool
    pool.close()
