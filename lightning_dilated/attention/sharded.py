"""The op's work on one rank or many: agree, send rows, compute what is here, merge what arrives; and all of it backward.

One rank is the same path with nothing to send.
Shape letters: B batch, N tokens of the sequence, L tokens of this rank, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_dilated.attention import switched
from lightning_dilated.attention.blockwise import Call
from lightning_dilated.attention.dropout import Dropout
from lightning_dilated.attention.engines import Request, choose
from lightning_dilated.attention.grouped import block_flops
from lightning_dilated.attention.local import local_backward, local_forward, local_gradients
from lightning_dilated.attention.rowwise import add_batch, merge_batch
from lightning_dilated.attention.views import Span, spans
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.definition import check_bounds
from lightning_dilated.pattern.rows import check_padding
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.exchange.heads import HeadGroup, windows
from lightning_dilated.sequence.exchange.run import BackwardRun, Compiled, Run, compile_program
from lightning_dilated.sequence.exchange.run_switch import CompiledSwitch, compile_switch
from lightning_dilated.sequence.exchange.wire import Wire
from lightning_dilated.sequence.group import SequenceGroup, find_sequence
from lightning_dilated.sequence.plan import plan
from lightning_dilated.sequence.problem import Document, Problem, straddling
from lightning_dilated.sequence.shard import Shard


@dataclass
class Inputs:
    """q (B, L, H, D), k and v (B, L, K, D)."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass
class Options:
    """The op's other arguments, as it takes them."""

    lengths: Tensor | None
    cu_seqlens: Tensor | None
    seed: Tensor | None
    pattern: str
    causal: bool
    scale: float
    dropout: float
    engine: str
    sequence: str
    grad: bool = True


@dataclass
class Saved:
    """What the backward has besides the inputs: the gradient of out, and the forward's results."""

    grad: Tensor
    out: Tensor
    lse: Tensor
    rows: Tensor | None = None
    number: Tensor | None = None


@dataclass
class Place:
    """What this rank does in a call: its blocks, its route to other ranks, and its head-parallel group."""

    call: Call
    spans: list[Span]
    route: Compiled | CompiledSwitch | None = None
    wire: Wire | None = None
    heads: HeadGroup | None = None
    windows: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ((), ())
    number: int = 0


def find_documents(batch: int, seq_len: int, options: Options) -> list[Span]:
    """The documents of a sequence of N tokens, after the checks that need values and not only shapes."""
    lengths, cu_seqlens = options.lengths, options.cu_seqlens
    if lengths is not None and batch:
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > seq_len:
            raise ValueError(f"lengths must lie in 0..{seq_len} (the padded length), got values from {low} to {high}.")
    if cu_seqlens is not None:
        check_bounds(cu_seqlens.tolist(), seq_len)
    found = spans(batch, seq_len, lengths, cu_seqlens)
    for length in {s.length for s in found}:
        check_padding(DilatedPattern.decode(options.pattern), length)
    return found


def _place(x: Inputs, o: Options, saved: Saved | None = None) -> Place:
    """Where this call's work lies; on several ranks after all of them agreed on it."""
    heads, kv_heads = x.q.shape[2], x.k.shape[2]
    group = find_sequence(o.sequence) if o.sequence else None
    pattern, found, flops = DilatedPattern.decode(o.pattern), [], math.inf
    if group is None:
        found = find_documents(x.q.shape[0], x.q.shape[1], o)
        if o.engine == "auto" and x.q.device.type == "cuda":
            flops = block_flops(pattern, found, x.q.shape, kv_heads, o.causal)
    request = o.engine, Request.of(x.q, o.dropout, o.scale, flops)
    engine = (choose(*request) if group is None else group.guard(choose, *request)).engine
    seed = 0 if o.seed is None else int(o.seed)
    call = Call(engine, pattern, heads, kv_heads, (0, heads), o.causal, o.scale)
    mask = lambda seed: Dropout(o.dropout, seed) if o.dropout > 0 and o.seed is not None else None  # noqa: E731
    if group is None:
        return Place(replace(call, mask=mask(seed)), found)
    agreed = group.agree(_facts(x, o, saved), x.q.shape[1], seed)
    found = find_documents(x.q.shape[0], agreed.seq_len, o)
    place = _shared_place(replace(call, mask=mask(agreed.seed)), group, found, agreed.lengths, x, saved is not None)
    return replace(place, number=agreed.number)


def _facts(x: Inputs, o: Options, saved: Saved | None) -> dict[str, object]:
    """What has to be equal on all ranks, besides the group's own settings."""
    short = lambda t: None if t is None else (len(t), hashlib.blake2b(t.numpy().tobytes(), digest_size=8).hexdigest())  # noqa: E731
    return {
        "pass": "forward" if saved is None else f"backward of call {int(saved.number)}",
        "requires grad": o.grad,
        "pattern": o.pattern,
        "batch": x.q.shape[0],
        "heads": x.q.shape[2],
        "kv heads": x.k.shape[2],
        "head dim": x.q.shape[3],
        "dtype": x.q.dtype,
        "causal": o.causal,
        "scale": o.scale,
        "dropout": o.dropout,
        "lengths": None if o.lengths is None else o.lengths.tolist(),
        "cu_seqlens (number, digest)": short(o.cu_seqlens),
    }


