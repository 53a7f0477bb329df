"""Transport: the collective that all exchanges use, an all-to-all of rows, with a record of bytes and times.

All ranks enter collectives in the order of the program, so they cannot deadlock. Ranks without a message for each other
exchange no bytes. GPU times are measured by events that the host does not wait for, and other times by the wall clock.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dilated.sequence.requirements import Problem

Mark = torch.cuda.Event | float


@dataclass
class Flight:
    """One collective, from the time when its rows are ready to be sent until the last row has arrived."""

    run: str  # forward or backward
    what: str
    sent: int
    received: int
    begin: Mark
    end: Mark | None = None


@dataclass
class Wait:
    """A period in which computation waited for rows."""

    run: str
    what: str
    begin: Mark
    end: Mark


@dataclass(frozen=True)
class Planned:
    """A planned call: all fields except `run` are arguments of `planner.held`."""

    run: str
    problem: Problem
    exchange: str
    rank: int
    per_node: int
    head_dim: int
    element_size: int


@dataclass
class TrafficLog:
    """The communication since the last `clear`, in order; pass it to `SequenceGroup.watch`.

    Attributes:
        agreeing: seconds that the host waited for control messages.
    """

    flights: list[Flight] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    planned: list[Planned] = field(default_factory=list)
    agreeing: float = 0.0

    def clear(self) -> None:
        self.flights, self.waits, self.planned, self.agreeing = [], [], [], 0.0

    def fly(self, flight: Flight, work: dist.Work | None, device: torch.device) -> None:
        """Record the start of a flight; on a GPU a separate stream records its end."""
        self.flights.append(flight)
        if device.type == "cuda" and work is not None:
            with torch.cuda.stream(_watcher(device)):
                work.wait()
                flight.end = mark(device)

    @contextlib.contextmanager
    def waiting(self, run: str, what: str, device: torch.device) -> Iterator[None]:
        begin = mark(device)
        yield
        self.waits.append(Wait(run, what, begin, mark(device)))


@functools.cache
def _watcher(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def mark(device: torch.device) -> Mark:
    """Return the current time, or on a GPU an event for the moment when the current stream reaches this point."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds(begin: Mark, end: Mark) -> float:
    """Return the seconds between two marks; GPU streams must have reached both."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000


@dataclass
class Traffic:
    """Bytes and messages of this rank to and from others (a copy to itself is not counted).

    Attributes:
        run: the pass that is counted.
        sent_to, received_from: bytes by the peer's rank in the process group.
        log: records when rows are in flight; None means no record.
    """

    run: str = "forward"
    messages: int = 0
    sent_to: Counter[int] = field(default_factory=Counter)
    received_from: Counter[int] = field(default_factory=Counter)
    log: TrafficLog | None = None

    @property
    def sent(self) -> int:
        return self.sent_to.total()

    @property
    def received(self) -> int:
        return self.received_from.total()

    def clear(self) -> None:
        self.messages = 0
        self.sent_to.clear()
        self.received_from.clear()


@dataclass
class Posted:
    """Rows in transit."""

    rows: Tensor
    work: dist.Work | None
    sent: Tensor  # must exist until the rows have been sent
    flight: Flight | None = None
    log: TrafficLog | None = None

    def wait(self) -> Tensor:
        """Wait until the rows have arrived, and return them; on a GPU, only the current stream waits."""
        if self.work is None or self.log is None:
            return self.follow()
        with self.log.waiting(self.flight.run, self.flight.what, self.rows.device):
            return self.follow()

    def follow(self) -> Tensor:
        """Wait without a record of the wait, for code that relays rows and computes nothing."""
        if self.work is not None:
            self.work.wait()
            if self.rows.device.type != "cuda":  # on a GPU, a second stream may wait for the same work
                self.work = None
                if self.flight is not None:
                    self.flight.end = mark(self.rows.device)
        return self.rows


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """On a GPU, run the body on the exchange's stream, after all work queued so far; on a CPU, just run the body.

    Memory allocated in the body belongs to that stream. A tensor that the caller's stream reads must be allocated
    before the body, or read only after `Posted.wait`; free it only after `rejoin`.
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


