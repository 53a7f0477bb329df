"""A signal to end, to any rank, ends a fit on all ranks before the same batch: SIGTERM, SIGINT and SLURM's requeue signal.

Lightning 2.6 has every rank read a number from its GPU before each batch, so that hosts wait for their GPUs between steps;
its signal handlers broadcast that number, or save a checkpoint, whatever the rank is doing, which another rank may take for
a collective of a step; and a fit that a signal ended exits with status 0. Here a handler notes the signal only, and hosts
exchange what they noted before each batch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_dilated.sequence.consensus import ControlGroup

_log = logging.getLogger(__name__)


class Ending:
    """Whether some rank of the job was sent a signal to end; takes the place of Lightning's own way.

    Args:
        trainer: whose fits end; before it registers its signal handlers.
        timeout: for which a rank waits for the others before a batch.
    """

    def __init__(self, trainer: Any, timeout: timedelta) -> None:
        self._trainer, self._process = trainer, os.getpid()
        #: the signal that ended the fit, the same on all ranks; None until then
        self.signal: int | None = None
        #: whether it asked to put the job back in SLURM's queue
        self.requeue = False
        #: whether a callback saves when the fit ends, and puts the job back in the queue; else Lightning's handler does
        self.saves = False
        self._noted, self._asked_to_requeue, self._requeued = 0, False, False
        self._quiet = ControlGroup(dist.group.WORLD, timeout, "endings") if trainer.world_size > 1 else None
        self._second = SecondInterrupt(self._kill_at_once)
        self._replaced: list[tuple[Any, str]] = []
        loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
        self._advance, self._register = type(loop).advance.__get__(loop), type(connector).register_signal_handlers
        self._requeue_by_lightning = type(connector)._slurm_sigusr_handler_fn.__get__(connector)
        self._replace(loop, "advance", self._ask_and_advance)
        self._replace(loop, "_broadcast_sigterm_tensor", _nothing)
        self._replace(connector, "register_signal_handlers", self._register_signal_handlers)
        self._replace(connector, "_sigterm_notifier_fn", self.note)
        self._replace(connector, "_slurm_sigusr_handler_fn", self.note_requeue)

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        setattr(owner, name, function)
        self._replaced.append((owner, name))

    def close(self) -> None:
        """Give the Trainer its own functions back."""
        for owner, name in self._replaced:
            vars(owner).pop(name, None)
        self._replaced.clear()
        self._second.close()

    # -- signal handlers: they only note, as they may run anywhere ---------------------------------------------------
    def _register_signal_handlers(self) -> None:
        """Lightning's handlers, which it removes at the end; in a fit SIGINT's too, unless the user has their own."""
        connector = self._trainer._signal_connector
        self._register(connector)
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if usual and self._fitting and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self.interrupt)
            self._second.watch()

    def __getstate__(self) -> dict[str, Any]:
        """Without the connection, which belongs to this process: a copy elsewhere asks nobody."""
        return {**self.__dict__, "_quiet": None}

    def note(self, signum: int, frame: Any) -> None:
        """SIGTERM: passes it on to the processes that this one started, as Lightning's handler does.

        In a fit what is under way, an optimizer step or a validation, is finished, so that all ranks end after it.
        """
        if os.getpid() != self._process:  # a fork, such as a loader's worker
            return
        first, self._noted = not self._noted, self._noted or signum
        if first and self._trainer.strategy.launcher is not None:
            self._trainer.strategy.launcher.kill(signum)
        if not self._fitting:
            self._trainer._signal_connector.received_sigterm = True

    def interrupt(self, signum: int, frame: Any) -> None:
        """SIGINT: the first is noted; the second ends the process at once.

        It is not passed on: a terminal sends it to all processes, which would take it for their second.
        """
        if os.getpid() == self._process:
            self._noted = signum
            _log.warning("interrupted: all ranks end after this step; interrupt again to end at once")

    def note_requeue(self, signum: int, frame: Any) -> None:
        """SLURM's signal that time is nearly up; outside of a fit Lightning's handler does what it does."""
        if os.getpid() != self._process:
            return
        if not self._fitting:
            self._requeue_by_lightning(signum, frame)
            return
        self._noted, self._asked_to_requeue = self._noted or signum, True

    def _kill_at_once(self) -> None:
        """Not waiting for anything: ranks that this process started would wait for it."""
        if self._trainer.strategy.launcher is not None:
            self._trainer.strategy.launcher.kill(signal.SIGKILL)
        os._exit(128 + signal.SIGINT)

    @property
    def _fitting(self) -> bool:
        return self._trainer.state.fn == TrainerFn.FITTING

    # -- between steps -----------------------------------------------------------------------------------------------
    def _ask_and_advance(self, *args: Any) -> None:
        self.ask()
        self._advance(*args)

    def ask(self) -> None:
        """Before each batch of training, before a validation, and at the end; outside of fits nothing.

        Gradients that wait for further batches would be lost: all ranks go on until the optimizer's step.

        Raises:
            SIGTERMException: on every rank, if one was sent a signal; its code is 128 and the signal's number.
            RuntimeError: where the others do not come.
        """
        if not self._fitting or self.signal is not None:
            return
        noted = self._gather()
        sent = {rank: signum for rank, (signum, _) in enumerate(noted) if signum}
        if not sent or self._trainer.fit_loop.epoch_loop._should_accumulate():
            return
        requeue = [signum for signum, asked in noted if asked]
        if requeue and not self.saves:
            self._save_by_lightning(requeue[0])
            return
        self.requeue, self.signal = bool(requeue), requeue[0] if requeue else min(sent.values())
        name, step = signal.Signals(self.signal).name, self._trainer.global_step
        _log.warning("ranks %s were told to end (%s): all do, after step %d", sorted(sent), name, step)
        self._trainer._signal_connector.received_sigterm = True
        self._expect_ends()
        raise SIGTERMException(128 + self.signal)

    def _gather(self) -> list[tuple[int, bool]]:
        """What each rank noted: (signal or 0, whether it asks to requeue)."""
        if self._quiet is None:
            return [(self._noted, self._asked_to_requeue)]
        try:
            told = self._quiet.gather(torch.tensor([self._noted, int(self._asked_to_requeue)], device="cpu"))
        except RuntimeError as error:
            rank = dist.get_rank()
            others = [r for r in range(dist.get_world_size()) if r != rank]
            raise RuntimeError(
                f"rank {rank} of the job waited in vain for the others, ranks {others} of the job, before a batch. One of "
                "them died, raised, or had fewer batches."
            ) from error
        return [(int(x[0]), bool(x[1])) for x in told]

    def _save_by_lightning(self, signum: int) -> None:
        """Lightning's own requeue, once and by all ranks at the same batch: it saves `hpc_ckpt_1.ckpt`, and training goes on
        until SLURM ends the job."""
        self._noted, self._asked_to_requeue = 0, False
        if not self._requeued:
            self._requeued = True
            self._requeue_by_lightning(signum, None)

    def _expect_ends(self) -> None:
        """Ranks that this process started end with a status other than 0, which their observer must not take for a death.

        It would kill this process, which may still have to wait for a logger or for SLURM.
        """
        launcher = self._trainer.strategy.launcher
        if isinstance(launcher, _SubprocessScriptLauncher):
            started = list(launcher.procs)
            launcher.procs.clear()  # the observer's own list
            launcher.procs = started


class SecondInterrupt:
    """Calls `act` at the second SIGINT, in a thread: handlers run only when the main thread does not wait in a collective.

    The interpreter writes the numbers of signals into a pipe as they come.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act, self._pipe = act, (-1, -1)

    def watch(self) -> None:
        """Begin, in the main thread; of no effect where somebody else reads the signals, as asyncio does."""
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
        threading.Thread(target=self._count, args=(read,), name="interrupts", daemon=True).start()

    def _count(self, read: int) -> None:
        seen = 0
        while signals := os.read(read, 64):
            seen += signals.count(signal.SIGINT)
            if seen > 1:
                self._act()
        os.close(read)

    def close(self) -> None:
        """End it."""
        write, self._pipe = self._pipe[1], (-1, -1)
        if write >= 0:
            _watched.discard(write)
            signal.set_wakeup_fd(-1)
            os.close(write)


