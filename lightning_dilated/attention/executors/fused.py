"""Attention over a rank's own blocks with each output row written once: parts of the branches, then one kernel.

The sequence is cut into chunks that no narrow segment crosses, done one after another, so that only the parts of a chunk,
and the thin ones of wide segments, are held with the results.
Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim, w segment length, r dilation rate.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from lightning_dilated import kernels
from lightning_dilated.attention.dropout import Dropout
from lightning_dilated.attention.executors.base import Call, Layout
from lightning_dilated.attention.executors.blockwise import block_backward, block_forward, suited
from lightning_dilated.attention.executors.tables import entries
from lightning_dilated.attention.views import Span, folds
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import Block, blocks

Part = TypeVar("Part")


@dataclass(frozen=True)
class Chunk:
    """Positions [start, stop) of a span.

    Its blocks are computed when it begins, and held to its end; `inner` are its pieces, with the blocks of narrower or
    denser branches. What has no pieces is where parts are combined.
    """

    start: int
    stop: int
    blocks: tuple[Block, ...]
    inner: tuple[Chunk, ...] = ()


@functools.lru_cache(maxsize=1024)
def layout(call_key: tuple, part: tuple[int, int], limits: tuple[int, int], own: int | None = None) -> Chunk:
    """The chunks of positions `part` of a document.

    Args:
        call_key: (pattern, tokens of the document, H, kv heads, heads, whole), as `blocks` takes them.
        part: (start, stop) in the document.
        limits: most positions of a chunk for dense branches, and for thin ones, whose parts have half the rows or fewer.
        own: a branch that is computed at once for all positions, since its part is no more than the result itself.
    """
    pattern, document, num_heads, num_kv_heads, heads, whole = call_key
    length, every = part[1] - part[0], frozenset(range(len(pattern.branches)))
    short = length <= limits[0 if own is None else 1]
    levels = [(length, every)] if short else _levels(pattern, num_heads, limits, every - {own}, length)

    def found(start: int, stop: int, names: frozenset[int]) -> tuple[Block, ...]:
        where = part[0] + start, part[0] + stop
        made = blocks(pattern, document, num_heads, num_kv_heads, where, heads, whole) if names else ()
        return tuple(replace(b, first=b.first + start) for b in made if b.branch in names)

    def grow(start: int, stop: int, depth: int) -> Chunk:
        inner: tuple[Chunk, ...] = ()
        if depth + 1 < len(levels):
            step = levels[depth + 1][0]
            cuts = [start, *range(start + step - (part[0] + start) % step, stop, step), stop]
            inner = tuple(grow(a, b, depth + 1) for a, b in itertools.pairwise(cuts))
        return Chunk(start, stop, found(start, stop, levels[depth][1]), inner)

    return grow(0, length, 0)


def _levels(
    pattern: DilatedPattern, num_heads: int, limits: tuple[int, int], names: frozenset[int], length: int
) -> list[tuple[int, frozenset[int]]]:
    """(positions of a chunk, its branches) from the whole span inwards; the span has what fits into no shorter chunk."""
    branches = pattern.branches
    dense = {i for i in names if 2 * len(branches[i].heads or range(num_heads)) > num_heads * branches[i].dilation_rate}
    fine, inner = _fitting(pattern, dense, limits[0], 1)
    coarse, middle = _fitting(pattern, names - inner, limits[1], fine)
    # a multiple of all segments, as long as the limit allows
    found = [(coarse * (limits[1] // coarse), middle), (fine * (limits[0] // fine), inner)]
    found = [(step, taken) for step, taken in found if taken and step < length]
    return [(length, frozenset(range(len(branches))).difference(*(taken for _, taken in found))), *found]


def _fitting(pattern: DilatedPattern, among: Iterable[int], limit: int, step: int) -> tuple[int, frozenset[int]]:
    """(a multiple of `step` of at most `limit` positions, the branches whose segments all end at its multiples)."""
    taken = set()
    for i in sorted(among, key=lambda i: pattern.branches[i].segment_length or math.inf):
        branch = pattern.branches[i]
        if branch.segment_length is None or branch.shift or math.lcm(step, branch.segment_length) > limit:
            continue
        step = math.lcm(step, branch.segment_length)
        taken.add(i)
    return step, frozenset(taken)


def walk(
    chunk: Chunk,
    make: Callable[[Block], Part],
    combine: Callable[[Chunk, tuple[Block, ...], list[Part]], None],
    found: tuple[Block, ...] = (),
    parts: Sequence[Part] = (),
) -> None:
    """Make every block's part, and combine them where no chunk is inside; a chunk's parts are let go when it is done."""
    held = [*parts, *map(make, chunk.blocks)]
    found += chunk.blocks
    if not chunk.inner:
        combine(chunk, found, held)
    for inner in chunk.inner:
        walk(inner, make, combine, found, held)


def every_block(chunk: Chunk) -> list[Block]:
    """Its blocks and those of all chunks inside."""
    return [*chunk.blocks, *(b for inner in chunk.inner for b in every_block(inner))]


#: Limits of a chunk, in (position, head, feature) triples: 131,072 tokens of 12 heads of 64 and multiples of it.
HELD = 131072 * 12 * 64
#: of the forward, which holds one tensor where the backward holds three and the engine's workspace
FORWARD = 4 * HELD
#: of the backward: of branches that have most rows; of the others, whose calls are small and gain by more segments
DENSE, THIN = HELD, 2 * HELD
#: a call up to this size is one chunk in the backward
WHOLE = 2 * HELD
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


#: parts may have this many rows for each of q; branches that overlap more are merged one by one, to hold one part at a time
OVERLAP = 2.5


def serves(pattern: DilatedPattern, q: Layout) -> bool:
    """Whether the kernels take tensors like q, and the parts of the pattern's branches are few enough to be held."""
    batch, tokens, heads, _ = q.shape
    overlap = sum(len(b.heads or range(heads)) / heads / b.dilation_rate for b in pattern.branches)
    fits = batch < 2**16 and tokens < 2**31 - 2**16  # of a launch's grid, and of positions in 32 bits
    return overlap <= OVERLAP and fits and q.dtype in DTYPES and kernels.available(q.device) and not captured(q.device)


