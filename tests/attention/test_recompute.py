"""Activation recomputation: full and selective checkpointing give the plain gradient. Selective runs the op once."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lightning_dilated as ld
from lightning_dilated.attention import op


@pytest.mark.parametrize(("keep", "runs"), [(False, 3), (True, 2)], ids=["recompute-all", "keep-the-op"])
def test_recomputed_block(keep: bool, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = ld.DilatedPattern.longnet([8, 32], [1, 2])
    project = torch.nn.Linear(16, 48)
    x = torch.randn(1, 40, 16, requires_grad=True)
    calls = []
    for name in ("run_forward", "run_backward"):
        run = getattr(op, name)
        monkeypatch.setattr(op, name, lambda *args, run=run: calls.append(args) or run(*args))

    def block(x: torch.Tensor) -> torch.Tensor:
        q, k, v = project(x).unflatten(-1, (3, 2, 8)).unbind(2)
        return ld.dilated_attention(q, k, v, pattern, causal=True, dropout=0.1).flatten(2).sin()

    torch.manual_seed(3)
    want = torch.autograd.grad(block(x).sum(), x)[0]
    calls.clear()
    saved = [torch.ops.lightning_dilated.attention.default]
    options = {"context_fn": partial(create_selective_checkpoint_contexts, saved)} if keep else {}
    torch.manual_seed(3)  # the recomputation has to use the same dropout seed
    got = torch.autograd.grad(checkpoint(block, x, use_reentrant=False, **options).sum(), x)[0]
    assert torch.equal(got, want)
    assert len(calls) == runs  # forward, then the forward again if it is recomputed, then backward
