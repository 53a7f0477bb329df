"""Where a call's work lies: what the ranks agree on, this rank's blocks, its route to others and its head-parallel group.

One rank is the same with nothing to send.
Shape letters: B batch, N tokens of the sequence, L tokens of this rank, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_dilated.attention.backends import Engine, Request, chained_up_to, choose
from lightning_dilated.attention.dropout import Dropout
from lightning_dilated.attention.executors.blockwise import Call
from lightning_dilated.attention.executors.grouped import block_flops
from lightning_dilated.attention.views import Span, spans
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import check_bounds, check_padding
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.exchange.head_parallel import HeadGroup, windows
from lightning_dilated.sequence.exchange.run import Compiled, compile_program
from lightning_dilated.sequence.exchange.switch import CompiledSwitch, compile_switch
from lightning_dilated.sequence.exchange.transport import Planned, Wire
from lightning_dilated.sequence.group import SequenceGroup, find_sequence
from lightning_dilated.sequence.planner import Plan, plan
from lightning_dilated.sequence.requirements import Document, Problem, straddling
from lightning_dilated.sequence.shard import Shard


@dataclass
class Inputs:
    """q (B, L, H, D), k and v (B, L, K, D)."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass
class Options:
    """The op's other arguments, as it takes them.

    `window` = (first, heads, kv heads): the heads of q are first, first + 1, ... of so many, and those of k and v theirs;
    () where q has all.
    """

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
    window: tuple[int, ...] = ()


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
    plan: Plan | None = None
    planned: Planned | None = None
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


def find_place(x: Inputs, o: Options, saved: Saved | None = None) -> Place:
    """Where this call's work lies; on several ranks after all of them agreed on it."""
    first, heads, kv_heads = o.window or (0, x.q.shape[2], x.k.shape[2])
    own = first, first + x.q.shape[2]
    group = find_sequence(o.sequence) if o.sequence else None
    seed = 0 if o.seed is None else int(o.seed)
    mask = lambda seed: Dropout(o.dropout, seed) if o.dropout > 0 and o.seed is not None else None  # noqa: E731
    pattern, found = DilatedPattern.decode(o.pattern), []
    if group is None:
        found = find_documents(x.q.shape[0], x.q.shape[1], o)
        engine = _engine(o, (pattern, heads, kv_heads, own, False), found, x.q)
    else:  # known better where the blocks are known; that there is one is seen before anything moves
        engine = group.guard(functools.partial(choose, say=False), o.engine, Request.of(x.q, o.dropout, o.scale)).engine
    call = Call(engine, pattern, heads, kv_heads, own, o.causal, o.scale, mask(seed))
    if group is None:
        return Place(call, found)
    turn = None if saved is None else f"backward of call {int(saved.number)}"
    facts = _facts(x, o, saved)
    agreed = group.agree(facts, x.q.shape[1], seed, turn, later=o.grad)
    call = replace(call, chained=chained_up_to(o.engine, Request.of(x.q, o.dropout, o.scale)), mask=mask(agreed.seed))
    # all that the place follows from; masks are another's in every call
    key = (
        None
        if call.mask
        else (*map(str, facts.values()), o.engine, engine.name, x.q.device, agreed.lengths, call.chained)
    )
    place = group.remember(key, lambda: _shared_place(call, group, o, agreed.lengths, x, saved is not None))
    if place.plan.exchange and place.wire.traffic.log is not None:
        place.wire.traffic.log.planned.append(place.planned)
    group.plan = place.plan
    return replace(place, number=agreed.number)


def _engine(o: Options, of: tuple, found: list[Span], q: Tensor) -> Engine:
    """The engine for blocks of such sizes, where these matter; `of`: see `block_flops`."""
    request = Request.of(q, o.dropout, o.scale)
    if o.engine == "auto" and q.device.type == "cuda":
        shape = *q.shape[:2], of[3][1] - of[3][0], q.shape[3]
        request = replace(request, block_flops=block_flops(of, o.causal, found, shape))
    return choose(o.engine, request).engine


def _facts(x: Inputs, o: Options, saved: Saved | None) -> dict[str, object]:
    """What has to be equal on all ranks, besides the group's own settings."""
    short = lambda t: None if t is None else (len(t), hashlib.blake2b(t.numpy().tobytes(), digest_size=8).hexdigest())  # noqa: E731
    return {
        "pass": "forward" if saved is None else "backward",
        "requires grad": o.grad,
        "pattern": o.pattern,
        "batch": x.q.shape[0],
        "heads": x.q.shape[2],
        "kv heads": x.k.shape[2],
        "window of heads": o.window,
        "head dim": x.q.shape[3],
        "dtype": x.q.dtype,
        "causal": o.causal,
        "scale": o.scale,
        "dropout": o.dropout,
        "lengths": None if o.lengths is None else o.lengths.tolist(),
        "cu_seqlens (number, digest)": short(o.cu_seqlens),
    }


def _shared_place(
    call: Call, group: SequenceGroup, o: Options, lengths: tuple[int, ...], x: Inputs, backward: bool
) -> Place:
    """The place of a rank of a sequence."""
    found = find_documents(x.q.shape[0], sum(lengths), o)
    size, traffic = group.head_size, group.backward_traffic if backward else group.forward_traffic
    ring, number = divmod(group.rank, size)
    of = call.pattern, call.num_heads, call.num_kv_heads, call.causal
    problem, local = share(group, *of, found, sum(lengths), call.heads)
    call = replace(call, heads=problem.heads)
    sizes = {"head_dim": x.q.shape[3], "element_size": x.q.element_size()}
    chosen = plan(problem, group.exchange, ranks_per_node=group.ranks_per_node, links=group.links, **sizes)
    place = Place(call, local, plan=chosen)
    if chosen.exchange:
        per_node = max(1, group.ranks_per_node // size)
        key = problem, ring, chosen.exchange, per_node, x.q.device
        place.route = group.remember(key, functools.partial(_compile, *key))
        place.wire = Wire(group.group, tuple(range(number, group.ranks, size)), ring, traffic)
        place.call = replace(call, whole=isinstance(place.route, CompiledSwitch))
        place.planned = Planned(traffic.run, problem, chosen.exchange, ring, per_node, **sizes)
    of = call.pattern, call.num_heads, call.num_kv_heads, call.heads, place.call.whole
    place.call = replace(place.call, engine=_engine(o, of, local, x.q))
    if size > 1:
        cuts = windows(x.q.shape[2], x.k.shape[2], size)
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
    window: tuple[int, int],
) -> tuple[Problem, list[Span]]:
    """The problem that this rank's ring solves, and the parts of documents that the rank computes alone.

    `window` = (first, stop) of the `num_heads` query heads are attended with.
    """
    ring, number = divmod(group.rank, group.head_size)
    first, count = window[0], window[1] - window[0]
    heads = windows(count, count * num_kv_heads // num_heads, group.head_size)[number]
    heads = first + heads[0], first + heads[1]
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
