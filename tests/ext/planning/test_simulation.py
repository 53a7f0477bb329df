"""Simulated steps: small ones added up by hand, and what has to hold for all of them.

The made-up device is of `machines`: 64 tokens of a rank take 6 + 14 ms of a block without its attention, 10 + 20 ms of its
own attention and 1 + 2 ms more of each wide branch, 0.125 + 0.375 ms of the few rows that others reach. Packing (0.5 ms) and
summing gradients (0.25 ms) go beside the own attention; a ring does both between its batches.
"""

import itertools
import time
from dataclasses import replace

import pytest

from lightning_dilated.ext.planning.simulating import simulation
from lightning_dilated.ext.planning.simulating.machine import Line
from lightning_dilated.ext.planning.simulating.simulation import attention_seconds, simulate
from lightning_dilated.ext.planning.simulating.timeline import Clock
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import blocks
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.planner import Links, make_problem, moved

from .machines import MS, machine

#: what a link must have, too little to see
FAST, NOTHING = 1e30, 1e-15
FREE = Links(near=FAST, far=FAST, round=NOTHING, message=NOTHING)
#: a round of 16 rows of K and V (32 bytes each in bf16) takes a second, that of their gradients two
SLOW = replace(FREE, near=512.0, far=512.0)
OUTSIDE = 3 + 5 + 7  # edge and optimizer, ms


def geometric(ranks: int, last: int | None = None) -> DilatedPattern:
    """(16, 1), (32, 2), ... up to the whole sequence of 64 tokens a rank."""
    return DilatedPattern.geometric(16, last or 64 * ranks)


def milliseconds(ranks: int, **options) -> float:
    """A step, rounded to what a float holds."""
    options = {"links": FREE, "average": False, **options}
    step = simulate(machine(), geometric(ranks), 64, ranks, **options)
    return round(step.seconds / MS, 6)


# -- by hand -----------------------------------------------------------------------------------------------------------
#: forward and backward of a block on two ranks: rest, own attention with one wide branch, a batch, few rows
FORWARD, BACKWARD = 6 + 11 + 1 + 0.125, 14 + 2 + 22 + 0.375
TWO = 2 * (FORWARD + BACKWARD) + OUTSIDE


@pytest.mark.parametrize("ranks, options, want", [
    (1, {}, 2 * (6 + 10 + 14 + 20) + OUTSIDE),
    (1, {"overhead": 0.004}, 2 * (6 + 10 + 14 + 20) + OUTSIDE + 4),
    (1, {"recompute": "attention-kept"}, 2 * (50 + 3) + OUTSIDE),
    (1, {"recompute": "block"}, 2 * (50 + 3 + 10) + OUTSIDE),
    (2, {"exchange": "gather"}, TWO),
    (2, {"exchange": "butterfly"}, TWO),
    # a ring packs rows behind its own attention, again in the backward, and their gradients; and sums those at the end
    (2, {"exchange": "ring"}, TWO + 2 * (0.5 + 0.5 + 0.5 + 0.25)),
    (2, {"exchange": "gather", "recompute": "attention-kept"}, TWO + 2 * 3),
    (2, {"exchange": "gather", "recompute": "block"}, TWO + 2 * (FORWARD - 6 + 3)),
    # packing and a round fly behind 11 ms of own attention, a round and the sum behind 22: what is over shows
    (2, {"exchange": "gather", "links": replace(FREE, round=10.5 * MS)}, TWO),
    (2, {"exchange": "gather", "links": replace(FREE, round=20.5 * MS)}, TWO + 2 * 10),
    (2, {"exchange": "gather", "links": replace(FREE, round=31.75 * MS)}, TWO + 2 * (21.25 + 10)),
    (2, {"exchange": "gather", "links": replace(FREE, message=31.75 * MS)}, TWO + 2 * (21.25 + 10)),
    (2, {"exchange": "gather", "links": SLOW}, TWO + 2 * (1000.5 - 11 + 2000.25 - 22)),
    # a butterfly's rounds follow each other beside 12 and 24 ms of own attention, whatever is computed with the first
    (4, {"exchange": "butterfly", "links": replace(FREE, round=5 * MS)},
     2 * ((6 + 12 + 1 + 1 + 0.125) + (14 + 4 + 24 + 0.375)) + OUTSIDE),
    (4, {"exchange": "butterfly", "links": replace(FREE, round=9 * MS)},
     2 * ((6 + 2 * 9.5 + 1 + 0.125) + (14 + 4 + 24 + 0.375)) + OUTSIDE),
    (4, {"exchange": "butterfly", "links": replace(FREE, round=13 * MS)},
     2 * ((6 + 2 * 13.5 + 1 + 0.125) + (14 + 4 + 2 * 13.25 + 0.375)) + OUTSIDE),
])  # fmt: skip
def test_by_hand(ranks, options, want):
    assert milliseconds(ranks, **options) == pytest.approx(want)


