"""Sums over the records of a log: times computed by hand, and bytes and seconds against the plan."""

import pytest

from lightning_dilated.ext.profiling.planned import moved
from lightning_dilated.ext.profiling.traffic import Sums, planned, reached, summary
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.exchange.transport import Flight, Planned, TrafficLog, Wait
from lightning_dilated.sequence.links import Links
from lightning_dilated.sequence.planner import make_problem, price

PATTERN = DilatedPattern.geometric(4, 32)
LINKS = Links(near=3e9, far=1e9, round=1e-3, message=1e-5)
RANKS, PER_NODE, SIZES = 4, 2, (8, 2)


def recorded(flights, waits):
    """Return a log of (pass, content, begin, end). Each flight sends 3 bytes and receives 10."""
    return TrafficLog([Flight(run, what, 3, 10, *x) for run, what, *x in flights], [Wait(*x) for x in waits])


F, B = ("forward", "rows"), ("backward", "gradients")
#: flights, waits, {(pass, content): (collectives, received, in flight, exposed, hidden)}
CASES = {
    "nothing": ([], [], {}),
    "hidden": ([(*F, 1.0, 3.0)], [], {F: (1, 10, 2, 0, 2)}),
    "exposed": ([(*F, 1.0, 3.0)], [(*F, 2.0, 3.0)], {F: (1, 10, 2, 1, 1)}),
    "a wait outlasts its flight": ([(*F, 1.0, 3.0)], [(*F, 2.0, 4.0)], {F: (1, 10, 2, 2, 1)}),
    "one after the other": ([(*F, 1.0, 3.0), (*F, 4.0, 5.0)], [(*F, 4.5, 5.0)], {F: (2, 20, 3, 0.5, 2.5)}),
    "at once": ([(*F, 1.0, 3.0), (*F, 2.0, 5.0)], [(*F, 2.5, 3.0), (*F, 4.0, 5.0)], {F: (2, 20, 4, 1.5, 2.5)}),
    "one within another": ([(*F, 1.0, 9.0), (*F, 2.0, 3.0)], [], {F: (2, 20, 8, 0, 8)}),
    "never waited for": ([(*F, 1.0, None), (*F, 2.0, 3.0)], [], {F: (2, 20, 1, 0, 1)}),
    "concurrent with another's wait": (
        [(*F, 1.0, 4.0), (*B, 2.0, 6.0)],
        [(*F, 2.0, 4.0), (*B, 5.0, 6.0)],
        {F: (1, 10, 3, 2, 1), B: (1, 10, 4, 1, 1), ("both", "all"): (2, 20, 5, 3, 2)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_times(name):
    flights, waits, want = CASES[name]
    *rows, total = summary(recorded(flights, waits))
    sums = {(x.run, x.what): (x.collectives, x.received, x.in_flight, x.exposed, x.hidden) for x in (*rows, total)}
    assert sums == {**({("both", "all"): want[F]} if F in want else {("both", "all"): (0,) * 5}), **want}
    assert total.hidden + total.exposed >= total.in_flight
    assert reached(recorded(flights, waits))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_plan(exchange, causal):
    problem = make_problem(PATTERN, 32, 4, 2, ranks=RANKS, causal=causal)
    took = []
    for rank in range(RANKS):
        calls = [Planned(run, problem, exchange, rank, PER_NODE, *SIZES) for run in ("forward", "backward")]
        total = summary(TrafficLog(planned=calls), LINKS)[-1]
        want = moved(problem, exchange, rank, PER_NODE, *SIZES)
        assert (total.planned_sent, total.planned_received) == (
            sum(x.sent for x in want),
            sum(x.received for x in want),
        )
        for call, x in zip(calls, want, strict=True):
            assert sum(y.planned_received for y in planned(call, LINKS)) == x.received
        took.append(total.planned)
    estimated = price(problem, exchange, PER_NODE, *SIZES, LINKS).seconds
    if causal:  # the rank that is priced receives the most rows, but the fewest of the gradients that are sent back
        assert 0.9 * estimated < max(took) <= estimated
    else:
        assert max(took) == pytest.approx(estimated, rel=1e-12)


@pytest.mark.parametrize(
    "what, sent, want", [("rows", 7, True), ("rows", 8, False), ("gradients", 7, True), ("tokens for heads", 8, None)]
)
def test_as_planned(what, sent, want):
    assert Sums("forward", what, sent=sent, received=5, planned_sent=7, planned_received=5).as_planned is want


def test_what_was_not_planned_is_unlike():
    row, _ = summary(recorded([(*F, 1.0, 2.0)], []))
    assert row.as_planned is False
