"""The one collective of every exchange, an all-to-all of rows, and the count of what it moved.

One collective that all ranks enter, in the order of the program, cannot deadlock; ranks without a message for each other
exchange nothing inside it.

When rows flew and when a rank waited for them, on a GPU by events that nobody waits for, elsewhere by the wall clock.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

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


@dataclass
class Traffic:
    """Bytes and messages of this rank to and from others (a copy to itself is not counted).

    Attributes:
        run: the pass that is counted.
        sent_to, received_from: bytes by the other's rank in the process group.
        clock: what notes when rows fly; None: nothing does.
    """

    run: str = "forward"
    messages: int = 0
    sent_to: Counter[int] = field(default_factory=Counter)
    received_from: Counter[int] = field(default_factory=Counter)
    clock: Clock | None = None

    @property
    def sent(self) -> int:
        """Bytes sent to others."""
        return self.sent_to.total()

    @property
    def received(self) -> int:
        """Bytes received from others."""
        return self.received_from.total()

    def far(self, rank: int, ranks_per_node: int) -> tuple[int, int]:
        """(sent, received) bytes that leave or enter the node of `rank`."""
        inside = lambda peer: peer // ranks_per_node == rank // ranks_per_node  # noqa: E731
        sides = (self.sent_to, self.received_from)
        return tuple(sum(n for peer, n in side.items() if not inside(peer)) for side in sides)

    def clear(self) -> None:
        """Count from 0."""
        self.messages = 0
        self.sent_to.clear()
        self.received_from.clear()


@dataclass
class Posted:
    """Rows under way."""

    rows: Tensor
    work: dist.Work | None
    sent: Tensor  # alive until the rows have left
    flight: Flight | None = None
    clock: Clock | None = None

    def wait(self) -> Tensor:
        """The rows, once they are here (on a GPU: once the stream that asks reaches this point)."""
        if self.work is None or self.clock is None:
            return self.follow()
        with self.clock.waiting(self.flight.run, self.flight.what, self.rows.device):
            return self.follow()

    def follow(self) -> Tensor:
        """The same, for what moves rows on and computes nothing: such a wait is not noted as one."""
        if self.work is not None:
            self.work.wait()
            if self.rows.device.type != "cuda":  # there another stream may ask, too
                self.work = None
                if self.flight is not None:
                    self.flight.end = mark(self.rows.device)
        return self.rows


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """On a GPU a stream of the exchange's own, behind what was asked for so far; elsewhere nothing.

    Memory that is taken within belongs to that stream and is given back to it; what the caller's stream reads is made
    before, or read after `Posted.wait`, and let go after `rejoin`.
    """
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            yield
    except BaseException:
        abandon(device)
        raise


def abandon(device: torch.device, flying: Iterable[Posted] = ()) -> None:
    """After an error (no memory left, say): rows that still fly must land before their memory is anything else's."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_stream(device))
        for posted in flying:  # collectives run on streams of the communicator's own
            if posted.work is not None:
                with contextlib.suppress(RuntimeError):  # the error that is under way says more
                    posted.work.wait()


def rejoin(device: torch.device, traffic: Traffic, what: str) -> None:
    """Have the stream of the caller wait for what was done `beside` it."""
    if device.type == "cuda":
        noted = contextlib.nullcontext() if traffic.clock is None else traffic.clock.waiting(traffic.run, what, device)
        with noted:
            torch.cuda.current_stream(device).wait_stream(_stream(device))


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for good, before other work: what it does is short, and others wait for it."""
    return torch.cuda.Stream(device, priority=-1)


@dataclass
class Wire:
    """Moves rows between the ranks of a call. `ranks` are their numbers in the process group."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    rank: int
    traffic: Traffic = field(default_factory=Traffic)

    def post(
        self,
        rows: Tensor,
        sends: Mapping[int, int],
        receives: Mapping[int, int],
        into: Tensor | None = None,
        what: str = "rows",
    ) -> Posted:
        """Send the leading rows to the first peer of `sends`, the next to the second, ...; {peer: number of rows}."""
        shape = (sum(receives.values()), *rows.shape[1:])
        out = rows.new_empty(shape) if into is None else into
        row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
        traffic, bytes_of = self.traffic, []
        for counts, side in ((sends, traffic.sent_to), (receives, traffic.received_from)):
            moved = {self.ranks[peer]: n * row_bytes for peer, n in counts.items() if peer != self.rank}
            side.update(moved)
            bytes_of.append(sum(moved.values()))
        traffic.messages += sum(1 for peer in sends if peer != self.rank)
        splits = [[0] * dist.get_world_size(self.group) for _ in range(2)]
        for at, counts in zip(splits, (receives, sends), strict=True):
            for peer, n in counts.items():
                at[self.ranks[peer]] = n
        rows = rows.contiguous()
        flight = None if traffic.clock is None else Flight(traffic.run, what, *bytes_of, mark(rows.device))
        work = dist.all_to_all_single(_bytes(out), _bytes(rows), *splits, group=self.group, async_op=True)
        if flight is not None:
            traffic.clock.fly(flight, work, rows.device)
        return Posted(out, work, rows, flight, traffic.clock)


def _bytes(x: Tensor) -> Tensor:
    """(rows, bytes of a row): every backend moves bytes, not every one each dtype."""
    return x.flatten(1).view(torch.uint8)
