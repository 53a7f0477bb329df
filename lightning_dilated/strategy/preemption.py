"""How jobs end early: a signal to any rank ends a fit on all ranks before the same batch, and where a rank is lost, the
errors of the others name it.

Lightning 2.6 has every rank read a number from its GPU before each batch, so that hosts wait for their GPUs between steps;
its signal handlers broadcast that number, or save a checkpoint, whatever the rank is doing, which another rank may take for
a collective of a step; and a fit that a signal ended exits with status 0. Here a handler only records the signal, and hosts
exchange what they recorded before each batch: those of a region, where there are several; the next outer step tells the
others.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_dilated._compat.lightning import (
    SignalHooks,
    forget_launched_processes,
    is_accumulating,
    set_received_sigterm,
)
from lightning_dilated._compat.torch import default_store
from lightning_dilated.checkpoint.ranks import reason
from lightning_dilated.sequence.consensus import ControlGroup

if TYPE_CHECKING:
    from lightning_dilated.strategy.mesh import MeshSizes

_log = logging.getLogger(__name__)


class Preemption:
    """Whether some rank of the job was sent a signal to end; replaces Lightning's handling.

    Args:
        trainer: whose fits end; before it registers its signal handlers.
        timeout: for which a rank waits for the others before a batch.
        region: the ranks of this one's region, which alone meet before each batch; None: all ranks do.

    Attributes:
        is_region_signalled: whether some rank of the region recorded a signal, before the latest batch.
        all_meet: set where all regions know that one of them is; then all ranks meet before the next batch.
    """

    def __init__(self, trainer: Any, timeout: timedelta, region: dist.ProcessGroup | None = None) -> None:
        self._trainer, self._process = trainer, os.getpid()
        #: the signal that ended the fit, the same on all ranks; None until then
        self.signal: int | None = None
        #: whether it was SLURM's signal to requeue the job
        self.requeue = False
        #: whether a callback saves when the fit ends, and requeues the job; else Lightning's handler does
        self.saves = False
        self._recorded, self._requeue_requested, self._requeued = 0, False, False
        self._quiet = ControlGroup(dist.group.WORLD, timeout, "endings") if trainer.world_size > 1 else None
        self._region = None if region is None else ControlGroup(region, timeout, "endings in a region")
        self.is_region_signalled = self.all_meet = False
        self._second = OnSecondInterrupt(self._kill_at_once)
        self._hooks = SignalHooks(trainer)
        self._hooks.replace(self._check_and_advance, self._register_signal_handlers, self.record, self.record_requeue)

    @property
    def recorded(self) -> bool:
        """Whether this rank was sent a signal."""
        return bool(self._recorded)

    def close(self) -> None:
        """Give the Trainer its own functions back."""
        self._hooks.restore()
        self._second.close()
        self._quiet = self._region = None

    # -- signal handlers: they only record, as they may run anywhere ---------------------------------------------------
    def _register_signal_handlers(self) -> None:
        """Lightning's handlers, which it removes at the end; in a fit one for SIGINT too, unless the user has their own."""
        self._hooks.register()
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if usual and self._fitting and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self.interrupt)
            self._second.watch()

    def __getstate__(self) -> dict[str, Any]:
        """Without the channels to other ranks, which belong to this process."""
        return {**self.__dict__, "_quiet": None, "_region": None}

    def record(self, signum: int, frame: Any) -> None:
        """SIGTERM: pass it on to the processes that this one started, as Lightning's handler does.

        In a fit an optimizer step or a validation under way is finished, so that all ranks end after it.
        """
        if os.getpid() != self._process:  # a fork, such as a loader's worker
            return
        first, self._recorded = not self._recorded, self._recorded or signum
        if first and self._trainer.strategy.launcher is not None:
            self._trainer.strategy.launcher.kill(signum)
        if not self._fitting:
            set_received_sigterm(self._trainer)

    def interrupt(self, signum: int, frame: Any) -> None:
        """SIGINT: the first is recorded; the second ends the process at once.

        It is not passed on: a terminal sends it to all processes, which would take it for their second.
        """
        if os.getpid() == self._process:
            self._recorded = signum
            _log.warning("interrupted: all ranks end after this step; interrupt again to end at once")

    def record_requeue(self, signum: int, frame: Any) -> None:
        """SLURM's signal that time is nearly up; outside of a fit, Lightning's handler runs."""
        if os.getpid() != self._process:
            return
        if not self._fitting:
            self._hooks.requeue(signum, frame)
            return
        self._recorded, self._requeue_requested = self._recorded or signum, True

    def _kill_at_once(self) -> None:
        """Without waiting for anything, also for ranks that this process started, which may wait for it."""
        if self._trainer.strategy.launcher is not None:
            self._trainer.strategy.launcher.kill(signal.SIGKILL)
        os._exit(128 + signal.SIGINT)

    @property
    def _fitting(self) -> bool:
        return self._trainer.state.fn == TrainerFn.FITTING

    # -- between steps -----------------------------------------------------------------------------------------------
    def _check_and_advance(self, *args: Any) -> None:
        if self._region is None or self.all_meet or not self._fitting:
            self.end_if_signalled()
        elif self.signal is None:
            self.is_region_signalled = any(signum for signum, _ in self._gather(self._region))
        self._hooks.advance(*args)

    def end_if_signalled(self) -> None:
        """Before each batch of training, before a validation, and at the end; outside of fits nothing.

        Gradients that wait for further batches would be lost: all ranks go on until the optimizer's step.

        Raises:
            SIGTERMException: on every rank, if one was sent a signal; its code is 128 and the signal's number.
            RuntimeError: where the others do not come.
        """
        if not self._fitting or self.signal is not None:
            return
        recorded = self._gather(self._quiet)
        sent = {rank: signum for rank, (signum, _) in enumerate(recorded) if signum}
        if not sent or is_accumulating(self._trainer):
            return
        requeue = [signum for signum, requested in recorded if requested]
        if requeue and not self.saves:
            self._save_by_lightning(requeue[0])
            return
        self.requeue, self.signal = bool(requeue), requeue[0] if requeue else min(sent.values())
        name, step = signal.Signals(self.signal).name, self._trainer.global_step
        _log.warning("ranks %s were told to end (%s): all do, after step %d", sorted(sent), name, step)
        set_received_sigterm(self._trainer)
        # processes that this one started end with a status other than 0; their observer would kill this one, which may still
        # have to wait for a logger or for SLURM
        forget_launched_processes(self._trainer.strategy.launcher)
        raise SIGTERMException(128 + self.signal)

    def _gather(self, ranks: ControlGroup | None) -> list[tuple[int, bool]]:
        """What each of the ranks recorded: (signal or 0, whether it was SLURM's to requeue)."""
        if ranks is None:
            return [(self._recorded, self._requeue_requested)]
        try:
            recorded = ranks.gather(torch.tensor([self._recorded, int(self._requeue_requested)], device="cpu"))
        except RuntimeError as error:
            rank = dist.get_rank()
            others = [r for r in dist.get_process_group_ranks(ranks.group) if r != rank]
            raise RuntimeError(
                f"rank {rank} of the job waited in vain for the others, ranks {others} of the job, before a batch. One of "
                "them died, raised, or had fewer batches."
            ) from error
        return [(int(x[0]), bool(x[1])) for x in recorded]

    def _save_by_lightning(self, signum: int) -> None:
        """Lightning's own requeue, once and by all ranks at the same batch: it saves `hpc_ckpt_1.ckpt`, and training goes on
        until SLURM ends the job."""
        self._recorded, self._requeue_requested = 0, False
        if not self._requeued:
            self._requeued = True
            self._hooks.requeue(signum, None)


