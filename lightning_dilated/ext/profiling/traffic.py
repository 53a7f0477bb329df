"""Sum a `TrafficLog` by pass and by kind of moved tensors, next to the planned numbers of the same calls.

Times are measured on this rank. While several collectives are in flight, the time counts once in each row and once in
the total."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from lightning_dilated.ext.profiling.planned import collectives
from lightning_dilated.sequence.exchange.transport import Flight, Mark, Planned, TrafficLog, Wait, seconds
from lightning_dilated.sequence.links import Links
from lightning_dilated.sequence.planner import DEFAULTS

#: kinds of moved tensors that the plan of an exchange counts; it leaves out trades of tokens for heads
EXCHANGED = ("rows", "outputs", "gradients")
Times = list[tuple[float, float]]


@dataclass(frozen=True)
class Sums:
    """Sums over the collectives of a pass that move one kind of tensor, or over all collectives.

    Attributes:
        run: "forward" (including recomputed forwards), "backward" or "both".
        what: one of `EXCHANGED`, "tokens for heads", "heads for tokens", or "all".
        collectives: number of collectives.
        sent, received: bytes to other ranks and from other ranks.
        in_flight: seconds after rows were ready, until they arrived (on a GPU) or were requested (on other devices).
        exposed: seconds in which computation waited (on a GPU the compute stream, on other devices the host).
        hidden: seconds of `in_flight` in which nothing waited.
        planned_sent, planned_received: planned bytes (`planned.moved`) of the tensors in `EXCHANGED`.
        planned: seconds that the plan estimates for its links if nothing is hidden, as in `planner.price`. They assume
            that a rank receives as much in rows as in gradients of rows, which is true only for the sum over all ranks.
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
        """True if the bytes are equal to the planned bytes; None for tensors that the plan does not count."""
        if self.what not in EXCHANGED:
            return None
        return (self.sent, self.received) == (self.planned_sent, self.planned_received)

    def __add__(self, other: Sums) -> Sums:
        names = list(self.__dataclass_fields__)[2:]
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})


def summary(log: TrafficLog, links: Links = DEFAULTS) -> list[Sums]:
    """Return sums by pass and kind of moved tensors, in the order of first occurrence, and last the total sums.

    Args:
        log: a log for which `reached` is True.
        links: speeds from which planned seconds are computed.
    """
    plans: dict[tuple[str, str], Sums] = {}
    for x in log.flights:
        plans.setdefault((x.run, x.what), Sums(x.run, x.what))
    for call in log.planned:
        for one in planned(call, links):
            plans[one.run, one.what] = plans.get((one.run, one.what), Sums(one.run, one.what)) + one
    origin = next(_marks(log), 0.0)
    waits = _times(log.waits, origin)
    sums = []
    for key, plan in plans.items():
        flights = [x for x in log.flights if (x.run, x.what) == key]
        row_waits = _times((x for x in log.waits if (x.run, x.what) == key), origin)
        moved = Sums(*key, len(flights), sum(x.sent for x in flights), sum(x.received for x in flights))
        sums.append(plan + moved + _times_of(_times(flights, origin), row_waits, waits))
    total = sum((replace(x, in_flight=0.0, exposed=0.0, hidden=0.0) for x in sums), Sums("both", "all"))
    return [*sums, total + _times_of(_times(log.flights, origin), waits, waits)]


@functools.lru_cache(maxsize=256)
def planned(call: Planned, links: Links) -> tuple[Sums, ...]:
    """Return the planned sums of one pass of a call on this rank, by kind of moved tensors."""
    forward, backward = collectives(
        call.problem, call.exchange, call.rank, call.per_node, call.head_dim, call.element_size
    )
    sums: dict[str, Sums] = {}
    for collective in forward if call.run == "forward" else backward:
        what = collective.what
        sent, received = (collective.bytes(side, call.rank) for side in ("sends", "receives"))
        near = sum(n for peer, n in received.items() if peer // call.per_node == call.rank // call.per_node)
        took = near / links.near + (sum(received.values()) - near) / links.far
        took += links.round + links.message * len(received)
        totals = {"planned_sent": sum(sent.values()), "planned_received": sum(received.values()), "planned": took}
        sums[what] = sums.get(what, Sums(call.run, what)) + Sums(call.run, what, **totals)
    return tuple(sums.values())


def reached(log: TrafficLog) -> bool:
    """Return whether the GPU has passed all recorded events, without waiting; on other devices return True."""
    return all(isinstance(x, float) or x.query() for x in _marks(log))


def reach(log: TrafficLog) -> None:
    """Wait until the GPU has passed all recorded events."""
    for x in _marks(log):
        if not isinstance(x, float):
            x.synchronize()


def _marks(log: TrafficLog) -> Iterator[Mark]:
    for x in (*log.flights, *log.waits):
        yield x.begin
        if x.end is not None:
            yield x.end


def _times_of(flights: Times, waits: Times, all_waits: Times) -> Sums:
    """Return `Sums` with times only. Time in flight counts as hidden only while nothing waits for any collective."""
    total = _length(flights)
    alone = _length(flights + all_waits) - _length(all_waits)
    return Sums("", "", in_flight=total, exposed=_length(waits), hidden=min(total, max(0.0, alone)))


def _times(intervals: Iterable[Flight | Wait], origin: Mark) -> Times:
    """Return the (begin, end) of intervals that ended, in seconds since `origin`."""
    return [(seconds(origin, x.begin), seconds(origin, x.end)) for x in intervals if x.end is not None]


def _length(times: Times) -> float:
    """Return the seconds that the union of the intervals covers."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(times):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