def captured(device: torch.device) -> bool:
    """Whether a CUDA graph records the call: its replay would read addresses from a table that is gone by then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _pieces(
    call: Call, found: list[Span], tensors: Sequence[Tensor], held: tuple[int, int], may_own: bool
) -> tuple[list[tuple[Span, Chunk]], int | None]:
    """Spans with their chunks, and the branch whose part can be the result (see `_own`)."""
    own = _own(call, found, tensors) if may_own else None
    pieces = list(_cut(call, found, tensors, held, own))
    if own is not None and len(pieces) > 1:
        return list(_cut(call, found, tensors, held, None)), None
    return pieces, own


def _cut(
    call: Call, found: list[Span], tensors: Sequence[Tensor], held: tuple[int, int], own: int | None
) -> Iterator[tuple[Span, Chunk]]:
    """Spans with their chunks; samples one by one where blocks cannot fold them into one axis."""
    q = tensors[0]
    for span in found:
        part = span.part or (0, span.length)
        key = call.pattern, span.document, call.num_heads, call.num_kv_heads, call.heads, call.whole
        limits = lambda batches: tuple(max(1, x // (batches * q.shape[2] * q.shape[3])) for x in held)  # noqa: E731
        made = layout(key, part, limits(span.batches), own)
        if span.batches == 1 or all(folds(span, b, *tensors) for b in every_block(made)):
            yield span, made
        else:
            alone = layout(key, part, limits(1), own)
            yield from ((replace(span, batch=span.batch + i, batches=1), alone) for i in range(span.batches))


def _own(call: Call, found: list[Span], tensors: Sequence[Tensor]) -> int | None:
    """A branch that has every row of the call in one block, where the engine lays those out as they lie in q."""
    batch, seq_len, heads, _ = tensors[0].shape
    if len(found) != 1 or not call.engine.rows_in_place or found[0].batches * found[0].length != batch * seq_len:
        return None
    span = found[0]
    key = call.pattern, span.document, call.num_heads, call.num_kv_heads, span.part, call.heads, call.whole
    for b in blocks(*key):
        every = b.segments * b.rows == span.length and b.heads == heads and b.row_stride == 1
        if every and not b.pads and b.rows >= call.engine.min_rows:
            return b.branch
    return None


def _where(span: Span, chunk: Chunk) -> tuple[int, int, int, int]:
    return span.batches, chunk.start, chunk.stop, span.start


def _result(shape: torch.Size, dtype: torch.dtype, device: torch.device, part: Tensor | None, covered: bool) -> Tensor:
    """The tensor of a result: a part's own memory, where that has every row of every head in place."""
    if part is not None and part.shape[1] == shape[2] and part.dtype == dtype:
        rows = part.transpose(1, 2)
        if rows.is_contiguous():
            return rows.reshape(shape)
    return (torch.empty if covered else torch.zeros)(shape, dtype=dtype, device=device)


def _covered(found: list[Span], x: Tensor) -> bool:
    """Whether spans hold every position of a (B, N, ...) tensor."""
    return sum(span.batches * span.length for span in found) == x.shape[0] * x.shape[1]


def _is(parts: Sequence[Tensor], own: int | None, out: Tensor) -> bool:
    """Whether part `own` is the memory of the result already."""
    return own is not None and parts[own].data_ptr() == out.data_ptr()