#: in place of a signal's number: ends the thread
_END = 0


class OnSecondInterrupt:
    """Calls `act` at the second SIGINT, in a thread: while the main thread waits in a collective, no handler runs.

    The interpreter writes the numbers of signals into a pipe as they come.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act, self._pipe = act, (-1, -1)
        self._thread: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process."""
        return {"_act": self._act, "_pipe": (-1, -1), "_thread": None}

    def watch(self) -> None:
        """Begin, in the main thread; without effect where another reader has the pipe, as asyncio does."""
        if os.name != "posix" or self._pipe[0] >= 0:
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if before >= 0:
            signal.set_wakeup_fd(before)
            os.close(read)
            os.close(write)
            return
        self._pipe = read, write
        _watched.add(write)
        self._thread = threading.Thread(target=self._count, args=(read,), name="interrupts", daemon=True)
        self._thread.start()

    def _count(self, read: int) -> None:
        seen = 0
        while _END not in (signals := os.read(read, 64)):
            seen += signals.count(signal.SIGINT)
            if seen > 1:
                self._act()

    def close(self) -> None:
        """End the thread."""
        (read, write), self._pipe = self._pipe, (-1, -1)
        if write < 0 or self._thread is None:
            return
        _watched.discard(write)
        signal.set_wakeup_fd(-1)
        os.set_blocking(write, True)
        os.write(write, bytes([_END]))  # a fork, such as a loader's worker, may hold the pipe open
        self._thread.join()
        os.close(read)
        os.close(write)


