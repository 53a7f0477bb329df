"""FLOPs of a step: what torch's own counter finds in it."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_dilated import Branch, DilatedPattern
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models.transformer import step_flops

from . import batch, tiny


@pytest.mark.parametrize(
    "options", [{}, {"num_kv_heads": 2, "ffn": "gelu", "shift_layers": "odd"}, {"tie_embeddings": False}]
)
@pytest.mark.parametrize("training", [True, False])
def test_counted(options, training):
    model, given = tiny(dtype=torch.float32, **options), batch(2, 23)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
        losses = model.token_losses(given)
        if training:
            losses.sum().backward()
    assert step_flops(model, 46, [23, 23], training) == counter.get_total_flops()


@pytest.mark.parametrize(
    "trained", ["head", "transformer.blocks.1", "transformer.blocks.1.ffn", "transformer.blocks.0.attention"]
)
@pytest.mark.parametrize("tied", [True, False])
def test_frozen(trained, tied):
    """What is frozen gets no gradient, and what lies before all that is trained passes none on."""
    model, given = tiny(dtype=torch.float32, tie_embeddings=tied), batch(2, 23)
    model.requires_grad_(False).get_submodule(trained).requires_grad_(True)
    with FlopCounterMode(display=False) as counter:
        model.token_losses(given).sum().backward()
    assert step_flops(model, 46, [23, 23]) == counter.get_total_flops()


def test_documents_and_windows_of_heads():
    pattern = DilatedPattern([Branch(4, 1, heads=[0]), (16, 2)])  # windows of heads have unlike numbers of pairs
    model, given = tiny(pattern, dtype=torch.float32), batch(1, 23)
    given["cu_seqlens"] = torch.tensor([0, 5, 5, 23], dtype=torch.int32)
    want = step_flops(model, 23, [5, 0, 18])
    assert want < step_flops(model, 23, [23])
    for chunks, again in ((1, 0), (2, 1)):
        model.transformer.memory = MemorySettings(head_chunks=chunks)
        with FlopCounterMode(display=False) as counter:
            model.token_losses(given).sum().backward()
        projections = 2 * sum(b.attention.in_proj_weight.numel() for b in model.transformer.blocks) * 23
        assert counter.get_total_flops() == want + again * projections  # q, k and v are projected twice


def test_no_blocks():
    with pytest.raises(ValueError, match="Linear has no TransformerBlock"):
        step_flops(torch.nn.Linear(2, 2), 4, [4])
