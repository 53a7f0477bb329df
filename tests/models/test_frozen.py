"""Frozen parameters need no products in the backward, even in tiles and chunks of heads. Other gradients stay equal."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models.blocks import BlockOptions, TransformerBlock

from . import batch, tiny
from .test_memory_settings import PATTERN

E, HIDDEN, HEADS, KV, TOKENS = 16, 24, 4, 2, 42
PROJECTED = E + 2 * E // HEADS * KV  # number of rows in the joint projection of q, k and v
WAYS = [
    MemorySettings(),
    MemorySettings("block", tile=5),
    MemorySettings(head_chunks=2),
    MemorySettings("block", tile=5, head_chunks=2),
    MemorySettings("attention-kept", tile=5, head_chunks=2),
]
#: frozen parts -> their numbers of weights
PARTS = {
    "ffn": 3 * E * HIDDEN,
    "attention.in_proj_weight": PROJECTED * E,
    "attention.out_proj": E * E,
    "ffn.fc1": E * HIDDEN,
}


def block(memory):
    torch.manual_seed(0)
    options = BlockOptions(bias=True)
    module = TransformerBlock(E, HEADS, HIDDEN, PATTERN, causal=True, num_kv_heads=KV, options=options).double()
    module.memory = memory
    return module


def frozen(module, names):
    """Freeze the named parts of a module, and return the module."""
    for name, p in module.named_parameters():
        p.requires_grad_(not any(name == x or name.startswith(f"{x}.") for x in names))
    return module


def backward(module, loss):
    """Run a backward. Return (its FLOPs, {name: gradient})."""
    module.zero_grad()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return counter.get_total_flops(), {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def of_block(memory, names, x):
    """Build a block with frozen parts. Return (FLOPs of its backward, {name: gradient}), including the input's."""
    module = frozen(block(memory), names)
    x = x.clone().requires_grad_(x.requires_grad)
    flops, grads = backward(module, module(x).square().sum())
    return flops, grads | ({} if x.grad is None else {"x": x.grad})


def cheaper(memory, names, x, products):
    """Assert that freezing saves the products of this many weights and keeps all other gradients bit by bit.

    With several samples they may be rounded: whether torch's linear merges a tile's rows depends on a trained weight.
    """
    (all_of, want), (some, got) = of_block(memory, [], x), of_block(memory, names, x)
    assert all_of - some == 2 * TOKENS * products
    assert got.keys() == {n for n in want if not any(n == y or n.startswith(f"{y}.") for y in names)}
    near = 1e-12 if len(x) > 1 else 0
    for name, grad in got.items():
        torch.testing.assert_close(grad, want[name], rtol=near, atol=near)


#: with 2 samples torch's linear takes a different path; in CI only test_what_nothing_before_needs runs both numbers
SAMPLES = [1, pytest.param(2, marks=pytest.mark.slow)]


@pytest.mark.parametrize("memory", WAYS, ids=str)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("samples", SAMPLES)
def test_a_part_of_a_block(memory, part, samples):
    x = torch.randn(samples, TOKENS // samples, E, dtype=torch.float64, requires_grad=True)
    cheaper(memory, [part], x, PARTS[part])


@pytest.mark.parametrize("memory", WAYS, ids=str)
@pytest.mark.parametrize("samples", [1, 2])
def test_what_nothing_before_needs(memory, samples):
    """With a frozen embedding, gradients of q, k and v serve only the weights of the projection and of the norm."""
    x = torch.randn(samples, TOKENS // samples, E, dtype=torch.float64)
    cheaper(memory, ["attention_norm"], x, PROJECTED * E)
    cheaper(memory, ["attention.in_proj_weight"], x, PROJECTED * E)
    cheaper(memory, ["attention.in_proj_weight", "attention_norm"], x, 2 * PROJECTED * E)  # the bias is still trained
    cheaper(memory, ["attention.in_proj_bias"], x, 0)


@pytest.mark.parametrize("memory", [MemorySettings(), MemorySettings("block", tile=5)], ids=str)
def test_a_head(memory):
    results = []
    for names in ([], ["head"]):
        torch.manual_seed(0)
        model = frozen(tiny(PATTERN, tie_embeddings=False), names)
        model.transformer.memory = memory
        results.append(backward(model, model.token_losses(batch(1, TOKENS)).sum()))
    (all_of, want), (some, got) = results
    assert all_of - some == 2 * TOKENS * want["head.weight"].numel()
    assert want.keys() - got.keys() == {"head.weight"} and all(torch.equal(g, want[n]) for n, g in got.items())
