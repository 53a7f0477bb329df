"""Early ends of jobs: a signal to any rank ends a fit on all ranks before the same batch; errors name lost ranks.

In Lightning 2.6 every rank reads a number from its GPU before each batch, so hosts wait for their GPUs between steps.
Lightning's signal handlers broadcast that number or save a checkpoint at any moment, and another rank may match this
call with a collective of a step. After the signal, Lightning exits with status 0. The handlers here only record the
signal. Ranks exchange their records before each batch; a region informs other regions in the next outer step.
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

from lightning_dilated._compat import lightning as compat
from lightning_dilated._compat.torch import default_store
from lightning_dilated.checkpoint.ranks import reason
from lightning_dilated.sequence.consensus import ControlGroup

if TYPE_CHECKING:
    from lightning_dilated.strategy.mesh import MeshSizes

_log = logging.getLogger(__name__)


class Preemption:
    """Ends a Trainer's fits after a signal to any rank of the job; replaces Lightning's signal handling.

    Args:
        trainer: a Trainer that has not registered its signal handlers yet.
        timeout: maximum time that a rank waits for the others before a batch.
        region: the ranks that exchange records before each batch: this rank's region; None: all ranks.

    Attributes:
        is_region_signalled: whether a rank of the region had recorded a signal before the latest batch.
        all_meet: True after an outer step has reported a signal; then all ranks exchange records before each batch.
    """

    def __init__(self, trainer: Any, timeout: timedelta, region: dist.ProcessGroup | None = None) -> None:
        self._trainer, self._process = trainer, os.getpid()
        #: the signal that ended the fit, the same on all ranks; None until then
        self.signal: int | None = None
        #: whether that signal was SLURM's request to requeue the job
        self.requeue = False
        #: whether a callback saves and requeues the job when the fit ends; if not, Lightning's handler does both
        self.saves = False
        self._recorded, self._requeue_requested, self._requeued = 0, False, False
        self._quiet = ControlGroup(dist.group.WORLD, timeout, "endings") if trainer.world_size > 1 else None
        self._region = None if region is None else ControlGroup(region, timeout, "endings in a region")
        self.is_region_signalled = self.all_meet = False
        self._second = OnSecondInterrupt(self._kill_at_once)
        self._hooks = compat.SignalHooks(trainer)
        self._hooks.replace(self._check_and_advance, self._register_signal_handlers, self.record, self.record_requeue)

    @property
    def recorded(self) -> bool:
        """True if this rank received a signal."""
        return bool(self._recorded)

    def close(self) -> None:
        """Restore the Trainer's functions."""
        self._hooks.restore()
        self._second.close()
        self._quiet = self._region = None

    # -- signal handlers; they may run at any moment, so they only record signals --------------------------------------
    def _register_signal_handlers(self) -> None:
        """Register Lightning's handlers, and in a fit a handler for SIGINT unless the user has one."""
        self._hooks.register()
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if usual and self._fitting and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self.interrupt)
            self._second.watch()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the channels to other ranks: they belong to this process."""
        return {**self.__dict__, "_quiet": None, "_region": None}

    def record(self, signum: int, frame: Any) -> None:
        """Record SIGTERM, and send it to the processes that this process started, as Lightning's handler does.

        A fit finishes the current optimizer step or validation, and then ends on all ranks.
        """
        if os.getpid() != self._process:  # this process is a fork, such as a loader's worker
            return
        first, self._recorded = not self._recorded, self._recorded or signum
        if first and self._trainer.strategy.launcher is not None:
            self._trainer.strategy.launcher.kill(signum)
        if not self._fitting:
            compat.set_received_sigterm(self._trainer)

    def interrupt(self, signum: int, frame: Any) -> None:
        """Record a first SIGINT; `OnSecondInterrupt` ends the process at the second.

        This sends no SIGINT to other processes: a terminal does that, and they would count two signals.
        """
        if os.getpid() == self._process:
            self._recorded = signum
            _log.warning("interrupted: all ranks end after this step; interrupt again to end at once")

    def record_requeue(self, signum: int, frame: Any) -> None:
        """Record SLURM's signal that the time limit is near; outside of a fit, run Lightning's handler."""
        if os.getpid() != self._process:
            return
        if not self._fitting:
            self._hooks.requeue(signum, frame)
            return
        self._recorded, self._requeue_requested = self._recorded or signum, True

    def _kill_at_once(self) -> None:
        """Kill this process and the ranks that it started, without waiting."""
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
        """End a fit if a rank received a signal; called before each batch, before a validation and at the end of a fit.

        While gradients accumulate, all ranks continue to the optimizer's step, so that no gradient is lost.

        Raises:
            SIGTERMException: on every rank, if a rank received a signal; its code is 128 plus the signal's number.
            RuntimeError: if the other ranks do not call this within the timeout.
        """
        if not self._fitting or self.signal is not None:
            return
        recorded = self._gather(self._quiet)
        sent = {rank: signum for rank, (signum, _) in enumerate(recorded) if signum}
        if not sent or compat.is_accumulating(self._trainer):
            return
        requeue = [signum for signum, requested in recorded if requested]
        if requeue and not self.saves:
            self._save_by_lightning(requeue[0])
            return
        self.requeue, self.signal = bool(requeue), requeue[0] if requeue else min(sent.values())
        name, step = signal.Signals(self.signal).name, self._trainer.global_step
        _log.warning("ranks %s received a signal to end (%s): all ranks end after step %d", sorted(sent), name, step)
        compat.set_received_sigterm(self._trainer)
        # The processes that this one started end with a nonzero status. Lightning's observer would then kill this
        # process, which may still wait for a logger or for SLURM.
        compat.forget_launched_processes(self._trainer.strategy.launcher)
        raise SIGTERMException(128 + self.signal)

    def _gather(self, ranks: ControlGroup | None) -> list[tuple[int, bool]]:
        """Return the records of `ranks`: (signal or 0, whether it was SLURM's requeue signal)."""
        if ranks is None:
            return [(self._recorded, self._requeue_requested)]
        try:
            recorded = ranks.gather(torch.tensor([self._recorded, int(self._requeue_requested)], device="cpu"))
        except RuntimeError as error:
            rank = dist.get_rank()
            peers = [r for r in dist.get_process_group_ranks(ranks.group) if r != rank]
            raise RuntimeError(
                f"rank {rank} of the job waited in vain for the others, ranks {peers} of the job, before a batch. One of "
                "them died, raised, or had fewer batches."
            ) from error
        return [(int(x[0]), bool(x[1])) for x in recorded]

    def _save_by_lightning(self, signum: int) -> None:
        """Call Lightning's requeue handler, which saves, once on all ranks at the same batch; the fit continues."""
        self._recorded, self._requeue_requested = 0, False
        if not self._requeued:
            self._requeued = True
            self._hooks.requeue(signum, None)


#: the byte that ends the thread; it is written to the pipe in place of a signal's number
_END = 0


class OnSecondInterrupt:
    """A thread that calls `act` at the second SIGINT, because the main thread runs no handler during a collective.

    The interpreter writes the number of each signal into a pipe, which the thread reads.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act, self._pipe = act, (-1, -1)
        self._thread: threading.Thread | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the pipe and the thread, which belong to this process."""
        return {"_act": self._act, "_pipe": (-1, -1), "_thread": None}

    def watch(self) -> None:
        """Start the thread, from the main thread; do nothing if another pipe, such as asyncio's, receives signals."""
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
        interrupts = 0
        while _END not in (signals := os.read(read, 64)):
            interrupts += signals.count(signal.SIGINT)
            if interrupts > 1:
                self._act()

    def close(self) -> None:
        """End the thread."""
        (read, write), self._pipe = self._pipe, (-1, -1)
        if write < 0 or self._thread is None:
            return
        _watched.discard(write)
        signal.set_wakeup_fd(-1)
        os.set_blocking(write, True)
        os.write(write, bytes([_END]))  # closing the pipe would not end the read, because a fork may keep it open
        self._thread.join()
        os.close(read)
        os.close(write)


#: pipes that receive this process's signals
_watched: set[int] = set()


def _forget_in_fork() -> None:
    if _watched:  # otherwise signals to the fork would count as signals to its parent
        _watched.clear()
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_fork)