def test_parts_of_a_step():
    step = simulate(machine(), geometric(2), 64, 2, exchange="gather", links=SLOW, average=False)
    want = {"rest": 40, "attention": 2 * 33, "arrivals": 6, "few rows": 1, "edge": 8, "optimizer": 7}
    assert {k: x / MS for k, x in step.compute.items()} == pytest.approx(want)
    assert step.exposed == pytest.approx(step.seconds - sum(want.values()) * MS)
    assert step.exposed / step.seconds > 0.97
    assert step.alone == pytest.approx(115 * MS) and step.efficiency == pytest.approx(step.alone / step.seconds)
    assert step.tokens_per_second == pytest.approx(64 / step.seconds)
    assert step.bytes("forward") == (2 * 512, 0) and step.bytes("backward") == (2 * 1024, 0)


def test_nothing_crosses():
    """Segments within a rank: no exchange, no waiting, a step as long as alone, whatever the links."""
    step = simulate(machine(), geometric(4, last=64), 64, 4, links=SLOW, average=False)
    assert step.exchange is None and step.bytes() == (0, 0)
    assert step.exposed == pytest.approx(0, abs=1e-12) and step.seconds == step.alone == pytest.approx(115 * MS)


# -- gradients ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("milliseconds_of_a_bucket, want", [
    (10, 108 + 10),  # the first block's bucket passes during the second's backward (34 ms); what comes last shows
    (100, 74 + 2 * 100),  # the second bucket queues behind the first
])  # fmt: skip
def test_buckets(milliseconds_of_a_bucket, want):
    """Forward 32, loss 8, each block's backward 34 ms; a block's gradients are 1 MiB, and fill the first bucket."""
    links = replace(FREE, far=2**20 / (milliseconds_of_a_bucket * MS))
    model = machine(block_parameters=2**18, edge_parameters=0)
    step = simulate(model, geometric(2, last=64), 64, 2, ranks_per_node=1, links=links)
    assert step.seconds / MS == pytest.approx(want + 7)
    assert step.exposed / MS == pytest.approx(want - 108)
    assert step.bytes("gradients") == (0, 2 * 2**20)


def test_one_bucket_within_a_node():
    """Both blocks' 2 MiB after 108 ms of work, and then the optimizer's 7."""
    links = replace(FREE, near=2**20 / (10 * MS))
    model = machine(block_parameters=2**18, edge_parameters=0)
    step = simulate(model, geometric(2, last=64), 64, 2, links=links)
    assert step.seconds / MS == pytest.approx(108 + 20 + 7) and step.exposed / MS == pytest.approx(20)
    assert step.bytes("gradients") == (2 * 2**20, 0)


