"""Memory settings under torch.compile: a stack that is traced as a whole, and pieces of many lengths."""

import pytest
import torch

from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models.transformer import DilatedTransformer

from .test_memory_settings import PATTERN, same

pytestmark = pytest.mark.full


@pytest.mark.parametrize("offload", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_groups_within_a_compiled_stack(offload):
    """torch.compile can trace checkpoints, but neither their contexts nor hooks on intermediate results."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        stack = DilatedTransformer(16, [PATTERN] * 4, 4, causal=True).double()
        stack.memory = MemorySettings("block", every=2, offload=offload)
        run = torch.compile(stack, backend="aot_eager") if compiled else stack
        x = torch.randn(2, 21, 16, dtype=torch.float64, requires_grad=True)
        results.append([*torch.autograd.grad(run(x).square().sum(), [x, *stack.parameters()])])
    same(*results)


@pytest.mark.slow
def test_compiled_pieces_of_many_lengths():
    """The last tile has a different size for each length, and a validation runs without gradients."""
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        stack = DilatedTransformer(16, [PATTERN] * 3, 4, causal=True).double()
        stack.memory = MemorySettings("block", tile=8, head_chunks=2)
        for block in stack.blocks if compiled else ():
            block.compile(fullgraph=True, backend="aot_eager")
        for i, length in enumerate((21, 40, 33, 1, 65, 7)):
            x = torch.randn(1 + i % 2, length, 16, dtype=torch.float64)
            stack.train()(x).square().sum().backward()
            with torch.no_grad():
                stack.eval()(x[:, : max(1, length - 3)])
        results.append([p.grad for p in stack.parameters()])
    same(*results)
