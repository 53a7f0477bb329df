"""Memory of a step: against measured peaks, exact for full steps of other sizes, and by kind."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import lightning_dilated as ld
from lightning_dilated.ext.convolution import convolution
from lightning_dilated.ext.planning.candidates import candidates, recommended
from lightning_dilated.ext.planning.counting import dry_run as trial
from lightning_dilated.ext.planning.counting.compiled import Graphs
from lightning_dilated.ext.planning.counting.footprint import footprint
from lightning_dilated.ext.planning.counting.memory_tracker import OPTIMIZER, PARAMETERS, Tape
from lightning_dilated.ext.planning.counting.model_specs import counted_model_of
from lightning_dilated.ext.planning.estimate import Case, Facts, last_true
from lightning_dilated.ext.planning.gpus import find_gpu
from lightning_dilated.ext.planning.memory import memory
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.pattern import DilatedPattern

pytestmark = pytest.mark.full

GIB = 2**30
FIVE = DilatedPattern.longnet([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
SMALL = DilatedPattern.longnet([64, 128], [1, 2])


def lm(pattern=SMALL, **sizes):
    return ld.LongNetLM(pattern, **{"dim": 64, "depth": 3, "num_heads": 4, **sizes})


# -- measured ----------------------------------------------------------------------------------------------------------
BYTES = {"pattern": FIVE, "dim": 768, "depth": 12, "num_heads": 12}
SLIDES = {"task": "classification", "num_classes": 2, "dropout": 0.0, "drop_path": 0.0}
#: (model, compiled, strategy, policy): (tokens, GPUs, GiB), from benchmarks/results/2026-11-22_h200_speed.md,
#: 2026-11-22_h200_slides.md, and for "attention-kept" 2026-11-21_h200_speed.md
MEASURED = {
    ("bytes", True, "single", "none"): [(131072, 1, 40.9), (262144, 1, 80.2)],
    ("bytes", True, "single", "block"): [
        (262144, 1, 19.9),
        (1 << 20, 1, 76.3),
        (1572864, 1, 114.0),
        (1835008, 1, 132.8),
    ],
    ("bytes", True, "single", "attention-kept"): [(1 << 20, 1, 87.4)],
    ("slides", False, "ring_dilated", "none"): [(70001, 1, 39.0), (70002, 2, 21.0)],
    ("slides", False, "ring_dilated", "block"): [(70001, 1, 8.9)],
}


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: f"{case[0]}-{case[3]}")
def test_measured(case):
    """Errors must be at most 2.5 %, and the largest is 1.7 %. Measured GiB have up to three digits."""
    kind, compiled, strategy, policy = case
    model = ld.LongNetLM(**BYTES) if kind == "bytes" else ld.SlideEncoder(**SLIDES)
    plan = footprint(counted_model_of(model, memory=MemorySettings(policy), compile_blocks=compiled))
    for tokens, ranks, gib in MEASURED[case]:
        beside = 2 if strategy == "ring_dilated" else 1  # in these runs DDP also wrapped a single GPU
        peak = memory(plan, tokens, Setup(strategy, ranks, data_ranks=beside)).peak / GIB
        assert peak == pytest.approx(gib, rel=0.025), (tokens, ranks)


@pytest.mark.parametrize("compiled, each", [(True, 2 + 2), (False, 2 + 4 + 4)])
def test_bytes_of_a_logit(compiled, each):
    """A compiled loss stores 16-bit logits and gradients. An eager loss also stores an fp32 copy and the log-softmax."""
    words = 1 << 17
    plan = footprint(
        counted_model_of(lm(vocab_size=words), "bf16-mixed", MemorySettings("block"), compiled), (1024, 2048)
    )
    few, many = (memory(plan, tokens).peak for tokens in (1 << 14, 1 << 15))
    assert (many - few) / (words << 14) == pytest.approx(each, rel=0.01)


# -- exact -------------------------------------------------------------------------------------------------------------
SETTINGS = {
    "none": MemorySettings(),
    "attention-kept": MemorySettings("attention-kept"),
    "block": MemorySettings("block"),
    "groups": MemorySettings("block", 2),
    "tiles": MemorySettings("block", tile=1024),
    "groups, heads": MemorySettings("block", 2, head_chunks=2),
    "groups, tiles, heads": MemorySettings("block", 2, tile=1024, head_chunks=2),
    "tiles, all kept": MemorySettings(tile=1024),
}


def check(subject, depth, tokens):
    """Compare the footprint's integers with a full count of a step of another length."""
    subject = replace(subject, depth=depth)
    counted = footprint(subject, (3072, 4096))
    graphs = Graphs(Tape()) if subject.compile_blocks else None
    tape = trial.step(
        lambda: subject.make(depth), lambda: subject.batch(tokens), subject.precision, subject.memory, graphs
    )
    assert len(tape.pieces) == len(counted.moments) > 10
    for moment, piece in zip(counted.moments, tape.pieces, strict=True):
        assert (moment.part, moment.piece.op, moment.piece.heads) == (piece.part, piece.op, piece.heads)
        assert moment.static == piece.static
        assert counted.held(moment, tokens) == piece.peak - piece.static, piece


