"""Memory of one rank: replicated and sharded parameters, offloaded parts, rows of other ranks."""

import functools
from dataclasses import replace

import pytest
import torch

from lightning_dilated.ext.planning.counting.footprint import exchanged, footprint
from lightning_dilated.ext.planning.counting.memory_tracker import (
    ACTIVATIONS,
    EXCHANGE,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
)
from lightning_dilated.ext.planning.counting.model_specs import counted_model_of
from lightning_dilated.ext.planning.estimate import Case, Facts
from lightning_dilated.ext.planning.gpus import GPUS
from lightning_dilated.ext.planning.memory import _static, bytes_moved_at_fit_end, memory
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.planner import make_problem

from .test_memory import lm

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def counted():
    return footprint(
        counted_model_of(lm(DilatedPattern.geometric(64, 1 << 14), depth=8), "bf16-mixed", MemorySettings("block")),
        (1024, 2048),
    )


def test_ddp_has_buckets(counted):
    one, two = (memory(counted, 1 << 14, x) for x in (Setup(), Setup("ring_dilated", data_ranks=2)))
    assert memory(counted, 1 << 14, Setup("ring_dilated")) == one  # a single rank averages with no other rank
    assert two.kinds[GRADIENTS] - one.kinds.get(GRADIENTS, 0) == one.kinds[PARAMETERS]
    assert {k: v for k, v in one.kinds.items() if k != GRADIENTS} == {
        k: v for k, v in two.kinds.items() if k != GRADIENTS
    }


def test_buckets_hold_the_gradients_whatever_their_size(counted):
    few, many = (memory(counted, 1 << 14, Setup("ring_dilated", 2, 2, bucket_cap_mb=x)) for x in (None, 1))
    assert few.kinds == many.kinds and few.peak == many.peak


