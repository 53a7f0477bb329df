"""Low-rank updates in the plan: exact for full steps, equal to real steps on a CPU, and their cost."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import lightning_dilated as ld
from lightning_dilated.ext.planning.candidates import candidates
from lightning_dilated.ext.planning.counting.footprint import footprint
from lightning_dilated.ext.planning.counting.memory_tracker import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS, Meter
from lightning_dilated.ext.planning.counting.model_specs import UPDATE_BACKWARD, UPDATE_FORWARD, counted_model_of
from lightning_dilated.ext.planning.estimate import Facts, estimate
from lightning_dilated.ext.planning.gpus import GPUS
from lightning_dilated.ext.planning.memory import memory
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.ext.pooled.pooled_model import add_lora
from lightning_dilated.memory.settings import MemorySettings

from .passes import Passes
from .test_memory import SETTINGS, check
from .test_slides import SIZES, labelled

pytestmark = pytest.mark.full

pytest.importorskip("peft")
H200 = GPUS["H200"]
TASK = {"task": "classification", "num_classes": 2, "dropout": 0.0, "drop_path": 0.0, "lora_rank": 2}


def encoder(**sizes):
    return ld.SlideEncoder(**{**SIZES, **TASK, "feature_dim": 96, **sizes})


def built(model, settings=None):
    model.configure_model()
    model.transformer.memory = settings or MemorySettings()
    return model.train()


def numbers(model, trained):
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trained)


# -- memory ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make, name, depth, precision", [
    (encoder, "none", 5, "bf16-mixed"),
    (encoder, "block", 5, "32-true"),
    (encoder, "attention-kept", 5, "bf16-true"),
    pytest.param(encoder, "tiles", 4, "bf16-mixed", marks=pytest.mark.slow),
    pytest.param(encoder, "groups", 8, "bf16-mixed", marks=pytest.mark.slow),
])  # fmt: skip
def test_length_is_exact(make, name, depth, precision):
    check(counted_model_of(make(), precision, SETTINGS[name]), depth, 5120)


@pytest.mark.parametrize("policy", ["none", "attention-kept", "block"])
def test_a_real_step_keeps_what_was_planned(policy):
    """Planned bytes after the forward, and of gradients after the backward, equal the bytes of real tensors."""
    settings = MemorySettings(policy)
    plan = footprint(counted_model_of(encoder(), "32-true", settings), (3072, 5120))
    between, last = (next(m for m in plan.moments if m.part == part) for part in (("between",), ("backward", 3)))
    model, data = built(encoder(), settings), labelled(3999)
    with Meter() as meter:
        parameters = meter.track(model.parameters(), PARAMETERS)
        loss, _ = model.token_mean(data)
        saved = meter.live - parameters
    loss.backward()
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert parameters == plan.parameters and gradients == plan.trained < 0.1 * parameters
    assert saved == pytest.approx(plan.held(between, 4000), rel=0.002)
    assert plan.held(last, 4000) > 0 and last.static - parameters < gradients


def test_states_and_buckets_are_of_what_is_trained():
    plan = footprint(counted_model_of(encoder(), "32-true", MemorySettings("block")), (1024, 2048))
    own = 4 * numbers(built(encoder()), True)
    one, two = (memory(plan, 4096, x) for x in (Setup(), Setup("ring_dilated", data_ranks=2)))
    assert one.kinds[OPTIMIZER] == 2 * own
    assert two.kinds[GRADIENTS] - one.kinds.get(GRADIENTS, 0) == own
    dealt = memory(plan, 4096, Setup("ring_dilated_fsdp", 4, 4))
    assert dealt.kinds[OPTIMIZER] == -(-2 * own // 4)


def test_states_on_the_host_are_of_what_is_trained():
    plan = footprint(counted_model_of(encoder(), "32-true"), (1024, 2048))
    model = built(encoder())
    locked = lambda p: 1 << (p.numel() * 4 - 1).bit_length()  # noqa: E731
    want = sum(locked(p) * (1 + p.requires_grad) for p in model.parameters()) + 8 * numbers(model, True)
    assert memory(plan, 4096, Setup("ring_dilated_fsdp", cpu_offload=True)).states == want


@pytest.mark.parametrize("offload, every", [(0.5, 1), (1.0, 1), (1.0, 2), (0.25, 1)])
def test_host_memory_is_what_training_takes(offload, every):
    """Compare host memory with training. The first block's input needs no gradient, and stays on the GPU."""
    settings = MemorySettings("block", every, offload)
    model = built(encoder(), settings)
    model.token_mean(labelled(255))[0].backward()
    here = footprint(counted_model_of(encoder(), "32-true", MemorySettings("block", every)), (1024, 2048))
    away = replace(here, subject=replace(here.subject, memory=settings))
    assert memory(away, 256).host == model.transformer._host.bytes
    at = [memory(x, 1 << 16).kinds[ACTIVATIONS] for x in (here, away)]
    left = max(0, round(offload * 4 / every) - 1)
    flying = 2 if left == 4 // every - 1 else 1  # copies in transit, to the host or back
    assert at[0] - at[1] == max(0, left - flying) * (here.hidden << 16)


