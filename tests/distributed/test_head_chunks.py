"""Chunks of heads on several ranks give one rank's results, with every exchange, and no row is sent twice."""

import pytest
import torch
from torch import Tensor

from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models.blocks import BlockOptions, TransformerBlock
from lightning_dilated.pattern import Branch, DilatedPattern

from .calls import positions, sequence

N, DIM = 32, 24
PATTERN = DilatedPattern.geometric(4, 32)
MIXED = DilatedPattern([Branch(6, 1, heads=[0, 1, 4]), Branch(12, 3, shift=5), (None, 2), Branch(20, 4, offset=1)])
WAYS = {
    "gather": (4, PATTERN, {"exchange": "gather"}),
    "ring": (3, MIXED, {"exchange": "ring"}),
    "butterfly": (4, PATTERN, {"exchange": "butterfly"}),
    "switch": (2, MIXED, {"exchange": "switch"}),
    "hierarchical": (4, MIXED, {"exchange": "hierarchical_gather", "ranks_per_node": 2}),
    "zigzag": (2, MIXED, {"layout": "zigzag"}),
    "head groups": (4, MIXED, {"head_size": 2}),
    "head groups, one kv head each": (4, PATTERN, {"head_size": 2, "exchange": "switch"}),
}


def block_of(pattern: DilatedPattern, chunks: int) -> tuple[TransformerBlock, Tensor]:
    """Return (a block of 6 heads and 3 kv heads, x (2, N, DIM))."""
    torch.manual_seed(0)
    options = BlockOptions(attention_dropout=0.2)
    block = TransformerBlock(DIM, 6, 16, pattern, num_kv_heads=3, causal=True, options=options).double()
    block.memory = MemorySettings(head_chunks=chunks, tile=None if chunks < 3 else 5)
    return block, torch.randn(2, N, DIM, dtype=torch.float64)


def results(block: TransformerBlock, x: Tensor) -> list[Tensor]:
    """Return the output, dx, and the gradients of the parameters."""
    torch.manual_seed(1)
    x = x.detach().requires_grad_()
    out = block(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])]


def on_ranks(rank, group, pattern, chunks, settings):
    """Return (results, positions, (bytes sent in the forward, in the backward)) of a rank."""
    block, x = block_of(pattern, chunks)
    with sequence(group, **settings) as ours, ours.active():
        at = positions(ours, N)
        outputs = results(block, x[:, at])
        return outputs, at, (ours.forward_traffic.sent, ours.backward_traffic.sent)


@pytest.mark.parametrize("way", WAYS)
def test_equal_to_one_rank_at_once(pool, way):
    ranks, pattern, settings = WAYS[way]
    want = results(*block_of(pattern, 1))
    sent = []
    for chunks in (1, 2, 3):
        outcomes = pool.run(ranks, on_ranks, pattern, chunks, settings)
        sent.append(torch.tensor([f[2] for f in outcomes]))
        at = torch.tensor([p for f in outcomes for p in f[1]]).argsort()
        for i, x in enumerate(want):
            parts = [f[0][i] for f in outcomes]
            got = torch.cat(parts, 1)[:, at] if i < 2 else sum(parts)
            torch.testing.assert_close(got, x, rtol=0, atol=1e-10)
    assert sent[0].sum(0).min() > 0
    assert torch.equal(sent[0].sum(0), sent[1].sum(0)) or "head" in way  # head groups split uneven chunks differently


def on_empty_shards(rank, group, settings):
    """Return (gradients of the parameters, number of tokens) of a rank, for a sequence of 2 tokens."""
    block, x = block_of(PATTERN, 2)
    with sequence(group, **settings) as ours, ours.active():
        return results(block, x[:, positions(ours, 2)])[2:], len(positions(ours, 2))


@pytest.mark.parametrize("settings", [{"exchange": "gather"}, {"exchange": "switch"}, {"head_size": 2}], ids=str)
def test_empty_shards(pool, settings):
    block, x = block_of(PATTERN, 1)
    want = results(block, x[:, :2])[2:]
    outcomes = pool.run(4, on_empty_shards, settings)
    assert sorted(f[1] for f in outcomes)[0] == 0
    for i, grad in enumerate(want):
        torch.testing.assert_close(sum(f[0][i] for f in outcomes), grad, rtol=0, atol=1e-10)
