"""Slide models in the plan: memory is exact for full steps and equals real steps on a CPU, and time."""

import functools
from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision

import lightning_dilated as ld
from lightning_dilated.ext.planning.counting.footprint import _lengths, footprint
from lightning_dilated.ext.planning.counting.memory_tracker import EXCHANGE, OPTIMIZER, PARAMETERS, Meter
from lightning_dilated.ext.planning.counting.model_specs import counted_model_of
from lightning_dilated.ext.planning.counting.workspace import workspace
from lightning_dilated.ext.planning.estimate import Facts, estimate, scaled
from lightning_dilated.ext.planning.gpus import GPUS
from lightning_dilated.ext.planning.memory import _decoder_away, _exchange, memory
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.pattern import DilatedPattern

from .test_memory import SETTINGS, check

pytestmark = pytest.mark.full

SIZES = {"dim": 64, "depth": 4, "num_heads": 4, "segment_lengths": [64, 128], "dilation_rates": [1, 2]}


def mae(**sizes):
    return ld.SlidePretrainer(
        **{**SIZES, "decoder_dim": 32, "decoder_depth": 3, "feature_dim": 96, "grid": 100, **sizes}
    )


def encoder(**sizes):
    return ld.SlideEncoder(
        **{**SIZES, "feature_dim": 96, "grid": 100, "task": "classification", "num_classes": 2, **sizes}
    )


MODELS = {"mae": mae, "encoder": encoder}


@functools.cache
def counted(precision="32-true", settings=None, decoder_depth=3):
    """Return the footprint of `mae`. It is cached."""
    return footprint(
        counted_model_of(mae(decoder_depth=decoder_depth), precision, settings or SETTINGS["none"]), (1024, 2048)
    )


# -- exact -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind, name, depth, precision, compiled", [
    pytest.param("mae", "none", 5, "bf16-mixed", False, marks=pytest.mark.slow),
    ("mae", "block", 5, "32-true", False),
    ("encoder", "none", 5, "bf16-true", False),
    pytest.param("encoder", "tiles", 4, "bf16-mixed", False, marks=pytest.mark.slow),
    ("encoder", "block", 4, "bf16-mixed", True),
    pytest.param("mae", "tiles", 4, "bf16-mixed", True, marks=pytest.mark.slow),
    pytest.param("mae", "attention-kept", 5, "bf16-mixed", True, marks=pytest.mark.slow),
    pytest.param("mae", "groups, tiles, heads", 8, "bf16-mixed", False, marks=pytest.mark.slow),
    pytest.param("encoder", "groups, tiles, heads", 8, "bf16-mixed", False, marks=pytest.mark.slow),
])  # fmt: skip
def test_depth_and_length_are_exact(kind, name, depth, precision, compiled):
    """Compare with a direct count of the full model. The decoder has three blocks at any depth."""
    check(counted_model_of(MODELS[kind](), precision, SETTINGS[name], compile_blocks=compiled), depth, 5120)


def test_a_decoder_like_the_encoder_has_its_own_graphs():
    """The decoder's blocks have tensors of the encoder's shapes, but without dropout, so their graphs differ."""
    check(counted_model_of(mae(decoder_dim=64, decoder_depth=1, dropout=0.1), "32-true", compile_blocks=True), 3, 5120)


