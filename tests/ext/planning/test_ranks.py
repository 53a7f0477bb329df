"""Steps on many ranks: small steps added up by hand; work and bytes equal the definition and the planner.

`machines` has the device. With 64 tokens per rank, forward + backward of a block take 6 + 14 ms without attention. 10 +
20 ms are for own attention, 1 + 2 ms per wide branch, 1 + 2 ms per batch of received rows, and 0.125 + 0.375 ms for
queries that attend to these rows. Packing (0.5 ms) and summing gradients (0.25 ms) overlap own attention.
"""

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.ext.planning.machine import Line
from lightning_dilated.ext.planning.ranks import attention_seconds, layer_on_ranks, step_on_ranks, work_of
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.ext.profiling.planned import moved
from lightning_dilated.pattern import Branch, DilatedPattern, Global, Window
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.planner import Links, make_problem, members_of

from ...examples import examples
from .machines import MS, machine

FREE = Links(near=1e30, far=1e30, round=1e-15, message=1e-15)
OUTSIDE = 3 + 5 + 7  # ms of the edge (forward, backward) and of the optimizer


def geometric(ranks, last=None):
    """Return (16, 1), (32, 2), ... up to the whole sequence of 64 tokens per rank."""
    return DilatedPattern.geometric(16, last or 64 * ranks)


def setup_of(ranks, links=FREE, per_node=None, **options):
    return Setup("ring_dilated", ranks, per_node or ranks, links=links, **options)


def step(ranks, pattern=None, model=None, options=None, **how):
    cycle = [pattern or geometric(ranks)]
    return step_on_ranks(model or machine(), cycle, 64, setup_of(ranks, **how), **options or {})


#: two blocks on two ranks: other layers, own attention and a wide branch, received rows, their queries; both passes
TWO = 2 * (6 + 11 + 1 + 0.125 + 14 + 2 + 22 + 0.375) + OUTSIDE


@pytest.mark.parametrize(
    "ranks, how, options, want",
    [
        (1, {}, {}, 2 * (6 + 10 + 14 + 20) + OUTSIDE),
        (1, {}, {"overhead": 0.004}, 2 * (6 + 10 + 14 + 20) + OUTSIDE + 4),
        (1, {}, {"recompute": "attention-kept"}, 2 * (50 + 3) + OUTSIDE),
        (1, {}, {"recompute": "block"}, 2 * (50 + 3 + 10) + OUTSIDE),
        (2, {"exchange": "gather"}, {}, TWO),
        (2, {"exchange": "butterfly"}, {}, TWO),
        (2, {"exchange": "ring"}, {}, TWO),
        (2, {"exchange": "gather"}, {"recompute": "attention-kept"}, TWO + 2 * 3),
        (2, {"exchange": "gather"}, {"recompute": "block"}, TWO + 2 * (3 + 11 + 1 + 0.125)),
    ],
)
def test_by_hand(ranks, how, options, want):
    assert step(ranks, options=options, **how).seconds / MS == pytest.approx(want)


def test_rows_that_travel_longer_than_the_own_attention():
    """In a layer, 16 rows take a second at 512 bytes/s (K and V of a row have 32 bytes), and fp32 gradients take two."""
    planned = step(2, exchange="gather", links=replace(FREE, near=512.0))
    late = 2 * (1000 + 0.5 - 11 + 2000 + 0.25 - 22)
    averaged = 4 * 2500 / 512 * 1e3
    assert planned.exposed / MS == pytest.approx(late + averaged)
    assert planned.seconds / MS == pytest.approx(TWO + late + averaged)
    assert planned.received["forward", "near"] == 2 * 16 * 32 and planned.received["gradients", "near"] == 10_000


def test_nothing_crosses():
    planned = step(4, geometric(1))
    assert planned.exchange is None and planned.bytes() == (0, 0)
    assert planned.seconds / MS == pytest.approx(2 * 50 + OUTSIDE)


def test_gradients_in_buckets():
    """A single bucket is sent after the backward. If buckets overlap it, the step waits for the last bucket only."""
    large = machine(block_parameters=1 << 20, edge_parameters=0, depth=2)
    at_once, beside = (
        step(2, geometric(1), large, links=replace(FREE, near=1e9), bucket_cap_mb=x).exposed for x in (None, 1)
    )
    assert at_once == pytest.approx(8 * 2**20 / 1e9) and beside == pytest.approx(2**20 / 1e9)


def test_sharded_parameters_are_not_averaged():
    setup = replace(setup_of(2, replace(FREE, near=1.0)), strategy="ring_dilated_fsdp")
    assert step_on_ranks(machine(), [geometric(1)], 64, setup).exposed == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_bytes_are_the_plans(exchange, causal):
    """Bytes equal the mean of `planned.moved` over ranks, for each layer and pass."""
    ranks, per_node, model = 4, 2, machine(causal=causal)
    pattern = geometric(ranks)
    problem = make_problem(pattern, 64 * ranks, 2, 2, ranks=ranks, causal=causal)
    assert EXCHANGES[exchange].why_not(problem, per_node) is None
    planned = step(ranks, pattern, model, exchange=exchange, per_node=per_node)
    each = [moved(problem, exchange, rank, per_node, 8, 2) for rank in range(ranks)]
    for i, run in enumerate(("forward", "backward")):
        assert sum(planned.bytes(run)) == pytest.approx(2 * sum(x[i].received for x in each) / ranks)


