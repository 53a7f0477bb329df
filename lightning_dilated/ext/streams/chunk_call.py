"""Choose the executor and the carried rows of a chunk's call of the attention op, and count the call's pairs.

Shape letters: B batch, L tokens of this rank's piece, H query heads, K kv heads, D head dim; a row is (2, D): K and V.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lightning_dilated._compat.cpython import avoid_frame_chunk_edge
from lightning_dilated._device import send
from lightning_dilated.attention import resolve
from lightning_dilated.attention.backends import Request, triton_up_to
from lightning_dilated.attention.context import OpCall
from lightning_dilated.attention.dropout import Dropout
from lightning_dilated.attention.executors.remote import RowExchange
from lightning_dilated.attention.ranks import compare, for_passes, record_planned
from lightning_dilated.attention.spans import Span
from lightning_dilated.attention.spec import CallSpec
from lightning_dilated.ext.streams.carried_rows import CarryPlan, chunk_problem, exchanged
from lightning_dilated.ext.streams.neighbours import chunk_wire
from lightning_dilated.sequence.exchange import gather
from lightning_dilated.sequence.exchange.program import Program
from lightning_dilated.sequence.exchange.row_ops import LocalRows, Rows, expand
from lightning_dilated.sequence.exchange.run import Compiled, compile_program
from lightning_dilated.sequence.exchange.transport import Planned
from lightning_dilated.sequence.group import SequenceGroup, find_sequence
from lightning_dilated.sequence.requirements import Document, Problem, piece_requests

if TYPE_CHECKING:
    from lightning_dilated.ext.streams.stream import LayerRows, Stream


@dataclass(frozen=True)
class ChunkRoute:
    """Index tensors of the rows that a rank reads in a chunk and of the rows that it carries on.

    Attributes:
        exchange: gathers the rows that the piece reads: carried rows, and other ranks' rows if ranks share the chunk.
        leaving: the piece's own rows that later chunks read.
        staying, dropped: indices of carried rows that later chunks read, and of all other carried rows.
    """

    exchange: Compiled
    leaving: Rows
    staying: Tensor
    dropped: Tensor


def chunk_route(plan: CarryPlan, chunk: int, device: torch.device) -> ChunkRoute:
    """Compute the route of a rank in a chunk."""
    problem, number = plan.problem, plan.piece(chunk)
    live, piece = plan.live(chunk), problem.shard.piece(number)
    program = gather.program(problem, number, problem.shard.each) if exchanged(problem, number) else Program([])
    exchange = compile_program(problem, number, program, device, live)
    local_rows = LocalRows((piece,), problem.kv_heads)
    runs = [
        run
        for x in plan.leaving(chunk)
        for sample in range(x.document.samples)
        for _, run in local_rows.find(x.document, x.head, x.rows, sample)
    ]
    leaving = Rows.of(expand(runs), len(piece), problem.kv_heads[1] - problem.kv_heads[0]).to(device)
    later = problem.shard.begin(chunk + 1)
    read_later = np.array([x.last >= later for x in live], dtype=bool)
    stays = np.repeat(read_later, np.array([x.count for x in live], dtype=np.int64))
    staying, dropped = (send(torch.from_numpy(np.flatnonzero(x)), device) for x in (stays, ~stays))
    return ChunkRoute(exchange, leaving, staying, dropped)


@dataclass(frozen=True)
class ChunkPart:
    """A rank's part of a chunk: its positions, the problem of the call, and `local`, the spans of documents in it."""

    positions: range
    problem: Problem
    local: tuple[Span, ...]


def chunk_part(
    stream: Stream,
    spec: CallSpec,
    shape: Sequence[int],
    kv_heads: int,
    documents: tuple[Tensor | None, Tensor | None],
    chunk: int,
) -> ChunkPart:
    """Return this rank's part of a chunk, for a call with q of `shape` (B, L, H, D) and K `kv_heads`.

    Raises:
        ValueError: if the documents do not fit the sequence, or the chunk has a different length.
    """
    tokens = stream.tokens(chunk)
    if shape[1] != len(tokens):
        raise ValueError(
            f"chunk {chunk} of {stream.seq_len} tokens has {len(tokens)} tokens, {tokens.start} to {tokens.stop - 1}; got "
            f"{shape[1]}."
        )
    window, pieces = resolve.head_window(spec, shape[2], kv_heads), stream.documents
    if pieces is None:
        every = resolve.find_documents(shape[0], stream.seq_len, *documents, spec)
        pieces = tuple(Document(s.batch, s.batches, s.start, s.start + s.length) for s in every)
    problem = chunk_problem(*window[:3], pieces, stream.shard, window.heads)
    # attention is causal, so the chunk's own blocks need documents only up to the end of the chunk
    documents_until = [replace(d, stop=min(d.stop, tokens.stop)) for d in pieces if d.start < tokens.stop]
    return ChunkPart(tokens, problem, resolve.local_spans(documents_until, [tokens]))


