"""Two gloo ranks for the callbacks that need them, and a run with its checkpoints.

The pool lives for the whole session, because xdist mixes files of this folder with others.
"""

import shutil
from collections.abc import Iterator

import pytest

from lightning_dilated.callbacks import ShardedCheckpoint

from ..distributed.pool import Pool
from .checkpoint_runs import STEPS, run, write_text


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Two ranks; a Trainer uses both."""
    workers = Pool(2)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of letters to train on."""
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def whole(text):
    """A run that is never interrupted."""
    return run(text, STEPS)


@pytest.fixture(scope="session")
def saved(text, tmp_path_factory):
    """Three checkpoints, at steps 2, 3 and 4 of the same run. Read only: tests copy it."""
    folder = tmp_path_factory.mktemp("saved")
    run(text, 4, ShardedCheckpoint(str(folder), every_n_train_steps=1, keep=3))
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(saved, tmp_path / "c")
