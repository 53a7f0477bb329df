"""One pool of four gloo ranks for the whole folder, and for the whole session: its files are run between others."""

from collections.abc import Iterator

import pytest

from .pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks; a call takes the first R of them."""
    pool = Pool()
    yield pool
    pool.close()
