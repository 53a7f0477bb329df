"""If a rank is lost, the errors of the other ranks name it and quote its error."""

import time

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_dilated.strategy.preemption import connection_broke, report_lost_ranks

from .runs import Run, launched, make
from .test_failures import TORCHRUN, start

GLOO = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer.")


def test_names_the_silent_and_what_others_raised():
    reasons = dist.HashStore()
    reasons.set("1", "")
    reasons.set("3", "ValueError: trouble of its own")
    words = report_lost_ranks(reasons, 0, 4, patience=0.2)
    assert words.startswith(
        "Rank 0 of the job lost the connection to another rank. Rank 3 of the job raised ValueError: tr"
    )
    assert "Ranks [2] of the job gave no sign within 0.2 seconds" in words and "[1" not in words


def test_does_not_wait_once_all_have_spoken():
    reasons = dist.HashStore()
    reasons.set("0", "OSError: no space")
    assert report_lost_ranks(reasons, 1, 2, patience=1e9).endswith("Rank 0 of the job raised OSError: no space.")
    reasons.set("0", "")
    assert "Ranks [0] of the job lost a connection, too" in report_lost_ranks(reasons, 1, 2, patience=1e9)


def test_does_not_wait_long_once_it_is_told_to_end():
    """torchrun's agents send a signal to the living ranks and then restart all, so these ranks wait only briefly."""
    begin = time.monotonic()
    words = report_lost_ranks(dist.HashStore(), 0, 2, patience=1e9, is_ending=lambda: time.monotonic() > begin + 0.3)
    assert 0.9 < time.monotonic() - begin < 60 and "Ranks [1] of the job gave no sign within" in words


def test_knows_a_broken_connection():
    wrapped = RuntimeError("rank 0 waited in vain")
    wrapped.__cause__ = GLOO
    assert connection_broke(GLOO) and connection_broke(wrapped) and connection_broke(dist.DistBackendError("NCCL"))
    circle = RuntimeError("of a model")
    circle.__cause__ = circle
    assert not any(connection_broke(x) for x in (None, circle, RuntimeError("of a model"), ValueError("/gloo/")))


class Breaks(pl.Callback):
    """Raises on rank 1. On other ranks, it raises the error of a broken connection."""

    def on_train_batch_start(self, trainer, *unused):
        raise ValueError("trouble of its own") if trainer.global_rank == 1 else RuntimeError(str(GLOO))


def errors(rank, group, run):
    """Return the errors of two fits in which rank 1 raises, and of one fit without an error."""
    words = []
    for callbacks in ([Breaks()], [Breaks()], []):
        built, model, data, _ = make(run, launched(rank), callbacks=callbacks)
        try:
            built.fit(model, data)
        except (RuntimeError, ValueError) as error:
            words.append(str(error))
    return words, torch.distributed.is_initialized()


@pytest.mark.parametrize("fsdp", [False, True])
def test_a_fit_says_who_raised(pools, fsdp):
    (lost, initialized), (own, _) = pools(2).run(2, errors, Run(fsdp=fsdp, steps=1, double=fsdp))
    assert own == ["trouble of its own"] * 2 and len(lost) == 2 and initialized
    for words in lost:
        assert words.startswith(
            "Rank 0 of the job lost the connection to another rank. Rank 1 of the job raised ValueError: trouble of its own."
        )
        assert words.endswith(str(GLOO))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring_dilated", "ring_dilated_fsdp"])
@pytest.mark.parametrize("who", [1, 2])
def test_a_killed_rank_is_named(tmp_path, strategy, who):
    launcher = [
        *TORCHRUN,
        "--nproc-per-node=3",
    ]  # torchrun's store outlives rank 0; Lightning's store may close before rank 0 has read it
    status, text = start(tmp_path, "kill", who, 3, launcher, strategy)
    assert status != 0 and f"Ranks [{who}] of the job gave no sign" in text, text[-3000:]
