"""Seconds of a step, scaled from the measured machine, against measured steps, and consistent with each other."""

from dataclasses import replace

import pytest

import lightning_dilated as ld
from lightning_dilated.ext.planning.counting.footprint import lighter
from lightning_dilated.ext.planning.counting.model_specs import counted_model_of
from lightning_dilated.ext.planning.counting.workspace import OpCall
from lightning_dilated.ext.planning.estimate import (
    ADAMW_PASSES,
    BANDWIDTH,
    HOST_LINK,
    HOST_MEMORY,
    LOSS_FORWARD,
    PASSES,
    Facts,
    estimate,
    measured_machine,
    scaled,
)
from lightning_dilated.ext.planning.gpus import GPUS
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence.planner import DEFAULTS

pytestmark = pytest.mark.full

FIVE = DilatedPattern.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
H200, ONE = GPUS["H200"], Setup()


def facts(**sizes):
    model = ld.LongNetLM(FIVE, **{"dim": 768, "depth": 12, "num_heads": 12, **sizes})
    return Facts.of(model, counted_model_of(model))


MINE = facts()


def seconds(model=MINE, tokens=1 << 18, gpu=H200, setup=ONE, away=0, **settings):
    return estimate(model, MemorySettings(**settings), tokens, setup, gpu, away).seconds


def test_the_measured_model_is_not_scaled():
    base, rescaled = measured_machine(), scaled(MINE, H200)
    assert (rescaled.block_parameters, rescaled.edge_parameters) == (base.block_parameters, base.edge_parameters)
    for actual, theirs in zip(rescaled.parts, base.parts, strict=True):
        for name in vars(theirs):
            assert getattr(actual, name) == pytest.approx(getattr(theirs, name), rel=1e-12), name
    assert rescaled.optimizer == pytest.approx(base.optimizer)
    assert rescaled.arrive_backward == base.arrive_backward and rescaled.pack == base.pack


def test_a_machine_without_long_rows_prices_attention():
    """Fields for long rows are zero if they were not measured. In this case, pairs account for all of the attention."""
    base = replace(measured_machine(), long_forward=0.0, long_backward=0.0)
    for same, parts in zip(scaled(MINE, H200, base).parts, base.parts, strict=True):
        assert same.attention_forward == pytest.approx(parts.attention_forward)
        assert same.attention_backward == pytest.approx(parts.attention_backward)


def test_scales():
    """With twice the depth or width, no causal mask, or a different GPU, each part scales with its own quantity."""
    base, wide = measured_machine(), facts(dim=1536, num_heads=24)
    rescaled = scaled(wide, H200)
    products = wide.block_parameters / MINE.block_parameters
    assert 3.9 < products < 4.1
    linear = (1 - PASSES) * products + PASSES * 2
    assert rescaled.parts[0].rest_forward == pytest.approx(linear * base.parts[0].rest_forward)
    assert rescaled.parts[0].attention_backward == pytest.approx(2 * base.parts[0].attention_backward)
    assert rescaled.parts[0].edge_forward == pytest.approx(2 * base.parts[0].edge_forward)
    names = ("attention_forward", "attention_backward")
    # without the factor of a step, which long rows' pairs do not have
    alone = replace(base, parts=tuple(replace(p, **{x: getattr(p, x) / 1.11 for x in names}) for p in base.parts))
    open_ = scaled(replace(MINE, call=replace(MINE.call, causal=False)), H200, alone)
    rise = [getattr(open_.parts[1], x) / getattr(alone.parts[1], x) for x in names]
    assert 1.8 < rise[0] < 1.9 and 1.7 < rise[1] < 1.8  # twice the pairs and the same number of rows
    slow = scaled(MINE, GPUS["A100-80GB"])
    by_passes = (1 - PASSES) * 989.4 / 312 + PASSES * 4.8 / 2.039
    assert slow.parts[0].rest_backward == pytest.approx(by_passes * base.parts[0].rest_backward)
    assert slow.optimizer == pytest.approx(4.8 / 2.039 * base.optimizer)
    assert seconds(facts(depth=24)) == pytest.approx(2 * seconds(), rel=0.02)


def test_a_wide_vocabulary_costs_its_products_and_its_loss():
    wide_part = scaled(facts(vocab_size=1 << 17), H200).parts[1]
    base = measured_machine()
    rate = base.block_parameters / ((1 - PASSES) * base.parts[1].rest_forward)
    wide = (1 << 17) - 256
    loss = wide * base.parts[1].tokens * 2 * LOSS_FORWARD / BANDWIDTH
    assert wide_part.edge_forward == pytest.approx(base.parts[1].edge_forward + wide * 768 / rate + loss)