def _descend(device: torch.device, made: Chunk, make: Callable, combine: Callable, parts: list) -> None:
    """`walk` from the blocks of a span's first chunk on, which are made.

    On a GPU the chunks inside take turns on two streams, so that the sums and last waves of one run beside the products
    of another. They write to no common row; what one allocates is freed before its turn ends.
    """
    if device.type != "cuda" or len(made.inner) < 2:
        walk(replace(made, blocks=()), make, combine, made.blocks, parts)
        return
    with torch.cuda.device(device):
        streams = torch.cuda.current_stream(), _side_stream(device)
        streams[1].wait_stream(streams[0])
        try:
            for i, inner in enumerate(made.inner):
                with torch.cuda.stream(streams[i % 2]):
                    walk(inner, make, combine, made.blocks, parts)
        finally:
            streams[0].wait_stream(streams[1])


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for good: memory that was freed on a stream is taken again on it only."""
    return torch.cuda.Stream(device)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@dataclass(frozen=True)
class Fused:
    """The executor: the parts of a chunk, then one kernel that writes its output rows."""

    call: Call
    spans: tuple[Span, ...]

    def masked(self, mask: Dropout) -> Fused:
        return replace(self, call=replace(self.call, mask=mask))

    def forward(self, inputs: Sequence[Tensor], final: bool) -> tuple[Tensor, Tensor, None]:
        call, inputs = self.call, suited(self.call.engine, *inputs)
        q, out = inputs[0], None
        pieces, own = _pieces(call, self.spans, inputs, (FORWARD, FORWARD), final)
        dtype, covered = q.dtype if final else torch.float32, _covered(self.spans, q)
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32, device=q.device)
        for span, chunk in pieces:
            make = functools.partial(block_forward, call, inputs, span)
            parts, at = [make(b) for b in chunk.blocks], _number(chunk.blocks, own)
            if out is None:
                out = _result(q.shape, dtype, q.device, None if at is None else parts[at][0], covered)
            _descend(q.device, chunk, make, functools.partial(_merge, own, span, out, lse), parts)
            del parts  # before those of the next span are made
        return torch.zeros_like(q, dtype=dtype) if out is None else out, lse, None

    def backward(
        self, tensors: Sequence[Tensor], lse: Tensor, received: None, total: list[Tensor] | None = None
    ) -> list[Tensor]:
        """dq, dk, dv at every position of the spans, in q's dtype, or added to `total`."""
        call, tensors = self.call, suited(self.call.engine, *tensors)
        q, add, total = tensors[1], total is not None, total or []
        whole = q.numel() <= WHOLE
        limits = (WHOLE, WHOLE) if whole else (DENSE, THIN)
        pieces, own = _pieces(call, self.spans, tensors, limits, whole and not add)
        for span, chunk in pieces:
            make = functools.partial(block_backward, call, tensors, lse, span)
            parts, at = [make(b) for b in chunk.blocks], _number(chunk.blocks, own)
            if not total:
                likes = zip(tensors[1:4], (None, None, None) if at is None else parts[at], strict=True)
                total = [_result(x.shape, x.dtype, x.device, p, _covered(self.spans, q)) for x, p in likes]
            _descend(q.device, chunk, make, functools.partial(_sum, own, span, total, add), parts)
            del parts
        return total or [torch.zeros_like(x) for x in tensors[1:4]]


def _merge(
    own: int | None, span: Span, out: Tensor, lse: Tensor, chunk: Chunk, of: tuple[Block, ...], parts: list
) -> None:
    """Merge parts into the rows of a chunk."""
    from lightning_dilated.kernels.combine import merge_parts

    table = entries(of, out.shape[2], False, out.device, chunk.start, chunk.stop - chunk.start, _stream(out.device))
    mine = slice(span.batch, span.batch + span.batches)
    out, lse = out[mine], lse[mine]
    values, weights = [x for x, _ in parts], [x.float() for _, x in parts]
    in_place = _is(values, _number(of, own), out)
    with kernels.on(out.device):
        merge_parts(out, lse, _alike(values, out), weights, table, _where(span, chunk), in_place)


def _sum(
    own: int | None, span: Span, total: list[Tensor], add: bool, chunk: Chunk, of: tuple[Block, ...], parts: list
) -> None:
    """Sum parts into the rows of a chunk."""
    from lightning_dilated.kernels.combine import sum_parts

    length, mine = chunk.stop - chunk.start, slice(span.batch, span.batch + span.batches)
    outs, device, at = [x[mine] for x in total], total[0].device, _number(of, own)
    tables = [entries(of, x.shape[2], i > 0, device, chunk.start, length, _stream(device)) for i, x in enumerate(outs)]
    of_each = list(zip(*parts, strict=True)) or [()] * len(outs)
    in_place = [_is(p, at, x) for p, x in zip(of_each, outs, strict=True)]
    with kernels.on(device):
        alike = [_alike(p, x) for p, x in zip(of_each, outs, strict=True)]
        sum_parts(outs, alike, tables, _where(span, chunk), add, in_place)


def _number(of: tuple[Block, ...], branch: int | None) -> int | None:
    """Which block is the branch's."""
    return next((i for i, b in enumerate(of) if b.branch == branch), None)


def _alike(parts: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    """Parts of one dtype (the math engine, which serves blocks too small for another, makes fp32), rows in one piece."""
    found = {p.dtype for p in parts}
    dtype = found.pop() if len(found) == 1 else like.dtype
    parts = [p.to(dtype) for p in parts]
    return [p if p.stride(-1) == 1 and p.data_ptr() % 16 == 0 else p.contiguous().clone() for p in parts]
