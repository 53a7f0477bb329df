"""The blockwise executor: computes one block after another in torch, for every kind of call.

The forward merges each block into a running (out, lse). The backward needs no results of single branches, because with
the merged out and lse the flash-attention backward of each block computes its part of the exact gradient.
Shape letters: B batch, N tokens, H query heads, D head dim, G samples and segments, J heads and n rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_dilated._compat.cpython import avoid_frame_chunk_edge
from lightning_dilated.attention.backends import Request, for_band, for_rows
from lightning_dilated.attention.backends.base import Band, Engine, Terms, merge
from lightning_dilated.attention.dropout import BlockDropout, Dropout
from lightning_dilated.attention.executors.base import Call, attend_pads, empty_state
from lightning_dilated.attention.spans import RowViews, Span, add_rows, cell_view, joined
from lightning_dilated.pattern.rows import Block, window_band


@dataclass(frozen=True)
class Blockwise:
    """Executor that computes the blocks of `spans` one by one, with one part in memory at a time."""

    call: Call
    spans: tuple[Span, ...]

    def masked(self, mask: Dropout) -> Blockwise:
        return replace(self, call=replace(self.call, mask=mask))

    @avoid_frame_chunk_edge
    def forward(self, inputs: Sequence[Tensor], final: bool) -> tuple[Tensor, Tensor, None]:
        if final and (only := self._only(inputs)) is not None:
            return *_single_block(self.call, suited(self.call.engine, *inputs), *only), None
        out, lse = empty_state(inputs[0])
        self.merge(inputs, out, lse)
        return out, lse, None

    def merge(self, inputs: Sequence[Tensor], out: Tensor, lse: Tensor) -> None:
        """Merge all blocks into a running out (B, N, H, D) and lse (B, H, N), in place."""
        tensors = suited(self.call.engine, *inputs)
        views = RowViews(tensors)
        for span, block in self._walk(tensors):
            merge_block(out, lse, *block_forward(self.call, views, span, block), span, block)

    @avoid_frame_chunk_edge
    def backward(
        self, tensors: Sequence[Tensor], lse: Tensor, received: Tensor | None, total: list[Tensor] | None = None
    ) -> list[Tensor]:
        if total is None and (only := self._only(tensors[1:4])) is not None:
            parts = block_backward(self.call, RowViews(suited(self.call.engine, *tensors)), lse, *only)
            return [_rows_of(part, x) for part, x in zip(parts, tensors[1:4], strict=True)]
        total = total or [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in tensors[1:4]]
        tensors = suited(self.call.engine, *tensors)
        views = RowViews(tensors)
        for span, block in self._walk(tensors):
            _add(total, block_backward(self.call, views, lse, span, block), span, block)
        return total

    def _only(self, inputs: Sequence[Tensor]) -> tuple[Span, Block] | None:
        """Return the only block if it has every row of q and k, and thus gives the call's results; else None."""
        batch, seq_len, heads, _ = inputs[0].shape
        blocks = self.call.blocks(self.spans[0]) if len(self.spans) == 1 else ()
        if len(blocks) != 1 or heads != inputs[1].shape[2]:
            return None
        (span,), (block,) = self.spans, blocks
        has_all_rows = span.batches * block.query_rows == batch * seq_len * heads and block.keys is None
        return (span, block) if has_all_rows and 1 in (span.batches, block.segments) else None

    def _walk(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Span, Block]]:
        """Yield every (span, block) in a fixed order; split the samples if the strides require it."""
        for span in self.spans:
            for block in self.call.blocks(span):
                for part in joined(span, block, *tensors):
                    yield part, block


def suited(engine: Engine, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors; replace a tensor by a copy if the engine does not support its strides."""
    # clone, because .contiguous() would not copy a contiguous tensor at a misaligned address
    return [x if engine.takes_strides(x) else x.clone(memory_format=torch.contiguous_format) for x in tensors]


def _single_block(call: Call, inputs: Sequence[Tensor], span: Span, block: Block) -> tuple[Tensor, Tensor]:
    """Return (out (B, N, H, D), lse (B, H, N)) of a call with one block; `inputs` are q, k and v."""
    out, lse = block_forward(call, RowViews(inputs), span, block)
    lse = lse.unflatten(0, (span.batches, block.segments)).transpose(1, 2).flatten(2)
    return _rows_of(out, inputs[0]), lse.to(torch.promote_types(inputs[0].dtype, torch.float32))


def _rows_of(part: Tensor, like: Tensor) -> Tensor:
    """Convert a part (G, J, n, D) that has all rows to a contiguous tensor with the shape of `like`, (B, N, H, D)."""
    return part.transpose(1, 2).reshape(like.shape).contiguous()


def merge_block(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, span: Span, block: Block) -> None:
    """Merge a block's (G, J, n, D) output and (G, J, n) log-sum-exp into the running state, in place."""
    rows, rows_lse = cell_view(out, span, block), cell_view(lse.transpose(1, 2), span, block)
    part, part_lse = (x.unflatten(0, (span.batches, block.segments)) for x in (part, part_lse))
    total, weight, part_weight = merge(rows_lse, part_lse)
    rows.mul_(weight[..., None]).addcmul_(part.to(rows.dtype), part_weight[..., None])
    rows_lse.copy_(total)


def engine_of(call: Call, span: Span, block: Block, q: Tensor) -> tuple[Engine, Terms]:
    """Return the engine for a block, and its terms."""
    keep = call.mask and BlockDropout(call.mask, span, block, call.window.heads[0])
    causal = call.causal and block.keys is None
    if block.width is None:
        return for_rows(call.engine, min(block.rows, block.key_rows)), Terms(causal, call.scale, keep)
    band = Band(*window_band(call.window.pattern.branches[block.branch], call.causal))
    return for_band(call.engine, Request.of(q, call.mask is not None, call.scale)), Terms(
        causal, call.scale, keep, band
    )


def block_forward(call: Call, inputs: RowViews, span: Span, block: Block) -> tuple[Tensor, Tensor]:
    """Return a block's (G, J, n, D) output and (G, J, n) log-sum-exp from q, k, v (B, N, heads, D)."""
    q, k, v = inputs.of(span, block)
    engine, terms = engine_of(call, span, block, q)
    part, part_lse = engine.forward(q, k, v, terms)
    if block.pads and not call.causal:
        part, part_lse = attend_pads(part, part_lse, block.pads)
    return part, part_lse


def block_backward(
    call: Call, tensors: RowViews, lse: Tensor, span: Span, block: Block
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's parts of dq, dk, dv, (G, J, n, D) each; `tensors` are grad, q, k, v and the merged out."""
    views = tensors.of(span, block)
    rows_lse = cell_view(lse.transpose(1, 2), span, block).flatten(0, 1).contiguous()
    engine, terms = engine_of(call, span, block, views[1])
    return engine.backward(*views, rows_lse, terms)


def _add(total: Sequence[Tensor], parts: Sequence[Tensor], span: Span, block: Block) -> None:
    for x, part, kv in zip(total, parts, (False, True, True), strict=True):
        add_rows(x, part, span, block, kv)
