"""When rows flew and when a rank waited for them, on a GPU by events that nobody waits for, elsewhere by the wall clock."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from lightning_dilated.sequence.requirements import Problem

Mark = torch.cuda.Event | float


@dataclass
class Flight:
    """One collective: when its rows were ready to leave, and when the last had come."""

    run: str  # forward or backward
    what: str
    sent: int
    received: int
    begin: Mark
    end: Mark | None = None


@dataclass
class Wait:
    """A time in which what computes stood still for rows."""

    run: str
    what: str
    begin: Mark
    end: Mark


@dataclass(frozen=True)
class Planned:
    """A call's exchange as the plan has it: the arguments of `plan.moved`."""

    run: str
    problem: Problem
    exchange: str
    rank: int
    per_node: int
    head_dim: int
    element_size: int


@dataclass
class Clock:
    """What happened since the last `clear`, in order; give it to `SequenceGroup.watch`.

    Attributes:
        agreeing: seconds in which the host waited for other hosts to agree.
    """

    flights: list[Flight] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    planned: list[Planned] = field(default_factory=list)
    agreeing: float = 0.0

    def clear(self) -> None:
        """Forget what happened."""
        self.flights, self.waits, self.planned, self.agreeing = [], [], [], 0.0

    def fly(self, flight: Flight, work: dist.Work | None, device: torch.device) -> None:
        """Note a flight that begins; on a GPU a stream that does nothing else sees it end."""
        self.flights.append(flight)
        if device.type == "cuda" and work is not None:
            with torch.cuda.stream(_watcher(device)):
                work.wait()
                flight.end = mark(device)

    @contextlib.contextmanager
    def waiting(self, run: str, what: str, device: torch.device) -> Iterator[None]:
        """Note a wait."""
        begin = mark(device)
        yield
        self.waits.append(Wait(run, what, begin, mark(device)))


@functools.cache
def _watcher(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def mark(device: torch.device) -> Mark:
    """Now; on a GPU when the current stream gets here."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds(begin: Mark, end: Mark) -> float:
    """Between two marks; a GPU's must have been reached."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000
