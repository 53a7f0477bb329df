"""If one rank receives SIGTERM, all ranks end after the same batch."""

import os
import signal
import threading
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lightning_dilated.strategy import preemption

from .runs import Run, launched, make
from .test_failures import losses, start

pytestmark = pytest.mark.full

#: validates after every second batch
RUN, CHECKED = Run(steps=6), {"val_check_interval": 2, "limit_val_batches": 2}


class SendsSigterm(pl.Callback):
    """Sends SIGTERM on the ranks `who`: at begin, backward or validation after two steps, or at the last backward."""

    def __init__(self, who, at):
        self.who, self.at, self.validated = who, at, 0

    def _send(self, trainer, at):
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
            self._send(trainer, "validation")

    def on_train_batch_start(self, trainer, *unused):
        self._send(trainer, "begin")

    def on_after_backward(self, trainer, *unused):
        self._send(trainer, "backward")


def ended(rank, group, who, at, options):
    """Return (error of a fit, steps, validation batches, broadcasts, whether the signal handler is restored)."""
    broadcasts, real, sender = [], torch.distributed.broadcast, SendsSigterm(who, at)
    built, model, data, _ = make(RUN, launched(rank), callbacks=[sender], **options)
    usual, why = signal.getsignal(signal.SIGTERM), ""
    torch.distributed.broadcast = lambda *a, **k: (broadcasts.append(a), real(*a, **k))[1]
    try:
        built.fit(model, data)
    except BaseException as error:
        why = type(error).__name__
    finally:
        torch.distributed.broadcast = real
    return why, built.global_step, sender.validated, len(broadcasts), signal.getsignal(signal.SIGTERM) is usual


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
    """The fit itself is complete, but nothing that would follow may begin."""
    assert pools(2).run(2, ended, [1], "last", {"limit_val_batches": 0}) == [("SIGTERMException", 6, 0, 0, True)] * 2


def test_one_rank(pools):
    assert pools(1).run(1, ended, [0], "backward", {"limit_val_batches": 0}) == [("SIGTERMException", 3, 0, 0, True)]


def test_nobody_is_told(pools):
    """Without a signal all batches run, and no tensor on a device is broadcast before a batch."""
    assert pools(2).run(2, ended, [], "begin", {"limit_val_batches": 0}) == [("", 6, 0, 0, True)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_goes_on_after_it(tmp_path: Path, who):
    """A job that ended by a signal continues when it is started again."""
    (alone := tmp_path / "alone").mkdir()
    status, text = start(alone, "nothing", 0, 1)
    assert status == 0
    want = losses(text)[0]
    (job := tmp_path / "job").mkdir()
    _, text = start(job, "term", who)
    assert not losses(text) and (job / "ckpt" / "last.ckpt").exists(), text[-3000:]
    status, text = start(job, "term", who)
    assert status == 0 and losses(text) == pytest.approx([want] * 2, rel=1e-5), text[-3000:]


# -- interrupted twice -------------------------------------------------------------------------------------------------
def test_the_second_interrupt_is_seen_while_the_main_thread_waits():
    """The second interrupt acts although the main thread waits. Interrupts in a forked process do not count."""
    acted, handler = threading.Event(), signal.signal(signal.SIGINT, lambda *args: None)
    second = preemption.OnSecondInterrupt(acted.set)
    try:
        second.watch()
        if (fork := os.fork()) == 0:
            os.kill(os.getpid(), signal.SIGINT)
            os._exit(0)
        os.waitpid(fork, 0)
        os.kill(os.getpid(), signal.SIGINT)
        assert not acted.wait(0.1)
        os.kill(os.getpid(), signal.SIGINT)
        assert acted.wait(10)
    finally:
        second.close()
        signal.signal(signal.SIGINT, handler)
    assert signal.set_wakeup_fd(-1) == -1


# -- workers of loaders ------------------------------------------------------------------------------------------------
class Slowly(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        time.sleep(0.1)
        return index


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_workers_leave_signals_to_the_process_that_started_them(signum):
    init = []
    options = {"num_workers": 1, "worker_init_fn": preemption.WorkerWithoutSignals(init.append)}
    loader = iter(torch.utils.data.DataLoader(Slowly(), **options))
    assert int(next(loader)) == 0
    (worker,) = loader._workers
    # sent by another process, like a scheduler's signal
    assert os.system(f"kill -{int(signum)} {worker.pid}") == 0
    assert [int(x) for x in loader] == [1, 2, 3]
    worker.join(10)
    assert worker.exitcode == 0


def test_a_worker_ends_when_its_parent_says_so():
    loader = iter(
        torch.utils.data.DataLoader(Slowly(), num_workers=1, worker_init_fn=preemption.WorkerWithoutSignals(None))
    )
    assert int(next(loader)) == 0
    (worker,) = loader._workers
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0


# -- exit status -------------------------------------------------------------------------------------------------------
class AtValidation(pl.Callback):
    def on_validation_batch_start(self, *args):
        os.kill(os.getpid(), signal.SIGTERM)


def validated(rank, group):
    built, model, data, _ = make(RUN, launched(rank), callbacks=[AtValidation()])
    try:
        built.validate(model, data, verbose=False)
    except SystemExit as end:
        return end.code
    return 0


def test_a_validation_of_its_own_exits_with_the_status_too(pools):
    assert pools(1).run(1, validated) == [143]
