"""Executors of a part of a sequence: each wraps the executor of a rank's local blocks and adds rows of other ranks.

`RowExchange` receives rows of K and V, and also uses rows that a rank carries, such as rows of a stream's earlier
chunks. `AllToAll` sends queries, keys and values to the owners of (segment, head) problems, which send outputs back.
`HeadParallel` exchanges tokens for heads before and after another executor. A batch consists of requests of the same
shape; their keys are indices into a store of rows from other ranks or chunks.
Shape letters: B batch, L local tokens, H heads of q, D head dim, G requests of a batch, n queries and m keys of a
request; a row of the store is (2, D): K and V.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_dilated import kernels
from lightning_dilated._compat.cpython import avoid_frame_chunk_edge
from lightning_dilated.attention.backends import ENGINES, Request, for_band, for_rows
from lightning_dilated.attention.backends.base import Band, Engine, Terms
from lightning_dilated.attention.backends.base import merge as log_sum_exp
from lightning_dilated.attention.dropout import BatchDropout, Dropout
from lightning_dilated.attention.executors.base import Call, Executor, attend_pads, empty_state
from lightning_dilated.sequence.exchange.all_to_all import CompiledSwitch, HeadGroup, SwitchRun, Windows
from lightning_dilated.sequence.exchange.row_ops import Batch, Rows, add_at, add_rows, take, take_apart
from lightning_dilated.sequence.exchange.run import BackwardRun, Compiled, Run
from lightning_dilated.sequence.exchange.transport import Wire


def _engine_of(call: Call, batch: Batch, q: Tensor, max_triton_pairs: float) -> tuple[Engine, Terms]:
    """Return the engine for a batch, and its terms. Triton computes batches of up to `max_triton_pairs` pairs in a head."""
    keep = call.mask and BatchDropout(call.mask, batch.branch, *batch.positions())
    n, m = batch.queries.shape[1], batch.keys.shape[1]
    terms = Terms(batch.causal, call.scale, keep, None if batch.band is None else Band(*batch.band))
    if n * m <= max_triton_pairs:
        return ENGINES["triton"], terms
    if terms.band is not None:
        return for_band(call.engine, Request.of(q, call.mask is not None, call.scale)), terms
    return for_rows(call.engine, min(n, m)), terms


def _keys(rows: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return K and V of a batch, (G, 1, m, D) each."""
    k, v = take_apart(rows, batch.keys)
    return k[:, None], v[:, None]