def chunk_pairs(
    stream: Stream,
    spec: CallSpec,
    shape: Sequence[int],
    kv_heads: int,
    documents: tuple[Tensor | None, Tensor | None],
    chunk: int,
) -> int:
    """Count the (query, key) pairs of this rank's queries in a chunk; see `chunk_part` for the arguments."""
    part = chunk_part(stream, spec, shape, kv_heads, documents, chunk)
    joint = sum(x.pairs for x in piece_requests(part.problem, part.positions))
    return resolve.local_pairs(resolve.head_window(spec, shape[2], kv_heads), spec.causal, part.local) + joint


def resolve_chunk(stream: Stream, call: OpCall) -> tuple[resolve.Resolved, int]:
    """Return the `Resolved` of a call on this rank, and the dropout seed that all ranks of the chunk share."""
    assert call.place is not None, "a chunk has a place in a stream"
    (layer, chunk), agreed, key, spec = call.place.tolist(), None, call.key, call.spec
    group = find_sequence(spec.sequence) if spec.sequence else None
    if group is not None:
        call_id = f"layer {layer}, chunk {chunk}"
        call_id += "" if call.number is None else f", backward of call {int(call.number)}"
        tokens = len(stream.shard.positions(chunk))
        agreed, engine = compare(group, call, call_id, tokens)
        key = *key, engine
    make = functools.partial(_chunk_call, stream, call, layer, chunk, group)
    # layers with the same pattern share a route, unless earlier calls carried rows to them
    exchange, route, planned = stream.remember(chunk, (*key, layer if stream.documents else None), make)
    record_planned(group, planned, call.backward)
    rows = stream.rows_of(layer, spec.window[0] if spec.window else 0)
    executor = Chunked(exchange, route, rows, chunk, stream.rising)
    if agreed is None:
        return resolve.Resolved(executor), call.seed
    return resolve.Resolved(executor, planned=planned, number=agreed.number), agreed.seed


def _chunk_call(
    stream: Stream, call: OpCall, layer: int, chunk: int, group: SequenceGroup | None
) -> tuple[RowExchange, ChunkRoute, tuple[Planned, Planned] | None]:
    """Return a chunk's executor, its route, and its planned exchanges (None if ranks exchange no rows)."""
    q, k, spec = call.q, call.k, call.spec
    part = chunk_part(stream, spec, q.shape, k.shape[2], call.documents, chunk)
    problem, request = part.problem, Request.of(q, spec.dropout, spec.scale)
    request = replace(request, changing=resolve.has_varying_length(part.local, q.shape[1]))
    max_triton_pairs = triton_up_to(spec.engine, replace(request, changing=True))  # the number of carried rows varies
    window = resolve.head_window(spec, q.shape[2], k.shape[2])
    blocks, local = resolve.local_executor(spec, request, window, part.local, q.shape, max_triton_pairs)
    route = chunk_route(stream.plan_of(problem, layer), chunk, q.device)
    if group is None or not route.exchange.rounds:
        return RowExchange(blocks, local, route.exchange, (None, None)), route, None
    number, per_node = stream.number(chunk), group.ranks_per_node
    traffic = group.forward_traffic, group.backward_traffic
    sizes = {"head_dim": q.shape[3], "element_size": q.element_size()}
    planned = for_passes(lambda x: Planned(x.run, problem, "gather", number, per_node, **sizes), traffic)
    wires = for_passes(lambda x: chunk_wire(group, stream.shard, number, x), traffic)
    return RowExchange(blocks, local, route.exchange, wires), route, planned


@dataclass(frozen=True)
class Chunked:
    """The executor of a chunk of a stream, or of a rank's piece of it.

    Attributes:
        exchange: computes attention to the chunk's own rows, to carried rows, and to other ranks' rows.
        route: the rows to read and to carry on.
        carried: the layer's rows of earlier chunks.
        chunk: index of the chunk.
        leaves: whether the forward leaves rows for later chunks.
    """

    exchange: RowExchange
    route: ChunkRoute
    carried: LayerRows
    chunk: int
    leaves: bool

    def masked(self, mask: Dropout) -> Chunked:
        return replace(self, exchange=self.exchange.masked(mask))

    @avoid_frame_chunk_edge
    def forward(self, inputs: Sequence[Tensor], final: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        _, k, v = inputs
        self.carried.enter(self.chunk, self.route, k)
        results = self.exchange.forward(inputs, final, self.carried.rows)
        if self.leaves:
            self.carried.leave(k, v)
        return results

    @avoid_frame_chunk_edge
    def backward(
        self, tensors: Sequence[Tensor], lse: Tensor, received: Tensor | None, total: list[Tensor] | None = None
    ) -> list[Tensor]:
        carried = self.carried
        carried.enter(self.chunk, self.route, tensors[2])
        total = self.exchange.backward(tensors, lse, received, total, (carried.rows, carried.read_grads(lse.dtype)))
        carried.add_own_grads(*total[1:])
        return total
