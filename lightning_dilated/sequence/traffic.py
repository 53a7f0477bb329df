"""What a `Clock` noted, as sums by pass and by what moved, beside what the plan says of the same calls.

Times are of this rank. A moment in which several things flew counts once, in a row and in the total.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from lightning_dilated.sequence.exchange.program import count
from lightning_dilated.sequence.exchange.transport import Clock, Mark, Planned, seconds
from lightning_dilated.sequence.links import Links
from lightning_dilated.sequence.planner import DEFAULTS, steps

#: what the plan of an exchange counts; head-parallel groups trade tokens for heads besides
EXCHANGED = ("rows", "queries", "outputs", "gradients")
Times = list[tuple[float, float]]


@dataclass(frozen=True)
class Sums:
    """Sums over the collectives of a pass that move one thing, or over all.

    Attributes:
        run: "forward" (recomputed ones, too), "backward" or "both".
        what: one of `EXCHANGED`, "tokens for heads", "heads for tokens", or "all".
        collectives: how many.
        sent, received: bytes to and from other ranks.
        in_flight: seconds in which something was under way, from when its rows were ready until they had come (on a GPU) or
            were asked for (elsewhere).
        exposed: seconds in which what computes stood still for it (on a GPU the compute stream, elsewhere the host).
        hidden: seconds of `in_flight` in which nothing stood still.
        planned_sent, planned_received: bytes by `plan.moved`, of what is in `EXCHANGED`.
        planned: seconds by the plan's links, nothing hidden, as `plan.price` reckons (that takes gradients that come home to
            be as many as rows that came, which holds of all ranks together).
    """

    run: str
    what: str
    collectives: int = 0
    sent: int = 0
    received: int = 0
    in_flight: float = 0.0
    exposed: float = 0.0
    hidden: float = 0.0
    planned_sent: int = 0
    planned_received: int = 0
    planned: float = 0.0

    @property
    def as_planned(self) -> bool | None:
        """Whether the bytes are those of the plan; None for what it does not count."""
        if self.what not in EXCHANGED:
            return None
        return (self.sent, self.received) == (self.planned_sent, self.planned_received)

    def __add__(self, other: Sums) -> Sums:
        names = list(self.__dataclass_fields__)[2:]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})


def summary(clock: Clock, links: Links = DEFAULTS) -> list[Sums]:
    """Sums of each pass and thing that moved, in the order they first did, and last those of all together.

    Args:
        clock: whose marks were `reached`.
        links: the speeds to reckon planned seconds with.
    """
    made: dict[tuple[str, str], Sums] = {}
    for x in clock.flights:
        made.setdefault((x.run, x.what), Sums(x.run, x.what))
    for call in clock.planned:
        for x in planned(call, links):
            made[x.run, x.what] = made.get((x.run, x.what), Sums(x.run, x.what)) + x
    origin = next(_marks(clock), 0.0)
    waits = _times(clock.waits, origin)
    found = []
    for key, start in made.items():
        flights = [x for x in clock.flights if (x.run, x.what) == key]
        own = _times((x for x in clock.waits if (x.run, x.what) == key), origin)
        moved = Sums(*key, len(flights), sum(x.sent for x in flights), sum(x.received for x in flights))
        found.append(start + moved + _spent(_times(flights, origin), own, waits))
    total = sum((replace(x, in_flight=0.0, exposed=0.0, hidden=0.0) for x in found), Sums("both", "all"))
    return [*found, total + _spent(_times(clock.flights, origin), waits, waits)]


@functools.lru_cache(maxsize=256)
def planned(call: Planned, links: Links) -> tuple[Sums, ...]:
    """What the plan says of one pass of a call on this rank, by what moves."""
    forward, backward = steps(call.problem, call.exchange, call.rank, call.per_node, call.head_dim, call.element_size)
    found: dict[str, Sums] = {}
    for what, step, size in forward if call.run == "forward" else backward:
        bytes_of = lambda side: {p: size * count(m) for p, m in side.items() if p != call.rank}  # noqa: E731, B023
        sent, received = bytes_of(step.sends), bytes_of(step.receives)
        near = sum(n for peer, n in received.items() if peer // call.per_node == call.rank // call.per_node)
        took = near / links.near + (sum(received.values()) - near) / links.far
        took += links.round + links.message * len(received)
        one = Sums(
            call.run, what, planned_sent=sum(sent.values()), planned_received=sum(received.values()), planned=took
        )
        found[what] = found[what] + one if what in found else one
    return tuple(found.values())


def reached(clock: Clock) -> bool:
    """Whether a GPU has passed all that the clock noted; elsewhere yes. Waits for nothing."""
    return all(isinstance(x, float) or x.query() for x in _marks(clock))


def reach(clock: Clock) -> None:
    """Wait until a GPU has passed all that the clock noted."""
    for x in _marks(clock):
        if not isinstance(x, float):
            x.synchronize()


def _marks(clock: Clock) -> Iterator[Mark]:
    for x in (*clock.flights, *clock.waits):
        yield x.begin
        if x.end is not None:
            yield x.end


def _spent(flights: Times, waits: Times, all_waits: Times) -> Sums:
    """The times alone. What flew while something stood still is not hidden, whatever that stood still for."""
    total = _length(flights)
    alone = _length(flights + all_waits) - _length(all_waits)
    return Sums("", "", in_flight=total, exposed=_length(waits), hidden=min(total, max(0.0, alone)))


def _times(found: Iterable, origin: Mark) -> Times:
    """(begin, end) in seconds since `origin`; what never ended is left out."""
    return [(seconds(origin, x.begin), seconds(origin, x.end)) for x in found if x.end is not None]


def _length(times: Times) -> float:
    """Seconds that lie in any of the times."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(times):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
