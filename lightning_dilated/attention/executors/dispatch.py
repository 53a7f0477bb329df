"""What a rank computes alone: its blocks, by Triton's combining kernels where they run, else merged one by one in torch.

Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dilated.attention.executors import fused, grouped
from lightning_dilated.attention.executors.blockwise import Call, add_blocks, empty_state, merge_blocks, suited
from lightning_dilated.attention.views import Span


def local_forward(
    call: Call, found: list[Span], inputs: tuple[Tensor, Tensor, Tensor], final: bool
) -> tuple[Tensor, Tensor]:
    """(out (B, N, H, D), lse (B, H, N)) of the blocks of q, k, v; zeros and -inf where none has a row.

    Where nothing is merged into out afterwards (`final`) it may come in q's dtype, else it is fp32 (fp64 for float64).
    """
    q = inputs[0]
    if not q.numel():  # no token or no head of this rank
        return empty_state(q)
    if (work := grouped.plan(call, found, q)) is not None:
        return grouped.forward(call, work, suited(call.engine, *inputs), final)
    if fused.serves(call.pattern, q):
        return fused.forward(call, found, suited(call.engine, *inputs), final)
    out, lse = empty_state(q)
    merge_blocks(call, found, suited(call.engine, *inputs), out, lse)
    return out, lse


def local_backward(
    call: Call, found: list[Span], tensors: tuple[Tensor, ...], lse: Tensor, total: list[Tensor]
) -> None:
    """Add the blocks' shares to `total` (dq, dk, dv); `tensors` are grad, q, k, v and the merged out."""
    if not tensors[1].numel():
        return
    if (work := grouped.plan(call, found, tensors[1])) is not None:
        grouped.backward(call, work, suited(call.engine, *tensors), lse, total)
        return
    add = fused.backward if fused.serves(call.pattern, tensors[1]) else add_blocks
    add(call, found, suited(call.engine, *tensors), lse, total)


def local_gradients(call: Call, found: list[Span], tensors: tuple[Tensor, ...], lse: Tensor) -> list[Tensor]:
    """dq, dk, dv where no other rank adds to them; they may come in the dtype of q, k and v."""
    inputs = tensors[1:4]
    if not inputs[0].numel():  # no token or no head of this rank
        return [torch.zeros_like(x) for x in inputs]
    if (work := grouped.plan(call, found, inputs[0])) is not None:
        return grouped.backward(call, work, suited(call.engine, *tensors), lse)
    if not fused.serves(call.pattern, inputs[0]):
        total = [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in inputs]
        local_backward(call, found, tensors, lse, total)
        return total
    return fused.backward(call, found, suited(call.engine, *tensors), lse)
