"""Attention over the blocks of documents that this rank holds: strided views in, a running merge out.

Forward merges every block into a running (out, lse). Backward needs no branch's own result: with the merged out and lse,
each block's ordinary flash-attention backward gives its share of the exact gradient.

The running merge of branches: (out, lse) so far, and one block's part, become (out, lse) by their log-sum-exp.

Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim, G samples and segments, J heads, n rows of a
block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dilated.attention.backends import for_rows
from lightning_dilated.attention.backends.base import Engine
from lightning_dilated.attention.dropout import BlockDropout, Dropout
from lightning_dilated.attention.views import Span, add_rows, cell_view, joined, row_view
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import Block, blocks


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


@dataclass(frozen=True)
class Call:
    """What every block of one call shares.

    `heads` = (first, stop) are the query heads in the tensors, of `num_heads` in all; with `whole` only segments that a
    span holds whole are computed (the others are somebody else's). Rows that arrive from other ranks are merged by triton's
    forward itself up to `chained` (query, key) pairs of a head.
    """

    engine: Engine
    pattern: DilatedPattern
    num_heads: int
    num_kv_heads: int
    heads: tuple[int, int]
    causal: bool
    scale: float
    mask: Dropout | None = None
    whole: bool = False
    chained: float = 0.0


def suited(engine: Engine, *tensors: Tensor) -> list[Tensor]:
    """The tensors as they are where their strides suit the engine; a copy only of those that do not."""
    # clone, because .contiguous() would return a contiguous tensor at a misaligned address as it is
    return [x if engine.takes_strides(x) else x.clone(memory_format=torch.contiguous_format) for x in tensors]


def _walk(call: Call, found: list[Span], *tensors: Tensor) -> Iterator[tuple[Span, Block]]:
    """Every (span, block) of a call, branch blocks in a fixed order; samples are split where strides demand it."""
    for span in found:
        of = (call.pattern, span.document, call.num_heads, call.num_kv_heads, span.part, call.heads, call.whole)
        for block in blocks(*of):
            for part in joined(span, block, *tensors):
                yield part, block


def merge_blocks(call: Call, found: list[Span], inputs: list[Tensor], out: Tensor, lse: Tensor) -> None:
    """Merge the blocks of q, k, v (B, N, heads, D) into the running out (B, N, H, D) and lse (B, H, N)."""
    for span, block in _walk(call, found, *inputs):
        _merge_block(call, inputs, (out, lse), span, block)


def _merge_block(call: Call, inputs: list[Tensor], state: tuple[Tensor, Tensor], span: Span, block: Block) -> None:
    """One block's forward into the running (out, lse); its part is freed on return, before the next block runs."""
    merge_(*state, *block_forward(call, inputs, span, block), span, block)


def block_forward(call: Call, inputs: list[Tensor], span: Span, block: Block) -> tuple[Tensor, Tensor]:
    """A block's (G, J, n, D) output and (G, J, n) log-sum-exp from q, k, v (B, N, heads, D)."""
    q, k, v = (row_view(x, span, block, kv) for x, kv in zip(inputs, (False, True, True), strict=True))
    keep = call.mask and BlockDropout(call.mask, span, block, call.heads[0])
    part, part_lse = for_rows(call.engine, block.rows).forward(q, k, v, call.causal, call.scale, keep)
    if block.pads and not call.causal:
        part, part_lse = attend_pads(part, part_lse, block.pads)
    return part, part_lse


def add_blocks(call: Call, found: list[Span], tensors: list[Tensor], lse: Tensor, total: list[Tensor]) -> None:
    """Add the blocks' shares of dq, dk, dv to their totals; `tensors` are grad, q, k, v and the merged out."""
    for span, block in _walk(call, found, *tensors):
        _add_block(call, tensors, lse, total, span, block)


def _add_block(call: Call, tensors: list[Tensor], lse: Tensor, total: list[Tensor], span: Span, block: Block) -> None:
    """One block's share; its parts are freed on return."""
    parts = block_backward(call, tensors, lse, span, block)
    for x, part, kv in zip(total, parts, (False, True, True), strict=True):
        add_rows(x, part, span, block, kv)


def block_backward(
    call: Call, tensors: list[Tensor], lse: Tensor, span: Span, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    """A block's shares of dq, dk, dv, (G, J, n, D) each."""
    views = (row_view(x, span, block, kv) for x, kv in zip(tensors, (False, False, True, True, False), strict=True))
    rows_lse = cell_view(lse.transpose(1, 2), span, block).flatten(0, 1).contiguous()
    keep = call.mask and BlockDropout(call.mask, span, block, call.heads[0])
    return for_rows(call.engine, block.rows).backward(*views, rows_lse, call.causal, call.scale, keep)
