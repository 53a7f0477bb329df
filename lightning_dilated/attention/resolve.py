"""Resolving a call: its spec, shapes and documents become one frozen `Resolved`, which forward and backward share.

On one rank that is remembered by what it follows from. On several the ranks first compare their calls, then each takes its
part of the sequence and the exchange that the planner chose. A chunk of a stream is such a part, of one rank or of several.
Shape letters: B batch, N tokens of the sequence, L tokens of this rank, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_dilated.attention import executors
from lightning_dilated.attention.backends import TRITON, Request, choose, environment, triton_up_to
from lightning_dilated.attention.context import OpCall, find_context
from lightning_dilated.attention.dropout import Dropout
from lightning_dilated.attention.executors import Call, Executor, HeadWindow, Layout, grouped
from lightning_dilated.attention.executors.fused import captured
from lightning_dilated.attention.executors.grouped import block_flops
from lightning_dilated.attention.executors.remote import AllToAll, HeadParallel, RowExchange
from lightning_dilated.attention.executors.tables import bits_of
from lightning_dilated.attention.spec import CallSpec, decode
from lightning_dilated.attention.views import Span, spans
from lightning_dilated.pattern.rows import check_bounds, check_padding
from lightning_dilated.sequence.consensus import Agreement
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.exchange.run import Compiled, compile_program
from lightning_dilated.sequence.exchange.switch import CompiledSwitch, HeadGroup, compile_switch, windows
from lightning_dilated.sequence.exchange.transport import Planned, Traffic, Wire
from lightning_dilated.sequence.group import SequenceGroup, find_sequence
from lightning_dilated.sequence.head_size import in_groups, plan_in_groups
from lightning_dilated.sequence.planner import Plan, plan
from lightning_dilated.sequence.requirements import Document, Problem, straddling

#: the lengths of sequences that are cut to one length are multiples of it
WHOLE = 64


@dataclass(frozen=True)
class Resolved:
    """How this rank computes a call.

    Attributes:
        executor: what computes it, forward and backward.
        plan: the exchange, and why not others; None on one rank.
        planned: of the forward's and the backward's exchange, where there is one.
        number: of the call, equal on all ranks; 0 on one rank.
    """

    executor: Executor
    plan: Plan | None = None
    planned: tuple[Planned, Planned] | None = None
    number: int = 0


def resolve(
    code: str,
    q: Tensor,
    k: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    place: Tensor | None = None,
    number: Tensor | None = None,
    backward: bool = False,
) -> Resolved:
    """The `Resolved` of a call with q (B, L, H, D) and k (B, L, K, D); on several ranks after all of them agreed on it.

    Args:
        code: of the call's `CallSpec`.
        lengths, cu_seqlens, seed, place: as the op takes them.
        number, backward: of the call whose backward this is.

    Raises:
        ValueError: for documents that do not fit the sequence, engines that cannot serve the call, ranks that differ, and
            dropout while a CUDA graph records.
    """
    if seed is not None and captured(q.device):
        raise ValueError(
            "a CUDA graph cannot record dropout of attention: its mask follows a seed of the host, and would be the same in "
            "each replay. Set dropout=0.0, or call it without a graph."
        )
    limits = [x for x in (lengths, cu_seqlens) if x is not None and x.device.type != "cpu"]
    if limits:
        cut = _cut.__wrapped__ if captured(q.device) else _cut  # as below
        bits = 0 if cu_seqlens is None else bits_of(len(cu_seqlens) - 1)
        of = code, q.shape, k.shape[2], q.dtype, q.device, bits, environment(q.device)
        whole = None if place is not None else cut(*of)
        if whole is not None:
            return _masked(Resolved(whole.cut(limits[0])), decode(code), seed)
        lengths, cu_seqlens = (None if x is None else _read(x) for x in (lengths, cu_seqlens))
    documents = None if lengths is None else tuple(lengths.tolist())
    bounds = None if cu_seqlens is None else cu_seqlens.numpy().tobytes()
    key = code, q.shape, k.shape[2], q.dtype, q.device, documents, bounds, environment(q.device)
    spec = decode(code)
    drawn = 0 if seed is None else int(seed)
    if place is not None:
        call = OpCall(key, spec, q, k, (lengths, cu_seqlens), place, drawn, number, backward)
        resolved, drawn = find_context(spec.context).resolve(call)
    elif spec.sequence:
        resolved, drawn = _agreed(key, spec, q, k, (lengths, cu_seqlens), drawn, number, backward)
    else:
        # a CUDA graph that records may lack a table that the next one has, so what it takes is not remembered
        resolved = (_alone.__wrapped__ if captured(q.device) else _alone)(*key)
    return _masked(resolved, spec, None if seed is None else drawn)


def _masked(resolved: Resolved, spec: CallSpec, seed: Tensor | int | None) -> Resolved:
    """The call with its dropout mask."""
    if seed is None or not spec.dropout:
        return resolved
    return replace(resolved, executor=resolved.executor.masked(Dropout(spec.dropout, int(seed))))


def _read(lengths: Tensor) -> Tensor:
    """Lengths or bounds of documents on the host, for a call whose work follows from their values.

    Raises:
        ValueError: while a CUDA graph records, which cannot wait for them.
    """
    if captured(lengths.device):
        raise ValueError(
            "lengths and cu_seqlens on the GPU are read by the grouped Triton kernels alone, and these do not serve this "
            "call, so a CUDA graph cannot record it. They take one rank, engine 'auto' or 'triton', patterns without "
            f"Global, and samples (with cu_seqlens a row) of up to {grouped.LIMIT:,} (token, head, feature) triples. Record "
            "the call without lengths and cu_seqlens, or call it without a graph."
        )
    return lengths.cpu()


@functools.lru_cache(maxsize=16)
def _cut(
    code: str, shape: torch.Size, kv_heads: int, dtype: torch.dtype, device: torch.device, bits: int, _: tuple
) -> grouped.Grouped | None:
    """The executor of a call of one rank whose lengths stay on the device, or the bounds of up to 2**bits documents; `cut`
    gives it these. None where no kernel reads them."""
    spec = decode(code)
    request = Request(device, dtype, shape[3], spec.dropout > 0, spec.scale)
    if spec.sequence or spec.engine not in ("auto", TRITON.name) or TRITON.why_not(request) or 0 in shape:
        return None
    try:
        check_padding(spec.pattern, shape[1])
    except ValueError:  # not for every length
        return None
    call = Call(TRITON, head_window(spec, shape[2], kv_heads), spec.causal, spec.scale)
    layout = Layout(shape, dtype, device, spec.dropout > 0, True, bits)
    at_once = max(1, grouped.LIMIT // shape[1:].numel())  # samples of a launch
    samples = [Span(i, min(at_once, shape[0] - i), 0, shape[1]) for i in range(0, shape[0], at_once)]
    works = grouped.plan(call, samples, layout)
    return None if works is None else grouped.Grouped(call, works)


@functools.lru_cache(maxsize=16)  # each holds tables on the device
def _alone(
    code: str,
    shape: torch.Size,
    kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    lengths: tuple[int, ...] | None,
    bounds: bytes | None,
    _: tuple,
) -> Resolved:
    """The call of one rank; the arguments are all that it follows from."""
    spec = decode(code)
    padded = None if lengths is None else torch.tensor(lengths)
    packed = None if bounds is None else torch.frombuffer(bytearray(bounds), dtype=torch.int32)
    documents = find_documents(shape[0], shape[1], padded, packed, spec)
    changing = of_any_length(documents, shape[1])
    request = Request(device, dtype, shape[3], spec.dropout > 0, spec.scale, changing=changing)
    return Resolved(local_executor(spec, request, head_window(spec, shape[2], kv_heads), documents, shape)[1])


def forget() -> None:
    """Forget how calls of one rank were resolved: for tests that change what the choice follows from."""
    _alone.cache_clear()
    _cut.cache_clear()


def check_lengths(lengths: Tensor, seq_len: int) -> None:
    """Raise ValueError for lengths (B,) on the CPU beyond N."""
    low, high = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    if low < 0 or high > seq_len:
        raise ValueError(f"lengths must lie in 0..{seq_len} (the padded length), got values from {low} to {high}.")


def find_documents(
    batch: int, seq_len: int, lengths: Tensor | None, cu_seqlens: Tensor | None, spec: CallSpec
) -> tuple[Span, ...]:
    """The documents of a sequence of N tokens, after the checks that need values and not only shapes."""
    if lengths is not None:
        check_lengths(lengths, seq_len)
    if cu_seqlens is not None:
        check_bounds(cu_seqlens.tolist(), seq_len)
    documents = tuple(spans(batch, seq_len, lengths, cu_seqlens))
    for length in {s.length for s in documents}:
        check_padding(spec.pattern, length)
    return documents


def head_window(spec: CallSpec, heads: int, kv_heads: int) -> HeadWindow:
    """The `HeadWindow` of a call; its tensors have `heads` query heads and `kv_heads` kv heads."""
    first, num_heads, num_kv_heads = spec.window or (0, heads, kv_heads)
    return HeadWindow(spec.pattern, num_heads, num_kv_heads, (first, first + heads))


def local_executor(
    spec: CallSpec, request: Request, window: HeadWindow, parts: Sequence[Span], shape: Sequence[int],
    in_triton: tuple[float, float] = (0.0, 0.0),
) -> tuple[Call, Executor]:  # fmt: skip
    """The call of a rank's parts of documents in tensors of `shape` (B, N, H, D), and the executor of their blocks."""
    if spec.engine == "auto" and request.device.type == "cuda":
        request = replace(request, block_flops=block_flops(window, spec.causal, parts, shape))
    engine = choose(spec.engine, request).engine
    call = Call(engine, window, spec.causal, spec.scale, in_triton=in_triton)
    return call, executors.choose(call, parts, Layout(shape, request.dtype, request.device, spec.dropout > 0))