#: pipes into which this process writes its signals
_watched: set[int] = set()


def _forget_in_fork() -> None:
    if _watched:  # or a fork's signals would count as ours
        _watched.clear()
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_fork)


class EndsOnSignal:
    """A mixin for a strategy, before Lightning's: also ends a fit before a validation and at its end."""

    _preemption: Preemption | None = None

    @property
    def preemption(self) -> Preemption | None:
        """What ends the fits of this strategy's Trainer; None before it runs."""
        return self._preemption

    def on_validation_start(self) -> None:
        """For a signal that came in the batch before it."""
        if self._preemption is not None:
            self._preemption.end_if_signalled()
        super().on_validation_start()

    def on_train_end(self) -> None:
        """For a signal that came in the last batch; after callbacks have saved."""
        super().on_train_end()
        if self._preemption is not None:
            self._preemption.end_if_signalled()

    def on_exception(self, exception: BaseException) -> None:
        """A validation, test or prediction that SIGTERM ends exits with that status, too."""
        if isinstance(exception, SIGTERMException) and exception.code is None:
            exception.code = 128 + signal.SIGTERM
        super().on_exception(exception)

    def teardown(self) -> None:
        """Lightning's; restores the Trainer's signal handling."""
        if self._preemption is not None:
            self._preemption.close()
            self._preemption = None
        super().teardown()


def requeue_job() -> None:
    """Requeue this SLURM job (of an array: this task); one rank calls.

    Raises:
        RuntimeError: where there is no job, or SLURM refuses.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if not re.fullmatch(r"\d+(_\d+)?", job):
        raise RuntimeError(f"the job cannot be put back in SLURM's queue: its number reads {job!r}")
    try:
        status: Any = subprocess.call(["scontrol", "requeue", job])
    except OSError as error:
        status = error
    if status != 0:
        raise RuntimeError(f"`scontrol requeue {job}` failed: {status}")


# -- workers of loaders ------------------------------------------------------------------------------------------------
class IgnoresSignals:
    """A loader's `worker_init_fn` that first makes the worker ignore signals, but for SIGTERM of its parent process.

    Schedulers and terminals signal whole groups of processes. A worker that ended by such a signal would fail the fit in the
    batch that was to be finished. A program that a worker starts inherits the blocked SIGTERM: end it with `Popen.kill`.
    """

    def __init__(self, inner: Callable[[int], Any] | None) -> None:
        self.inner = inner

    def __call__(self, worker: int) -> None:
        for name in ("SIGINT", "SIGUSR1", "SIGUSR2"):
            if hasattr(signal, name):  # a function, as programs that the worker starts would inherit SIG_IGN
                signal.signal(getattr(signal, name), _nothing)
        if hasattr(signal, "sigwaitinfo"):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_end_by_parent, name="signals", daemon=True).start()
        if self.inner is not None:
            self.inner(worker)


def _end_by_parent() -> None:
    while True:
        with contextlib.suppress(InterruptedError):
            if signal.sigwaitinfo({signal.SIGTERM}).si_pid == os.getppid():
                os._exit(0)  # as torch's workers do


def _nothing(*args: Any) -> None:
    """Handles signals that are meant for another process."""


# -- lost ranks --------------------------------------------------------------------------------------------------------
#: seconds to wait for the reasons of other ranks, whose connections break at about the same time
PATIENCE = 5.0
#: the same, once this rank got a signal to end
ENDING = 1.0
#: numbers of the runs of this process, which are the same on all ranks
_runs = itertools.count()


class ReportsLostRanks:
    """A mixin for a strategy, before Lightning's: after a collective failed, the error says which ranks ended and why.

    gloo says "Connection reset by peer", and names only a port. So every rank that ends with an error leaves its reason in
    the job's store, and a rank whose connection broke reads what the others left.
    """

    _run = -1
    sizes: MeshSizes

    def _count_run(self) -> None:
        """As a run begins, on every rank: reasons of an earlier run, after which a script went on, have another number."""
        self._run = next(_runs)

    def on_exception(self, exception: BaseException) -> None:
        """Lightning's; leaves this rank's reason, and adds to the message of a broken connection which rank is lost."""
        super().on_exception(exception)  # type: ignore[misc]
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        broken = connection_broke(exception)
        try:
            reasons = dist.PrefixStore(f"lightning-dilated/reasons/{self._run}", default_store())
            reasons.set(str(dist.get_rank()), "" if broken else reason(exception))
            size = self.sizes.region_size
            of_rank = reasons, dist.get_rank(), dist.get_world_size(), size
            words = report_lost_ranks(*of_rank, is_ending=self._is_ending) if broken else ""
        except RuntimeError:
            words = "Rank 0 of the job, or the node that serves the job's store, died or ended: the store is gone."
        if broken:
            exception.args = (f"{words}\n{exception}", *exception.args[1:])

    def _is_ending(self) -> bool:
        """Whether this rank was sent a signal to end, as torchrun's agents do once a rank has died."""
        preemption = getattr(self, "_preemption", None)
        return preemption is not None and preemption.recorded


