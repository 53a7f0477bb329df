"""The one op, registered with torch: forward, backward, shapes for tracing, and autograd.

Saved for backward: q, k, v, out, lse and the rows received from other ranks, whatever the number of branches.

FLOPs of the op for torch.utils.flop_counter: pairs that the pattern really has, not N squared.

Two matmuls a pair forward (4 D FLOPs), five backward (10 D); softmax, merge and padding are not counted, as torch does.

Shape letters: B batch, N tokens (of this rank), H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from lightning_dilated._compat.cpython import with_room
from lightning_dilated.attention import run
from lightning_dilated.attention.resolve import Inputs, Options, Saved, share
from lightning_dilated.attention.views import spans
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import blocks, pairs
from lightning_dilated.sequence.group import find_sequence
from lightning_dilated.sequence.planner import joint_pairs

run_forward, run_backward = with_room(run.run_forward), with_room(run.run_backward)

NAME = "lightning_dilated::attention"


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
    grad: bool,
    window: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out (B, N, H, D), lse (B, H, N), received rows, number of the call).

    `pattern` is `DilatedPattern.code`, `sequence` a group's name, `grad` whether a backward will follow, `window` where the
    heads of q lie (see `Options`). On one rank
    `sequence` is "" and nothing is received; the third result is then empty, (0,). On several it is (n, D): the rows that
    the backward needs again, so that recomputation that keeps this op's results moves nothing twice. The number, () int64
    on the CPU, is equal on all ranks, and tells their backwards apart.
    """
    options = Options(lengths, cu_seqlens, seed, pattern, causal, scale, dropout, engine, sequence, grad, tuple(window))
    return run_forward(Inputs(q, k, v), options)


@attention.register_fake
def _(q, k, v, lengths, cu_seqlens, seed, pattern, causal, scale, dropout, engine, sequence, grad, window):
    batch, seq_len, heads, head_dim = q.shape
    lse = q.new_empty((batch, heads, seq_len), dtype=torch.promote_types(q.dtype, torch.float32))
    rows = q.new_empty((torch.library.get_ctx().new_dynamic_size(), head_dim)) if sequence else q.new_empty(0)
    number = torch.empty((), dtype=torch.int64, device="cpu")
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse, rows, number


@torch.library.custom_op(NAME + "_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: Tensor | None,
    number: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    pattern: str,
    causal: bool,
    scale: float,
    dropout: float,
    engine: str,
    sequence: str,
    needs_grad: bool,
    window: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from the gradient of out, the merged out and lse, and the rows received in the forward."""
    options = Options(
        lengths, cu_seqlens, seed, pattern, causal, scale, dropout, engine, sequence, needs_grad, tuple(window)
    )
    return run_backward(Inputs(q, k, v), options, Saved(grad, out, lse, rows, number))


@attention_backward.register_fake
def _(grad, q, k, v, *rest):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, lengths, cu_seqlens, seed, *ctx.rest = inputs
    out, lse, rows, number = output
    kept = (rows, number) if ctx.rest[-3] else (None, None)  # on one rank nothing was received
    ctx.save_for_backward(q, k, v, out, lse, *kept, lengths, cu_seqlens, seed)


def _backward(ctx: Any, grad: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    dq, dk, dv = torch.ops.lightning_dilated.attention_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return dq, dk, dv, *([None] * 11)


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> None:
    raise RuntimeError(
        "dilated_attention has no double backward: its gradient was asked to be differentiated again. "
        "Leave out create_graph=True, or take lightning_dilated.attention.oracle.oracle for short sequences."
    )


attention.register_autograd(_backward, setup_context=_setup)
attention_backward.register_autograd(_no_double_backward)


def attention_pairs(
    q: Tensor,
    k: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    pattern: str,
    causal: bool,
    sequence: str = "",
    window: Sequence[int] = (),
) -> int:
    """(query, key) pairs over samples and heads; traced tensors have no lengths to read, so there every row counts.

    On a rank of a sequence: the pairs of its own queries (with head groups, of its heads), which sum to those of one rank.
    """
    batch, seq_len, own, _ = q.shape
    first, heads, kv_heads = window or (0, own, k.shape[2])
    lengths, cu_seqlens = (None if isinstance(x, FakeTensor) else x for x in (lengths, cu_seqlens))
    who = DilatedPattern.decode(pattern)
    group = find_sequence(sequence) if sequence else None
    if group is None or group.agreed is None:
        found = spans(batch, seq_len, lengths, cu_seqlens)
        of = heads, kv_heads, causal, (first, first + own)
        return sum(s.batches * pairs(who, s.length, *of) for s in found)
    seq_len = group.agreed.seq_len
    found = spans(batch, seq_len, lengths, cu_seqlens)
    problem, local = share(group, who, heads, kv_heads, causal, found, seq_len, (first, first + own))
    near = (
        span.batches * block.pairs(causal)
        for span in local
        for block in blocks(who, span.document, heads, kv_heads, span.part, problem.heads)
    )
    return sum(near) + joint_pairs(problem, group.rank // group.head_size)


@register_flop_formula(torch.ops.lightning_dilated.attention, get_raw=True)
def _forward_flops(
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
    grad: bool,
    window: Sequence[int],
    *,
    out_val: Any = None,
    **kwargs: Any,
) -> int:
    return 4 * q.shape[3] * attention_pairs(q, k, lengths, cu_seqlens, pattern, causal, sequence, window)


@register_flop_formula(torch.ops.lightning_dilated.attention_backward, get_raw=True)
def _backward_flops(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: Tensor | None,
    number: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    pattern: str,
    causal: bool,
    scale: float,
    dropout: float,
    engine: str,
    sequence: str,
    needs_grad: bool,
    window: Sequence[int],
    *,
    out_val: Any = None,
    **kwargs: Any,
) -> int:
    return 10 * q.shape[3] * attention_pairs(q, k, lengths, cu_seqlens, pattern, causal, sequence, window)
