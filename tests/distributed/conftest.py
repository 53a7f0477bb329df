"""A pool of four gloo ranks for the whole session, because xdist mixes files of this folder with others."""

from collections.abc import Iterator

import pytest

from .pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks; a call on R ranks uses the first R of them."""
    pool = Pool()
    yield pool
    pool.close()