def _shared_place(
    call: Call, group: SequenceGroup, found: list[Span], lengths: tuple[int, ...], x: Inputs, backward: bool
) -> Place:
    """The place of a rank of a sequence."""
    size, traffic = group.head_size, group.backward_traffic if backward else group.forward_traffic
    ring, number = divmod(group.rank, size)
    problem, local = share(group, call.pattern, call.num_heads, call.num_kv_heads, call.causal, found, sum(lengths))
    call = replace(call, heads=problem.heads)
    place = Place(call, local)
    sizes = {"head_dim": x.q.shape[3], "element_size": x.q.element_size()}
    group.plan = plan(problem, group.exchange, ranks_per_node=group.ranks_per_node, **sizes)
    if group.plan.exchange:
        per_node = max(1, group.ranks_per_node // size)
        key = problem, ring, group.plan.exchange, per_node, x.q.device
        place.route = group.remember(key, functools.partial(_compile, *key))
        place.wire = Wire(group.group, tuple(range(number, group.ranks, size)), ring, traffic)
        place.call = replace(call, whole=isinstance(place.route, CompiledSwitch))
    if size > 1:
        cuts = windows(call.num_heads, call.num_kv_heads, size)
        members = tuple(range(ring * size, (ring + 1) * size))
        place.heads = HeadGroup(Wire(group.group, members, number, traffic), tuple(lengths[m] for m in members))
        kv = [(a // problem.group, -(-b // problem.group)) for a, b in cuts]
        place.windows = cuts, kv
    return place


def share(
    group: SequenceGroup,
    pattern: DilatedPattern,
    num_heads: int,
    num_kv_heads: int,
    causal: bool,
    found: list[Span],
    seq_len: int,
) -> tuple[Problem, list[Span]]:
    """The problem that this rank's ring solves, and the parts of documents that the rank computes alone."""
    ring, number = divmod(group.rank, group.head_size)
    heads = windows(num_heads, num_kv_heads, group.head_size)[number]
    shard = Shard(seq_len, group.ranks // group.head_size, group.layout, group.head_size)
    documents = [Document(s.batch, s.batches, s.start, s.start + s.length) for s in found]
    problem = Problem(pattern, num_heads, num_kv_heads, causal, shard, straddling(documents, shard), heads)
    return problem, local_spans(documents, shard.ranges(ring))


def _compile(
    problem: Problem, rank: int, exchange: str, per_node: int, device: torch.device
) -> Compiled | CompiledSwitch:
    program = EXCHANGES[exchange].program(problem, rank, per_node)
    make = compile_switch if exchange == "switch" else compile_program
    return make(problem, rank, program, device)


def local_spans(documents: list[Document], pieces: tuple[range, ...]) -> list[Span]:
    """The parts of documents that lie in runs of consecutive positions of a rank."""
    out, start = [], 0
    for piece in pieces:
        for d in documents if piece.step == 1 else ():
            low, high = max(piece.start, d.start), min(piece.stop, d.stop)
            if low < high:
                here, origin = start + low - piece.start, piece.start - start
                out.append(Span(d.sample, d.samples, here, high - low, d.stop - d.start, low - d.start, origin))
        start += len(piece)
    return out


def run_forward(x: Inputs, o: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, received rows, number of the call), see `op.attention`."""
    place = _place(x, o)
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
        return switched.forward(call, place.spans, place.route, place.wire, (q, k, v))
    run = Run(place.route, place.wire, k, v)
    out, lse = local_forward(call, place.spans, (q, k, v), False)
    for arrival in run.arrivals():
        for batch in arrival.batches:
            merge_batch(call, batch, q, arrival.rows, out, lse)
    return out, lse, run.rows.flatten(0, 1)


def run_backward(x: Inputs, o: Options, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), see `op.attention_backward`."""
    place = _place(x, o, saved)
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
    total = [torch.zeros(t.shape, dtype=lse.dtype, device=q.device) for t in (q, k, v)]
    local = lambda: local_backward(call, place.spans, tensors, lse, total)  # noqa: E731
    if isinstance(place.route, CompiledSwitch):
        switched.backward(call, place.route, place.wire, tensors, lse, rows, total, local)
        return total
    run = BackwardRun(place.route, place.wire, k, v, rows, total[1], total[2])
    for arrival in run.arrivals():
        for batch in arrival.batches:
            add_batch(call, batch, (grad, q, out), arrival.rows, lse, total[0], arrival.grads)
    local()
    run.finish()
    return total
