"""Fixtures that tests of extensions share with tests of the core."""

from collections.abc import Iterator

import pytest

from ..data.conftest import file, folder, lambda_virus, store, touched  # noqa: F401
from ..distributed.pool import Pool
from ..kernels.conftest import free_of_determinism, interpreter  # noqa: F401


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Two ranks; a Trainer uses both. Xdist mixes files of several folders, so the pool lives for the whole session."""
    workers = Pool(2)
    yield workers
    workers.close()