def of_any_length(documents: Sequence[Span], seq_len: int) -> bool:
    """Whether documents of a sequence of N tokens may have other lengths in the next call.

    So do sequences whose length is no multiple of `WHOLE`, such as slides with as many tokens as tissue: who cuts sequences
    to one length takes a rounder one.
    """
    return bool(seq_len % WHOLE) or any(document.length != seq_len for document in documents)


# -- one sequence on many ranks ----------------------------------------------------------------------------------------
def _agreed(
    key: tuple,
    spec: CallSpec,
    q: Tensor,
    k: Tensor,
    documents: tuple[Tensor | None, Tensor | None],
    seed: int,
    number: Tensor | None,
    backward: bool,
) -> tuple[Resolved, int]:
    """The call of a rank of a sequence, and the seed of all ranks."""
    group = find_sequence(spec.sequence)
    turn = None if number is None else f"backward of call {int(number)}"
    agreed, engine = compare(group, spec, q, k, documents, seed, turn, backward)
    key = *key, engine, agreed.lengths
    resolved = group.remember(key, lambda: _shared(spec, group, documents, agreed.lengths, q, k))
    record_planned(group, resolved.planned, backward)
    group.plan = resolved.plan
    return replace(resolved, number=agreed.number), agreed.seed


def compare(
    group: SequenceGroup,
    spec: CallSpec,
    q: Tensor,
    k: Tensor,
    documents: tuple[Tensor | None, Tensor | None],
    seed: int,
    turn: str | None,
    backward: bool,
    chunk: int | None = None,
) -> tuple[Agreement, str]:
    """The ranks' agreement on a call (of a chunk of so many tokens), and the name of an engine that serves it."""
    request = Request.of(q, spec.dropout, spec.scale)
    # that some engine serves is seen before anything moves; which one is known better where the blocks are known
    engine = group.guard(functools.partial(choose, say=False), spec.engine, request).engine
    facts = _facts(spec, q, k, documents, backward)
    later = spec.needs_grad or chunk is not None
    return group.agree(facts, q.shape[1], seed, turn, later=later, chunk=chunk), engine.name


