"""Attention where (segment, head) problems are computed by their owners: queries travel, too, and outputs come back.

Shape letters: B batch, L local tokens, H query heads, D head dim; an owner holds m query rows and n key rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_dilated.attention.executors.blockwise import Call
from lightning_dilated.attention.executors.dispatch import local_forward
from lightning_dilated.attention.executors.merge import empty_state
from lightning_dilated.attention.executors.remote import add_batch, merge_batch, merge_rows
from lightning_dilated.attention.views import Span
from lightning_dilated.sequence.exchange.run_switch import CompiledSwitch, SwitchRun
from lightning_dilated.sequence.exchange.transport import Wire


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
