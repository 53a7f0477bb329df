"""A rank is told to end (SIGTERM): all of them do, after the same batch."""

import os
import signal
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from .runs import Run, launched, make
from .test_failures import losses, start

pytestmark = pytest.mark.full

#: validated after every second batch
RUN, CHECKED = Run(steps=6), {"val_check_interval": 2, "limit_val_batches": 2}


class Told(pl.Callback):
    """Ranks get the signal at the third batch, or the last, or in the validation before it, where `at` says."""

    def __init__(self, who, at):
        self.who, self.at, self.validated = who, at, 0

    def _tell(self, trainer, at):
        step = 5 if self.at == "last" else 2
        if (
            trainer.global_rank in self.who
            and trainer.global_step == step
            and self.at in (at, "last" * (at == "backward"))
        ):
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_batch_start(self, trainer, *unused):
        self.validated += 1
        if trainer.global_step == 2 and self.validated % 2:
            self._tell(trainer, "validation")

    def on_train_batch_start(self, trainer, *unused):
        self._tell(trainer, "begin")

    def on_after_backward(self, trainer, *unused):
        self._tell(trainer, "backward")


def ended(rank, group, who, at, options):
    """Why a fit ended, its steps, batches of validation, what GPUs would have been asked, and the handler afterwards."""
    asked, real, told = [], torch.distributed.broadcast, Told(who, at)
    built, model, data, _ = make(RUN, launched(rank), callbacks=[told], **options)
    usual, why = signal.getsignal(signal.SIGTERM), ""
    torch.distributed.broadcast = lambda *a, **k: (asked.append(a), real(*a, **k))[1]
    try:
        built.fit(model, data)
    except BaseException as error:
        why = type(error).__name__
    finally:
        torch.distributed.broadcast = real
    return why, built.global_step, told.validated, len(asked), signal.getsignal(signal.SIGTERM) is usual


@pytest.mark.parametrize("at", ["begin", "backward"])
@pytest.mark.parametrize("who", [[0], [1], [0, 1]])
def test_all_ranks_end_after_the_same_batch(pools, who, at):
    assert pools(2).run(2, ended, who, at, {"limit_val_batches": 0}) == [("SIGTERMException", 3, 0, 0, True)] * 2


@pytest.mark.parametrize("who", [[1], [0, 1]])
def test_a_validation_is_finished_or_not_begun(pools, who):
    assert pools(2).run(2, ended, who, "validation", CHECKED) == [("SIGTERMException", 2, 2, 0, True)] * 2
    assert (
        pools(2).run(2, ended, who, "backward", {**CHECKED, "val_check_interval": 3})
        == [("SIGTERMException", 3, 0, 0, True)] * 2
    )


def test_told_in_the_last_batch(pools):
    """The fit is over, but what comes after it must not begin."""
    assert pools(2).run(2, ended, [1], "last", {"limit_val_batches": 0}) == [("SIGTERMException", 6, 0, 0, True)] * 2


def test_one_rank(pools):
    assert pools(1).run(1, ended, [0], "backward", {"limit_val_batches": 0}) == [("SIGTERMException", 3, 0, 0, True)]


def test_nobody_is_told(pools):
    """And no tensor of the device is broadcast before a batch."""
    assert pools(2).run(2, ended, [], "begin", {"limit_val_batches": 0}) == [("", 6, 0, 0, True)] * 2


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
