"""Compute the GPU memory of the attention op and the recurrence op in addition to their inputs and results.

The numbers follow from the executors' own chunks, launches and limits.

Shape letters: L tokens of a rank, H query heads, D head dim, B batch.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_dilated._compat.torch import real_tensors
from lightning_dilated.attention.backends import Engine, Request, choose
from lightning_dilated.attention.executors import fused, grouped
from lightning_dilated.attention.executors.base import Call, HeadWindow
from lightning_dilated.attention.executors.fused import Chunk
from lightning_dilated.attention.resolve import has_varying_length
from lightning_dilated.attention.spans import Span
from lightning_dilated.ext.hashed.op import HASHED, HASHED_BACKWARD
from lightning_dilated.ext.recurrence import op, triton_chunks
from lightning_dilated.ext.recurrence.chunks import GROUPED_FROM
from lightning_dilated.ext.recurrence.runs import CHUNK
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import Block, cycle_to, global_tokens, without_global

#: bytes of a log-sum-exp
LSE = 4
#: engines that allocate an fp32 sum of dq, delta and log-sum-exp for each row in the backward; with them, 8.08 GiB are
#: computed for the op at 1,048,576 tokens, and 8.10 GiB were measured on an H200
SUMS_DQ = ("cudnn", "flash")


@dataclass(frozen=True)
class OpCall:
    """One call of the attention op on a GPU.

    Attributes:
        tokens, batch: L and B of this rank.
        whole: number of tokens of the whole sequence; None: L. offset: position of this rank's first token.
        window: (first, stop) of the call's query heads; None: all H.
        final: whether out is complete after the call; False if results of other ranks' rows will be merged into it.
        others: the patterns of layers 1, 2, ... if they differ; layers cycle through `pattern` and `others`.
    """

    pattern: DilatedPattern
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    tokens: int
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1
    whole: int | None = None
    offset: int = 0
    window: tuple[int, int] | None = None
    final: bool = True
    dropout: bool = False
    engine: str = "auto"
    capability: tuple[int, int] = (9, 0)
    others: tuple[DilatedPattern, ...] = ()

    @property
    def cycle(self) -> tuple[DilatedPattern, ...]:
        """The patterns that layers 0, 1, ... cycle through."""
        return self.pattern, *self.others

    def layers(self, depth: int) -> list[tuple[OpCall, int]]:
        """Return the distinct calls of `depth` layers, each with its number of layers."""
        counts = Counter(cycle_to(self.cycle, depth))
        return [(replace(self, pattern=pattern, others=()), layers) for pattern, layers in counts.items()]

    @property
    def spans(self) -> list[Span]:
        """The rank's part of the sequence: a list of one span, or an empty list if the rank has no tokens."""
        if not self.tokens:
            return []
        return [Span(0, self.batch, 0, self.tokens, self.whole, self.offset, self.offset)]

    @property
    def head_range(self) -> tuple[int, int]:
        """The tensors' query heads, (first, stop)."""
        return self.window or (0, self.heads)

    @property
    def own_heads(self) -> tuple[int, int]:
        """The numbers of (query heads, kv heads) in the tensors."""
        first, stop = self.head_range
        group = self.heads // self.kv_heads
        return stop - first, -(-stop // group) - first // group

    @property
    def rows(self) -> int:
        """Number of rows of q, over all samples and heads."""
        return self.batch * self.tokens * self.own_heads[0]

    @property
    def row(self) -> int:
        """Bytes of one row of q in one head."""
        return self.head_dim * self.dtype.itemsize

    @property
    def results(self) -> tuple[int, int]:
        """Bytes of (out and lse, dq and dk and dv)."""
        keys = self.batch * self.tokens * self.own_heads[1]
        return self.rows * (self.row + LSE), (self.rows + 2 * keys) * self.row

    @property
    def call(self) -> Call:
        """The executors' description of the call."""
        return Call(engine_of(self), self.head_window, self.causal, self.head_dim**-0.5)

    @property
    def head_window(self) -> HeadWindow:
        """The heads that the call computes."""
        return HeadWindow(self.pattern, self.heads, self.kv_heads, self.head_range)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v on the meta device."""
        heads, kv = self.own_heads
        make = lambda h: torch.empty(self.batch, self.tokens, h, self.head_dim, dtype=self.dtype, device="meta")  # noqa: E731
        return make(heads), make(kv), make(kv)

    @property
    def block_flops(self) -> float:
        """`grouped.block_flops` of the call without owned segments; infinite if the grouped executor does not serve it."""
        shape = self.batch, self.tokens, self.own_heads[0], self.head_dim
        return grouped.block_flops(self.head_window, self.causal, self.spans, shape)

    @property
    def block_rows(self) -> list[int]:
        """Number of rows of each block in the call's only span, over samples and heads."""
        (span,) = self.spans
        return [_rows(span, b) for b in self.call.blocks(span)]


@functools.lru_cache(maxsize=4096)
def engine_of(x: OpCall) -> Engine:
    """Return the engine that a GPU of this capability uses, regardless of the hardware of this machine.

    Raises:
        ValueError: if no engine can run the call.
    """
    flops = x.block_flops if x.engine == "auto" else math.inf
    scale, changing = x.head_dim**-0.5, has_varying_length((), x.tokens if x.whole is None else x.whole)
    request = Request(torch.device("cuda"), x.dtype, x.head_dim, x.dropout, scale, flops, x.capability, changing)
    return choose(x.engine, request, log=False).engine


@functools.lru_cache(maxsize=4096)
def workspace(x: OpCall) -> tuple[int, int]:
    """Return the op's (forward, backward) peak bytes in addition to inputs and results."""
    if not x.rows:
        return 0, 0
    if (inner := _without_global(x)) is not None:
        return _beside_global(x, inner)
    q = x.tensors()[0]
    peaks = _grouped(x) or (_fused(x) if fused.suits(x.pattern, q.shape, q.dtype) else _blockwise(x))
    return max(0, peaks[0] - x.results[0]), max(0, peaks[1] - x.results[1])


def _without_global(x: OpCall) -> OpCall | None:
    """Return the call without global branches, if one executor computes the others together; see `executors.choose`."""
    pattern, numbers = without_global(x.pattern), [b.tokens is not None for b in x.pattern.branches]
    if pattern is None or not any(numbers) or (x.dropout and numbers != sorted(numbers)):
        return None
    inner = replace(x, pattern=pattern, final=False)
    together = _grouped(inner) is not None or fused.suits(pattern, x.tensors()[0].shape, x.dtype)
    return inner if together else None


def _beside_global(x: OpCall, inner: OpCall) -> tuple[int, int]:
    """Compute the peaks of `executors.WithGlobalTokens`: other branches in fp32, then global tokens block by block."""
    wide, (forward, backward) = max(4, x.dtype.itemsize), workspace(inner)
    crossing = {i for i, b in enumerate(x.pattern.branches) if b.tokens is not None}
    most = max((_rows(x.spans[0], b) for b in x.call.blocks(x.spans[0]) if b.branch in crossing), default=0)
    out, narrow = x.rows * (x.head_dim * wide + LSE), x.rows * x.row if wide != x.dtype.itemsize else 0
    merged = out + max(most * (x.row + 2 * x.head_dim * wide + 4 * LSE), narrow)
    sums, rounded = x.results[1] // x.dtype.itemsize * wide, x.results[1] if wide != x.dtype.itemsize else 0
    part = 3 * x.row + 2 * LSE + (4 * x.head_dim if engine_of(x).name in SUMS_DQ else 0)
    peak = sums + max(rounded, backward, most * part)
    return max(forward, merged - x.results[0]), peak - x.results[1]


# -- a few launches for all blocks -------------------------------------------------------------------------------------
def _grouped(x: OpCall) -> tuple[int, int] | None:
    """Compute the peaks of `executors.grouped`; None if it does not serve the call."""
    if engine_of(x).name != "triton" or x.block_flops == math.inf or global_tokens(x.pattern):
        return None
    out = x.rows * (x.head_dim * (x.dtype.itemsize if x.final else 4) + LSE)
    rows, places = sum(x.block_rows), 8 if x.dropout else 0
    # backward: log-sum-exp and delta of each row, and its dk and dv, which are freed before dq is allocated
    return out + rows * (x.row + LSE + places), x.results[1] + rows * (2 * LSE + 2 * x.row + places)


# -- chunk by chunk ---------------------------------------------------------------------------------------------------
def _fused(x: OpCall) -> tuple[int, int]:
    """Compute the peaks of `executors.fused`."""
    call, spans, (q, k, v) = x.call, x.spans, x.tensors()
    pieces = fused.forward_pieces(call, spans, [q, k, v], x.final)
    wide = 0 if x.final else x.rows * x.head_dim * 4
    first = wide + _held(pieces, x.row + LSE, 0, x.results[0])
    pieces = fused.backward_pieces(call, spans, [q, q, k, v, q], add=False)
    sums = 4 * x.head_dim if call.engine.name in SUMS_DQ else 0
    return first, _held(pieces, 3 * x.row, sums + 2 * LSE, x.results[1])


def _held(pieces: fused.Pieces, part: int, engine: int, results: int) -> int:
    """Return the peak bytes. Each row of a held block takes `part` bytes, each row of the running block takes `engine`
    further bytes, and `results` bytes are allocated after the first span's outermost parts."""
    peak = before = 0
    spans, branch = pieces
    for span, chunk in spans:
        outer = part * sum(_rows(span, b) for b in chunk.blocks if b.branch == branch)
        added = 0 if before else results - outer
        for rows in _leaves(span, chunk):
            live = before
            for i, n in enumerate([*rows, 0]):
                live += added if i == len(chunk.blocks) else 0
                peak = max(peak, live + n * (part + engine))
                live += n * part
        before += added
    return peak


def _leaves(span: Span, chunk: Chunk) -> list[list[int]]:
    """List, for each innermost chunk, the rows of the blocks in memory while the chunk is combined, oldest first."""
    leaves: list[list[int]] = []
    fused.walk(chunk, functools.partial(_rows, span), lambda _, every, rows: leaves.append(rows))
    return leaves


def _rows(span: Span, block: Block) -> int:
    return span.batches * block.segments * block.heads * block.rows


# -- block by block ----------------------------------------------------------------------------------------------------
def _blockwise(x: OpCall) -> tuple[int, int]:
    """Compute the peaks of `executors.blockwise`: fp32 sums, and one block's result with the copies that merge it."""
    wide = max(4, x.dtype.itemsize)
    most = max(x.block_rows, default=0)
    sums = 4 * x.head_dim if engine_of(x).name in SUMS_DQ else 0
    out = x.rows * (x.head_dim * wide + LSE) + most * (x.row + 2 * x.head_dim * wide + 4 * LSE)
    back = x.results[1] // x.dtype.itemsize * wide
    rounded = x.results[1] if wide != x.dtype.itemsize else 0  # results in the dtype of q, in addition to the sums
    narrow = x.rows * x.row if wide != x.dtype.itemsize else 0
    return max(out, x.rows * (x.head_dim * wide + LSE) + narrow), back + max(
        rounded, most * (3 * x.row + sums + 2 * LSE)
    )


#: names of the pieces of mixers' ops in `memory_tracker.Piece.op`
NAMES = {
    op.RECURRENCE: "recurrence",
    op.RECURRENCE_BACKWARD: "recurrence backward",
    HASHED: "hashed",
    HASHED_BACKWARD: "hashed backward",
}


# -- recurrences: a Meter measures the op at two lengths ---------------------------------------------------------------


def recurrence_workspace(forward: bool, call: OpCall, spec: str, meter: Callable[[], Any]) -> int:
    """Return the bytes of a recurrence call with L tokens and B samples; `meter` returns a new `Meter`."""
    described = op.RecurrenceSpec.decode(spec)
    sizes = call.heads, call.kv_heads, call.head_dim
    (short, low), (long, high) = _metered(forward, sizes, call.dtype, spec, meter)
    shared = call.whole is not None and call.whole > call.tokens  # ranks with a part of a sequence use one window
    whole = not described.causal or shared
    tokens = call.tokens if whole else min(call.tokens, op.WINDOW)
    rows = call.heads * (1 if forward else 2) + (0 if forward else 2 * call.kv_heads)  # a window's results are copied
    copied = 0 if tokens == call.tokens else call.batch * tokens * rows * call.head_dim * call.dtype.itemsize
    counted = max(0, round(low + (high - low) * (call.batch * tokens - short) / (long - short))) + copied
    if described.kind != "gated_delta":
        return counted
    # the machine of the run decides between PyTorch code and the Triton kernel: take the larger number
    heads, dims = (call.heads, call.kv_heads), (call.head_dim, call.head_dim)
    window = triton_chunks.window(call.batch, heads, dims, call.dtype)
    tokens = call.tokens if whole else min(call.tokens, window)
    cut = tokens < call.tokens
    return max(counted, triton_chunks.held_bytes(call.batch * tokens, heads, dims, call.dtype, not forward, cut) or 0)


@functools.lru_cache(maxsize=64)
def _metered(
    forward: bool, sizes: tuple[int, int, int], dtype: torch.dtype, spec: str, meter: Callable[[], Any]
) -> tuple[tuple[int, int], ...]:
    """Run two calls on the CPU, and return the (tokens, bytes) of each."""
    segment = op.RecurrenceSpec.decode(spec).segment or CHUNK
    with real_tensors():
        grouped = 2 * GROUPED_FROM * segment <= op.WINDOW  # whether a window is long enough to group segments
        lengths = tuple(n * segment for n in ((GROUPED_FROM, 2 * GROUPED_FROM) if grouped else (4, 8)))
        return tuple((n, _recurrence_held(forward, n, sizes, dtype, spec, meter())) for n in lengths)


def _recurrence_held(
    forward: bool, tokens: int, sizes: tuple[int, int, int], dtype: torch.dtype, spec: str, meter: Any
) -> int:
    heads, kv_heads, dim = sizes
    kind = op.RecurrenceSpec.decode(spec).kind
    with torch.device("cpu"), meter:
        q, k, v = (torch.zeros(1, tokens, n, dim, dtype=dtype) for n in (heads, kv_heads, kv_heads))
        gates = [torch.zeros(1, tokens, kv_heads, dtype=torch.float32) for _ in range(2)]
        tensors = [q, k, v, *(gates if kind == "gated_delta" else (None, None))]
        grad = [] if forward else [torch.zeros_like(q)]
        known = meter.live
        meter.reset_peak()
        results = (op.run_forward if forward else op.run_backward)(*grad, *tensors, None, None, spec)
        results = (results,) if isinstance(results, Tensor) else results
        return meter.peak - known - sum(x.nbytes for x in results)
