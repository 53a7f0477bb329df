"""Pools of one, two and four ranks, because a Trainer uses all ranks of its process group.

The pools exist for the whole session, because xdist mixes files of this folder with others.
"""

from collections.abc import Callable, Iterator

import pytest

from ..distributed.pool import Pool


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Pool]]:
    """Return a function: `pools(4)` returns a pool of four ranks, which is started on first use."""
    started: dict[int, Pool] = {}

    def get(ranks: int) -> Pool:
        if ranks not in started:
            started[ranks] = Pool(ranks)
        return started[ranks]

    yield get
    for pool in started.values():
        pool.close()
