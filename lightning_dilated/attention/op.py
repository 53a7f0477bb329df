"""The attention op, registered with torch: forward, backward, shapes for tracing, autograd, and FLOPs.

For any number of branches the op saves q, k, v, out, lse and the rows received from other ranks for the backward. FLOPs
count the pattern's pairs, with two products per pair in the forward (4 D) and five in the backward (10 D). As in
torch's counts, softmax, merge and padding are left out.
Shape letters: B batch, N tokens (of this rank), H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dilated._compat.torch import is_fake
from lightning_dilated._ops import Op
from lightning_dilated.attention.context import RANKS, find_context
from lightning_dilated.attention.resolve import resolve, whole_pairs
from lightning_dilated.attention.spec import CallSpec, decode


# -- computing ---------------------------------------------------------------------------------------------------------
def run_forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, seed: Tensor | None, spec: str,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (out (B, N, H, D), lse (B, H, N), received rows (n, D), number of the call); `spec` is `CallSpec.code`.

    The received rows are a result because the backward needs them again: if recomputation saves this op's results, they
    are sent only once. The number, () int64 on the CPU, identifies the call on all ranks. On one rank, received rows
    and number are empty, (0,). `place`, (2,) int64 on the CPU, is the (layer, chunk) of a stream.
    """
    resolved = resolve(spec, q, k, lengths, cu_seqlens, seed, place)
    out, lse, received = resolved.executor.forward((q, k, v), True)
    if not decode(spec).sequence:
        return out.to(q.dtype), lse.contiguous(), q.new_empty(0), q.new_empty(0)
    if received is None:
        received = q.new_empty(0, q.shape[3])
    number = torch.tensor(resolved.number, dtype=torch.int64, device="cpu")
    return out.to(q.dtype), lse.contiguous(), received, number


def run_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, received: Tensor | None,
    number: Tensor | None, lengths: Tensor | None, cu_seqlens: Tensor | None, seed: Tensor | None, spec: str,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (dq, dk, dv) from the gradient of out, the merged out and lse, and the rows received in the forward."""
    resolved = resolve(spec, q, k, lengths, cu_seqlens, seed, place, number, backward=True)
    dq, dk, dv = resolved.executor.backward((grad, q, k, v, out), lse, received)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


# -- shapes, for tracing -----------------------------------------------------------------------------------------------
def _fake_forward(q, k, v, lengths, cu_seqlens, seed, spec, place=None):
    batch, seq_len, heads, head_dim = q.shape
    lse = q.new_empty((batch, heads, seq_len), dtype=torch.promote_types(q.dtype, torch.float32))
    received, number = q.new_empty(0), q.new_empty(0)
    if decode(spec).sequence:
        received = q.new_empty((torch.library.get_ctx().new_dynamic_size(), head_dim))
        number = torch.empty((), dtype=torch.int64, device="cpu")
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse, received, number


def _fake_backward(grad, q, k, v, *_):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


# -- autograd ----------------------------------------------------------------------------------------------------------
def _saves(args: Sequence[Any], results: Sequence[Tensor]) -> tuple[Sequence[Tensor | None], str]:
    q, k, v, lengths, cu_seqlens, seed, spec, place = args if len(args) == 8 else (*args, None)
    out, lse, *received = results
    return (q, k, v, out, lse, *to_save(received, spec), lengths, cu_seqlens, seed, place), spec


def _arguments(grad: Tensor, saved: Sequence[Tensor | None], spec: str) -> tuple[Any, ...]:
    *tensors, place = saved
    return grad, *tensors, spec, place


def to_save(received: list[Tensor], spec: str) -> list[Tensor | None]:
    """Return [received rows, number of the call] for the backward; [None, None] on one rank."""
    return received if decode(spec).sequence else [None, None]


# -- FLOPs -------------------------------------------------------------------------------------------------------------
def _forward_flops(q, k, v, lengths, cu_seqlens, seed, spec, place=None) -> int:
    return 4 * q.shape[3] * attention_pairs(q, k, lengths, cu_seqlens, place, decode(spec))


def _backward_flops(grad, q, k, v, out, lse, received, number, lengths, cu_seqlens, seed, spec, place=None) -> int:
    return 10 * q.shape[3] * attention_pairs(q, k, lengths, cu_seqlens, place, decode(spec))


def attention_pairs(
    q: Tensor, k: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, place: Tensor | None, spec: CallSpec
) -> int:
    """Return the number of (query, key) pairs. While tracing, lengths have no values, so every row counts.

    On several ranks, count the pairs of this rank's queries and heads; the ranks' counts sum to the count on one rank.
    In a stream, count the pairs of the chunk's queries; tracing assumes the first chunk.
    """
    lengths, cu_seqlens, place = (None if is_fake(x) else x for x in (lengths, cu_seqlens, place))
    call = spec, q, k, (lengths, cu_seqlens)
    name = spec.context if place is not None else RANKS if spec.sequence else ""
    return find_context(name).pairs(*call, place) if name else whole_pairs(*call)


#: schema of the last arguments of both ops, after the tensors of rows
_OPTIONS = "Tensor? lengths, Tensor? cu_seqlens, Tensor? seed, str spec, Tensor? place=None"
_OP = Op(
    "attention",
    schemas=(
        f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
        "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? received, Tensor? number, "
        f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    ),
    caller="dilated_attention",
    remedy="Leave out create_graph=True, or take lightning_dilated.attention.oracle.oracle for short sequences.",
    # the names are looked up at each call, so that tests can replace them
    run=(lambda *args: run_forward(*args), lambda *args: run_backward(*args)),
    fake=(_fake_forward, _fake_backward),
    saves=_saves,
    arguments=_arguments,
    flops=(_forward_flops, _backward_flops),
)
ATTENTION = _OP.forward
