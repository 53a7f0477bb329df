"""Hooks on weights run once, with the sum of the gradients of all tiles and chunks of heads."""

import pytest
import torch

from lightning_dilated.memory.settings import MemorySettings

from . import batch, tiny
from .test_memory_settings import PATTERN, SETTINGS, same


def hooked(model, data, chosen, factor):
    """Return (gradients of the mean loss, number of calls of each weight's hook). The hooks multiply by `factor`."""
    model.transformer.memory = chosen
    model.zero_grad()
    calls = dict.fromkeys(dict(model.named_parameters()), 0)

    def add(name, p):
        def hook(grad):
            calls[name] += 1
            return factor * grad

        return p.register_hook(hook)

    handles = [add(name, p) for name, p in model.named_parameters()]
    total, count = model.loss_terms(data)
    (total / count).backward()
    for handle in handles:
        handle.remove()
    return [p.grad.clone() for p in model.parameters()], calls


@pytest.mark.parametrize("options", [{}, {"tie_embeddings": False}], ids=["tied", "untied"])
@pytest.mark.parametrize("chosen", SETTINGS.values(), ids=SETTINGS)
def test_a_hook_sees_the_whole_gradient_once(chosen, options):
    model, data = tiny(PATTERN, num_kv_heads=2, depth=3, **options), batch(1, 21)
    want, _ = hooked(model, data, MemorySettings(), 1.0)
    for factor in (3.0, 1.0):  # hooks of the first round are removed for the second
        grads, calls = hooked(model, data, chosen, factor)
        same(grads, [factor * x for x in want])
        assert set(calls.values()) == {1}


def test_hooks_are_there_after_a_failed_backward():
    model, data, grads = tiny(PATTERN, torch.float64, depth=1), batch(1, 21), []
    model.transformer.memory = MemorySettings(tile=7)
    weight = model.transformer.blocks[0].ffn.fc2.weight
    weight.register_hook(grads.append)

    def fail(module, inputs, out):
        if out.requires_grad:  # only when the backward recomputes the block
            out.register_hook(lambda grad: 1 / 0)

    failing = model.transformer.blocks[0].ffn.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model.token_losses(data).sum().backward()
    failing.remove()
    assert not grads
    model.token_losses(data).sum().backward()
    assert len(grads) == 1
