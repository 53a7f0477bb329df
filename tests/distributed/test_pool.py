"""The pool of workers that other tests use."""

import gc
import os

import pytest

from .pool import Pool

pytestmark = pytest.mark.full


def state(rank, group, name):
    """Return an environment variable of this worker, and whether garbage collection excludes imported objects."""
    return os.environ.get(name), gc.get_freeze_count() > 100_000


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_that_replace_others_are_like_them(monkeypatch, method):
    monkeypatch.delenv("OF_THE_POOL", raising=False)
    pool = Pool(1, method=method, environment={"OF_THE_POOL": "1"})
    for _ in range(2):
        assert pool.run(1, state, "OF_THE_POOL") == [("1", True)]
        pool.close()
    assert "OF_THE_POOL" not in os.environ
