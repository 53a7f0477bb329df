"""A rank is told to end (SIGTERM): all of them do, after the same batch."""

import os
import signal
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from .runs import Run, launched, make
from .test_failures import losses, start

RUN = Run(steps=6)


class Told(pl.Callback):
    """A rank gets the signal at the third batch, where `at` says."""

    def __init__(self, who, at):
        self.who, self.at = who, at

    def _tell(self, trainer, at):
        if (trainer.global_rank, trainer.global_step, at) == (self.who, 2, self.at):
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_start(self, trainer, *unused):
        self._tell(trainer, "begin")

    def on_after_backward(self, trainer, *unused):
        self._tell(trainer, "backward")


def ended(rank, group, who, at):
    """Why a fit ended, its steps, and what GPUs would have been asked."""
    asked, real = [], torch.distributed.broadcast
    built, model, data, _ = make(RUN, launched(rank))
    built.callbacks.append(Told(who, at))
    torch.distributed.broadcast = lambda *a, **k: (asked.append(a), real(*a, **k))[1]
    usual = signal.getsignal(signal.SIGTERM)
    try:
        built.fit(model, data)
    except BaseException as error:
        return type(error).__name__, built.global_step, len(asked), signal.getsignal(signal.SIGTERM) is usual
    finally:
        torch.distributed.broadcast = real
    return "", built.global_step, len(asked), signal.getsignal(signal.SIGTERM) is usual


@pytest.mark.parametrize("at", ["begin", "backward"])
@pytest.mark.parametrize("who", [0, 1])
def test_all_ranks_end_after_the_same_batch(pools, who, at):
    assert pools(2).run(2, ended, who, at) == [("SIGTERMException", 3, 0, True)] * 2


def test_nobody_is_told(pools):
    """And no tensor of the device is broadcast before a batch."""
    assert pools(2).run(2, ended, None, "begin") == [("", 6, 0, True)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_goes_on_after_it(tmp_path: Path, who):
    """A job that was told to end, and is started again."""
    (alone := tmp_path / "alone").mkdir()
    status, text = start(alone, "nothing", 0, 1)
    assert status == 0
    want = losses(text)[0]
    (job := tmp_path / "job").mkdir()
    _, text = start(job, "term", who)
    assert not losses(text) and (job / "ckpt" / "last.ckpt").exists(), text[-3000:]
    status, text = start(job, "term", who)
    assert status == 0 and losses(text) == pytest.approx([want] * 2, rel=1e-5), text[-3000:]
