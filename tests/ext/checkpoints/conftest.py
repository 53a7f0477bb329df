"""Fixtures: a training run, and its checkpoints."""

import shutil

import pytest

from lightning_dilated.callbacks import ShardedCheckpoint

from .checkpoint_runs import STEPS, run, write_text


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
