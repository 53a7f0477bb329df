"""The clocks of all ranks: work on compute streams and collectives on streams of their own, in the order of the real calls.

Every stream does one thing after another in the order in which the program issues it, so each event's time follows from
earlier ones at once: start = the latest of what it waits for. Times are arrays over ranks.
Shape letters: R ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from lightning_dilated.planning.simulating.rounds import Array, Rows
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
        watched: the rank whose events are kept; None: nobody's.

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

    def beside(self) -> None:
        """Let what follows on the exchange's stream begin when what compute streams did so far is done."""
        self.free[EXCHANGE] = np.maximum(self.free[EXCHANGE], self.free[COMPUTE])

    def post(self, run: str, rows: Rows, row_bytes: float, stream: str = COMPUTE) -> Array:
        """Start a round when what `stream` did so far is done; its end, for `wait`.

        A rank's round begins when it and all its peers have come to it. It lasts as long as the slowest of them needs for
        the bytes inside the node and between nodes, which go side by side, the larger of both directions, and a message
        each peer; and the latency of a round.
        """
        start = np.maximum(self.free[stream], self.free[EXCHANGE])
        near, far = np.maximum(rows.sent, rows.received) * row_bytes
        needs = np.maximum(near / self.links.near, far / self.links.far) + rows.messages * self.links.message
        end = rows.latest(start) + self.links.round + rows.latest(needs)
        self.free[EXCHANGE] = end
        for side, n in zip(("near", "far"), rows.received.sum(1), strict=True):
            self.moved[run, side] += float(n) * row_bytes
        self._note(EXCHANGE, run, start, end)
        return end

    def reduce(self, size: float) -> None:
        """Average `size` bytes of gradients over all ranks, once everyone has them; nothing with one rank.

        A ring carries 2 (R - 1) / R of the bytes past every rank. Over several nodes there is a ring for every rank of a
        node, each through the adapter of another one, so that a node's adapters work together.
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
        """Let compute streams go on after `end` only."""
        self.free[COMPUTE] = np.maximum(self.free[COMPUTE], end)

    def _note(self, stream: str, kind: str, start: Array, stop: Array) -> None:
        if self.watched is not None and stop[self.watched] > start[self.watched]:
            self.events.append(Event(stream, kind, float(start[self.watched]), float(stop[self.watched])))
