"""Pools of one to four gloo ranks for this folder, because a Trainer uses all ranks of its process group."""

from collections.abc import Callable, Iterator

import pytest

from ...distributed.pool import Pool


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Pool]]:
    """Return a function: `pools(2)` returns a pool of two ranks, which is started on first use."""
    started: dict[int, Pool] = {}

    def get(ranks: int) -> Pool:
        if ranks not in started:
            started[ranks] = Pool(ranks)
        return started[ranks]

    yield get
    for pool in started.values():
        pool.close()
