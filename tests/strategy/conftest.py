"""Pools of one, two and four ranks: a Trainer takes all ranks of its process group.

They last for the session: under xdist files of this folder are run between others.
"""

from collections.abc import Callable, Iterator

import pytest

from ..distributed.pool import Pool


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Pool]]:
    """pools(4) are four ranks, started when first asked for."""
    made: dict[int, Pool] = {}

    def get(ranks: int) -> Pool:
        if ranks not in made:
            made[ranks] = Pool(ranks)
        return made[ranks]

    yield get
    for pool in made.values():
        pool.close()
