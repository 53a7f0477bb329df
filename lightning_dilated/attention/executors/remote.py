"""Attention over rows picked by number: batches of equal wants, whose keys lie in a store of rows from many ranks.

Attention where (segment, head) problems are computed by their owners: queries travel, too, and outputs come back.

Shape letters: B batch, L local tokens, H heads of q, D head dim, G wants of a batch, n queries and m keys of each, a
row of the store is (2, D): K and V, an owner holds m query rows and n key rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_dilated import kernels
from lightning_dilated.attention.backends import ENGINES, for_rows
from lightning_dilated.attention.backends.base import Engine
from lightning_dilated.attention.dropout import BatchDropout
from lightning_dilated.attention.executors.blockwise import Call, attend_pads, empty_state
from lightning_dilated.attention.executors.dispatch import local_forward
from lightning_dilated.attention.views import Span
from lightning_dilated.sequence.exchange import row_ops
from lightning_dilated.sequence.exchange.row_ops import Batch, add_at, take, take_apart
from lightning_dilated.sequence.exchange.switch import CompiledSwitch, SwitchRun
from lightning_dilated.sequence.exchange.transport import Wire


def _parts(call: Call, batch: Batch) -> tuple[Engine, BatchDropout | None]:
    keep = call.mask and BatchDropout(call.mask, batch.branch, *batch.positions())
    return for_rows(call.engine, min(batch.queries.shape[1], batch.keys.shape[1])), keep


def _keys(rows: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """K and V of a batch, (G, 1, m, D) each."""
    k, v = take_apart(rows, batch.keys)
    return k[:, None], v[:, None]


def _lse_index(lse: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the flat rows of a (B, L, H) numbering lie in lse (B, H, L)."""
    heads, length = lse.shape[1:]
    return rows // (heads * length), rows % heads, rows // heads % length


def merge_batch(call: Call, batch: Batch, q: Tensor, rows: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge a batch into the running out (B, L, H, D), contiguous, and lse (B, H, L)."""
    engine, keep = _parts(call, batch)
    if batch.queries.shape[1] * batch.keys.shape[1] <= call.chained:
        engine = ENGINES["triton"]
    given = take(q, batch.queries)[:, None], *_keys(rows, batch), batch.causal, call.scale, keep
    if engine.forward_into is not None:
        engine.forward_into(*given, (out, lse, batch.queries[:, None], batch.pads))
        return
    part, part_lse = engine.forward(*given)
    if batch.pads:
        part, part_lse = attend_pads(part, part_lse, batch.pads)
    merge_rows(batch.queries, part[:, 0], part_lse[:, 0], out, lse)


def _merges(out: Tensor, lse: Tensor, part: Tensor) -> bool:
    """Whether the kernel serves, which reads and writes every row once."""
    plain = out.dtype == lse.dtype == torch.float32 and out.is_contiguous() and lse.is_contiguous()
    return plain and part.stride(-1) == 1 and kernels.available(out.device)


def merge_rows(rows: Tensor, part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge parts (..., D) and their log-sum-exp (...) into flat rows (...) of out and lse; no row may occur twice."""
    if rows.numel() >= row_ops.MANY and _merges(out, lse, part):
        from lightning_dilated.kernels.rows import merge

        part, part_lse = (x if rows.dim() > 1 else x[None] for x in (part, part_lse))
        return merge(rows.view(part_lse.shape), part, part_lse, out, lse)
    at, flat = _lse_index(lse, rows), out.view(-1, out.shape[-1])
    before, part_lse = lse[at], part_lse.to(lse.dtype)
    total = torch.logaddexp(before, part_lse)
    least = total.masked_fill(total == -torch.inf, 0.0)  # of rows that nothing was attended in, which stay 0
    weight = lambda x: torch.exp(x - least)[..., None]  # noqa: E731
    flat[rows] = (flat[rows] * weight(before)).addcmul_(part.to(out.dtype), weight(part_lse))
    lse[at] = total


def add_batch(
    call: Call, batch: Batch, tensors: tuple[Tensor, ...], rows: Tensor, lse: Tensor, dq: Tensor, grads: Tensor
) -> None:
    """Add a batch's share to dq (B, L, H, D), contiguous, and to the store's gradients; `tensors` are grad, q and out."""
    engine, keep = _parts(call, batch)
    k, v = _keys(rows, batch)
    grad, q, out = (take(x, batch.queries)[:, None] for x in tensors)
    rows_lse = (lse[0, 0, batch.queries] if lse.shape[:2] == (1, 1) else lse[_lse_index(lse, batch.queries)])[:, None]
    part, *key_parts = engine.backward(grad, q, k, v, out, rows_lse, batch.causal, call.scale, keep)
    add_at(dq.view(-1, dq.shape[-1]), batch.queries, [part[:, 0]], distinct=True)
    add_at(grads, batch.keys, [x[:, 0] for x in key_parts], batch.distinct)


def _as_tensor(rows: Tensor) -> Tensor:
    """(m, D) rows as a (1, m, 1, D) tensor, so that row numbers are flat numbers."""
    return rows[None, :, None]


def forward(
    call: Call,
    found: list[Span],
    route: CompiledSwitch,
    wire: Wire,
    inputs: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """out (B, L, H, D), lse (B, H, L), and the rows to keep for the backward, (2n + m, D)."""
    run = SwitchRun(route, wire)
    run.post(*inputs)
    out, lse = local_forward(call, found, inputs, False)
    queries, rows = run.arrived()
    queries = _as_tensor(queries)
    state = empty_state(queries)
    for batch in route.batches:
        merge_batch(call, batch, queries, rows, *state)
    # out and lse side by side, in fp32: the merge at home rounds once
    partial = torch.cat([state[0][0, :, 0], state[1][0, 0, :, None]], 1)
    for at, part in run.by_peer(run.home(partial).wait()):
        merge_rows(at, part[:, :-1], part[:, -1], out, lse)
    return out, lse, run.kept


def backward(
    call: Call,
    route: CompiledSwitch,
    wire: Wire,
    tensors: tuple[Tensor, ...],
    lse: Tensor,
    kept: Tensor,
    total: list[Tensor],
    local: Callable[[], None],
) -> None:
    """Add all gradients to `total` (dq, dk, dv); `tensors` are grad, q, k, v, out and `local` adds the local blocks'."""
    grad, q, _, _, out = tensors
    run = SwitchRun(route, wire, kept)
    sides, their_lse = run.to_owners(grad, out), run.to_owners(lse.transpose(1, 2)[..., None])
    queries, rows = (_as_tensor(x) if i == 0 else x for i, x in enumerate(run.arrived()))
    sides, their_lse = sides.wait(), their_lse.wait()[:, 0, 0][None, None]
    their_grad, their_out = (_as_tensor(sides[:, i]) for i in range(2))
    dq = torch.zeros(queries.shape, dtype=lse.dtype, device=q.device)
    grads = torch.zeros(rows.shape, dtype=lse.dtype, device=q.device)
    for batch in route.batches:
        add_batch(call, batch, (their_grad, queries, their_out), rows, their_lse, dq, grads)
    coming = run.home(dq[0, :, 0]), run.home(grads, keys=True)
    local()
    dim = q.shape[3]
    total[0].view(-1, dim).index_add_(0, route.queries.rows, coming[0].wait())
    back = coming[1].wait()
    for i in range(2):
        total[1 + i].view(-1, dim).index_add_(0, route.keys.rows, back[:, i])