# -- beside real steps -------------------------------------------------------------------------------------------------
def slide(tiles):
    at = torch.arange(tiles)
    coords = torch.cat([torch.full((1, 2), -1), torch.stack([at % 100, at // 100], 1) * 256])[None]
    lengths, index = torch.tensor([tiles + 1]), torch.zeros(1, dtype=torch.int64)
    return {"features": torch.randn(1, tiles + 1, 96), "coords": coords, "lengths": lengths, "index": index}


def labelled(tiles):
    return {k: v for k, v in slide(tiles).items() if k != "index"} | {"label": torch.zeros(1, dtype=torch.int64)}


@pytest.mark.parametrize("model, batch, tokens, tolerance", [
    (mae, lambda: slide(3999), 4000, 0.002),  # the hidden tiles are drawn at random
    (encoder, lambda: labelled(3999), 4000, 0.002),
])  # fmt: skip
def test_a_real_step_keeps_what_was_planned(model, batch, tokens, tolerance):
    """Compare with a meter over real tensors, with real masks and grids: the bytes after the forward."""
    plan = footprint(counted_model_of(model(), "32-true"), (3072, 5120))
    (between,) = (m for m in plan.moments if m.part == ("between",))
    net, data = model().train(), batch()
    net.configure_model()
    with Meter() as meter:
        parameters = meter.track(net.parameters(), PARAMETERS)
        loss, _ = net.token_mean(data)
        saved = meter.live - parameters
    assert loss.requires_grad and parameters == plan.parameters
    assert saved == pytest.approx(plan.held(between, tokens), rel=tolerance)


def test_hidden_states_by_stack():
    plan = counted("bf16-mixed")
    assert (plan.hidden, plan.inner) == (64 * 4, 32 * 2)  # autocast determines the dtype of the decoder's projection


@pytest.mark.parametrize("offload", [0.5, 1.0])
def test_host_memory_is_what_training_takes(offload):
    settings = MemorySettings("block", offload=offload)
    model = mae()
    model.configure_model()
    for stack in (model.transformer, model.decoder):
        stack.memory = settings
    model.token_mean(slide(255))[0].backward()
    plan = counted(settings=MemorySettings("block"))
    plan = replace(plan, subject=replace(plan.subject, memory=settings))
    assert memory(plan, 256).host == model.transformer._host.bytes + model.decoder._host.bytes


def lives(settings):
    """Return the bytes that are not offloaded when each decoder block starts, in forward and recomputation."""
    model = mae(decoder_depth=5)
    model.configure_model()
    for stack in (model.transformer, model.decoder):
        stack.memory = settings
    bytes_at, meter, phase = {}, Meter(), ["forward"]

    def note(number, attention, inputs):
        away = model.transformer._host.bytes + model.decoder._host.bytes
        bytes_at[phase[0], number] = meter.live - away

    for i, block in enumerate(model.decoder.blocks):
        block.attention.register_forward_pre_hook(partial(note, i))
    torch.manual_seed(0)
    data = slide(999)
    with meter:
        loss, _ = model.token_mean(data)
        phase[0] = "between"
        note(0, None, None)
        phase[0] = "backward"
        loss.backward()
    return bytes_at


@pytest.mark.parametrize(
    "offload, every",
    [(1.0, 1), (0.6, 1), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((0.2, 1), (0.4, 2), (1.0, 2)))],
)
def test_the_decoders_inputs_are_where_training_has_them(offload, every):
    """Decoder inputs are on the GPU or host as in a real step. If all encoder inputs are offloaded, the last is on both."""
    settings = MemorySettings("block", every, offload)
    here, away = lives(MemorySettings("block", every)), lives(settings)
    plan = counted(settings=MemorySettings("block", every), decoder_depth=5)
    plan = replace(plan, subject=replace(plan.subject, memory=settings))
    sizes, planned = (1000 * 64 * 4, 1000 * 32 * 4), {}
    for m in plan.moments:
        if (m.decoding and len(m.part) > 2) or m.part == ("between",):
            planned[m.part[1:] or ("between", 0)] = _decoder_away(plan, m, 1000)
    groups = -(-4 // every)
    sent = round(offload * groups)
    encoder = (sent - (sent == groups)) * sizes[0]
    saved = {key: here[key] - away[key] - encoder for key in here}
    assert len(saved) == 11 and saved == {key: planned[key] for key in saved}
    if offload == 1 and every == 1:
        assert [saved["backward", i] // sizes[1] for i in range(5)] == [0, 0, 1, 2, 3]
        assert [saved["forward", i] // sizes[1] for i in range(5)] == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("kind", MODELS)
def test_features_are_in_the_dtype_of_the_precision(kind, precision):
    batch = counted_model_of(MODELS[kind](), precision).batch(2048)
    want = HalfPrecision("bf16-true").convert_input({"x": torch.zeros(1)})["x"].dtype
    assert batch["features"].dtype == (want if precision == "bf16-true" else torch.float32)
    assert batch["features"].shape[1] == 2048


def test_slides_are_counted_at_whole_tiles():
    subject = counted_model_of(encoder(), memory=MemorySettings("block", tile=1000))
    low, high = _lengths(subject.memory)  # lengths at which `footprint` counts
    assert footprint(subject).sizes == (low, high)
    assert low % 1000 == high % 1000 == 0 and 4 * low == 3 * high


# -- what ranks hold ---------------------------------------------------------------------------------------------------
WIDE = {"segment_lengths": [64, 256, 1024, 4096], "dilation_rates": [1, 2, 4, 8]}


def test_exchanged_rows_of_both_stacks():
    plan = footprint(counted_model_of(mae(**WIDE), "32-true", MemorySettings("attention-kept")), (1024, 2048))
    x = memory(plan, 4096, Setup("ring_dilated", 4, 4))
    rows, inner = x.exchange, x.exchange.decoder
    assert x.kinds[EXCHANGE] > 0 and 0 < inner.kept == rows.kept // 2  # heads have half the width
    taken = {(*m.part, m.piece.op): _exchange(plan, m, rows) for m in plan.moments}
    all_rows = 4 * rows.kept + 3 * inner.kept
    assert taken["head", ""] == all_rows
    assert taken["decoder", "forward", 2, "forward"] == all_rows + inner.forward
    assert taken["decoder", "backward", 2, "backward"] == all_rows + inner.backward
    assert taken["backward", 3, "backward"] == 4 * rows.kept + rows.backward
    assert taken["forward", 0, "forward"] == rows.kept + rows.forward


def test_the_ops_room_is_that_of_its_stack():
    plan = counted("bf16-mixed")
    call, inner = replace(plan.subject.call, tokens=4096), replace(plan.subject.decoder.call, tokens=4096)
    assert (call.head_dim, inner.head_dim) == (16, 8) and inner.heads == 4
    backward = {m.decoding: m for m in plan.moments if m.piece.op == "backward"}
    assert plan.room(backward[True], inner) == workspace(inner)[1] < plan.room(backward[False], call)


def test_fsdp_deals_both_stacks():
    plan = counted()
    real, built = plan.parameters, mae()
    built.configure_model()
    block, inner = (sum(p.nbytes for p in s.blocks[0].parameters()) for s in (built.transformer, built.decoder))
    assert plan.subject.decoder.parameters * 4 == inner
    x = memory(plan, 4096, Setup("ring_dilated_fsdp", 4, 4))
    assert x.kinds[PARAMETERS] == -(-real // 4) + 2 * block + real - 4 * block - 3 * inner
    assert x.kinds[OPTIMIZER] == -(-2 * real // 4)


# -- time --------------------------------------------------------------------------------------------------------------
def facts(model):
    return Facts.of(model, counted_model_of(model))


PATTERN = DilatedPattern.longnet([64, 128], [1, 2])
COUNTED = {
    **MODELS,
    "lm": lambda: ld.LongNetLM(PATTERN, dim=64, depth=3, num_heads=4),
    "lm, tied": lambda: ld.LongNetLM(PATTERN, dim=64, depth=3, num_heads=4, tie_embeddings=True),
    "mlm": lambda: ld.LongNetMLM(PATTERN, vocab_size=8, mask_token=7, dim=64, depth=3, num_heads=4),
    "classifier": lambda: ld.LongNetClassifier(PATTERN, feature_dim=8, task="regression", dim=64, num_heads=4),
}


@pytest.mark.parametrize("kind", COUNTED)
def test_parameters_are_the_models(kind):
    model = COUNTED[kind]()
    assert facts(model).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("policy", ["none", "block"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_time_counts_both_stacks(policy, ranks):
    """A decoder of the encoder's width costs as much time and memory as adding its blocks to the encoder."""
    setup = Setup("ring_dilated", ranks, ranks)
    two_stacks = facts(mae(**WIDE, decoder_dim=64))
    alone = facts(mae(**WIDE, depth=7, decoder_depth=1)).stacks[0]
    two, one = (estimate(x, MemorySettings(policy), 4096, setup, GPUS["H200"]) for x in (two_stacks, alone))
    for kind in ("attention", "rest"):
        assert two.step.compute[kind] == pytest.approx(one.step.compute[kind]), kind
    assert two.step.bytes("forward", "again", "backward") == pytest.approx(
        one.step.bytes("forward", "again", "backward")
    )
    assert two.seconds > one.seconds and two.step.compute["edge"] > one.step.compute["edge"]


def test_settings_cost_of_both_stacks():
    model = facts(mae(decoder_dim=64, decoder_depth=4))
    seconds = [
        estimate(model, x, 1 << 18, Setup(), GPUS["H200"]).seconds
        for x in (SETTINGS["none"], SETTINGS["attention-kept"], SETTINGS["block"], SETTINGS["groups"])
    ]
    assert sorted(seconds) == seconds
    again = seconds[2] - seconds[0]  # for all blocks; groups of two add a whole forward for half of them
    whole = 0.0
    for machine in (scaled(x, GPUS["H200"]) for x in model.stacks):
        whole += (1 - machine.again) * machine.at(1 << 18).rest_forward * machine.depth / 2
    assert whole > 0 and seconds[3] - seconds[2] == pytest.approx(again / 2 + whole)


def test_features_cost_their_projection():
    few, many = (facts(encoder(feature_dim=n)) for n in (48, 3072))
    assert (few.vocab, many.vocab) == (48, 3072)
    few, many = (estimate(x, MemorySettings(), 1 << 17, Setup(), GPUS["H200"]) for x in (few, many))
    assert many.flops - few.flops == pytest.approx(6 * (1 << 17) * (3072 - 48) * 64) and many.seconds > few.seconds
