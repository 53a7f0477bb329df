"""Plans of models with hashed heads: memory equals real calls and steps on a CPU; parameters, FLOPs, and notes."""

import contextlib
import functools
from unittest import mock

import pytest
import torch

import lightning_dilated as ld
from lightning_dilated.ext.convolution import convolution
from lightning_dilated.ext.hashed import heads, lookup
from lightning_dilated.ext.hashed.op import HASHED, LossTerms, encode
from lightning_dilated.ext.planning.counting import hashed
from lightning_dilated.ext.planning.counting.footprint import footprint
from lightning_dilated.ext.planning.counting.hashed import (
    CarriedBytes,
    HashedSizes,
    entry_seconds,
    hashed_workspace,
    looked_up_share,
    sent_bytes,
)
from lightning_dilated.ext.planning.counting.memory_tracker import OPTIMIZER, PARAMETERS, Meter
from lightning_dilated.ext.planning.counting.model_specs import Facts, counted_model_of
from lightning_dilated.ext.planning.estimate import BANDWIDTH, Case
from lightning_dilated.ext.planning.gpus import find_gpu
from lightning_dilated.ext.planning.memory import memory
from lightning_dilated.ext.planning.plan import hashed_note
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models.transformer import step_flops

from ...models import batch
from ..planning.test_memory import SETTINGS, check
from . import cases
from .test_streams import Chunks

pytestmark = pytest.mark.full
SLOW = pytest.mark.slow


@pytest.fixture
def parts(monkeypatch):
    """Compute fewer entries at a time, so that bytes grow with tokens from a few thousand tokens on."""
    monkeypatch.setattr(lookup, "PART", 1 << 18)


def lm(layers=(1, 3), dim=64, latest=64, **options):
    sizes = {"depth": 4, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 4096, **options}
    heads = {"layers": list(layers), "soft_until": 512, "latest": latest} if layers else None
    return ld.LongNetLM(ld.DilatedPattern.longnet([64], [1]), 11, dim, hashed=heads, **sizes)


# -- memory ------------------------------------------------------------------------------------------------------------
CALLS = {
    "one head": (HashedSizes(1, 32, 1, 4, 16), torch.bfloat16, 64, 1),
    "two kv heads": (HashedSizes(4, 8, 2, 2, 8), torch.float32, 64, 1),
    "many rows": (HashedSizes(3, 16, 1, 3, 4), torch.float32, 300, 4),
}


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("name", [pytest.param(x, marks=SLOW if x == "many rows" else []) for x in CALLS])
def test_workspace_is_that_of_a_longer_call(name, kernels, parts):
    """An estimate from two short calls equals a longer call of the op with random tensors."""
    sizes, dtype, latest, probes = CALLS[name]
    tokens, terms = 5000, LossTerms((0.1, 1.0, 0.1, 0.1))
    spec = encode(latest, probes, 0.1, False)
    torch.manual_seed(0)
    rows = [torch.randn(1, tokens, n, sizes.head_dim, dtype=dtype) for n in (sizes.heads, *[sizes.kv_heads] * 2)]
    logits = [torch.randn(1, tokens, *sizes[2:]) for _ in range(2)]
    tensors = [x.requires_grad_() for x in (*rows, *logits, torch.zeros(sizes.heads))]
    terms.labelled, scale = torch.rand(1, tokens) < 0.9, torch.ones(())
    with Meter() as meter, hashed._kernels() if kernels else contextlib.nullcontext():
        meter.track([*tensors, terms.labelled, scale], PARAMETERS)
        out, _ = HASHED(*tensors, None, None, None, terms.number, spec)
        beside = meter.peak - meter.live
        grad, terms.scale = torch.ones_like(out), scale
        before = meter.live
        meter.reset_peak()
        grads = torch.autograd.grad(out, tensors, grad)
        peaks = beside, meter.peak - before - sum(x.nbytes for x in grads)
    capability = (9, 0) if kernels else (7, 0)
    for forward, peak in zip((True, False), peaks, strict=True):
        counted = hashed_workspace(forward, tokens, sizes, dtype, spec, Meter, capability)
        # kernels need less memory for lookups without rows, which are frequent if there are many codes
        least = 0.8 if kernels and sizes.codes**sizes.groups > 100 else 0.97
        assert least * counted < peak < 1.03 * counted, forward


