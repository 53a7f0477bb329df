"""One pool of four gloo ranks, which lives for the whole session because files of this folder run between others."""

from collections.abc import Iterator

import pytest

from .pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks; a call uses the first R of them."""
    pool = Pool()
    yield pool
    pool.close()
