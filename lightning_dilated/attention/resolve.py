"""Turns a call's spec, shapes and documents into one frozen `Resolved`, which forward and backward share.

Calls of one rank are resolved and cached here. A context (other ranks, a stream) resolves its own calls.
Shape letters: B batch, N tokens of the sequence, L tokens of this rank, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_dilated.attention import executors
from lightning_dilated.attention.backends import TRITON, Request, choose, environment
from lightning_dilated.attention.context import RANKS, OpCall, find_context
from lightning_dilated.attention.dropout import Dropout
from lightning_dilated.attention.executors import Call, Executor, HeadWindow, Layout, grouped
from lightning_dilated.attention.executors.fused import captured
from lightning_dilated.attention.executors.grouped import block_flops
from lightning_dilated.attention.executors.tables import bits_of
from lightning_dilated.attention.spans import Span, spans
from lightning_dilated.attention.spec import CallSpec, decode
from lightning_dilated.pattern.rows import check_bounds, check_padding, pairs

if TYPE_CHECKING:
    from lightning_dilated.sequence.exchange.transport import Planned
    from lightning_dilated.sequence.planner import Plan
    from lightning_dilated.sequence.requirements import Document

#: a sequence length that is not a multiple of this number is expected to change from call to call
LENGTH_GRAIN = 64


@dataclass(frozen=True)
class Resolved:
    """A call, ready to be computed by this rank.

    Attributes:
        executor: computes forward and backward.
        plan: the choice of the exchange, with reasons; None on one rank.
        planned: the planned exchanges of forward and backward, for traffic logs; None without an exchange.
        number: the call's number, the same on all ranks; 0 on one rank.
    """

    executor: Executor
    plan: Plan | None = None
    planned: tuple[Planned, Planned] | None = None
    number: int = 0


def resolve(
    code: str, q: Tensor, k: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None, seed: Tensor | None,
    place: Tensor | None = None, number: Tensor | None = None, backward: bool = False,
) -> Resolved:  # fmt: skip
    """Return the `Resolved` of a call with q (B, L, H, D) and k (B, L, K, D). Several ranks first agree on the call.

    Args:
        code: code of the `CallSpec`.
        lengths, cu_seqlens, seed, place: arguments of the op.
        number: in a backward, the number of the forward's call.
        backward: whether this call is a backward.

    Raises:
        ValueError: if documents do not fit the sequence, an engine cannot serve the call, the ranks' calls differ, or
            dropout is used while a CUDA graph records.
    """
    if seed is not None and captured(q.device):
        raise ValueError(
            "a CUDA graph cannot record dropout of attention: its mask depends on a seed on the host, and would be the "
            "same in each replay. Set dropout=0.0, or call it without a graph."
        )
    limits = [x for x in (lengths, cu_seqlens) if x is not None and x.device.type != "cpu"]
    if limits:
        cut = _cut.__wrapped__ if captured(q.device) else _cut  # not cached while a CUDA graph records, as below
        bits = 0 if cu_seqlens is None else bits_of(len(cu_seqlens) - 1)
        arguments = code, q.shape, k.shape[2], q.dtype, q.device, bits, environment(q.device)
        grouped_executor = None if place is not None else cut(*arguments)
        if grouped_executor is not None:
            return _masked(Resolved(grouped_executor.cut(limits[0])), decode(code), seed)
        lengths, cu_seqlens = (None if x is None else _read(x) for x in (lengths, cu_seqlens))
    documents = None if lengths is None else tuple(lengths.tolist())
    bounds = None if cu_seqlens is None else cu_seqlens.numpy().tobytes()
    key = code, q.shape, k.shape[2], q.dtype, q.device, documents, bounds, environment(q.device)
    spec = decode(code)
    drawn = 0 if seed is None else int(seed)
    if place is not None or spec.sequence:
        call = OpCall(key, spec, q, k, (lengths, cu_seqlens), place, drawn, number, backward)
        resolved, drawn = find_context(RANKS if place is None else spec.context).resolve(call)
    else:
        # not cached while a CUDA graph records, because the choice may depend on tables that this recording lacks
        resolved = (_alone.__wrapped__ if captured(q.device) else _alone)(*key)
    return _masked(resolved, spec, None if seed is None else drawn)


def _masked(resolved: Resolved, spec: CallSpec, seed: Tensor | int | None) -> Resolved:
    if seed is None or not spec.dropout:
        return resolved
    return replace(resolved, executor=resolved.executor.masked(Dropout(spec.dropout, int(seed))))


def _read(lengths: Tensor) -> Tensor:
    """Copy `lengths` or `cu_seqlens` to the host, because this call's schedule depends on their values.

    Raises:
        ValueError: while a CUDA graph records, because the host cannot wait for a copy then.
    """
    if captured(lengths.device):
        raise ValueError(
            "only the grouped Triton kernels read lengths and cu_seqlens on the GPU, and they do not serve this call, "
            "so a CUDA graph cannot record it. They need one rank, engine 'auto' or 'triton', patterns without "
            f"Global, and samples (with cu_seqlens a row) of up to {grouped.LIMIT:,} (token, head, feature) triples. Record "
            "the call without lengths and cu_seqlens, or call it without a graph."
        )
    return lengths.cpu()


@functools.lru_cache(maxsize=16)
def _cut(
    code: str, shape: torch.Size, kv_heads: int, dtype: torch.dtype, device: torch.device, bits: int, _: tuple
) -> grouped.Grouped | None:
    """Return the executor of a call of one rank if kernels can read lengths, or bounds of up to 2**bits documents, on
    the device, else None. The caller passes lengths or bounds to the executor's method `cut`."""
    spec = decode(code)
    request = Request(device, dtype, shape[3], spec.dropout > 0, spec.scale)
    if spec.sequence or spec.engine not in ("auto", TRITON.name) or TRITON.why_not(request) or 0 in shape:
        return None
    try:
        check_padding(spec.pattern, shape[1])
    except ValueError:  # the padding is not defined for this length
        return None
    call = Call(TRITON, head_window(spec, shape[2], kv_heads), spec.causal, spec.scale)
    layout = Layout(shape, dtype, device, spec.dropout > 0, True, bits)
    at_once = max(1, grouped.LIMIT // shape[1:].numel())  # the maximum number of samples in a launch
    samples = [Span(i, min(at_once, shape[0] - i), 0, shape[1]) for i in range(0, shape[0], at_once)]
    works = grouped.plan(call, samples, layout)
    return None if works is None else grouped.Grouped(call, works)


@functools.lru_cache(maxsize=16)  # small, because an entry keeps tables on the device
def _alone(
    code: str, shape: torch.Size, kv_heads: int, dtype: torch.dtype, device: torch.device,
    lengths: tuple[int, ...] | None, bounds: bytes | None, _: tuple,
) -> Resolved:  # fmt: skip
    """Resolve a call of one rank; the arguments are the key of the cache."""
    spec = decode(code)
    padded = None if lengths is None else torch.tensor(lengths)
    packed = None if bounds is None else torch.frombuffer(bytearray(bounds), dtype=torch.int32)
    documents = find_documents(shape[0], shape[1], padded, packed, spec)
    changing = has_varying_length(documents, shape[1])
    request = Request(device, dtype, shape[3], spec.dropout > 0, spec.scale, changing=changing)
    return Resolved(local_executor(spec, request, head_window(spec, shape[2], kv_heads), documents, shape)[1])


def forget() -> None:
    """Clear the caches of calls of one rank, for tests that change the environment."""
    _alone.cache_clear()
    _cut.cache_clear()


def check_lengths(lengths: Tensor, seq_len: int) -> None:
    """Raise ValueError unless lengths (B,), on the CPU, are in 0..N."""
    low, high = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    if low < 0 or high > seq_len:
        raise ValueError(f"lengths must lie in 0..{seq_len} (the padded length), got values from {low} to {high}.")


def find_documents(
    batch: int, seq_len: int, lengths: Tensor | None, cu_seqlens: Tensor | None, spec: CallSpec
) -> tuple[Span, ...]:
    """Check the values of lengths or cu_seqlens, and return the documents of a sequence of N tokens."""
    if lengths is not None:
        check_lengths(lengths, seq_len)
    if cu_seqlens is not None:
        check_bounds(cu_seqlens.tolist(), seq_len)
    documents = tuple(spans(batch, seq_len, lengths, cu_seqlens))
    for length in {s.length for s in documents}:
        check_padding(spec.pattern, length)
    return documents


def head_window(spec: CallSpec, heads: int, kv_heads: int) -> HeadWindow:
    """Return the `HeadWindow` of a call on tensors with `heads` query heads and `kv_heads` kv heads."""
    first, num_heads, num_kv_heads = spec.window or (0, heads, kv_heads)
    return HeadWindow(spec.pattern, num_heads, num_kv_heads, (first, first + heads))


def local_executor(
    spec: CallSpec, request: Request, window: HeadWindow, parts: Sequence[Span], shape: Sequence[int],
    max_triton_pairs: tuple[float, float] = (0.0, 0.0), owned: Sequence[int] = (),
) -> tuple[Call, Executor]:  # fmt: skip
    """Return the `Call` and the executor for a rank's parts of documents in tensors of `shape` (B, N, H, D).

    `owned`: pairs of segments that a switch gives to this rank, see `block_flops`.
    """
    if spec.engine == "auto" and request.device.type == "cuda":
        request = replace(request, block_flops=block_flops(window, spec.causal, parts, shape, owned))
    engine = choose(spec.engine, request).engine
    call = Call(engine, window, spec.causal, spec.scale, max_triton_pairs=max_triton_pairs)
    return call, executors.choose(call, parts, Layout(shape, request.dtype, request.device, spec.dropout > 0))


def has_varying_length(documents: Sequence[Span], seq_len: int) -> bool:
    """Return whether documents of a sequence of N tokens probably have different lengths in the next call.

    A length that is not a multiple of `LENGTH_GRAIN` suggests sequences with natural lengths, such as slides, because users
    who cut all sequences to one length usually choose a round number.
    """
    return bool(seq_len % LENGTH_GRAIN) or any(document.length != seq_len for document in documents)


def local_spans(documents: Sequence[Document], pieces: Sequence[range]) -> tuple[Span, ...]:
    """Return the parts of documents in a rank's runs of consecutive positions."""
    parts, start = [], 0
    for piece in pieces:
        for d in documents if piece.step == 1 else ():
            low, high = max(piece.start, d.start), min(piece.stop, d.stop)
            if low < high:
                row, origin = start + low - piece.start, piece.start - start
                parts.append(Span(d.sample, d.samples, row, high - low, d.stop - d.start, low - d.start, origin))
        start += len(piece)
    return tuple(parts)


def whole_pairs(spec: CallSpec, q: Tensor, k: Tensor, documents: tuple[Tensor | None, Tensor | None]) -> int:
    """Return the number of (query, key) pairs of whole sequences, q (B, N, H, D) and k (B, N, K, D), over all heads."""
    window = head_window(spec, q.shape[2], k.shape[2])
    return sum(
        s.batches * pairs(spec.pattern, s.length, *window[1:3], spec.causal, window.heads)
        for s in spans(q.shape[0], q.shape[1], *documents)
    )


def local_pairs(window: HeadWindow, causal: bool, local: Sequence[Span]) -> int:
    """Return the number of pairs in the blocks that a rank or chunk computes from its own rows."""
    return sum(x.batches * block.pairs(causal) for x in local for block in window.blocks(x.document, x.part))
