"""The one op, registered with torch: forward, backward, shapes for tracing, autograd and FLOPs.

Forward runs every branch block by block and merges it into a running (out, lse). Backward needs no branch's own result:
with the merged out and lse, each block's ordinary flash-attention backward gives its share of the exact gradient.
Saved for backward: q, k, v, out, lse, whatever the number of branches.
Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_dilated.attention.dropout import BlockDropout, Dropout
from lightning_dilated.attention.engines import Request, choose, for_rows
from lightning_dilated.attention.engines.base import Engine
from lightning_dilated.attention.merge import attend_pads, empty_state, merge_
from lightning_dilated.attention.views import Span, add_rows, cell_view, joined, row_view, spans
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.definition import check_bounds
from lightning_dilated.pattern.rows import Block, blocks, check_padding

NAME = "lightning_dilated::attention"


def _documents(q: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, pattern: DilatedPattern) -> list[Span]:
    """The spans of a call, after the checks that need values and not only shapes."""
    batch, seq_len = q.shape[:2]
    if lengths is not None and batch:
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > seq_len:
            raise ValueError(f"lengths must lie in 0..{seq_len} (the padded length), got values from {low} to {high}.")
    if cu_seqlens is not None:
        check_bounds(cu_seqlens.tolist(), seq_len)
    found = spans(batch, seq_len, lengths, cu_seqlens)
    for length in {s.length for s in found}:
        check_padding(pattern, length)
    return found


def _walk(
    found: list[Span], pattern: DilatedPattern, num_heads: int, kv_heads: int, *tensors: Tensor
) -> Iterator[tuple[Span, Block]]:
    """Every (span, block) of a call, branch blocks in a fixed order; samples are split where strides demand it."""
    for span in found:
        for block in blocks(pattern, span.length, num_heads, kv_heads):
            for part in joined(span, block, *tensors):
                yield part, block


def _suited(engine: Engine, *tensors: Tensor) -> list[Tensor]:
    """The tensors as they are where their strides suit the engine; a copy only of those that do not."""
    # clone, because .contiguous() would return a contiguous tensor at a misaligned address as it is
    return [x if engine.takes_strides(x) else x.clone(memory_format=torch.contiguous_format) for x in tensors]


def _dropout(p: float, seed: Tensor | None) -> Dropout | None:
    return Dropout(p, int(seed)) if p > 0 and seed is not None else None


def _merge_block(
    engine: Engine,
    inputs: tuple[Tensor, Tensor, Tensor],
    state: tuple[Tensor, Tensor],
    span: Span,
    block: Block,
    causal: bool,
    scale: float,
    mask: Dropout | None,
) -> None:
    """One block's forward into the running (out, lse); its part is freed on return, before the next block runs."""
    q, k, v = (row_view(x, span, block, kv) for x, kv in zip(inputs, (False, True, True), strict=True))
    keep = mask and BlockDropout(mask, span, block)
    part, part_lse = for_rows(engine, block.rows).forward(q, k, v, causal, scale, keep)
    if block.pads and not causal:
        part, part_lse = attend_pads(part, part_lse, block.pads)
    merge_(*state, part, part_lse, span, block)


def _add_block(
    engine: Engine,
    saved: tuple[Tensor, ...],
    total: list[Tensor],
    span: Span,
    block: Block,
    causal: bool,
    scale: float,
    mask: Dropout | None,
) -> None:
    """One block's share of dq, dk and dv into their totals; its parts are freed on return."""
    *tensors, lse = saved
    views = (row_view(x, span, block, kv) for x, kv in zip(tensors, (False, False, True, True, False), strict=True))
    rows_lse = cell_view(lse.transpose(1, 2), span, block).flatten(0, 1).contiguous()
    keep = mask and BlockDropout(mask, span, block)
    parts = for_rows(engine, block.rows).backward(*views, rows_lse, causal, scale, keep)
    for x, part, kv in zip(total, parts, (False, True, True), strict=True):
        add_rows(x, part, span, block, kv)


@torch.library.custom_op(NAME, mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    pattern: str,
    causal: bool,
    scale: float,
    dropout: float,
    engine: str,
    sequence: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out (B, N, H, D), lse (B, H, N), received rows): `pattern` is `DilatedPattern.code`, `sequence` a group's name.

    On one rank `sequence` is "" and nothing is received; the third result is then empty.
    """
    if sequence:
        raise ValueError(f"sequence={sequence!r} names no group: this version computes attention on one rank only.")
    who = DilatedPattern.decode(pattern)
    found = _documents(q, lengths, cu_seqlens, who)
    out, lse = empty_state(q)
    if q.numel() == 0:
        return out.to(q.dtype), lse, q.new_empty(0)
    chosen = choose(engine, Request.of(q, dropout, scale)).engine
    q, k, v = _suited(chosen, q, k, v)
    mask = _dropout(dropout, seed)
    for span, block in _walk(found, who, q.shape[2], k.shape[2], q, k, v):
        _merge_block(chosen, (q, k, v), (out, lse), span, block, causal, scale, mask)
    return out.to(q.dtype), lse, q.new_empty(0)


@attention.register_fake
def _(q, k, v, lengths, cu_seqlens, seed, pattern, causal, scale, dropout, engine, sequence):
    batch, seq_len, heads, _ = q.shape
    lse = q.new_empty((batch, heads, seq_len), dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse, q.new_empty(0)


@torch.library.custom_op(NAME + "_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    pattern: str,
    causal: bool,
    scale: float,
    dropout: float,
    engine: str,
    sequence: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from the gradient of out and the merged out and lse."""
    who = DilatedPattern.decode(pattern)
    wide = torch.promote_types(q.dtype, torch.float32)
    total = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v)]
    if q.numel():
        chosen = choose(engine, Request.of(q, dropout, scale)).engine
        q, k, v, out, grad = _suited(chosen, q, k, v, out, grad)
        found = _documents(q, lengths, cu_seqlens, who)
        mask = _dropout(dropout, seed)
        for span, block in _walk(found, who, q.shape[2], k.shape[2], q, k, v, out, grad):
            _add_block(chosen, (grad, q, k, v, out, lse), total, span, block, causal, scale, mask)
    return total[0].to(q.dtype), total[1].to(k.dtype), total[2].to(v.dtype)


@attention_backward.register_fake
def _(grad, q, k, v, *rest):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, lengths, cu_seqlens, seed, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, output[0], output[1], lengths, cu_seqlens, seed)


def _backward(ctx: Any, grad: Tensor, grad_lse: Tensor | None, grad_rows: Tensor | None) -> tuple[Any, ...]:
    dq, dk, dv = torch.ops.lightning_dilated.attention_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return dq, dk, dv, *([None] * 9)


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> None:
    raise RuntimeError(
        "dilated_attention has no double backward: its gradient was asked to be differentiated again. "
        "Leave out create_graph=True, or take lightning_dilated.attention.oracle.oracle for short sequences."
    )


attention.register_autograd(_backward, setup_context=_setup)
attention_backward.register_autograd(_no_double_backward)