#: pipes into which this process writes its signals
_watched: set[int] = set()


def _forget_in_fork() -> None:
    if _watched:  # or a fork's signals would count as ours
        _watched.clear()
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_fork)


class EndsTogether:
    """To be inherited by a strategy, before Lightning's: asks where Lightning's loops do not."""

    _ending: Ending | None = None

    @property
    def ending(self) -> Ending | None:
        """What ends the fits of this strategy's Trainer; None before it runs."""
        return self._ending

    def on_validation_start(self) -> None:
        """Told in the batch before it."""
        if self._ending is not None:
            self._ending.ask()
        super().on_validation_start()

    def on_train_end(self) -> None:
        """Told in the last batch; after callbacks have saved."""
        super().on_train_end()
        if self._ending is not None:
            self._ending.ask()

    def on_exception(self, exception: BaseException) -> None:
        """A validation, test or prediction that SIGTERM ends, exits with its status, too."""
        if isinstance(exception, SIGTERMException) and exception.code is None:
            exception.code = 128 + signal.SIGTERM
        super().on_exception(exception)

    def teardown(self) -> None:
        """The Trainer gets its own functions back."""
        if self._ending is not None:
            self._ending.close()
            self._ending = None
        super().teardown()


def requeue_job() -> None:
    """Put this SLURM job (of an array: this task) back in the queue; of one rank.

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
class LeavesSignals:
    """A loader's `worker_init_fn`, and before it: the worker ends when the process that started it says so.

    Schedulers and terminals signal whole groups of processes. A worker that ended by that would fail the fit, in the batch
    that was to be finished. A program that a worker starts inherits the blocked SIGTERM: end it with `Popen.kill`.
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
    """Stands in for Lightning's broadcast before a batch, and handles signals that are another process's."""