class PreemptionMixin:
    """A mixin, placed before Lightning's class, that also checks for signals before a validation and after a fit."""

    _preemption: Preemption | None = None

    @property
    def preemption(self) -> Preemption | None:
        """The `Preemption` of this strategy's Trainer; None before the Trainer runs."""
        return self._preemption

    def on_validation_start(self) -> None:
        """End the fit before the validation if a signal arrived during the last batch."""
        if self._preemption is not None:
            self._preemption.end_if_signalled()
        super().on_validation_start()

    def on_train_end(self) -> None:
        """End the fit if a signal arrived during the last batch, after callbacks have saved."""
        super().on_train_end()
        if self._preemption is not None:
            self._preemption.end_if_signalled()

    def on_exception(self, exception: BaseException) -> None:
        """Set the exit status to 128 + SIGTERM after a SIGTERM, even if it ended a validation, test or prediction."""
        if isinstance(exception, SIGTERMException) and exception.code is None:
            exception.code = 128 + signal.SIGTERM
        super().on_exception(exception)

    def teardown(self) -> None:
        """Restore the Trainer's signal handling."""
        if self._preemption is not None:
            self._preemption.close()
            self._preemption = None
        super().teardown()


def requeue_job() -> None:
    """Requeue this SLURM job, or this task of a job array. Only one rank may call this.

    Raises:
        RuntimeError: if this process is not in a SLURM job, or `scontrol requeue` fails.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if not re.fullmatch(r"\d+(_\d+)?", job):
        raise RuntimeError(f"the job cannot be put back in SLURM's queue: its number is {job!r}")
    try:
        status: Any = subprocess.call(["scontrol", "requeue", job])
    except OSError as error:
        status = error
    if status != 0:
        raise RuntimeError(f"`scontrol requeue {job}` failed: {status}")


# -- workers of loaders ------------------------------------------------------------------------------------------------
class WorkerWithoutSignals:
    """A `worker_init_fn` that makes a worker ignore signals, except SIGTERM from its parent, and then calls `inner`.

    Schedulers and terminals signal whole groups of processes. If such a signal ended a worker, the fit would fail before its
    last batch is finished. A program that a worker starts inherits the blocked SIGTERM: end it with `Popen.kill`.
    """

    def __init__(self, inner: Callable[[int], Any] | None) -> None:
        self.inner = inner

    def __call__(self, worker: int) -> None:
        for name in ("SIGINT", "SIGUSR1", "SIGUSR2"):
            if hasattr(signal, name):  # not SIG_IGN, which programs that the worker starts would inherit
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
    """Ignore a signal."""


# -- lost ranks --------------------------------------------------------------------------------------------------------
#: seconds to wait for the other ranks' reasons; connections of all ranks break at about the same time
PATIENCE = 5.0
#: seconds to wait for the other ranks' reasons after this rank received a signal to end
ENDING = 1.0
#: the counter that numbers this process's runs; equal on all ranks
_runs = itertools.count()


class RankLossMixin:
    """A strategy mixin, placed before Lightning's class, that adds lost ranks and reasons to errors of collectives.

    gloo reports "Connection reset by peer" and names only a port. So every rank that ends with an error writes its
    reason into the job's store, and a rank with a broken connection reads the reasons of the others.
    """

    _run = -1
    sizes: MeshSizes

    def _count_run(self) -> None:
        """Give each run a number, equal on all ranks, because the reasons of a failed run stay in the store."""
        self._run = next(_runs)

    def on_exception(self, exception: BaseException) -> None:
        """Store this rank's reason; add the lost ranks to the message of a broken connection."""
        super().on_exception(exception)  # type: ignore[misc]
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        broken = connection_broke(exception)
        try:
            reasons = dist.PrefixStore(f"lightning-dilated/reasons/{self._run}", default_store())
            reasons.set(str(dist.get_rank()), "" if broken else reason(exception))
            job = reasons, dist.get_rank(), dist.get_world_size(), self.sizes.region_size
            words = report_lost_ranks(*job, is_ending=self._is_ending) if broken else ""
        except RuntimeError:
            words = "Rank 0 of the job, or the node that serves the job's store, died or ended: the store is gone."
        if broken:
            exception.args = (f"{words}\n{exception}", *exception.args[1:])

    def _is_ending(self) -> bool:
        """Return True if this rank received a signal to end; torchrun's agents send one after a rank has died."""
        preemption = getattr(self, "_preemption", None)
        return preemption is not None and preemption.recorded