@pytest.mark.parametrize(
    "policy", [pytest.param("none", marks=SLOW), "attention-kept", pytest.param("block", marks=SLOW)]
)
def test_a_real_step_takes_what_was_planned(policy, parts, monkeypatch):
    """Hashed heads add the planned bytes to the peak of a real step, if both compute convolutions without kernels."""
    monkeypatch.setattr(convolution, "unsupported", lambda *_: "serves nothing")
    settings, tokens, peaks = MemorySettings(policy), 4096, []
    for layers in ((), (1, 3)):
        planned = memory(
            footprint(counted_model_of(lm(layers), "32-true", settings, capability=(7, 0)), (3072, 5120)), tokens
        )
        model = lm(layers)
        model.configure_model()
        model.train()
        model.transformer.memory = settings
        with Meter() as meter:
            meter.track(model.parameters(), PARAMETERS)
            model.token_mean(batch(1, tokens))[0].backward()
        peaks.append((planned.peak - planned.kinds[OPTIMIZER], meter.peak))
    added, real = (b - a for a, b in zip(*peaks, strict=True))
    assert added == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("layers, name, compiled", [
    ((1, 3), "none", False),
    ((0,), "attention-kept", False),
    pytest.param((0, 1, 2, 3), "tiles", False, marks=SLOW),
    pytest.param((1, 3), "block", True, marks=SLOW),
    pytest.param((1, 3), "attention-kept", True, marks=SLOW),
])  # fmt: skip
def test_length_is_exact(layers, name, compiled):
    """`soft_until` is above the counted lengths, but the counted heads look up codes."""
    check(counted_model_of(lm(layers), "bf16-mixed", SETTINGS[name], compiled), 4, 5120)


def test_equal_layers_are_counted_once():
    pieces, calls = [], []
    for depth in (12, 6):
        subject = counted_model_of(lm(range(depth), depth=depth), "bf16-mixed", MemorySettings("block"), False)
        with mock.patch.object(heads, "HASHED", wraps=HASHED) as op:
            pieces.append(footprint(subject, (3072, 4096)).moments)
        calls.append(op.call_count)
    assert len(pieces[0]) > len(pieces[1]) and 0 < calls[0] == calls[1]


# -- parameters, FLOPs, time -------------------------------------------------------------------------------------------
KEPT, TOKENS = MemorySettings("attention-kept"), 1 << 18


@functools.cache
def case(layers=(), ranks=1, latest=64):
    model = lm(layers, 256, latest=latest)
    subject = counted_model_of(model, "bf16-mixed", None, False)
    return Case(subject, Facts.of(model, subject), Setup("ring_dilated", ranks), find_gpu("H200"))


def test_layers_that_differ():
    """Layers with and without hashed heads are counted separately."""
    none, half, whole = (case(layers) for layers in ((), (1, 3), (0, 1, 2, 3)))
    assert [x is not None for x in half.facts.hashed] == [False, True, False, True] and none.facts.hashed == ()
    for planned, layers in ((none, ()), (half, (1, 3)), (whole, (0, 1, 2, 3))):
        model = lm(layers, 256)
        model.configure_model()
        assert planned.facts.parameters == sum(p.numel() for p in model.parameters())
    assert none.facts.block_parameters == half.facts.block_parameters == whole.facts.block_parameters
    peaks = [x.memory(KEPT, TOKENS).peak for x in (none, half, whole)]
    assert peaks[0] < peaks[1] < peaks[2]
    seconds = [x.time(KEPT, TOKENS).step.compute.get("hashed heads", 0.0) for x in (none, half, whole)]
    assert seconds[0] == 0 < seconds[1] == pytest.approx(seconds[2] / 2)
    layer = half.facts.hashed[1]
    moved = 2 * TOKENS * (2 * layer.forward.moved + layer.backward.moved) / BANDWIDTH
    lookups = 2 * 3 * TOKENS * sum(entry_seconds(layer.description, layer.sizes, False))
    assert seconds[1] - lookups == pytest.approx(moved, rel=0.3) and layer.forward.moved > 0


MEASURED = HashedSizes(1, 64, 1, 4, 16)


def test_lookups_take_the_measured_time():
    """See benchmarks/results/2026-11-28_h200_hashed.md: a backward in a layer computes the forward, too."""
    for shared, seconds in ((False, (2.59e-3, 9.44e-3)), (True, (9.08e-3, 25.06e-3))):
        seconds_of = functools.partial(entry_seconds, shared=shared)
        forward, backward = (3 * 2**20 * x for x in seconds_of(ld.Hashed(), MEASURED))
        assert (forward, backward) == pytest.approx(seconds)
        more = [
            seconds_of(*x) for x in ((ld.Hashed(latest=128), MEASURED), (ld.Hashed(), MEASURED._replace(head_dim=128)))
        ]
        assert all(3 * 2**20 * x[0] > 1.1 * forward and 3 * 2**20 * x[1] > 1.1 * backward for x in more)