def _lse_index(lse: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices in lse (B, H, L) of flat rows of (B, L, H)."""
    heads, length = lse.shape[1:]
    return rows // (heads * length), rows % heads, rows // heads % length


def merge_batch(call: Call, batch: Batch, q: Tensor, rows: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge a batch into the running out (B, L, H, D), contiguous, and lse (B, H, L)."""
    engine, terms = _engine_of(call, batch, q, call.max_triton_pairs[0])
    arguments = take(q, batch.queries)[:, None], *_keys(rows, batch), terms
    if engine.forward_into is not None:
        engine.forward_into(*arguments, (out, lse, batch.queries[:, None], batch.pads))
        return
    part, part_lse = engine.forward(*arguments)
    if batch.pads:
        part, part_lse = attend_pads(part, part_lse, batch.pads)
    merge_rows(batch.queries, part[:, 0], part_lse[:, 0], out, lse)


def _merges(out: Tensor, lse: Tensor, part: Tensor) -> bool:
    """Return whether the kernel, which reads and writes each row once, supports these tensors."""
    plain = out.dtype == lse.dtype == torch.float32 and out.is_contiguous() and lse.is_contiguous()
    return plain and part.stride(-1) == 1 and kernels.available(out.device)


def merge_rows(rows: Tensor, part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge parts (..., D) and their log-sum-exp (...) into flat rows (...) of out and lse; no row may occur twice."""
    if _merges(out, lse, part):  # one launch in place of about fifteen
        from lightning_dilated.kernels.rows import merge

        part, part_lse = (x if rows.dim() > 1 else x[None] for x in (part, part_lse))
        return merge(rows.view(part_lse.shape), part, part_lse, out, lse)
    at, flat = _lse_index(lse, rows), out.view(-1, out.shape[-1])
    lse[at], weight, part_weight = log_sum_exp(lse[at], part_lse)
    flat[rows] = (flat[rows] * weight[..., None]).addcmul_(part.to(out.dtype), part_weight[..., None])


def add_batch(
    call: Call, batch: Batch, tensors: tuple[Tensor, ...], rows: Tensor, lse: Tensor, dq: Tensor, grads: Tensor
) -> None:
    """Add a batch's gradients to contiguous dq (B, L, H, D) and to `grads` of the store; `tensors`: grad, q, out."""
    engine, terms = _engine_of(call, batch, tensors[1], call.max_triton_pairs[1])
    k, v = _keys(rows, batch)
    grad, q, out = (take(x, batch.queries)[:, None] for x in tensors)
    rows_lse = (lse[0, 0, batch.queries] if lse.shape[:2] == (1, 1) else lse[_lse_index(lse, batch.queries)])[:, None]
    part, *key_parts = engine.backward(grad, q, k, v, out, rows_lse, terms)
    add_at(dq.view(-1, dq.shape[-1]), batch.queries, [part[:, 0]], distinct=True)
    add_at(grads, batch.keys, [x[:, 0] for x in key_parts], batch.distinct)


@dataclass(frozen=True)
class RowExchange:
    """Sends rows, computes the local blocks meanwhile, and merges the results for the rows that arrive.

    Attributes:
        local: the executor of the rank's local blocks.
        route: the compiled exchange.
        wires: the wires of forward and backward; (None, None) if no rows move.
    """

    call: Call
    local: Executor
    route: Compiled
    wires: tuple[Wire, Wire] | tuple[None, None]

    def masked(self, mask: Dropout) -> RowExchange:
        return replace(self, call=replace(self.call, mask=mask), local=self.local.masked(mask))

    @avoid_frame_chunk_edge
    def forward(
        self, inputs: Sequence[Tensor], final: bool, carried: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute `Executor.forward`; `carried` (n, 2, D) are rows that the rank has in addition to k and v."""
        q, k, v = inputs
        queries = self.route.queries
        with Run(self.route, self.wires[0], k, v, carried=carried) as run:
            out, lse, _ = self.local.forward(inputs, queries is not None)
            _merge_requests(self.call, queries, (q, out, lse), ((x.batches, x.rows) for x in run.arrivals()))
        return out, lse, run.received

    @avoid_frame_chunk_edge
    def backward(
        self,
        tensors: Sequence[Tensor],
        lse: Tensor,
        received: Tensor | None,
        total: list[Tensor] | None = None,
        carried: tuple[Tensor, Tensor] | None = None,
    ) -> list[Tensor]:
        """Compute `Executor.backward`; `carried`: rows of the forward, and their gradients to update in place."""
        grad, q, k, v, out = tensors
        with BackwardRun(self.route, self.wires[1], k, v, received, lse.dtype, carried) as run:
            arrivals = ((x.batches, x.rows, x.grads) for x in run.arrivals())
            dq = _add_requests(self.call, self.route.queries, (grad, q, out, lse), arrivals)
            total = self.local.backward(tensors, lse, None, total)
            add_rows(self.route.queries, total[0], dq)
            run.finish(*total[1:])
        return total


def _merge_requests(
    call: Call,
    selected: Rows | None,
    tensors: tuple[Tensor, Tensor, Tensor],
    arrivals: Iterable[tuple[Sequence[Batch], Tensor]],
) -> None:
    """Merge batches and their rows into out and lse, in place; `tensors` are q, out and lse."""
    q, out, lse = tensors
    if selected is not None and not len(
        selected.flat
    ):  # no query reads the rows, but the other ranks need this rank in the exchange
        for _ in arrivals:
            pass
        return
    queries, state = _select(selected, q), (_select(selected, out).to(lse.dtype), _select_lse(selected, lse))
    for batches, rows in arrivals:
        for batch in batches:
            merge_batch(call, batch, queries, rows, *state)
        del rows  # free them before the next round is posted
    if selected is not None:
        selected.put(out, state[0][0, :, 0])
        selected.put(lse.transpose(1, 2), state[1][0, 0])


def _add_requests(
    call: Call,
    selected: Rows | None,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    arrivals: Iterable[tuple[Sequence[Batch], Tensor, Tensor]],
) -> Tensor:
    """Return dq of the selected rows, (n, D), or of all rows, (B, L, H, D); `tensors` are grad, q, out and lse.

    Add the gradients of each arrival's rows to the third tensor of the arrival.
    """
    *sides, lse = tensors
    inputs, rows_lse = tuple(_select(selected, x) for x in sides), _select_lse(selected, lse)
    dq = torch.zeros(inputs[1].shape, dtype=lse.dtype, device=lse.device)
    for batches, rows, grads in arrivals:
        for batch in batches:
            add_batch(call, batch, inputs, rows, rows_lse, dq, grads)
        del rows, grads  # free them before the next round is posted
    return dq if selected is None else dq[0, :, 0]


def _select(selected: Rows | None, x: Tensor) -> Tensor:
    """Return the selected rows (1, n, 1, D) of a (B, L, H, D) tensor; without a selection, return the tensor."""
    return x if selected is None else selected.take(x)[None, :, None]


def _select_lse(selected: Rows | None, lse: Tensor) -> Tensor:
    """Return the selected rows (1, 1, n) of a (B, H, L) tensor; without a selection, return the tensor."""
    return lse if selected is None else selected.take(lse.transpose(1, 2))[None, None]


@dataclass(frozen=True)
class AllToAll:
    """Sends q, k and v to the owner of each (segment, head) problem, and merges the outputs that owners send back."""

    call: Call
    local: Executor
    route: CompiledSwitch
    wires: tuple[Wire, Wire]

    def masked(self, mask: Dropout) -> AllToAll:
        return replace(self, call=replace(self.call, mask=mask), local=self.local.masked(mask))

    @avoid_frame_chunk_edge
    def forward(self, inputs: Sequence[Tensor], final: bool) -> tuple[Tensor, Tensor, Tensor]:
        run = SwitchRun(self.route, self.wires[0])
        run.post(*inputs)
        out, lse, _ = self.local.forward(inputs, False)
        queries, rows = run.arrived()
        queries = _as_tensor(queries)
        state = empty_state(queries)
        for batch in self.route.batches:
            merge_batch(self.call, batch, queries, rows, *state)
        # out and lse are sent in one fp32 tensor, so that only the merge into the result rounds
        partial = torch.cat([state[0][0, :, 0], state[1][0, 0, :, None]], 1)
        for indices, part in run.by_peer(run.home(partial).wait()):
            merge_rows(indices, part[:, :-1], part[:, -1], out, lse)
        return out, lse, run.kept

    @avoid_frame_chunk_edge
    def backward(
        self, tensors: Sequence[Tensor], lse: Tensor, received: Tensor | None, total: list[Tensor] | None = None
    ) -> list[Tensor]:
        grad, q, _, _, out = tensors
        total = total or [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in tensors[1:4]]
        run = SwitchRun(self.route, self.wires[1], received)
        posted = run.to_owners(grad, out, lse)
        queries, rows = run.arrived()
        queries, (sides, sent_lse) = _as_tensor(queries), run.at_owner(posted)
        owned, owned_lse = (_as_tensor(sides[:, 0]), queries, _as_tensor(sides[:, 1])), sent_lse[None, None, :, 0]
        dq, grads = run.sums(lse.dtype)
        for batch in self.route.batches:
            add_batch(self.call, batch, owned, rows, owned_lse, _as_tensor(dq), grads)
        posted = run.gradients_home(dq, grads)
        self.local.backward(tensors, lse, None, total)
        query_grads, key_grads = run.at_home(posted)
        dim = q.shape[3]
        total[0].view(-1, dim).index_add_(0, self.route.queries.rows, query_grads)
        for x, part in zip(total[1:], key_grads.unbind(1), strict=True):
            x.view(-1, dim).index_add_(0, self.route.keys.rows, part)
        return total


def _as_tensor(rows: Tensor) -> Tensor:
    """Return (m, D) rows as a (1, m, 1, D) tensor, so that a row's index is its flat index."""
    return rows[None, :, None]


@dataclass(frozen=True)
class HeadParallel:
    """Exchanges tokens for heads in a group of neighbouring ranks; a rank computes the group's tokens for its heads.

    Attributes:
        inner: the executor of the rank's heads.
        groups: the head groups of forward and backward.
        cuts, kv_cuts: (first, stop) of the query heads and kv heads of each rank of the group.
    """

    call: Call
    inner: Executor
    groups: tuple[HeadGroup, HeadGroup]
    cuts: Windows
    kv_cuts: Windows

    def masked(self, mask: Dropout) -> HeadParallel:
        return replace(self, inner=self.inner.masked(mask))

    @avoid_frame_chunk_edge
    def forward(self, inputs: Sequence[Tensor], final: bool) -> tuple[Tensor, Tensor, Tensor]:
        group, q = self.groups[0], inputs[0]
        by_heads = group.to_heads(inputs, (self.cuts, self.kv_cuts, self.kv_cuts))
        out, lse, received = self.inner.forward(by_heads, True)
        saved = [x.reshape(-1, x.shape[-1]) for x in (*by_heads, received) if x is not None]
        # ranks may have different executors with results of different dtypes, but must send the same dtype
        wide = torch.promote_types(q.dtype, torch.float32)
        out = group.to_tokens(out.to(q.dtype), self.cuts, q.shape[2])
        lse = group.to_tokens(lse.to(wide).transpose(1, 2)[..., None], self.cuts, q.shape[2])
        return out, lse[..., 0].transpose(1, 2), torch.cat(saved)

    @avoid_frame_chunk_edge
    def backward(
        self, tensors: Sequence[Tensor], lse: Tensor, received: Tensor | None, total: list[Tensor] | None = None
    ) -> list[Tensor]:
        group, (grad, q, k, v, out) = self.groups[1], tensors
        *by_heads, received = self._saved(received, q, k)
        grad, out = group.to_heads((grad, out), (self.cuts, self.cuts))
        (lse,) = group.to_heads((lse.transpose(1, 2)[..., None],), (self.cuts,))
        lse = lse[..., 0].transpose(1, 2).contiguous()
        # sums in fp32, because all ranks must send the same dtype, even a rank without a head
        parts = [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in by_heads]
        parts = self.inner.backward((grad, *by_heads, out), lse, received, parts)
        sides = zip(parts, (self.cuts, self.kv_cuts, self.kv_cuts), (q, k, v), strict=True)
        return [group.to_tokens(x, cuts, like.shape[2]) for x, cuts, like in sides]

    def _saved(self, rows: Tensor, q: Tensor, k: Tensor) -> list[Tensor]:
        """Return q, k and v of the rank's heads from the forward, and the rows that the inner executor saved."""
        batch, tokens = q.shape[0], sum(self.groups[1].lengths)
        first, stop = self.call.window.heads
        group = q.shape[2] // k.shape[2]
        widths = [stop - first, *[-(-stop // group) - first // group] * 2]
        sizes = [batch * tokens * w for w in widths]
        *parts, inner_rows = rows.split([*sizes, len(rows) - sum(sizes)])
        return [*(p.view(batch, tokens, w, q.shape[3]) for p, w in zip(parts, widths, strict=True)), inner_rows]