# -- time --------------------------------------------------------------------------------------------------------------
def facts(**sizes):
    model = encoder(**sizes)
    return Facts.of(model, counted_model_of(model))


def test_flops_are_what_torch_counts():
    """Norms, biases, the head and products of updates' weights are not in the plan, but their share is below 1 %."""
    sizes = {"dim": 256, "depth": 3}
    model, data = built(encoder(**sizes)), labelled(2047)
    with FlopCounterMode(display=False) as counter:
        model.token_mean(data)[0].backward()
    low_rank, whole = (
        estimate(facts(**sizes, **x), MemorySettings(), 2048, Setup(), H200) for x in ({}, {"lora_rank": None})
    )
    assert low_rank.flops == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert low_rank.flops < 0.8 * whole.flops


def test_trained_numbers():
    model, of = built(encoder(lora_rank=3)), facts(lora_rank=3)
    assert (of.parameters, of.trained_parameters) == (numbers(model, False), numbers(model, True)) and not of.whole
    block = model.transformer.blocks[0]
    assert of.trained.block == numbers(block, True) and of.depth == 4
    update = 3 * (64 + 192)  # the joint projection's update: the gradient of the sum W + s B A is computed instead
    assert of.trained.gradients == of.trained.block - update + 192 * 64
    assert of.trained.weights == numbers(block, False) - update


@pytest.mark.filterwarnings("ignore:target_parameters=")
def test_passes_of_an_update():
    """Count the passes over memory that an update adds to the layer's own."""
    tokens, counts = 10007, []
    for lora in (False, True):
        layer = nn.ModuleDict({"fc1": nn.Linear(96, 160)}).requires_grad_(False)
        if lora:
            add_lora(layer, 1, 2.0)
        x = torch.randn(tokens, 96, requires_grad=True)
        with Passes(tokens) as forward:
            y = layer["fc1"](x)
        with Passes(tokens) as backward:
            y.backward(torch.ones_like(y))
        counts.append((forward.seen / tokens / 4, backward.seen / tokens / 4))
    for i, (into, out) in enumerate((UPDATE_FORWARD, UPDATE_BACKWARD)):
        assert counts[1][i] - counts[0][i] == pytest.approx(into * 96 + out * 160, rel=0.05)


def test_less_than_training_all():
    """Wide linear layers take less time, gradients and states less memory. The op's time does not change."""
    settings, setup = MemorySettings(), Setup("ring_dilated", 2, 2)
    sizes = {"dim": 2048, "num_heads": 16}
    own, whole = (estimate(facts(**sizes, **x), settings, 1 << 18, setup, H200) for x in ({}, {"lora_rank": None}))
    assert 0.7 * whole.step.compute["rest"] < own.step.compute["rest"] < whole.step.compute["rest"]
    assert own.step.compute["attention"] == whole.step.compute["attention"]
    assert own.step.bytes("gradients")[0] < 0.02 * whole.step.bytes("gradients")[0]
    assert own.step.compute["optimizer"] < 0.02 * whole.step.compute["optimizer"]


def test_no_windows_and_no_compiled_blocks():
    assert {x.head_chunks for x in candidates(facts().windows, 0.0, 4)} == {1}
    with pytest.raises(ValueError, match="low-rank updates are not compiled: if the model has"):
        counted_model_of(encoder(), compile_blocks=True)