BRANCHES = st.one_of(
    st.builds(
        lambda w, r, t: Branch(w, r, shift=t % w),
        st.sampled_from([4, 8, 12, 20, 64]),
        st.integers(1, 4),
        st.integers(0, 9),
    ),
    st.builds(Window, st.sampled_from([3, 8])),
    st.builds(Global, st.sampled_from([1, 5])),
)


@settings(max_examples=examples(60), deadline=None)
@given(
    branches=st.lists(BRANCHES, min_size=1, max_size=3), ranks=st.integers(2, 5), tokens=st.integers(5, 60),
    causal=st.booleans(), layout=st.sampled_from(["contiguous", "zigzag"]), group=st.sampled_from([1, 2]),
    exchange=st.sampled_from([None, "switch"]),
)  # fmt: skip
def test_work_is_the_definition(branches, ranks, tokens, causal, layout, group, exchange):
    """The ranks' pairs, with their own and with received rows, add up to the pairs of the pattern."""
    pattern, length = DilatedPattern(tuple(branches)), tokens
    problem = make_problem(pattern, length, 4, 2, ranks=ranks * group, causal=causal, layout=layout, head_size=group)
    if exchange is not None and EXCHANGES[exchange].why_not(problem, ranks):
        return
    total = 0
    for member in members_of(problem):
        for rank in range(problem.shard.ranks):
            work = work_of(member, exchange, rank)
            total += work.pairs + sum(pairs for pairs, _ in work.own.values())
    assert total == int(pattern.counts(length, 4, causal, 2).sum())


@pytest.mark.parametrize("exchange", [x for x in EXCHANGES if x != "auto"])
def test_slower_links_never_help(exchange):
    seconds_of = lambda links: step(8, exchange=exchange, per_node=4, links=links).seconds  # noqa: E731
    base = Links(near=1e6, far=1e5, round=1e-4, message=1e-4)
    slower = ("near", 0.5), ("far", 0.5), ("round", 2), ("message", 2)
    assert all(seconds_of(base) <= seconds_of(replace(base, **{name: getattr(base, name) * x})) for name, x in slower)


def test_zigzag_gives_ranks_equal_work():
    """In a dense causal pattern, the last of four contiguous shards would have 1.75 times the mean work."""
    dense, model = (
        DilatedPattern.dense(),
        machine(causal=True, arrive_forward=Line(0, 1e-5), arrive_backward=Line(0, 2e-5)),
    )
    contiguous, zigzag = (step(4, dense, model, layout=x, exchange="gather") for x in ("contiguous", "zigzag"))
    assert contiguous.uneven > 0.4 * contiguous.seconds and zigzag.uneven < 0.02 * zigzag.seconds
    assert zigzag.seconds < contiguous.seconds


def test_groups_trade_tokens_for_heads():
    """A head group of all ranks exchanges no rows. The time to trade tokens for heads follows from the bytes."""
    step_of = lambda size, near: step(2, geometric(2), links=replace(FREE, near=near), head_size=size)  # noqa: E731
    assert step_of(2, 1e30).exchange is None and step_of(1, 1e30).exchange is not None
    assert step_of(2, 1e6).compute["tokens for heads"] > 1e3 * step_of(2, 1e12).compute["tokens for heads"] > 0
    layer = layer_on_ranks(machine(), geometric(2), "auto", 64, setup_of(2, head_size="auto"))
    assert layer.forward["attention"].shape == (2,)


@pytest.mark.parametrize("head_size", ["auto", 1, 2])
def test_layers_of_other_groups(head_size):
    """If layers have rank groups of different sizes, times are added rank by rank."""
    cycle, setup = [DilatedPattern.dense(32), geometric(16)], setup_of(16, Links(), 4, head_size=head_size)
    model = machine(causal=True)
    joined = step_on_ranks(model, cycle, 64, setup)
    each = [step_on_ranks(model, [x], 64, setup) for x in cycle]
    assert min(x.seconds for x in each) <= joined.seconds <= max(x.seconds for x in each)


def test_a_pair_among_many_keys_and_its_row():
    """In a dense layer, `long_forward` is the time per pair, and a row takes at least no additional time."""
    slow = machine(long_forward=1e-7, long_backward=2e-7)
    forward, backward = attention_seconds(slow, 64)
    assert (forward.pair, backward.pair) == (1e-7, 2e-7)
    assert forward.of(2 * 3 * 16 * 64, 3 * 2 * 64) >= 0


def test_a_billion_tokens():
    begin = time.perf_counter()
    planned = step_on_ranks(
        machine(first=2048), [DilatedPattern.geometric(2048, 2**30)], 2**18, setup_of(4096, Links(), 8)
    )
    assert time.perf_counter() - begin < 20 and planned.seconds > 0 and planned.exchange is not None
