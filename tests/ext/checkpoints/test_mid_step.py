"""Events between two chunks of a step: a checkpoint is due, the process gets a signal to end, or it is killed.

The job resumes from the last checkpoint, with the same losses as an undisturbed run.
"""

import os
import signal
import time
from datetime import timedelta
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, model_checkpoint

from lightning_dilated import DilatedPattern, LongNetLM
from lightning_dilated.callbacks import ActivationRecompute, ShardedCheckpoint
from lightning_dilated.data import ByteDataModule, StreamDataModule
from lightning_dilated.ext.checkpoints import sharded_checkpoint

from ...distributed.forked import context
from ...models import trainer
from ...strategy.runs import Record
from .checkpoint_runs import names

pytestmark = pytest.mark.full

PATTERN = DilatedPattern.longnet([8, 32], [1, 2])
STEPS, CHUNK = 6, 16
#: kind of data -> the kind of pass with which a step of four chunks ends
LAST = {"sequences": "backward", "streams": "chunk"}


class Clock:
    """The module `time`, with a monotonic clock that can be advanced."""

    def __init__(self):
        self.ahead = 0.0

    def monotonic(self):
        return time.monotonic() + self.ahead

    def __getattr__(self, name):
        return getattr(time, name)


class Between(pl.Callback):
    """Calls functions between chunks. Keys are (optimizer steps so far, kind of pass, chunks done)."""

    def __init__(self, calls):
        self.calls = calls

    def on_train_start(self, trainer, pl_module):
        call = lambda name, done, total: self.calls.pop((trainer.global_step, name, done), int)()  # noqa: E731
        pl_module.transformer.stream.watch = call


def run(text, kind, steps=STEPS, *callbacks, due=None, ends=None, ckpt=None, begun=1, **options):
    """Return (losses, parameters) of a run on data of this kind, or (losses, exit status) if a signal ends the run.

    Args:
        due: moment (steps, pass, chunks) at which the clock advances by an hour.
        ends: (moment, signal): at this moment the process sends itself this signal.
        begun: seed of the initial weights.
    """
    pl.seed_everything(begun, verbose=False)
    clock, record, calls = Clock(), Record(), {}
    if due is not None:
        calls[due] = lambda: setattr(clock, "ahead", clock.ahead + 3600.0)
    if ends is not None:
        calls[ends[0]] = lambda: os.kill(os.getpid(), ends[1])
    shares = {"val_fraction": 0, "test_fraction": 0}
    data = ByteDataModule(text, 64, **shares) if kind == "sequences" else StreamDataModule(text, 64, 2, **shares)
    every = [record, ActivationRecompute(stream=CHUNK), *callbacks, Between(calls)]
    options = {"enable_checkpointing": any(isinstance(x, pl.callbacks.Checkpoint) for x in callbacks), **options}
    built = trainer(devices=1, precision="64-true", max_steps=steps, callbacks=every, **options)
    model = LongNetLM(PATTERN, dim=16, depth=1, num_heads=2, kv_conv=2)
    now = [mock.patch.object(x, "time", clock) for x in (model_checkpoint, sharded_checkpoint)]
    with now[0], now[1]:
        try:
            built.fit(model, data, ckpt_path=ckpt)
        except SystemExit as end:
            return record.losses, end.code
    return record.losses, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture(scope="module", params=sorted(LAST))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def whole(text, kind):
    """An undisturbed run."""
    return run(text, kind)


def by_time(folder):
    return ModelCheckpoint(folder, "{step}", save_top_k=-1, train_time_interval=timedelta(hours=1))


def check_rest(whole, resumed, steps):
    assert resumed[0] == pytest.approx(whole[0][steps:], rel=1e-9)
    torch.testing.assert_close(resumed[1], whole[1], rtol=1e-9, atol=1e-12)


def test_due_by_time(text, kind, whole, tmp_path):
    """With either callback, a checkpoint that is due in mid-step is written once, at the end of the step."""
    due = (2, LAST[kind], 2)
    for saver in (by_time(tmp_path / "a"), ShardedCheckpoint(str(tmp_path / "b"), every_n_minutes=59, at_end=False)):
        assert run(text, kind, STEPS, saver, due=due)[0] == pytest.approx(whole[0], rel=1e-9)
    assert names(tmp_path / "a") == ["step=3.ckpt"]
    assert [x for x in names(tmp_path / "b") if x.startswith("step")] == ["step-00000003"]
    check_rest(whole, run(text, kind, ckpt=tmp_path / "a" / "step=3.ckpt", begun=2), 3)
    check_rest(whole, run(text, kind, STEPS, ShardedCheckpoint(str(tmp_path / "b"), resume="must"), begun=2), 3)


@pytest.mark.parametrize("done", [1, 3])
def test_killed(text, kind, whole, tmp_path, done):
    """After SIGKILL between chunks, only complete earlier checkpoints exist, and the step is repeated."""
    events = {"due": (1, LAST[kind], 2), "ends": ((4, LAST[kind], done), signal.SIGKILL)}
    process = context().Process(target=run, args=(text, kind, STEPS, by_time(tmp_path)), kwargs=events)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert names(tmp_path) == ["step=2.ckpt"]
    check_rest(whole, run(text, kind, ckpt=tmp_path / "step=2.ckpt", begun=2), 2)


@pytest.mark.parametrize("strategy", ["auto", "ring_dilated"])
def test_told_to_end(text, kind, whole, tmp_path, strategy):
    """After SIGTERM between chunks, the step is finished and saved."""
    ends = ((2, LAST[kind], 1), signal.SIGTERM)
    losses, status = run(text, kind, STEPS, ShardedCheckpoint(str(tmp_path)), ends=ends, strategy=strategy)
    assert status == 128 + signal.SIGTERM and losses == pytest.approx(whole[0][:3], rel=1e-9)
    resumed = run(text, kind, STEPS, ShardedCheckpoint(str(tmp_path), resume="must"), begun=2, strategy=strategy)
    check_rest(whole, resumed, 3)


def test_due_between_micro_batches(text, kind, tmp_path):
    """A checkpoint that is due in the first of two micro-batches waits for the optimizer step, with either callback."""
    two = {"accumulate_grad_batches": 2}
    whole = run(text, kind, 3, **two)
    for saver in (by_time(tmp_path / "a"), ShardedCheckpoint(str(tmp_path / "b"), every_n_minutes=59, at_end=False)):
        run(text, kind, 3, saver, due=(1, LAST[kind], 2), **two)
    assert names(tmp_path / "a") == ["step=2.ckpt"]
    check_rest(whole, run(text, kind, 3, ckpt=tmp_path / "a" / "step=2.ckpt", begun=2, **two), 4)
    check_rest(whole, run(text, kind, 3, ShardedCheckpoint(str(tmp_path / "b"), resume="must"), begun=2, **two), 4)
