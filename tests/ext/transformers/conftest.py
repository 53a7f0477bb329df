"""Pools of one to four gloo ranks for the folder; a Trainer needs all ranks of its process group."""

from collections.abc import Callable, Iterator

import pytest

from ...distributed.pool import Pool


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Pool]]:
    """Return a function: `pools(2)` is a pool of two ranks, started on first use."""
    started: dict[int, Pool] = {}

    def get(ranks: int) -> Pool:
        if ranks not in started:
            started[ranks] = Pool(ranks)
        return started[ranks]

    yield get
    for pool in started.values():
        pool.close()