def seconds_of_hashed(planned, tokens):
    return planned.time(KEPT, tokens).step.compute["hashed heads"]


def test_time_grows_with_tokens_rows_and_ranks():
    one, layer = case((1, 3)), case((1, 3)).facts.hashed[1]
    assert seconds_of_hashed(one, 2 * TOKENS) == pytest.approx(2 * seconds_of_hashed(one, TOKENS), rel=0.05)
    assert seconds_of_hashed(case((1, 3), latest=640), TOKENS) > 1.5 * seconds_of_hashed(one, TOKENS)
    for ranks, link in ((4, "near"), (16, "far")):
        shared = case((1, 3), ranks)
        sent = sent_bytes(layer.description, layer.sizes, layer.dtype, TOKENS, 2 * TOKENS, ranks)
        slower, faster = (sum(entry_seconds(layer.description, layer.sizes, x)) for x in (True, False))
        added = seconds_of_hashed(shared, ranks * TOKENS) - seconds_of_hashed(one, TOKENS)
        added -= 2 * 3 * TOKENS * (slower - faster)
        most = 2 * sum(sent) / getattr(shared.setup.links, link)
        assert 0.5 * most < added <= 1.001 * most


def test_streams_take_longer_for_carried_rows():
    """Chunks compute rows of earlier chunks, which take memory, too."""
    settings, tokens = MemorySettings("block", stream=1 << 16), 1 << 20
    none, few, many = case(), case((1, 3), latest=1), case((1, 3), latest=64)
    less, more = (x._carried_lookups(settings, tokens, 2.0) for x in (few, many))
    layer = few.facts.hashed[1]
    share = looked_up_share(layer.description, 1 << 16)
    assert share == pytest.approx(1 - 1 / 7.389, rel=1e-3)  # two lookups for each code
    forward, backward = (2 * 15 * 2**16 * share * x for x in entry_seconds(layer.description, layer.sizes, True))
    assert less == pytest.approx((2 + 14 / 15) * forward + backward) and more > 5 * less
    assert none._carried_lookups(settings, tokens, 2.0) == 0
    assert many.time(settings, tokens).seconds > few.time(settings, tokens).seconds + more - less
    assert case((1, 3), 4)._carried_lookups(settings, tokens, 2.0) < more
    peaks = [x.memory(settings, tokens).peak for x in (few, many)]
    sizes = [
        CarriedBytes.of(x.facts.hashed[1].description, layer.sizes, layer.dtype, tokens, 1 << 16) for x in (few, many)
    ]
    assert peaks[1] - peaks[0] == sum(
        n * (2 * (x.live + x.grads + x.stored) + x.moved) for n, x in zip((-1, 1), sizes, strict=True)
    )


@pytest.mark.parametrize("latest", [3, 1000])
def test_carried_bytes_are_those_of_a_stream(latest):
    """With 4 codes that occur often, a stream carries all the rows that it may carry."""
    calls = cases.Case((400,), latest=latest, dim=8, dtype=torch.float32)
    chunks = Chunks(calls, 50)
    with torch.no_grad():
        for i in range(8):
            chunks.attend(calls.tensors(), i)
    carry = chunks.stream.hashed_of(0)
    planned = CarriedBytes.of(
        ld.Hashed(groups=2, codes=2, latest=latest, probes=1), HashedSizes(2, 8, 1, 2, 2), torch.float32, 400, 50
    )
    stored = sum(part.nbytes for *_, parts in carry._replaced for x in parts for part in x)
    assert (planned.live, planned.stored) == (carry.rows.nbytes, stored)


def test_flops_are_those_of_a_step():
    """The plan and `step_flops` count the same products and lookups of hashed heads."""
    planned, counted = [], []
    for layers in ((), (1, 3)):
        model = lm(layers, 256)
        model.configure_model()
        planned.append(case(layers).time(KEPT, TOKENS).flops)
        counted.append(step_flops(model, TOKENS, [TOKENS]))
    assert planned[1] - planned[0] == counted[1] - counted[0]


def test_the_note_says_what_is_not_counted():
    note, layer = hashed_note(case((1, 3))), case((1, 3)).facts.hashed[1]
    assert "layer(s) 1, 3" in note and f"{6 * layer.lookups:.3g} FLOPs of lookups a token of a step" in note
    assert "memory of rows that ranks exchange is not counted" in note
    assert "all layers" in hashed_note(case((0, 1, 2, 3))) and hashed_note(case()) is None
