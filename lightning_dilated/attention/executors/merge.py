"""The running merge of branches: (out, lse) so far, and one block's part, become (out, lse) by their log-sum-exp.

Shape letters: B batch, N tokens, H heads, D head dim; G samples and segments, J heads, n rows of a block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_dilated.attention.views import Span, cell_view
from lightning_dilated.pattern.rows import Block


def empty_state(q: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of no branch at all: zeros (B, N, H, D) and -inf (B, H, N), in fp32 (fp64 for float64 inputs)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, seq_len, heads, _ = q.shape
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    return out, torch.full((batch, heads, seq_len), -torch.inf, dtype=dtype, device=q.device)


def attend_pads(part: Tensor, part_lse: Tensor, pads: int) -> tuple[Tensor, Tensor]:
    """Let `pads` zero keys with zero values (score 0) into a block's softmax: out is scaled by exp(lse - lse')."""
    total = torch.logaddexp(part_lse, torch.full_like(part_lse, math.log(pads)))
    return part * torch.exp(part_lse - total).to(part.dtype)[..., None], total


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, span: Span, block: Block) -> None:
    """Merge a block's (G, J, n, D) output and (G, J, n) log-sum-exp into the running state, in place."""
    rows = cell_view(out, span, block)
    rows_lse = cell_view(lse.transpose(1, 2), span, block)
    part = part.unflatten(0, (span.batches, block.segments))
    part_lse = part_lse.unflatten(0, (span.batches, block.segments))
    total = torch.logaddexp(rows_lse, part_lse)
    rows.mul_(torch.exp(rows_lse - total)[..., None])
    rows.addcmul_(part.to(rows.dtype), torch.exp(part_lse - total)[..., None])
    rows_lse.copy_(total)
