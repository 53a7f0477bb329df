"""If a rank is busy elsewhere, the messages of CommunicationProfiler wait as long as the strategy's messages."""

import time
from datetime import timedelta
from unittest import mock

import lightning.pytorch as pl
import pytest

from lightning_dilated.callbacks import CommunicationProfiler
from lightning_dilated.ext.profiling import communication

from ...strategy.runs import Run, launched, make

pytestmark = pytest.mark.full


class Slow(pl.Callback):
    """Makes a validation last longer than ranks wait for each other in training."""

    def on_validation_batch_start(self, trainer, *args):
        time.sleep(0.8)


def fit(rank, group, timeout):
    """Return (timeout of the profiler's messages, number of logged batches, number of steps)."""
    profiler, logged = CommunicationProfiler(warmup=0, table=False), []
    start = lambda trainer, module: logged.append(profiler._quiet.backend.backend.options._timeout)  # noqa: E731
    slow = Slow()
    slow.on_train_start = start
    run = Run(steps=2, strategy={"timeout": timeout})
    limits = {"limit_val_batches": 6, "val_check_interval": 1}
    built, model, data, _ = make(run, launched(rank), callbacks=[profiler, slow], **limits)
    late = lambda clock: rank > 0  # noqa: E731 - the first rank's GPU is behind
    with mock.patch.object(communication, "reached", late):
        built.fit(model, data)
    return logged, profiler.steps, built.global_step


@pytest.mark.slow
def test_a_validation_longer_than_the_timeout(pool):
    """Two validations of five seconds are longer than the timeout of four seconds of a single message."""
    for outcome in pool.run(2, fit, 4):
        assert outcome == ([timedelta(seconds=4)], 2, 2)
