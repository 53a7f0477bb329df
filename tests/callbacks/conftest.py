"""Fixtures: two gloo ranks for callbacks that need them, and a run with its checkpoints.

The pool exists for the whole session, because xdist mixes files of this folder with others.
"""

import shutil
from collections.abc import Iterator

import pytest

from lightning_dilated.callbacks import ShardedCheckpoint

from ..distributed.pool import Pool
from .checkpoint_runs import STEPS, run, write_text


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Two ranks; a Trainer in them uses both."""
    workers = Pool(2)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of letters to train on."""
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def whole(text):
    """An uninterrupted run."""
    return run(text, STEPS)


@pytest.fixture(scope="session")
def saved(text, tmp_path_factory):
    """A folder with checkpoints of steps 2, 3 and 4 of `whole`. It is read-only: tests use a copy."""
    folder = tmp_path_factory.mktemp("saved")
    run(text, 4, ShardedCheckpoint(str(folder), every_n_train_steps=1, keep=3))
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    """A copy of `saved` that a test may damage."""
    return shutil.copytree(saved, tmp_path / "c")
