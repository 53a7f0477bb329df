"""The one op, registered with torch: forward, backward, shapes for tracing, autograd, and its FLOPs.

Saved for backward: q, k, v, out, lse and the rows received from other ranks, whatever the number of branches. FLOPs count
the pairs that the pattern has: two matmuls a pair forward (4 D), five backward (10 D); softmax, merge and padding are left
out, as torch does.
Shape letters: B batch, N tokens (of this rank), H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_dilated._compat.cpython import with_room
from lightning_dilated._compat.torch import is_fake
from lightning_dilated.attention.resolve import chunk_part, resolve, share
from lightning_dilated.attention.spec import CallSpec, decode
from lightning_dilated.attention.views import Span, spans
from lightning_dilated.pattern.rows import blocks, pairs
from lightning_dilated.sequence.group import find_sequence
from lightning_dilated.sequence.planner import joint_pairs
from lightning_dilated.sequence.requirements import Problem, piece_requests

NAME = "lightning_dilated::attention"


@torch.library.custom_op(NAME, mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    spec: str,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out (B, N, H, D), lse (B, H, N), received rows, number of the call); `spec` is `CallSpec.code`.

    On one rank nothing is received; the third result is then empty, (0,). On several it is (n, D): the rows that the
    backward needs again, so that recomputation that saves this op's results moves nothing twice. The number, () int64 on
    the CPU, is equal on all ranks, and tells their backwards apart. `place` (2,) int64 on the CPU is the (layer, chunk) of a
    stream.
    """
    return run_forward(q, k, v, lengths, cu_seqlens, seed, spec, place)


@with_room
def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    spec: str,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `attention` does."""
    resolved = resolve(spec, q, k, lengths, cu_seqlens, seed, place)
    out, lse, received = resolved.executor.forward((q, k, v), True)
    if received is None:
        received = q.new_empty(0, q.shape[3]) if decode(spec).sequence else q.new_empty(0)
    number = torch.tensor(resolved.number, dtype=torch.int64, device="cpu")
    return out.to(q.dtype), lse.contiguous(), received, number


@attention.register_fake
def _(q, k, v, lengths, cu_seqlens, seed, spec, place=None):
    batch, seq_len, heads, head_dim = q.shape
    lse = q.new_empty((batch, heads, seq_len), dtype=torch.promote_types(q.dtype, torch.float32))
    shared = bool(decode(spec).sequence)
    received = q.new_empty((torch.library.get_ctx().new_dynamic_size(), head_dim)) if shared else q.new_empty(0)
    number = torch.empty((), dtype=torch.int64, device="cpu")
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse, received, number


@torch.library.custom_op(NAME + "_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    received: Tensor | None,
    number: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    spec: str,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from the gradient of out, the merged out and lse, and the rows received in the forward."""
    return run_backward(grad, q, k, v, out, lse, received, number, lengths, cu_seqlens, seed, spec, place)


@with_room
def run_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    received: Tensor | None,
    number: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    spec: str,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `attention_backward` does."""
    resolved = resolve(spec, q, k, lengths, cu_seqlens, seed, place, number, backward=True)
    dq, dk, dv = resolved.executor.backward((grad, q, k, v, out), lse, received)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@attention_backward.register_fake
def _(grad, q, k, v, *others):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *others, ctx.spec, place = inputs
    out, lse, *received = output
    ctx.save_for_backward(q, k, v, out, lse, *to_save(received, ctx.spec), *others, place)


def to_save(received: list[Tensor], spec: str) -> list[Tensor | None]:
    """Of (received rows, number of the call) what the backward needs: nothing on one rank."""
    return received if decode(spec).sequence else [None, None]


def _backward(ctx: Any, grad: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    *saved, place = ctx.saved_tensors
    dq, dk, dv = torch.ops.lightning_dilated.attention_backward(grad, *saved, ctx.spec, place)
    return dq, dk, dv, None, None, None, None, None


def _no_double_backward(ctx: Any, *grads: Tensor | None) -> None:
    raise RuntimeError(
        "dilated_attention has no double backward: its gradient was asked to be differentiated again. "
        "Leave out create_graph=True, or take lightning_dilated.attention.oracle.oracle for short sequences."
    )


attention.register_autograd(_backward, setup_context=_setup)
attention_backward.register_autograd(_no_double_backward)


# -- FLOPs -------------------------------------------------------------------------------------------------------------
@register_flop_formula(torch.ops.lightning_dilated.attention, get_raw=True)
def _forward_flops(q, k, v, lengths, cu_seqlens, seed, spec, place=None, *, out_val: Any = None, **options: Any) -> int:
    return 4 * q.shape[3] * attention_pairs(q, k, lengths, cu_seqlens, place, decode(spec))


@register_flop_formula(torch.ops.lightning_dilated.attention_backward, get_raw=True)
def _backward_flops(grad, q, k, v, out, lse, received, number, lengths, cu_seqlens, seed, spec, place=None, *,
                    out_val: Any = None, **options: Any) -> int:  # fmt: skip
    return 10 * q.shape[3] * attention_pairs(q, k, lengths, cu_seqlens, place, decode(spec))


def attention_pairs(
    q: Tensor, k: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, place: Tensor | None, spec: CallSpec
) -> int:
    """(query, key) pairs over samples and heads; traced tensors have no lengths to read, so there every row counts.

    On a rank of a sequence: the pairs of its own queries (with head groups, of its heads), which sum to those of one rank.
    In a stream: those of the chunk's queries; traced, as if the chunk were the first.
    """
    batch, seq_len, own, _ = q.shape
    first, heads, kv_heads = spec.window or (0, own, k.shape[2])
    window = first, first + own
    lengths, cu_seqlens, place = (None if is_fake(x) else x for x in (lengths, cu_seqlens, place))
    if spec.stream and place is not None:
        part = chunk_part(spec, q.shape, k.shape[2], (lengths, cu_seqlens), int(place[1]))
        joint = sum(x.pairs for x in piece_requests(part.problem, part.positions))
        return _pairs_of(spec, part.problem, part.local, heads, kv_heads) + joint
    group = find_sequence(spec.sequence) if spec.sequence else None
    if group is None or group.agreed is None:
        documents = spans(batch, seq_len, lengths, cu_seqlens)
        return sum(s.batches * pairs(spec.pattern, s.length, heads, kv_heads, spec.causal, window) for s in documents)
    seq_len = group.agreed.seq_len
    documents = spans(batch, seq_len, lengths, cu_seqlens)
    problem, local = share(group, spec, heads, kv_heads, documents, seq_len, window)
    joint = joint_pairs(problem, group.rank // group.head_size)
    return _pairs_of(spec, problem, local, heads, kv_heads) + joint


def _pairs_of(spec: CallSpec, problem: Problem, local: Sequence[Span], heads: int, kv_heads: int) -> int:
    """Pairs of the blocks that a rank, or a chunk, computes alone."""
    return sum(
        span.batches * block.pairs(spec.causal)
        for span in local
        for block in blocks(spec.pattern, span.document, heads, kv_heads, span.part, problem.heads)
    )
