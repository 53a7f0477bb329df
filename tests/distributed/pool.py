"""A pool of worker processes, one per rank, that run named functions together. It starts once and serves many tests.

The test process sends (function, arguments) through pipes to the first R workers. Each worker calls function(rank,
group, *args) with the process group of these R ranks, and sends back the result or the error.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_dilated.sequence.consensus import _connections as control_connections
from lightning_dilated.sequence.group import _groups as sequence_groups

SIZES = (1, 2, 3, 4)
#: modules that the fork server imports once, before it forks workers
PRELOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "lightning",
    "lightning_dilated",
    "hypothesis",  # the modules with the workers' functions import it
    "pytest",
    "torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks",
]
#: once a rank has raised, seconds until a rank without an answer counts as hanging
GRACE = 15.0


@dataclass(frozen=True)
class Answer:
    """The result of a function on one rank: its value, or the exception's type name, message and traceback."""

    rank: int
    value: Any = None
    error: str | None = None
    message: str = ""
    trace: str = ""


class Hang(BaseException):
    """Some ranks did not answer. A BaseException, because hypothesis would try smaller cases, which also hang."""


class Failed(AssertionError):
    """Some ranks raised an exception."""


class Pool:
    """`size` gloo ranks in separate processes. A worker that raises stays alive; workers that hang are replaced.

    Args:
        size: the largest number of ranks in a call.
        timeout: seconds within which every rank must answer a call.
        method: "forkserver" forks workers from a process that has imported the package; "spawn" starts new
            interpreters, which read environment variables at import.
        environment: additional environment variables of all workers, including replacements.
        first: a function that a worker calls before anything else.
    """

    def __init__(
        self,
        size: int = max(SIZES),
        timeout: float = 60.0,
        method: str = "forkserver",
        environment: dict[str, str] | None = None,
        first: Callable[[], None] | None = None,
    ) -> None:
        self.size, self.timeout, self.method = size, timeout, method
        self.environment, self.first = environment or {}, first
        self._workers: list[tuple[mp.Process, Connection]] = []

    def run(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the values of function(rank, group, *args) on ranks 0..R-1.

        Raises:
            Failed: with the traceback of every rank that raised.
            Hang: with the ranks that did not answer.
        """
        return self.values(self.answers(ranks, function, *args), f"{function.__name__}{args}")

    def errors(self, error: type[Exception], ranks: int, function: Callable[..., Any], *args: Any) -> list[str]:
        """Return the message of each rank's `error`, which the function must raise on every rank."""
        answers = self.answers(ranks, function, *args)
        assert {a.error for a in answers} == {error.__name__}, answers
        return [a.message for a in answers]

    def values(self, answers: list[Answer], call: object) -> list[Any]:
        """Return the values of the answers. Raise Failed if any rank raised."""
        wrong = [a for a in answers if a.error]
        if wrong:
            if len(wrong) < len(answers):
                self.close()  # ranks may wait for each other's messages
            traces = "\n".join(f"--- rank {a.rank} of {len(answers)}:\n{a.trace}" for a in wrong)
            raise Failed(f"{call} failed on ranks {[a.rank for a in wrong]}\n{traces}")
        return [a.value for a in answers]

    def answers(
        self, ranks: int, function: Callable[..., Any], *args: Any, timeout: float | None = None
    ) -> list[Answer]:
        """Return the result or error of each rank."""
        self._start()
        name = (function.__module__, function.__qualname__)
        for _, pipe in self._workers[:ranks]:
            pipe.send_bytes(pickle.dumps((ranks, name, args)))
        received: dict[int, Answer] = {}
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:ranks])}
        end = time.monotonic() + (timeout or self.timeout)
        while pipes and (ready := wait(pipes, end - time.monotonic())):
            for pipe in ready:
                rank = pipes.pop(pipe)
                received[rank] = _read(pipe, rank)
                if received[rank].error:
                    end = min(end, time.monotonic() + GRACE)
        if pipes or any(a.error == "EOFError" for a in received.values()):
            self._give_up(f"{function.__name__}{args}", sorted(pipes.values()), received)
        return [received[rank] for rank in range(ranks)]

    def _give_up(self, call: str, silent: list[int], received: dict[int, Answer]) -> None:
        self.close()
        traces = [f"--- rank {a.rank} raised:\n{a.trace}" for a in received.values() if a.error]
        raise Hang("\n".join([f"{call}: ranks {silent} did not answer; the workers were ended.", *traces]))

    def _start(self) -> None:
        if self._workers:
            return
        context = mp.get_context(self.method)
        if self.method == "forkserver":
            context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"  # a file of this pool: other sessions could use the same port
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment.items():
                patch.setenv(name, value)  # a spawned interpreter has the variable before `_work` runs
            environment = dict(os.environ)  # a forked worker has the variables from the start of the fork server
            for rank in range(self.size):
                here, there = context.Pipe()
                args = rank, self.size, str(store), there, environment, self.first
                process = context.Process(target=_work, args=args, daemon=True, name=f"pool {rank}")
                process.start()
                there.close()
                self._workers.append((process, here))

    def close(self) -> None:
        """Terminate the workers. The next call starts new ones."""
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers.clear()


def _read(pipe: Connection, rank: int) -> Answer:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:  # the process has already ended
        return Answer(rank, error="EOFError", message="the worker died", trace="the worker died")


def _work(
    rank: int, size: int, store: str, pipe: Connection, environment: dict[str, str], first: Callable[[], None] | None
) -> None:
    """Run a worker: create the process groups, then answer calls until the pipe is closed."""
    gc.freeze()  # exclude imported objects from garbage collection, which would take 0.3 s
    os.environ.clear()
    os.environ.update(environment)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if first is not None:
        first()
    minute = timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=minute)
    groups = {n: dist.new_group(list(range(n)), timeout=minute) for n in SIZES if n <= size}
    initial = set(_groups())
    while True:
        try:
            ranks, (module, name), args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            function = getattr(importlib.import_module(module), name)
            answer = Answer(rank, function(rank, groups[ranks], *args))
        except Exception as error:
            answer = Answer(rank, None, type(error).__name__, str(error), traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
        del answer
        _end_groups(initial)


def _end_groups(initial: set[dist.ProcessGroup]) -> None:
    """Destroy the groups that a call created, because the thread of each wakes up a hundred times per second.

    A strategy does not close its SequenceGroup, which has process groups, because later backwards may need it.
    """
    for sequence in list(sequence_groups.values()):
        sequence.close()
    new = [group for group in _groups() if group not in initial]
    for key in [key for key in control_connections if key[0] in new]:
        del control_connections[key]
    for group in new:
        dist.destroy_process_group(group)
    if new:
        new.clear()
        gc.collect()


def _groups() -> list[dist.ProcessGroup]:
    """Return all process groups of this process."""
    return list(dist.distributed_c10d._world.pg_map)