def test_bucket_sizes(monkeypatch):
    """1 MiB, then 25 MiB each, then the rest; within a node all at once."""
    sizes = []
    monkeypatch.setattr(Clock, "reduce", lambda self, size: sizes.append(size) if self.ranks > 1 else None)
    model = machine(block_parameters=10 * 2**18, edge_parameters=3 * 2**18, depth=6)
    simulate(model, geometric(2, last=64), 64, 2, ranks_per_node=1)
    assert [x / 2**20 for x in sizes] == [1, 25, 25, 12]
    sizes.clear()
    simulate(model, geometric(2, last=64), 64, 2)
    assert [x / 2**20 for x in sizes] == [63]


@pytest.mark.parametrize("per_node", [1, 2])
def test_bucket_sizes_that_are_asked_for(monkeypatch, per_node):
    """All alike, the first one too, within a node and between nodes."""
    sizes = []
    monkeypatch.setattr(Clock, "reduce", lambda self, size: sizes.append(size) if self.ranks > 1 else None)
    model = machine(block_parameters=10 * 2**18, edge_parameters=3 * 2**18, depth=6)
    simulate(model, geometric(2, last=64), 64, 2, ranks_per_node=per_node, bucket_cap_mb=20)
    assert [x / 2**20 for x in sizes] == [20, 20, 20, 3]


def test_buckets_within_a_node():
    """A block's 1 MiB passes during the next one's backward, where one bucket would wait for both."""
    links = replace(FREE, near=2**20 / (10 * MS))
    model = machine(block_parameters=2**18, edge_parameters=0)
    step = simulate(model, geometric(2, last=64), 64, 2, links=links, bucket_cap_mb=1)
    assert step.seconds / MS == pytest.approx(108 + 10 + 7) and step.exposed / MS == pytest.approx(10)
    assert step.bytes("gradients") == (2 * 2**20, 0)


@pytest.mark.parametrize("ranks, per_node, seconds", [
    (2, 2, 1 + 2 * 10 + 100 / 50),
    (8, 8, 1 + 6 * 10 + 2 * 7 / 8 * 100 / 50),
    (8, 4, 1 + 6 * 10 + 2 * 7 / 8 * 100 / 20),  # four adapters of a node side by side
    (8, 1, 1 + 6 * 10 + 2 * 7 / 8 * 100 / 5),
])  # fmt: skip
def test_average(ranks, per_node, seconds):
    clock = Clock(ranks, per_node, Links(near=50, far=5, round=1, message=10))
    clock.work("rest", 3.0)
    clock.reduce(100)
    assert clock.free["gradients"].tolist() == pytest.approx([3 + seconds] * ranks)


# -- of all steps ------------------------------------------------------------------------------------------------------
def pattern_of(ranks: int) -> DilatedPattern:
    """Geometric; where the ranks are no power of 2, with the sequence as the last segment."""
    return geometric(ranks) if ranks != 3 else DilatedPattern.longnet([16, 32, 64, 192], [1, 2, 4, 8])


def serves(exchange: str, ranks: int, per_node: int, causal: bool = False) -> bool:
    """Whether it does."""
    problem = make_problem(pattern_of(ranks), 64 * ranks, 2, ranks=ranks, causal=causal)
    return EXCHANGES[exchange].why_not(problem, per_node) is None


#: what can serve; causal or not makes no difference
CASES = [(name, ranks) for ranks in (2, 3, 4, 8) for name in EXCHANGES if serves(name, ranks, 2)]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("exchange, ranks", CASES)
def test_bytes_are_the_plans(exchange, ranks, causal):
    """What all ranks receive in a step is what `plan.moved` counts from their programs, in each of the layers."""
    assert serves(exchange, ranks, 2, causal)
    model, pattern = machine(causal=causal), pattern_of(ranks)
    problem = make_problem(pattern, 64 * ranks, 2, ranks=ranks, causal=causal)
    step = simulate(model, pattern, 64, ranks, exchange=exchange, ranks_per_node=2, recompute="block")
    each = [moved(problem, exchange, rank, 2, model.head_dim, model.element_size) for rank in range(ranks)]
    for run, number in (("forward", 0), ("again", 0), ("backward", 1)):
        total = sum(step.moved[run, side] for side in ("near", "far"))
        assert total == model.depth * sum(x[number].received for x in each) > 0
    assert ("again", "near") not in simulate(model, pattern, 64, ranks, exchange=exchange, ranks_per_node=2).moved


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_slower_links_never_help(exchange):
    pattern, base = geometric(8), {"near": 1e5, "far": 1e4, "round": 1e-3, "message": 1e-4}

    def seconds(**other: float) -> float:
        links = Links(**{**base, **other})
        return simulate(machine(causal=True), pattern, 64, 8, exchange=exchange, ranks_per_node=4, links=links).seconds

    for name, values in (
        ("near", (1e7, 1e5, 1e3)),
        ("far", (1e7, 1e4, 1e2)),
        ("round", (NOTHING, 1e-3, 1)),
        ("message", (NOTHING, 1e-4, 1)),
    ):
        found = [seconds(**{name: value}) for value in values]
        assert found == sorted(found) and found[-1] > found[0], name


