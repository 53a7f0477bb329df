"""The op's work on one rank or many: agree, send rows, compute what is here, merge what arrives; and all of it backward.

One rank is the same path with nothing to send.
Shape letters: B batch, L tokens of this rank, H query heads, K kv heads, D head dim; n rows that other ranks' keys reach.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dilated.attention.executors import remote
from lightning_dilated.attention.executors.dispatch import local_backward, local_forward, local_gradients
from lightning_dilated.attention.executors.remote import add_batch, merge_batch
from lightning_dilated.attention.resolve import Inputs, Options, Place, Saved, find_place
from lightning_dilated.sequence.exchange.row_ops import Rows, add_rows
from lightning_dilated.sequence.exchange.run import BackwardRun, Run
from lightning_dilated.sequence.exchange.switch import CompiledSwitch


def run_forward(x: Inputs, o: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, received rows, number of the call), see `op.attention`."""
    place = find_place(x, o)
    q, k, v = x.q, x.k, x.v
    if place.heads:
        q_cut, kv_cut = place.windows
        q, k, v = place.heads.to_heads((q, k, v), (q_cut, kv_cut, kv_cut))
    out, lse, kept = _forward(place, q, k, v)
    if place.heads:
        kept = torch.cat([*(t.reshape(-1, t.shape[-1]) for t in (q, k, v)), kept])
        out = place.heads.to_tokens(out.to(q.dtype), q_cut, x.q.shape[2])
        lse = place.heads.to_tokens(lse.transpose(1, 2)[..., None], q_cut, x.q.shape[2])[..., 0].transpose(1, 2)
    number = torch.tensor(place.number, dtype=torch.int64, device="cpu")
    return out.to(q.dtype), lse.contiguous(), kept if o.sequence else q.new_empty(0), number


def _forward(place: Place, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, kept rows (n, D)) of this rank's queries."""
    call, kept = place.call, q.new_empty(0, q.shape[3])
    if place.route is None:
        return *local_forward(call, place.spans, (q, k, v), True), kept
    if isinstance(place.route, CompiledSwitch):
        return remote.forward(call, place.spans, place.route, place.wire, (q, k, v))
    some = place.route.queries
    with Run(place.route, place.wire, k, v) as run:
        out, lse = local_forward(call, place.spans, (q, k, v), some is not None)
        queries, state = _picked(some, q), (_picked(some, out).to(lse.dtype), _picked_lse(some, lse))
        for arrival in run.arrivals():
            for batch in arrival.batches:
                merge_batch(call, batch, queries, arrival.rows, *state)
    if some is not None:
        some.put(out, state[0][0, :, 0])
        some.put(lse.transpose(1, 2), state[1][0, 0])
    return out, lse, run.rows.flatten(0, 1)


def _picked(some: Rows | None, x: Tensor) -> Tensor:
    """(1, n, 1, D) of a (B, L, H, D) tensor, or all of it."""
    return x if some is None else some.take(x)[None, :, None]


def _picked_lse(some: Rows | None, lse: Tensor) -> Tensor:
    """(1, 1, n) of a (B, H, L) tensor, or all of it."""
    return lse if some is None else some.take(lse.transpose(1, 2))[None, None]


def run_backward(x: Inputs, o: Options, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), see `op.attention_backward`."""
    place = find_place(x, o, saved)
    q, k, v = x.q, x.k, x.v
    grad, out, lse, rows = saved.grad, saved.out, saved.lse, saved.rows
    if place.heads:
        q_cut, kv_cut = place.windows
        q, k, v, rows = _kept_heads(place, rows, q, k)
        grad, out = place.heads.to_heads((grad, out), (q_cut, q_cut))
        (lse,) = place.heads.to_heads((lse.transpose(1, 2)[..., None],), (q_cut,))
        lse = lse[..., 0].transpose(1, 2).contiguous()
    total = _backward(place, (grad, q, k, v, out), lse, rows)
    if place.heads:
        total = [
            place.heads.to_tokens(t, cut, y.shape[2])
            for t, cut, y in zip(total, (q_cut, kv_cut, kv_cut), (x.q, x.k, x.v), strict=True)
        ]
    return total[0].to(x.q.dtype), total[1].to(x.k.dtype), total[2].to(x.v.dtype)


def _kept_heads(place: Place, rows: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v) of the rank's window as the forward received them, and the other kept rows."""
    batch, tokens = q.shape[0], sum(place.heads.lengths)
    first, stop = place.call.heads
    group = q.shape[2] // k.shape[2]
    widths = [stop - first, *[-(-stop // group) - first // group] * 2]
    *parts, rest = rows.split([*(sizes := [batch * tokens * w for w in widths]), len(rows) - sum(sizes)])
    return *(p.view(batch, tokens, w, q.shape[3]) for p, w in zip(parts, widths, strict=True)), rest


def _backward(place: Place, tensors: tuple[Tensor, ...], lse: Tensor, rows: Tensor | None) -> list[Tensor]:
    """This rank's gradients and those that come home: dq, dk, dv."""
    call, (grad, q, k, v, out) = place.call, tensors
    if place.route is None:
        return local_gradients(call, place.spans, tensors, lse)
    if isinstance(place.route, CompiledSwitch):
        total = _zeros((q, k, v), lse.dtype)
        local = lambda: local_backward(call, place.spans, tensors, lse, total)  # noqa: E731
        remote.backward(call, place.route, place.wire, tensors, lse, rows, total, local)
        return total
    some = place.route.queries
    with BackwardRun(place.route, place.wire, k, v, rows, lse.dtype) as run:
        picked, their_lse = [_picked(some, x) for x in (grad, q, out)], _picked_lse(some, lse)
        (dq,) = _zeros(picked[1:2], lse.dtype)
        for arrival in run.arrivals():
            for batch in arrival.batches:
                add_batch(call, batch, picked, arrival.rows, their_lse, dq, arrival.grads)
        total = local_gradients(call, place.spans, tensors, lse)
        add_rows(some, total[0], dq[0, :, 0] if some is not None else dq)
        run.finish(*total[1:])
    return total


def _zeros(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Room for sums of gradients."""
    return [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in tensors]