def test_fsdp_deals_parameters(counted):
    whole = counted.parameters
    block = counted.blocks[0][0]
    x = memory(counted, 1 << 14, Setup("ring_dilated_fsdp", 4, 4))
    assert x.kinds[PARAMETERS] == -(-whole // 4) + 2 * block + (whole - 8 * block)
    assert x.kinds[OPTIMIZER] == -(-2 * whole // 4)


@pytest.mark.parametrize("offload", [False, True])
def test_the_output_projection_has_its_whole_gradient(offload):
    """From the head's backward on, the gradient is unsharded. FSDP reduces parameters outside of blocks at the end."""
    model = lm(vocab_size=4096, tie_embeddings=False)
    plan = footprint(counted_model_of(model, "bf16-mixed", MemorySettings("block")), (1024, 2048))
    setup, size = Setup("ring_dilated_fsdp", 4, 4, cpu_offload=offload), 4096 * 64 * 4
    parts = {m.part: m for m in plan.moments}
    gradients = [_static(plan, parts[part], setup)[GRADIENTS] for part in (("backward", 2), ("head",))]
    assert gradients[0] >= size and gradients[1] == 0


def test_cpu_offload_leaves_gathered_blocks(counted):
    """Gathered blocks stay on the GPU. The host pads parameters and gradients to powers of two, but not the states."""
    whole, block = counted.parameters, counted.blocks[0][0]
    edge = whole - 8 * block
    plain = memory(counted, 1 << 14, Setup("ring_dilated_fsdp", 4, 4))
    x = memory(counted, 1 << 14, Setup("ring_dilated_fsdp", 4, 4, cpu_offload=True))
    assert x.kinds[PARAMETERS] == 2 * block + edge + -(-block // 4) and OPTIMIZER not in x.kinds
    norm = 64 * 4  # the last norm's gradient is unsharded until the backward ends
    assert x.kinds.get(GRADIENTS, 0) in (0, 2 * block + -(-block // 4) + norm)
    assert x.kinds[ACTIVATIONS] == plain.kinds[ACTIVATIONS]
    assert plain.states == 0 and x.host == plain.host == 0
    model = lm(depth=8)
    model.configure_model()
    locked = lambda p: 1 << (-(-p.shape[0] // 4) * p[0].numel() * 4 - 1).bit_length()  # noqa: E731
    own = sum(locked(p) for p in model.parameters())
    assert x.states == 2 * own + 2 * -(-whole // 4)
    less = memory(counted, 1 << 14, Setup("ring_dilated_fsdp", 4, 4, "adamw8bit", cpu_offload=True))
    assert less.states < x.states


def test_host_memory_limits_cpu_offload():
    """If host memory is limited, block inputs may use the memory that the states leave."""
    model = lm(depth=8)
    subject = counted_model_of(model)
    setup = Setup("ring_dilated_fsdp", 2, 2, cpu_offload=True)
    case = functools.cache(lambda host: Case(subject, Facts.of(model, subject), setup, GPUS["H200"], host))
    states = case(0).memory(MemorySettings(), 4096).states / 2**30
    assert case(0).fits(MemorySettings(), 4096) and case(0).room == 0
    assert not case(states / 2).fits(MemorySettings(), 4096) and case(states / 2).room == 0
    assert case(states + 1).fits(MemorySettings(), 4096) and case(states + 1).room == pytest.approx(1)


def test_eight_bit_states(counted):
    numbers = counted.parameters // 4
    assert memory(counted, 4096, Setup(optimizer="adamw8bit")).kinds[OPTIMIZER] == round(numbers * (2 + 8 / 256))


@pytest.mark.parametrize("exchange", ["gather", "butterfly"])
def test_kept_rows_are_the_plans(exchange):
    pattern, n = DilatedPattern.geometric(64, 1 << 12), 1 << 12
    exchange_rows = exchanged(pattern, n, (4, 4, 16), True, 2, Setup("ring_dilated", 4, 4, exchange=exchange))
    problem = make_problem(pattern, n, 4, ranks=4, causal=True)
    assert exchange_rows.name == exchange
    assert exchange_rows.kept == max(EXCHANGES[exchange].volume(problem, r, 4).kept for r in range(4)) * 16 * 2 > 0


def test_kept_rows_by_policy():
    pattern = DilatedPattern.geometric(64, 1 << 14)
    under_way = lambda x: {0, x.exchange.forward, x.exchange.backward}  # noqa: E731 - outside of the op, or in it
    for name, layers in (("attention-kept", 8), ("block", 1)):
        plan = footprint(counted_model_of(lm(pattern, depth=8), "bf16-mixed", MemorySettings(name)), (1024, 2048))
        x = memory(plan, 1 << 14, Setup("ring_dilated", 4, 4))
        assert x.exchange.kept > 0 and x.kinds[EXCHANGE] - layers * x.exchange.kept in under_way(x)


@pytest.mark.parametrize("offload, every", [(0.5, 1), (1.0, 1), (1.0, 2), (0.0, 1)])
def test_host_memory_is_what_training_takes(offload, every):
    """Compare with the buffers that a real step allocates."""
    settings = MemorySettings("block", every, offload)
    model = lm(depth=4)
    model.configure_model()
    model.transformer.memory = settings
    tokens = torch.zeros(1, 256, dtype=torch.int64)
    model.token_mean({"tokens": tokens, "labels": tokens})[0].backward()
    plan = footprint(counted_model_of(lm(depth=4), "32-true", settings), (1024, 2048))
    assert memory(plan, 256).host == model.transformer._host.bytes


def test_what_lightning_moves_as_fit_ends():
    """Compare with the tensors that exist after a step."""
    model = lm()
    model.configure_model()
    plan = footprint(counted_model_of(model, "32-true", MemorySettings()), (1024, 2048))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(1, 256, dtype=torch.int64)
    model.token_mean({"tokens": tokens, "labels": tokens})[0].backward()
    optimizer.step()
    states = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    whole = sum(x.nbytes for x in (*model.parameters(), *(p.grad for p in model.parameters()), *states))
    assert bytes_moved_at_fit_end(plan, Setup()) == bytes_moved_at_fit_end(plan, Setup("ring_dilated", 4, 4)) == whole
    assert bytes_moved_at_fit_end(plan, Setup("ring_dilated_fsdp", 4, 4)) == -(-whole // 4)


def test_offloading_frees_the_gpu(counted):
    here = memory(counted, 1 << 18)
    subject = replace(counted.subject, memory=MemorySettings("block", offload=0.5))
    away = memory(replace(counted, subject=subject), 1 << 18)
    one = counted.hidden << 18
    assert away.host == 4 * one and here.peak - away.peak == 3 * one  # one copy is in transit
    assert here.kinds[ACTIVATIONS] == 8 * one and away.kinds[ACTIVATIONS] == 5 * one
    subject = replace(counted.subject, memory=MemorySettings("block", offload=1.0))
    all_away = memory(replace(counted, subject=subject), 1 << 18)
    assert all_away.host == 8 * one and all_away.kinds[ACTIVATIONS] == 2 * one  # one in use, the next in transit
    # the peak moves to the backward of the second block, when the gradients of six more blocks exist
    gradients = 6 * counted.blocks[0][0]
    assert all_away.moment == ("backward", 1) and here.moment == ("backward", 7)
    assert all_away.kinds[GRADIENTS] - here.kinds[GRADIENTS] == gradients
    assert here.peak - all_away.peak == 6 * one - gradients