def record_planned(group: SequenceGroup | None, planned: tuple[Planned, Planned] | None, backward: bool) -> None:
    """Record an exchange as planned, where the group is watched."""
    if group is not None and planned is not None and group.forward_traffic.log is not None:
        group.forward_traffic.log.planned.append(planned[backward])


def _facts(
    spec: CallSpec, q: Tensor, k: Tensor, documents: tuple[Tensor | None, Tensor | None], backward: bool
) -> dict[str, object]:
    """What has to be equal on all ranks, besides the group's own settings."""
    lengths, bounds = documents
    digest = None if bounds is None else hashlib.blake2b(bounds.numpy().tobytes(), digest_size=8).hexdigest()
    return {
        "pass": "backward" if backward else "forward",
        "requires grad": spec.needs_grad,
        "pattern": spec.pattern.code,
        "batch": q.shape[0],
        "heads": q.shape[2],
        "kv heads": k.shape[2],
        "window of heads": spec.window,
        "head dim": q.shape[3],
        "dtype": q.dtype,
        "causal": spec.causal,
        "scale": spec.scale,
        "dropout": spec.dropout,
        "lengths": None if lengths is None else lengths.tolist(),
        "cu_seqlens (number, digest)": None if bounds is None else (len(bounds), digest),
    }