@pytest.mark.parametrize("name, depth, precision, compiled", [
    ("none", 5, "bf16-mixed", False),
    ("attention-kept", 5, "bf16-mixed", False),
    ("block", 5, "bf16-mixed", False),
    ("tiles", 4, "bf16-mixed", False),
    ("tiles", 4, "bf16-mixed", True),
    pytest.param("none", 4, "bf16-mixed", True, marks=pytest.mark.slow),
    pytest.param("groups", 8, "bf16-mixed", False, marks=pytest.mark.slow),
    pytest.param("groups, heads", 4, "32-true", False, marks=pytest.mark.slow),
    pytest.param("groups, tiles, heads", 8, "bf16-mixed", False, marks=pytest.mark.slow),
    pytest.param("tiles, all kept", 5, "bf16-mixed", False, marks=pytest.mark.slow),
])  # fmt: skip
def test_length_is_exact(name, depth, precision, compiled):
    check(counted_model_of(lm(num_kv_heads=2), precision, SETTINGS[name], compiled), depth, 5120)


LINEAR = {"kind": "linear", "segment": 256}
LAYERS = {
    "all have positions": {"rotary_base": [1e4]},
    "none has": {"rotary_base": ["none"]},
    "half have": {"rotary_base": ["none", 1e4]},
    "one of four has": {"rotary_base": ["none", 1e4, "none", "none"]},
    "all recur": {"recurrence": LINEAR},
    "every second recurs": {"recurrence": [None, LINEAR]},
    "the first of four recurs": {"recurrence": [LINEAR, None, None, None]},
    "both differ": {"recurrence": [LINEAR, None, None], "rotary_base": [1e4, "none"]},
}
QUICK = {
    ("both differ", "none", False),
    ("one of four has", "block", False),
    ("half have", "none", False),
    ("the first of four recurs", "block", False),
    ("all recur", "attention-kept", False),
}
WAYS = [*((x, False) for x in ("none", "block", "attention-kept", "groups")), ("attention-kept", True)]


@pytest.mark.parametrize("layers, settings, compiled", [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
    for case in ((layers, *way) for layers in LAYERS for way in WAYS)
])  # fmt: skip
def test_exact_where_layers_differ(layers, settings, compiled):
    """The footprint is exact for layers with different positions and recurrences."""
    model = lm(depth=6, num_kv_heads=2, **LAYERS[layers])
    subject = counted_model_of(model, "bf16-mixed", SETTINGS[settings], compiled)
    check(subject, 6, 5120)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_exact_with_kernels_of_convolutions(compiled, monkeypatch):
    """The op counts as on a GPU, where a layer saves the op's inputs and outputs, and no padded copy."""
    subject = counted_model_of(lm(kv_conv=4), "bf16-mixed", compile_blocks=compiled)
    with monkeypatch.context() as patch:
        patch.setattr(convolution, "unsupported", lambda *_: "serves nothing")
        by_torch = footprint(subject, (3072, 4096))
    check(subject, 4, 5120)
    by_kernels, row = footprint(subject, (3072, 4096)), 64 * 2
    saved = [x.saved(next(m for m in x.moments if m.part == ("head",)), 1 << 20) >> 20 for x in (by_kernels, by_torch)]
    # with kernels, the projection of q is saved as well, because the rows of q are slices of it
    assert saved[0] - saved[1] == 3 * row


def test_parameters_and_gradients_are_the_models():
    model = lm()
    plan = footprint(counted_model_of(model, "32-true"), (1024, 2048))
    real = sum(p.nbytes for p in lm().parameters())
    assert plan.parameters == real
    assert {m.static for m in plan.moments if m.part[0] == "forward"} == {2 * real}
    assert plan.hidden == 64 * 4


@pytest.mark.parametrize("precision, size", [("bf16-mixed", 4), ("bf16-true", 2), ("32-true", 4)])
def test_states_by_precision(precision, size):
    plan = footprint(counted_model_of(lm(), precision, MemorySettings("block")), (1024, 2048))
    kinds = memory(plan, 4096).kinds
    assert kinds[OPTIMIZER] == 2 * kinds[PARAMETERS] == 2 * size * sum(p.numel() for p in lm().parameters())


