"""The clocks of all ranks: compute streams and collectives on streams of their own, in the order of the real calls.

A stream does one thing after another in the order in which the program issues it, so the time of an event follows from
earlier ones: start = the latest of what it waits for. Times are arrays over ranks. `Op` issues the events of the op's
forward and backward in the order of `attention.executors.remote` and `sequence.exchange.run` on GPUs.

Shape letters: R ranks, D head dim.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dilated.ext.planning.simulating.machine import Line, Machine
from lightning_dilated.ext.planning.simulating.rounds import Array, Moves, Rows
from lightning_dilated.sequence.planner import Links

#: streams of a rank
COMPUTE, EXCHANGE, GRADIENTS = "compute", "exchange", "gradients"


@dataclass(frozen=True)
class Event:
    """What one rank did on one of its streams from `start` to `stop`, in seconds of the step."""

    stream: str
    kind: str
    start: float
    stop: float


class Clock:
    """The streams of R ranks.

    Args:
        ranks: R.
        per_node: ranks that share fast links.
        links: speeds and latencies.
        watched: the rank whose events are recorded; None: no rank's.

    Attributes:
        spent: seconds (R,) of compute streams by kind of work.
        moved: bytes received by all ranks, by (pass, "near" or "far").
    """

    def __init__(self, ranks: int, per_node: int, links: Links, watched: int | None = None) -> None:
        self.ranks, self.per_node, self.links, self.watched = ranks, per_node, links, watched
        self.free = {stream: np.zeros(ranks) for stream in (COMPUTE, EXCHANGE, GRADIENTS)}
        self.spent: dict[str, Array] = {}
        self.moved: Counter[tuple[str, str]] = Counter()
        self.events: list[Event] = []

    def work(self, kind: str, seconds: Array | float, stream: str = COMPUTE) -> None:
        """Compute on every rank."""
        start = self.free[stream]
        self.free[stream] = start + seconds
        if stream == COMPUTE:
            self.spent[kind] = self.spent.get(kind, np.zeros(self.ranks)) + seconds
        self._note(stream, kind, start, self.free[stream])

    def join(self) -> None:
        """Let the exchange's stream wait for the work of compute streams so far."""
        self.free[EXCHANGE] = np.maximum(self.free[EXCHANGE], self.free[COMPUTE])

    def post(self, run: str, rows: Rows, row_bytes: float, stream: str = COMPUTE) -> Array:
        """Start a round after the work of `stream` so far; returns its end, for `wait`.

        A rank's round begins when it and all its peers have reached it. It lasts the latency of a round, and as long as the
        slowest of them needs for its intra-node and inter-node bytes, which move concurrently, in the direction with more
        of them, and for a message to each peer.
        """
        return self.post_together(run, [(rows, row_bytes)], stream)

    def post_together(self, run: str, parts: Sequence[tuple[Rows, float]], stream: str = COMPUTE) -> Array:
        """`post` of rows of several widths in one round."""
        start = np.maximum(self.free[stream], self.free[EXCHANGE])
        sent, received = (sum(getattr(rows, side) * size for rows, size in parts) for side in ("sent", "received"))
        near, far = np.maximum(sent, received)
        messages = np.max([rows.messages for rows, _ in parts], 0)
        needs = np.maximum(near / self.links.near, far / self.links.far) + messages * self.links.message
        latest = lambda x: np.max([rows.latest(x) for rows, _ in parts], 0)  # noqa: E731
        end = latest(start) + self.links.round + latest(needs)
        self.free[EXCHANGE] = end
        for side, size in zip(("near", "far"), received.sum(1), strict=True):
            self.moved[run, side] += float(size)
        self._note(EXCHANGE, run, start, end)
        return end

    def reduce(self, size: float) -> None:
        """Average `size` bytes of gradients over all ranks, once everyone has them; nothing with one rank.

        A ring moves 2 (R - 1) / R of the bytes through every rank. Over several nodes there is a ring for every rank of a
        node, each through another adapter, so that all adapters of a node are used.
        """
        if self.ranks == 1:
            return
        start = np.maximum(self.free[COMPUTE], self.free[GRADIENTS])
        nodes = -(-self.ranks // self.per_node)
        speed = min(self.links.near, self.links.far * self.per_node) if nodes > 1 else self.links.near
        seconds = self.links.round + 2 * math.ceil(math.log2(self.ranks)) * self.links.message
        seconds += 2 * (self.ranks - 1) / self.ranks * size / speed
        self.free[GRADIENTS] = np.full(self.ranks, start.max() + seconds)
        self.moved["gradients", "far" if nodes > 1 else "near"] += 2 * (self.ranks - 1) * size
        self._note(GRADIENTS, "gradients", start, self.free[GRADIENTS])

    def wait(self, end: Array) -> None:
        """Let compute streams wait for `end`."""
        self.free[COMPUTE] = np.maximum(self.free[COMPUTE], end)

    def _note(self, stream: str, kind: str, start: Array, stop: Array) -> None:
        if self.watched is not None and stop[self.watched] > start[self.watched]:
            self.events.append(Event(stream, kind, float(start[self.watched]), float(stop[self.watched])))


#: kinds of work: a rank's local attention, batches of arriving rows, packing rows, picking the few rows that they reach
ATTENTION, ARRIVALS, PACKING, FEW = "attention", "arrivals", "packing", "few rows"


@dataclass(frozen=True)
class Op:
    """One attention of a step; `moves` is None where no segment crosses a shard.

    Attributes:
        local_forward, local_backward: seconds of the rank's local blocks.
    """

    machine: Machine
    moves: Moves | None
    local_forward: float
    local_backward: float

    @property
    def row(self) -> int:
        return 2 * self.machine.head_dim * self.machine.element_size

    @property
    def wide_row(self) -> int:
        return 2 * self.machine.head_dim * self.machine.wide_size

    def forward(self, clock: Clock, run: str = "forward") -> None:
        """One forward; `run` is the name that its bytes are counted under."""
        if self.moves is None:
            clock.work(ATTENTION, self.local_forward)
        elif self.moves.style == "switch":
            self._switch_forward(clock, run)
        else:
            ends = self._begin(clock, run)
            clock.work(ATTENTION, self.local_forward)
            for i in range(len(self.moves.rounds)):
                self._arrive(clock, run, i, ends, self.machine.arrive_forward)
            clock.work(FEW, self.machine.few_forward.of(self.moves.queries))

    def backward(self, clock: Clock) -> None:
        local = lambda: clock.work(ATTENTION, self.local_backward)  # noqa: E731
        if self.moves is None:
            local()
        elif self.moves.style == "switch":
            self._switch_backward(clock, local)
        else:
            (self._ring_backward if self.moves.style == "ring" else self._kept_backward)(clock, local)
            clock.work(FEW, self.machine.few_backward.of(self.moves.queries))

    def _begin(self, clock: Clock, run: str) -> list[Array]:
        """Post all rounds of rows that are saved, in order on the exchange's stream; of a ring the first one."""
        clock.join()
        rounds = self.moves.rounds[:1] if self.moves.style == "ring" else self.moves.rounds
        return [self._post(clock, run, rows, EXCHANGE) for rows in rounds]

    def _arrive(self, clock: Clock, run: str, i: int, ends: list[Array], line: Line) -> None:
        """Wait for a round, in a ring post the next one, and compute the batches."""
        clock.wait(ends[i])
        if i + 1 == len(ends) < len(self.moves.rounds):
            ends.append(self._post(clock, run, self.moves.rounds[i + 1]))
        clock.work(ARRIVALS, line.of(self.moves.pairs[i], self.moves.batches[i]))

    def _post(self, clock: Clock, run: str, rows: Rows, stream: str = COMPUTE) -> Array:
        """Pack rows of K and V and send them."""
        self._move(clock, self.machine.pack, rows.packed * self.row, stream)
        return clock.post(run, rows, self.row, stream)

    def _kept_backward(self, clock: Clock, local: Callable[[], None]) -> None:
        """All batches; then gradients are sent to their owners, last round first, and are summed during the local blocks."""
        clock.work(ARRIVALS, self.machine.arrive_backward.of(self.moves.pairs.sum(0), self.moves.batches.sum(0)))
        clock.join()
        for rows in reversed(self.moves.rounds):
            clock.post("backward", rows.back(), self.wide_row, EXCHANGE)
            self._add(clock, rows.back(), EXCHANGE)
        local()
        clock.wait(clock.free[EXCHANGE])

    def _ring_backward(self, clock: Clock, local: Callable[[], None]) -> None:
        """The rows travel again; each round's gradients are sent to their owners, and are summed after the local blocks."""
        coming: list[tuple[Rows, Array]] = []
        ends = self._begin(clock, "backward")
        for i, rows in enumerate(self.moves.returns):
            self._arrive(clock, "backward", i, ends, self.machine.arrive_backward)
            self._move(clock, self.machine.pack, rows.packed * self.wide_row)
            coming.append((rows, clock.post("backward", rows, self.wide_row)))
        local()
        for rows, end in coming:
            clock.wait(end)
            self._add(clock, rows)

    def _add(self, clock: Clock, rows: Rows, stream: str = COMPUTE) -> None:
        """Sum returned gradients."""
        self._move(clock, self.machine.add, rows.landed * self.wide_row, stream)

    def _move(self, clock: Clock, line: Line, size: Array, stream: str = COMPUTE) -> None:
        clock.work(PACKING, line.of(size, (size > 0).astype(float)), stream)

    def _switch_forward(self, clock: Clock, run: str) -> None:
        """Keys and queries to the owners, local blocks, the owners' problems, outputs back."""
        unit = self.machine.head_dim * self.machine.element_size
        returned = (self.machine.head_dim + 1) * self.machine.wide_size
        keys, queries = self.moves.rounds
        self._move(clock, self.machine.pack, keys.packed * self.row)
        self._move(clock, self.machine.pack, queries.packed * unit)
        end = clock.post_together(run, [(keys, self.row), (queries, unit)])
        clock.work(ATTENTION, self.local_forward)
        clock.wait(end)
        self._owned(clock, self.machine.arrive_forward)
        clock.wait(clock.post(run, queries.back(), returned))
        self._move(clock, self.machine.add, queries.packed * returned)

    def _switch_backward(self, clock: Clock, local: Callable[[], None]) -> None:
        """Gradients and outputs to the owners, their problems, gradients back while the local blocks run."""
        unit, wide = self.machine.head_dim * self.machine.element_size, self.machine.wide_size
        keys, queries = self.moves.rounds
        self._move(clock, self.machine.pack, queries.packed * 2 * unit)
        self._move(clock, self.machine.pack, queries.packed * wide)
        clock.wait(clock.post("backward", queries, 2 * unit + wide))
        self._owned(clock, self.machine.arrive_backward)
        returned = self.machine.head_dim * wide
        end = clock.post_together("backward", [(queries.back(), returned), (keys.back(), self.wide_row)])
        local()
        clock.wait(end)
        for size in (queries.packed * returned, keys.packed * self.wide_row):
            self._move(clock, self.machine.add, size)

    def _owned(self, clock: Clock, line: Line) -> None:
        clock.work(ARRIVALS, line.of(self.moves.pairs.sum(0), self.moves.batches.sum(0)))