def _shared(
    spec: CallSpec,
    group: SequenceGroup,
    documents: tuple[Tensor | None, Tensor | None],
    lengths: tuple[int, ...],
    q: Tensor,
    k: Tensor,
) -> Resolved:
    """What a rank of a sequence computes, alone and with others; `lengths` are the tokens of each rank."""
    batch, _, heads, head_dim = q.shape
    window = head_window(spec, heads, k.shape[2])
    every = find_documents(batch, sum(lengths), *documents, spec)
    sizes = {"head_dim": head_dim, "element_size": q.element_size()}
    chosen, parts = share(group, spec, window, every, sum(lengths), sizes)
    problem, head_size = chosen.problem, chosen.head_size
    ring, member = divmod(group.rank, head_size)
    members = range(ring * head_size, (ring + 1) * head_size)
    per_node = max(1, group.ranks_per_node // head_size)
    route = None
    if name := chosen.exchange:
        routed = problem, ring, name, per_node, q.device
        route = group.remember(routed, functools.partial(_compile, *routed))
    whole = isinstance(route, CompiledSwitch)
    changing = of_any_length(every, sum(lengths))
    request = replace(Request.of(q, spec.dropout, spec.scale), changing=changing)
    shape = batch, sum(lengths[m] for m in members), problem.heads[1] - problem.heads[0], head_dim
    window = window._replace(heads=problem.heads, whole=whole)
    call, executor = local_executor(spec, request, window, parts, shape, triton_up_to(spec.engine, request))
    both = group.forward_traffic, group.backward_traffic
    planned = None
    if name and route is not None:
        ranks = tuple(range(member, group.ranks, head_size))
        wires = for_passes(lambda x: Wire(group.group, ranks, ring, x), both)
        executor = (AllToAll if whole else RowExchange)(call, executor, route, wires)
        planned = for_passes(lambda x: Planned(x.run, problem, name, ring, per_node, **sizes), both)
    if head_size > 1:
        cuts = windows(heads, k.shape[2], head_size)
        kv_cuts = [(a // problem.group, -(-b // problem.group)) for a, b in cuts]
        tokens = tuple(lengths[m] for m in members)
        groups = for_passes(lambda x: HeadGroup(Wire(group.group, tuple(members), member, x), tokens), both)
        executor = HeadParallel(call, executor, groups, cuts, kv_cuts)
    return Resolved(executor, chosen, planned)


def for_passes(make: Callable[[Traffic], Any], both: tuple[Traffic, Traffic]) -> tuple[Any, Any]:
    """One for the forward and one for the backward."""
    return make(both[0]), make(both[1])


def share(
    group: SequenceGroup,
    spec: CallSpec,
    window: HeadWindow,
    documents: Sequence[Span],
    seq_len: int,
    sizes: Mapping[str, int],
) -> tuple[Plan, tuple[Span, ...]]:
    """The plan of the problem that this rank's ring solves, and the parts of documents that the rank computes alone;
    `sizes` are the planner's head_dim and element_size."""
    pieces = [Document(s.batch, s.batches, s.start, s.start + s.length) for s in documents]
    shard = group.shard(seq_len)
    problem = Problem(*window[:3], spec.causal, shard, straddling(pieces, shard), window.heads)
    options: dict[str, Any] = {"ranks_per_node": group.ranks_per_node, "links": group.links, **sizes}
    options["exchange_memory"] = group.exchange_memory
    if group.head_size == "auto" and group.layout != "chunked":
        chosen = plan_in_groups(problem, group.rank, group.exchange, **options)
    else:
        size = group.head_size if isinstance(group.head_size, int) else 1
        chosen = plan(in_groups(problem, size, group.rank % size), group.exchange, **options)
    ring = chosen.problem.shard.ranges(group.rank // chosen.head_size)
    return chosen, local_spans(pieces, ring)


def _compile(
    problem: Problem, rank: int, exchange: str, per_node: int, device: torch.device
) -> Compiled | CompiledSwitch:
    program: Any = EXCHANGES[exchange].program(problem, rank, per_node)
    make = compile_switch if exchange == "switch" else compile_program
    return make(problem, rank, program, device)


def local_spans(documents: Sequence[Document], pieces: Sequence[range]) -> tuple[Span, ...]:
    """The parts of documents that lie in runs of consecutive positions of a rank."""
    parts, start = [], 0
    for piece in pieces:
        for d in documents if piece.step == 1 else ():
            low, high = max(piece.start, d.start), min(piece.stop, d.stop)
            if low < high:
                here, origin = start + low - piece.start, piece.start - start
                parts.append(Span(d.sample, d.samples, here, high - low, d.stop - d.start, low - d.start, origin))
        start += len(piece)
    return tuple(parts)