def test_settings_save_what_they_should():
    """At a length where activations dominate, each setting has a lower peak than the one before."""
    order = ["attention-kept", "block", "groups"]
    peaks = []
    for name in order:
        plan = footprint(counted_model_of(lm(depth=12), "bf16-mixed", SETTINGS[name]), (2048, 4096))
        peaks.append(memory(plan, 1 << 20).peak)
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3


TILES = MemorySettings("block", tile=1024)


# -- the longest -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("limit, most", [*itertools.product([0, 1, 2, 3, 7, 8, 1000], [1, 8, 100])])
def test_last_true(limit, most):
    assert last_true(lambda n: n <= limit, most) == min(limit, most)


def test_longest_fits_and_no_more():
    model = lm(FIVE, depth=4)
    subject = counted_model_of(model, "bf16-mixed")
    case = Case(subject, Facts.of(model, subject), Setup("ring_dilated", 2, 2), find_gpu("rtx 4090"))
    settings = MemorySettings("block")
    longest = case.longest(settings)
    assert longest % 2048 == 0 and case.fits(settings, longest) and not case.fits(settings, longest + 2048)
    assert recommended(case, [MemorySettings(), settings], longest) == settings
    assert recommended(case, [settings], 2 * longest) is None
    assert recommended(case, [MemorySettings(), settings], None) == settings


def test_longest_with_keys_of_all_ranks():
    """With dense attention a rank receives all other keys, and the longest sequence is far from both first guesses."""
    model = lm(DilatedPattern.dense(), depth=4)
    subject = counted_model_of(model, "bf16-mixed")
    case = Case(subject, Facts.of(model, subject), Setup("ring_dilated", 8, 8), find_gpu("rtx 4090"))
    settings = MemorySettings("block")
    longest = case.longest(settings)
    assert case.fits(settings, longest) and not case.fits(settings, longest + longest // 100)


def test_the_fastest_that_fits_is_recommended():
    """The recommended setting is the fastest that fits. In this test, copies to the host take no time."""
    seconds = {MemorySettings(): 1, MemorySettings("block"): 3, MemorySettings("block", offload=1): 2, TILES: 2}
    case = SimpleNamespace(
        fits=lambda x, tokens: x.policy == "block", time=lambda x, tokens: SimpleNamespace(seconds=seconds[x])
    )
    assert recommended(case, list(seconds), 1024) == MemorySettings("block", offload=1)


def test_candidates():
    settings = candidates(kv_heads=2, host=64.0, depth=12)
    assert settings[0] == MemorySettings() and len(settings) == len(set(settings))
    assert {x.head_chunks for x in settings} == {1, 2} and {x.offload for x in settings} == {0, 64.0}
    assert all(x.head_chunks == 1 and x.every == 1 and not x.offload for x in candidates(1, 0.0, 1))


def frozen():
    return ld.SlideEncoder(task="regression", freeze_encoder=True)


@pytest.mark.parametrize("call, says", [
    (lambda: Setup("ddp"), "strategy must be one of single, ring_dilated"),
    (lambda: Setup(ranks=2), "2 GPUs need strategy ring_dilated"),
    (lambda: Setup(optimizer="sgd"), "optimizer must be one of adamw"),
    (lambda: Setup(cpu_offload=True), "cpu_offload is an option of strategy ring_dilated_fsdp, not of single"),
    (lambda: Setup(bucket_cap_mb=25), "bucket_cap_mb is an option of strategy ring_dilated, not of single"),
    (lambda: Setup("ring_dilated", bucket_cap_mb=0), "bucket_cap_mb must be at least 1"),
    (lambda: find_gpu("V100"), "--gpu must be one of H200, H100"),
    (lambda: find_gpu("H200", 0), "--gpu-memory must be GiB"),
    (lambda: counted_model_of(ld.SlideEncoder()), "this SlideEncoder has no task"),
    (lambda: counted_model_of(frozen()), "the blocks of this SlideEncoder are frozen.* leave freeze_encoder out"),
    (lambda: counted_model_of(ld.DilatedModule()), r"DilatedModule must define example_batch\(tokens\)"),
])  # fmt: skip
def test_refused(call, says):
    with pytest.raises((ValueError, TypeError), match=says):
        call()


def test_not_within_a_device():
    with torch.device("cpu"), pytest.raises(RuntimeError, match="cannot be counted inside"):
        footprint(counted_model_of(lm()))