def connection_broke(error: BaseException | None) -> bool:
    """Return True if an error or one of its causes comes from a collective that lost another rank."""
    checked: set[int] = set()
    while error is not None and id(error) not in checked:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error)):
            return True
        checked.add(id(error))
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
    """Describe in one line the ranks that raised an error, and the ranks that gave no reason in `patience` seconds.

    Args:
        reasons: a store of {rank: reason} for the ranks that ended; the reason is "" for a broken connection.
        rank: this process among `world` ranks of the job.
        region_size: ranks of a region; None: one region.
        patience: seconds to wait for the other ranks.
        is_ending: returns True if this rank received a signal to end. Then wait only `ENDING` seconds, because the
            launcher waits for this rank before it restarts all ranks.

    Raises:
        RuntimeError: if the store cannot be reached.
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
    peers = [x for x in range(world) if x != rank]
    if not sentences:
        sentences.append(f"Ranks {peers} of the job lost a connection, too: look at the network between their nodes.")
    return f"Rank {rank} of the job lost the connection to another rank. {' '.join(sentences)}"


def lost_regions(lost: list[int], world: int, region_size: int) -> list[str]:
    """Return a sentence for each region with lost ranks; an empty list if the job has a single region."""
    sentences = []
    for region, first in enumerate(range(0, world, region_size) if region_size < world else ()):
        ranks = range(first, first + region_size)
        alive = [x for x in ranks if x not in lost]
        if len(alive) < region_size:
            which = "all" if not alive else f"{region_size - len(alive)} of its {region_size}"
            sentences.append(f"Region {region} (ranks {first} to {ranks[-1]}) has lost {which} ranks.")
    return sentences