def abandon(device: torch.device, posted: Iterable[Posted] = ()) -> None:
    """Wait for rows in flight after an error, such as out of memory, so that their memory can be reused."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_stream(device))
        for rows in posted:  # collectives run on the communicator's streams
            if rows.work is not None:
                with contextlib.suppress(RuntimeError):  # the error being raised is the cause
                    rows.work.wait()


def rejoin(device: torch.device, traffic: Traffic, what: str) -> None:
    """Make the caller's stream wait for the `side_stream`."""
    if device.type == "cuda":
        waiting = contextlib.nullcontext()
        if traffic.log is not None:
            waiting = traffic.log.waiting(traffic.run, what, device)
        with waiting:
            torch.cuda.current_stream(device).wait_stream(_stream(device))


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream of high priority, because its work is short and other ranks wait for it."""
    return torch.cuda.Stream(device, priority=-1)


@dataclass(frozen=True)
class Block:
    """Rows (n, ...) of one dtype and width in a collective of several blocks; `sends`, `receives`: see `Wire.post`."""

    rows: Tensor
    sends: Mapping[int, int]
    receives: Mapping[int, int]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.rows.shape[1:]) * self.rows.element_size()


@dataclass
class PostedBlocks:
    """Blocks in transit in one collective."""

    posted: Posted
    blocks: tuple[Block, ...]

    def wait(self) -> list[list[Tensor]]:
        """Return the bytes of each block, one piece for each peer that sent any, in rising order of peers."""
        peers = _peers(x.receives for x in self.blocks)
        sizes = [x.receives.get(peer, 0) * x.row_bytes for peer in peers for x in self.blocks]
        pieces = self.posted.wait().flatten().split(sizes) if sizes else ()
        return [list(pieces[i :: len(self.blocks)]) for i in range(len(self.blocks))]


def joined(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    """Concatenate pieces of bytes into new rows with the dtype and row shape of `like`."""
    if not pieces:
        return like.new_empty(0, *like.shape[1:])
    return torch.cat(list(pieces)).view(like.dtype).view(-1, *like.shape[1:])


def _peers(counts: Iterable[Mapping[int, int]]) -> list[int]:
    return sorted({peer for x in counts for peer in x})


@dataclass
class Wire:
    """Moves rows between the ranks of a call; `ranks` are their numbers in the process group."""

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
        """Post rows, in the order of `sends`; `sends` and `receives` are {peer: number of rows}."""
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
        for split, counts in zip(splits, (receives, sends), strict=True):
            for peer, n in counts.items():
                split[self.ranks[peer]] = n
        rows = rows.contiguous()
        flight = None if traffic.log is None else Flight(traffic.run, what, *bytes_of, mark(rows.device))
        work = dist.all_to_all_single(_bytes(out), _bytes(rows), *splits, group=self.group, async_op=True)
        if flight is not None:
            traffic.log.fly(flight, work, rows.device)
        return Posted(out, work, rows, flight, traffic.log)

    def post_together(self, blocks: Sequence[Block], what: str = "rows") -> PostedBlocks:
        """Post several blocks of rows in one collective; a peer's parts of all blocks are consecutive."""
        parts = [_bytes(x.rows.contiguous()).split(list(x.sends.values())) for x in blocks]
        by_peer = [dict(zip(x.sends, part, strict=True)) for x, part in zip(blocks, parts, strict=True)]
        leaving = [part[peer].flatten() for peer in _peers(x.sends for x in blocks) for part in by_peer if peer in part]
        rows = torch.cat(leaving) if leaving else blocks[0].rows.new_empty(0, dtype=torch.uint8)
        sends, receives = (
            {peer: sum(getattr(x, side).get(peer, 0) * x.row_bytes for x in blocks) for peer in peers}
            for side in ("sends", "receives")
            for peers in [_peers(getattr(x, side) for x in blocks)]
        )
        return PostedBlocks(self.post(rows[:, None], sends, receives, what=what), tuple(blocks))


def _bytes(x: Tensor) -> Tensor:
    """Return x as (rows, bytes of a row), because every backend can move bytes, but not every dtype."""
    return x.flatten(1).view(torch.uint8)