@pytest.mark.parametrize("dim, passes", [(768, False), (2048, True), (4096, True), (4096, False)])
@pytest.mark.parametrize("tokens", [1 << 16, 1 << 18, 1 << 20])
def test_a_head_takes_no_less_than_its_flops(dim, passes, tokens):
    """A head takes 1 to 2.5 times the time of its FLOPs. The upper bound includes a large loss."""
    words = 1 << 17
    model = facts(dim=dim, num_heads=dim // 64)
    wide, small = (replace(model, vocab=256 + x, logits=passes) for x in (words, 0))
    seconds = [estimate(x, MemorySettings(), tokens, ONE, H200).step.compute["edge"] for x in (wide, small)]
    least = 6 * dim * words * tokens / H200.flops
    assert least < seconds[0] - seconds[1] < least / 0.4


#: (width, vocabulary, tile size or None, measured ms), from benchmarks/results/2026-11-23_h200_one_gpu.md
LOSSES = [
    (768, 50304, None, 32.3),
    (768, 50304, 8192, 34.7),
    (768, 128256, 8192, 110.2),
    (4096, 50304, None, 128.0),
    (4096, 50304, 8192, 133.3),
    (4096, 128256, 8192, 381.2),
]


@pytest.mark.parametrize("dim, vocab, tile, ms", LOSSES)
def test_measured_losses(dim, vocab, tile, ms):
    """Compare the milliseconds that a word vocabulary adds to a step, relative to the bytes of 65,536 tokens."""
    model = facts(dim=dim, num_heads=dim // 64)
    wide, small = (
        estimate(replace(model, vocab=x), MemorySettings(tile=tile), 1 << 16, ONE, H200) for x in (vocab, 256)
    )
    assert (wide.seconds - small.seconds) * 1e3 == pytest.approx(ms, rel=0.12)


def test_settings_cost():
    base = seconds()
    kept_op, block = seconds(policy="attention-kept"), seconds(policy="block")
    assert base < kept_op < block < seconds(policy="block", every=2) < base + 2 * (block - base)
    # measured: 0.25 of 2.40 s at 1,048,576 tokens; without recomputation, tiles compute the feed-forward a second time
    tiles = seconds(policy="block", tile=4096) - block
    assert 0.05 * block < tiles < 0.12 * block and base + tiles < seconds(tile=4096) < block
    assert block < seconds(policy="block", head_chunks=4) < seconds(policy="block", every=2, head_chunks=4)


#: (sizes, settings, tokens, seconds), used for fitting the estimate; benchmarks/results/2026-11-22_h200_longest.md
BLOCK = MemorySettings("block")
FITTED = [
    ({}, BLOCK, 1048576, 2.47),
    ({}, replace(BLOCK, tile=32768), 1048576, 2.65),
    ({}, replace(BLOCK, tile=32768, head_chunks=4), 1048576, 3.09),
    ({}, replace(BLOCK, tile=32768, head_chunks=6), 3145728, 9.91),
    ({}, replace(BLOCK, tile=32768, head_chunks=4), 4980736, 14.79),
    ({"dim": 1024, "depth": 24, "num_heads": 16}, replace(BLOCK, every=2, tile=32768, head_chunks=8), 3670016, 39.03),
    ({"dim": 2048, "depth": 24, "num_heads": 16}, replace(BLOCK, every=2, tile=16384, head_chunks=8), 1703936, 48.85),
]


@pytest.mark.parametrize("sizes, settings, tokens, seconds", FITTED)
def test_stays_at_what_was_measured(sizes, settings, tokens, seconds):
    assert estimate(facts(**sizes), settings, tokens, ONE, H200).seconds == pytest.approx(seconds, rel=0.05)


def test_each_window_costs():
    seconds = [
        estimate(MINE, MemorySettings("block", head_chunks=n), 1 << 20, ONE, H200).seconds for n in (1, 2, 6, 12)
    ]
    assert sorted(seconds) == seconds and seconds[3] - seconds[2] > 5 * 12 * (1 << 20) * 768 * 2 * 12 / 4.8e12


def test_kept_attention_projects_windows_as_often_as_blocks():
    """Both policies project again in forward, recomputation and backward. "attention-kept" only saves the op."""
    kept_op, block = (seconds(policy=p, head_chunks=4) - seconds(policy=p) for p in ("attention-kept", "block"))
    assert kept_op == pytest.approx(block) and kept_op > seconds(head_chunks=4) - seconds()


def test_offloading_waits_for_the_link():
    block = estimate(MINE, MemorySettings("block"), 1 << 18, ONE, H200)
    some = estimate(MINE, MemorySettings("block"), 1 << 18, ONE, H200, away=int(block.seconds * HOST_LINK / 4))
    much = estimate(MINE, MemorySettings("block"), 1 << 18, ONE, H200, away=int(4 * block.seconds * HOST_LINK))
    assert some.seconds == block.seconds and some.hidden > 0 and some.exposed == pytest.approx(0)
    assert much.seconds == pytest.approx(8 * block.seconds) and much.exposed > 6 * block.seconds
    assert much.mfu * 8 == pytest.approx(block.mfu) and 0.2 < block.mfu < 0.6


def test_sharded_parameters_wait_where_little_is_computed():
    big = facts(dim=4096, num_heads=32, depth=4)
    few = estimate(big, MemorySettings(), 1 << 12, Setup("ring_dilated_fsdp", 8), H200)
    many = estimate(big, MemorySettings(), 1 << 20, Setup("ring_dilated_fsdp", 8), H200)
    assert few.exposed > 0.3 * few.seconds and many.exposed < 0.05 * many.seconds


@pytest.mark.parametrize("tokens", [1 << 12, 1 << 20])
def test_cpu_offload_takes_copies_and_an_optimizer_on_the_host(tokens):
    big = facts(dim=4096, num_heads=32, depth=4)
    dealt = Setup("ring_dilated_fsdp", 8)
    plain, host = (estimate(big, MemorySettings(), tokens, replace(dealt, cpu_offload=x), H200) for x in (False, True))
    assert host.optimizer == pytest.approx(7 * 4 * big.parameters / HOST_MEMORY) and plain.optimizer == 0
    added = host.seconds - plain.seconds - host.optimizer + plain.step.compute["optimizer"]
    copies = 3 * 4 * big.parameters / 8 / HOST_LINK
    if tokens == 1 << 20:  # the computation hides the copies, except the first block's
        assert host.hidden == pytest.approx(copies) and 0 < added < 0.1 * copies
    else:
        assert 0.8 * copies < added < 1.4 * copies
    assert host.exposed > host.optimizer


def test_buckets_of_gradients_are_the_setups():
    """A single bucket is sent after the backward. Smaller buckets overlap it, except for the first block's two."""
    model = replace(MINE, call=replace(MINE.call, pattern=DilatedPattern.dense(2048)))  # exchanges gradients only
    whole, parts = (
        estimate(model, MemorySettings(), 1 << 18, Setup("ring_dilated", 2, 2, bucket_cap_mb=x), H200)
        for x in (None, 25)
    )
    sums = lambda size: size / DEFAULTS.near + DEFAULTS.round + 2 * DEFAULTS.message  # noqa: E731
    assert whole.step.bytes("gradients") == parts.step.bytes("gradients") == (4 * model.parameters, 0)
    assert whole.exposed == pytest.approx(sums(4 * model.parameters))
    assert sums(25 * 2**20) < parts.exposed < 2 * sums(25 * 2**20)
    assert whole.seconds - parts.seconds == pytest.approx(whole.exposed - parts.exposed)


def test_many_ranks():
    """Planning for 64 ranks is fast, because many heads are merged into fewer, wider heads with the same bytes."""
    pattern = DilatedPattern.geometric(2048, 1 << 24)
    model = replace(MINE, call=replace(MINE.call, pattern=pattern))
    t = estimate(model, MemorySettings("block"), 1 << 24, Setup("ring_dilated", 64), H200)
    assert t.step.exchange in ("gather", "butterfly", "hierarchical_gather", "hierarchical_butterfly")
    call = OpCall(pattern, 64, 8, 128, True, 1)
    less = lighter(call, 64)
    assert (less.heads, less.kv_heads, less.head_dim) == (16, 2, 512) and lighter(call, 16) == call
    assert less.heads * less.head_dim == 64 * 128 and less.kv_heads * less.head_dim == 8 * 128


def test_both_stacks_step_on_the_host():
    """Offloading copies and updates the parameters of the encoder and of the decoder on the host."""
    model = ld.SlidePretrainer(depth=1, dim=96, num_heads=4, decoder_dim=192, decoder_depth=3)
    facts_of_model = Facts.of(model, counted_model_of(model, "32-true"))
    setup = Setup("ring_dilated_fsdp", cpu_offload=True)
    optimizer = estimate(facts_of_model, MemorySettings(), 4096, setup, H200).optimizer
    assert optimizer == pytest.approx(ADAMW_PASSES * facts_of_model.parameters * 4 / HOST_MEMORY)
    assert facts_of_model.parameters > 3 * facts_of_model.depth * facts_of_model.block_parameters