@pytest.mark.parametrize("form", ["gather", "butterfly"])
@pytest.mark.parametrize("ranks", [16, 64])
def test_hierarchy_where_far_links_are_slow(form, ranks):
    """Each adapter carries a share of what the node needs; with links all alike the flat form has fewer rounds."""

    def exposed(name: str, links: Links) -> float:
        options = {"ranks_per_node": 8, "links": links, "average": False}
        return simulate(machine(), geometric(ranks), 64, ranks, exchange=name, **options).exposed

    slow = Links(near=1e9, far=1e4, round=1e-5, message=NOTHING)
    assert exposed(f"hierarchical_{form}", slow) < exposed(form, slow) / 2
    alike = Links(near=1e9, far=1e9, round=1.0, message=NOTHING)
    assert exposed(f"hierarchical_{form}", alike) > exposed(form, alike)


def test_later_ranks_have_more_to_do_where_causal():
    """The busiest rank is the last, whose queries see the keys of all others."""
    line, none = Line(0.0, 1e-6), Line(0.0, 0.0)
    model = machine(causal=True, arrive_forward=line, arrive_backward=line, pack=none, add=none)
    step = simulate(model, geometric(4), 64, 4, exchange="gather", average=False)
    # heads x (queries x keys before): branch (128, 8) 8 x 8 on rank 3, branch (256, 16) 4 x 12
    assert step.compute["arrivals"] == pytest.approx(2 * 2 * (2 * (8 * 8 + 4 * 12)) * 1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_the_step_lasts_as_long_as_the_busiest_ranks(causal):
    """Dense and causal, rank 3 of 4 computes the keys of three others, and ranks on the mean those of one and a half."""
    line, none = Line(0.0, 1e-6), Line(0.0, 0.0)
    model = machine(causal=causal, arrive_forward=line, arrive_backward=line, pack=none, add=none)
    step = simulate(model, DilatedPattern.dense(), 64, 4, exchange="gather", links=FREE, average=False)
    blocks = 2 * 2 * 2 * 64 * 64 * 1e-6  # a block of keys, in both layers and heads, forward and backward
    assert step.compute["arrivals"] == pytest.approx(3 * blocks)
    assert step.uneven == pytest.approx(1.5 * blocks if causal else 0.0)
    assert step.seconds >= sum(step.compute.values())


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_own_pairs_are_those_of_the_rank_with_most(ranks):
    """Segments that end within ranks leave them unlike numbers of pairs."""
    pattern = DilatedPattern.longnet([100], [1]).shifted(0.3)
    shards = [blocks(pattern, 64 * ranks, 2, 2, (64 * r, 64 * (r + 1))) for r in range(ranks)]
    every = [sum(x.pairs(True) for x in shard) for shard in shards]
    most, rows = simulation._most_work(pattern, 64, ranks, (2, 2), True)
    assert most in every and most >= sum(every) / ranks and rows == 2 * 64


def test_own_pairs_of_a_dense_pattern():
    """Where no branch fits a rank, its own attention goes by pairs."""
    step = simulate(machine(), DilatedPattern.dense(), 64, 2, exchange="gather", links=FREE, average=False)
    measured = 64 * 16 + 2 * 16 * 16 + 16 * 16
    assert step.compute["attention"] / MS == pytest.approx(2 * (10 + 20) * 64 * 64 / measured)


def test_a_pair_among_many_keys_and_its_row():
    """Where pairs among many keys were measured, the rest of the measured pattern's time is its rows'."""
    pairs, rows = 2 * (64 * 16 + 2 * 16 * 16 + 16 * 16), 2 * (64 + 32 + 16)
    (pair, row), (all_, none) = attention_seconds(machine(long_forward=6 * MS / pairs), 64)
    assert pair * pairs == pytest.approx(6 * MS) and row * rows == pytest.approx(4 * MS)
    assert all_ * pairs == pytest.approx(20 * MS) and none == 0
    dense = lambda **x: simulate(machine(**x), DilatedPattern.dense(), 64, 1).compute["attention"]  # noqa: E731
    assert dense(long_forward=6 * MS / pairs) < dense() / 1.1


def test_events_of_a_rank():
    step = simulate(machine(), geometric(4), 64, 4, exchange="butterfly", links=SLOW, watched=3)
    for stream in ("compute", "exchange"):
        found = [e for e in step.events if e.stream == stream]
        assert found and all(a.stop <= b.start + 1e-12 for a, b in itertools.pairwise(found))
    busy = sum(e.stop - e.start for e in step.events if e.stream == "compute")
    assert busy == pytest.approx(sum(step.compute.values()))
    found = [(e.stream, e.kind) for e in step.events]
    rounds = 2 * 2  # layers, rounds
    assert [found.count(("exchange", x)) for x in ("forward", "backward", "packing")] == [rounds, rounds, 2 * rounds]
    assert found.count(("compute", "packing")) == 0
    assert step.events[-1].kind == "optimizer" and step.events[-1].stop == pytest.approx(step.seconds)


@pytest.mark.parametrize("exchange", ["gather", "hierarchical_butterfly"])
def test_a_billion_tokens(exchange):
    """4,096 ranks with 262,144 tokens each, in seconds, exchange logarithmic in the ranks."""
    begin = time.process_time()
    model = machine(causal=True, first=2048, heads=12, kv_heads=12, head_dim=64)
    step = simulate(model, DilatedPattern.geometric(2048, 2**30), 2**18, 4096, exchange=exchange, ranks_per_node=8)
    assert step.tokens == 2**30 and time.process_time() - begin < 30
    rows = sum(step.bytes("forward")) / model.depth / (2 * 64 * 2 * 12)
    # (S/2) log2 R rows a head; causal, a gather brings half of that on the mean, a few less where rates pass a shard's rows
    bound = 1024 * 12 * (1 if "butterfly" in exchange else 0.5)
    assert 0.9 * bound < rows <= bound


# -- refused -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options, message", [
    ({"recompute": "all"}, "recompute policy must be one of"),
    ({"exchange": "post"}, "exchange must be one of"),
    ({"exchange": "hierarchical_gather"}, "needs several nodes"),
    ({"overhead": -1.0}, "overhead must be a finite number"),
    ({"watched": 4}, "watched=4 is not one of the ranks 0..3"),
    ({"ranks": 0}, "ranks must be"),
    ({"tokens": 0}, "tokens must be"),
    ({"bucket_cap_mb": 0}, "bucket_cap_mb must be at least 1"),
])  # fmt: skip
def test_refused(options, message):
    given = {"tokens": 64, "ranks": 4, **options}
    with pytest.raises(ValueError, match=message):
        simulate(machine(), geometric(4), **given)


def test_limit_of_exact_counts():
    assert simulation.EXACT == 16
    with pytest.raises(ValueError, match="is simulated for few ranks only"):
        simulate(machine(), geometric(32), 64, 32, exchange="ring")