def connection_broke(error: BaseException | None) -> bool:
    """Whether an error, or the one behind it, is that of a collective that lost another rank."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error)):
            return True
        seen.add(id(error))
        error = error.__cause__
    return False


def report_lost_ranks(
    reasons: Any,
    rank: int,
    world: int,
    region_size: int | None = None,
    patience: float = PATIENCE,
    is_ending: Callable[[], bool] = lambda: False,
) -> str:
    """Which ranks raised and what, and which gave no sign within `patience` seconds, in one line.

    Args:
        reasons: a store in which each rank that ended left its reason under its number, "" for a broken connection.
        rank: of this process, of `world` ranks of the job.
        region_size: ranks of a region; None: there is one.
        patience: seconds to wait for the other ranks.
        is_ending: whether this rank got a signal to end, and waits for `ENDING` seconds only: a launcher that knows of the
            loss waits for it, to start the ranks again.

    Raises:
        RuntimeError: where the store is gone.
    """
    silent, begin = [x for x in range(world) if x != rank], time.monotonic()
    ended: list[int] = []
    end = begin + patience
    while silent and time.monotonic() < end:
        ended += [x for x in silent if reasons.check([str(x)])]
        silent = [x for x in silent if x not in ended]
        if is_ending():
            end = min(end, begin + ENDING)
        time.sleep(0.1 if silent else 0)
    waited = min(patience, time.monotonic() - begin)
    raised = {x: words for x in sorted(ended) if (words := reasons.get(str(x)).decode())}
    sentences = [f"Rank {x} of the job raised {words}." for x, words in raised.items()]
    if silent:
        sentences.append(
            f"Ranks {silent} of the job gave no sign within {waited:.2g} seconds after it: they died (look at their output, "
            "and whether the system ended them for memory), or hang."
        )
    sentences += lost_regions([*raised, *silent], world, region_size or world)
    others = [x for x in range(world) if x != rank]
    if not sentences:
        sentences.append(f"Ranks {others} of the job lost a connection, too: look at the network between their nodes.")
    return f"Rank {rank} of the job lost the connection to another rank. {' '.join(sentences)}"


def lost_regions(lost: list[int], world: int, region_size: int) -> list[str]:
    """A sentence on each region with lost ranks, where there are several regions."""
    sentences = []
    for region, first in enumerate(range(0, world, region_size) if region_size < world else ()):
        ranks = range(first, first + region_size)
        left = [x for x in ranks if x not in lost]
        if len(left) < region_size:
            which = "all" if not left else f"{region_size - len(left)} of its {region_size}"
            sentences.append(f"Region {region} (ranks {first} to {ranks[-1]}) has lost {which} ranks.")
    return sentences
