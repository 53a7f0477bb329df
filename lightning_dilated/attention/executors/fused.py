"""The fused executor: branches compute parts, and one kernel combines them, so that each output row is written once.

The sequence is cut into chunks that no narrow segment crosses, and the chunks are computed one after another. Only the
parts of one chunk, and the small parts of wide segments, are in memory together with the results.
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
from lightning_dilated._compat.cpython import avoid_frame_chunk_edge
from lightning_dilated.attention.dropout import Dropout
from lightning_dilated.attention.executors.base import Call, HeadWindow, Layout
from lightning_dilated.attention.executors.blockwise import block_backward, block_forward, suited
from lightning_dilated.attention.executors.tables import entries
from lightning_dilated.attention.spans import RowViews, Span, folds
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import Block, global_tokens

Part = TypeVar("Part")


@dataclass(frozen=True)
class Chunk:
    """Positions [start, stop) of a span.

    The parts of `blocks` are computed when the chunk begins and freed when it ends. `inner` lists smaller chunks, with
    the blocks of narrower or denser branches. Parts are combined in the chunks that have no inner chunks.
    """

    start: int
    stop: int
    blocks: tuple[Block, ...]
    inner: tuple[Chunk, ...] = ()


#: spans with their chunks, and the branch that `_result_branch` returned
Pieces = tuple[list[tuple[Span, Chunk]], int | None]


@functools.lru_cache(maxsize=1024)
def layout(
    window: HeadWindow, document: int, part: tuple[int, int], limits: tuple[int, int], at_once: int | None = None
) -> Chunk:
    """Return the chunks of positions `part` of a document.

    Args:
        document: tokens of the document.
        part: (start, stop) in the document.
        limits: maximum positions of a chunk with dense branches (parts of over half the rows), and of other chunks.
        at_once: a branch that is computed for all positions at once, because its part is not larger than the result.
    """
    length, branches = part[1] - part[0], frozenset(range(len(window.pattern.branches)))
    levels = [(length, branches)]
    if length > limits[0 if at_once is None else 1]:
        levels = _levels(window.pattern, window.num_heads, limits, branches - {at_once}, length)

    def blocks_of(start: int, stop: int, branches: frozenset[int]) -> tuple[Block, ...]:
        positions = part[0] + start, part[0] + stop
        blocks = window.blocks(document, positions) if branches else ()
        # an object that is already a key of caches is found without a comparison of its fields
        return tuple(replace(b, first=b.first + start) if start else b for b in blocks if b.branch in branches)

    def chunk(start: int, stop: int, depth: int) -> Chunk:
        inner: tuple[Chunk, ...] = ()
        if depth + 1 < len(levels):
            step = levels[depth + 1][0]
            cuts = [start, *range(start + step - (part[0] + start) % step, stop, step), stop]
            inner = tuple(chunk(a, b, depth + 1) for a, b in itertools.pairwise(cuts))
        return Chunk(start, stop, blocks_of(start, stop, levels[depth][1]), inner)

    return chunk(0, length, 0)


def _levels(
    pattern: DilatedPattern, num_heads: int, limits: tuple[int, int], names: frozenset[int], length: int
) -> list[tuple[int, frozenset[int]]]:
    """Return (positions of a chunk, branches) by level. Level 0 is a span, with the branches that fit no chunk."""
    branches = pattern.branches
    dense = {i for i in names if 2 * len(branches[i].heads or range(num_heads)) > num_heads * branches[i].dilation_rate}
    fine, inner = _fitting(pattern, dense, limits[0], 1)
    coarse, middle = _fitting(pattern, names - inner, limits[1], fine)
    # chunks are the largest multiples of all their segments within the limits
    cuts = [(coarse * (limits[1] // coarse), middle), (fine * (limits[0] // fine), inner)]
    cuts = [(step, taken) for step, taken in cuts if taken and step < length]
    return [(length, frozenset(range(len(branches))).difference(*(taken for _, taken in cuts))), *cuts]


def _fitting(pattern: DilatedPattern, among: Iterable[int], limit: int, step: int) -> tuple[int, frozenset[int]]:
    """Return m, a multiple of `step` up to `limit`, and the branches in which a segment ends at each multiple of m."""
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
    outer: tuple[Block, ...] = (),
    outer_parts: Sequence[Part] = (),
) -> None:
    """Make the parts of all blocks, and combine them in the innermost chunks with the parts of the outer chunks."""
    blocks, parts = outer + chunk.blocks, [*outer_parts, *map(make, chunk.blocks)]
    if not chunk.inner:
        combine(chunk, blocks, parts)
    for inner in chunk.inner:
        walk(inner, make, combine, blocks, parts)


def every_block(chunk: Chunk) -> list[Block]:
    """Return the blocks of a chunk and of all its inner chunks."""
    return [*chunk.blocks, *(b for inner in chunk.inner for b in every_block(inner))]


#: limits of chunks are multiples of this number of (position, head, feature) triples (131,072 tokens, 12 heads of 64)
UNIT = 131072 * 12 * 64
#: the limit in the forward, which holds one tensor of results; the backward holds three and the engine's workspace
FORWARD = 4 * UNIT
#: limits in the backward for dense and thin branches (small calls are faster with more segments)
DENSE, THIN = UNIT, 2 * UNIT
#: up to this number of elements of q, the backward is one chunk
ONE_PIECE = 2 * UNIT
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: maximum number of rows in all branches' parts, per row of q; for more rows, blocks are merged one by one
OVERLAP = 2.5


def serves(pattern: DilatedPattern, q: Layout) -> bool:
    """Return whether the kernels serve tensors like q on this device now."""
    return suits(pattern, q.shape, q.dtype) and kernels.available(q.device) and not captured(q.device)


def suits(pattern: DilatedPattern, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether the kernels support q (B, N, H, D), and whether the parts of all branches fit in memory."""
    batch, tokens, heads, _ = shape
    overlap = sum(len(b.heads or range(heads)) / heads / b.dilation_rate for b in pattern.branches)
    fits = batch < 2**16 and tokens < 2**31 - 2**16  # limits of a launch's grid, and of positions in 32 bits
    return overlap <= OVERLAP and fits and dtype in DTYPES and not global_tokens(pattern)


def captured(device: torch.device) -> bool:
    """Return whether a CUDA graph is recording. Its replay would read addresses from a table that is freed by then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def forward_pieces(call: Call, spans: Sequence[Span], inputs: Sequence[Tensor], final: bool) -> Pieces:
    """Return the pieces of the forward; `inputs` are q, k and v."""
    return _pieces(call, spans, inputs, (FORWARD, FORWARD), final)


def backward_pieces(call: Call, spans: Sequence[Span], tensors: Sequence[Tensor], add: bool) -> Pieces:
    """Return the pieces of the backward; `add`: whether it adds to given gradients; `tensors`: grad, q, k, v, out."""
    if tensors[1].numel() <= ONE_PIECE:
        return _pieces(call, spans, tensors, (ONE_PIECE, ONE_PIECE), not add)
    pieces, _ = _pieces(call, spans, tensors, (DENSE, THIN), False)
    branch = None if add or len(pieces) > 1 else _result_branch(call, spans, tensors)
    # compute a branch in one piece only if no chunk cuts it: else the engine's workspace outweighs the saving
    at_once = any(b.branch == branch for _, chunk in pieces for b in chunk.blocks)
    return pieces, branch if at_once else None


def _pieces(
    call: Call, spans: Sequence[Span], tensors: Sequence[Tensor], limits: tuple[int, int], may_own: bool
) -> Pieces:
    branch = _result_branch(call, spans, tensors) if may_own else None
    pieces = list(_cut(call, spans, tensors, limits, branch))
    if branch is not None and len(pieces) > 1:
        return list(_cut(call, spans, tensors, limits, None)), None
    return pieces, branch


def _cut(
    call: Call, spans: Sequence[Span], tensors: Sequence[Tensor], limits: tuple[int, int], at_once: int | None
) -> Iterator[tuple[Span, Chunk]]:
    """Yield spans with their chunks; sample by sample if blocks cannot fold the samples into one axis."""
    q = tensors[0]
    for span in spans:
        part = span.part or (0, span.length)
        key = call.window, span.document
        positions = lambda batches: tuple(max(1, x // (batches * q.shape[2] * q.shape[3])) for x in limits)  # noqa: E731
        chunk = layout(*key, part, positions(span.batches), at_once)
        if span.batches == 1 or all(folds(span, b, *tensors) for b in every_block(chunk)):
            yield span, chunk
        else:
            sample = layout(*key, part, positions(1), at_once)
            yield from ((replace(span, batch=span.batch + i, batches=1), sample) for i in range(span.batches))


def _result_branch(call: Call, spans: Sequence[Span], tensors: Sequence[Tensor]) -> int | None:
    """Return a branch with every row of the call in one block, if the engine returns rows in the layout of q."""
    batch, seq_len, heads, _ = tensors[0].shape
    if len(spans) != 1 or not call.engine.rows_in_place or spans[0].batches * spans[0].length != batch * seq_len:
        return None
    span = spans[0]
    for b in call.blocks(span):
        has_all_rows = b.segments * b.rows == span.length and b.heads == heads and b.row_stride == 1
        if has_all_rows and not b.pads and b.rows >= call.engine.min_rows:
            return b.branch
    return None


def _where(span: Span, chunk: Chunk) -> tuple[int, int, int, int]:
    return span.batches, chunk.start, chunk.stop, span.start


def _result(shape: torch.Size, dtype: torch.dtype, device: torch.device, part: Tensor | None, covered: bool) -> Tensor:
    """Return the tensor for a result: the part itself if it has all rows of all heads in place, else a new tensor."""
    if part is not None and part.shape[1] == shape[2] and part.dtype == dtype:
        rows = part.transpose(1, 2)
        if rows.is_contiguous():
            return rows.reshape(shape)
    return (torch.empty if covered else torch.zeros)(shape, dtype=dtype, device=device)


def _covered(spans: Sequence[Span], x: Tensor) -> bool:
    """Return whether the spans contain every position of a (B, N, ...) tensor."""
    return sum(span.batches * span.length for span in spans) == x.shape[0] * x.shape[1]


def _is_result(parts: Sequence[Tensor], index: int | None, out: Tensor) -> bool:
    return index is not None and parts[index].data_ptr() == out.data_ptr()


def _descend(device: torch.device, chunk: Chunk, make: Callable, combine: Callable, parts: list) -> None:
    """Walk through a span's outermost chunk, given its `parts`.

    On a GPU, the inner chunks alternate between two streams, so that the sums and last waves of one chunk run
    concurrently with the products of the next chunk. Chunks write different rows, and free memory on their stream.
    """
    if device.type != "cuda" or len(chunk.inner) < 2:
        walk(replace(chunk, blocks=()), make, combine, chunk.blocks, parts)
        return
    with torch.cuda.device(device):
        streams = torch.cuda.current_stream(), _side_stream(device)
        streams[1].wait_stream(streams[0])
        try:
            for i, inner in enumerate(chunk.inner):
                with torch.cuda.stream(streams[i % 2]):
                    walk(inner, make, combine, chunk.blocks, parts)
        finally:
            streams[0].wait_stream(streams[1])


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one side stream for all calls, because memory freed on a stream is reused on that stream only."""
    return torch.cuda.Stream(device)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@dataclass(frozen=True)
class Fused:
    """Executor that computes the parts of a chunk, and then writes the chunk's output rows with one kernel."""

    call: Call
    spans: tuple[Span, ...]

    def masked(self, mask: Dropout) -> Fused:
        return replace(self, call=replace(self.call, mask=mask))

    @avoid_frame_chunk_edge
    def forward(self, inputs: Sequence[Tensor], final: bool) -> tuple[Tensor, Tensor, None]:
        call, inputs = self.call, suited(self.call.engine, *inputs)
        q, out = inputs[0], None
        pieces, branch = forward_pieces(call, self.spans, inputs, final)
        views = RowViews(inputs)
        dtype, covered = q.dtype if final else torch.float32, _covered(self.spans, q)
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32, device=q.device)
        for span, chunk in pieces:
            make = functools.partial(block_forward, call, views, span)
            parts, index = [make(b) for b in chunk.blocks], _index(chunk.blocks, branch)
            if out is None:
                out = _result(q.shape, dtype, q.device, None if index is None else parts[index][0], covered)
            _descend(q.device, chunk, make, functools.partial(_merge, branch, span, out, lse), parts)
            del parts  # free them before the next span's parts are made
        return torch.zeros_like(q, dtype=dtype) if out is None else out, lse, None

    @avoid_frame_chunk_edge
    def backward(
        self, tensors: Sequence[Tensor], lse: Tensor, received: Tensor | None, total: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Return dq, dk, dv at every position of the spans in q's dtype, or add them to `total`."""
        call, tensors = self.call, suited(self.call.engine, *tensors)
        q, add, total = tensors[1], total is not None, total or []
        pieces, branch = backward_pieces(call, self.spans, tensors, add)
        views = RowViews(tensors)
        for span, chunk in pieces:
            make = functools.partial(block_backward, call, views, lse, span)
            parts, index = [make(b) for b in chunk.blocks], _index(chunk.blocks, branch)
            if not total:
                likes = zip(tensors[1:4], (None, None, None) if index is None else parts[index], strict=True)
                total = [_result(x.shape, x.dtype, x.device, p, _covered(self.spans, q)) for x, p in likes]
            _descend(q.device, chunk, make, functools.partial(_sum, branch, span, total, add), parts)
            del parts
        return total or [torch.zeros_like(x) for x in tensors[1:4]]


def _merge(
    branch: int | None, span: Span, out: Tensor, lse: Tensor, chunk: Chunk, blocks: tuple[Block, ...], parts: list
) -> None:
    from lightning_dilated.kernels.combine import merge_parts

    length = chunk.stop - chunk.start
    table = entries(blocks, out.shape[2], False, out.device, chunk.start, length, _stream(out.device))
    samples = slice(span.batch, span.batch + span.batches)
    out, lse = out[samples], lse[samples]
    values, weights = [x for x, _ in parts], [x.float() for _, x in parts]
    in_place = _is_result(values, _index(blocks, branch), out)
    with kernels.on(out.device):
        merge_parts(out, lse, _of_one_dtype(values, out), weights, table, _where(span, chunk), in_place)


def _sum(
    branch: int | None, span: Span, total: list[Tensor], add: bool, chunk: Chunk, blocks: tuple[Block, ...], parts: list
) -> None:
    from lightning_dilated.kernels.combine import sum_parts

    length, samples = chunk.stop - chunk.start, slice(span.batch, span.batch + span.batches)
    sums, device, index = [x[samples] for x in total], total[0].device, _index(blocks, branch)
    tables = [
        entries(blocks, x.shape[2], i > 0, device, chunk.start, length, _stream(device)) for i, x in enumerate(sums)
    ]
    by_sum = list(zip(*parts, strict=True)) or [()] * len(sums)
    in_place = [_is_result(p, index, x) for p, x in zip(by_sum, sums, strict=True)]
    with kernels.on(device):
        parts_of_sums = [_of_one_dtype(p, x) for p, x in zip(by_sum, sums, strict=True)]
        sum_parts(sums, parts_of_sums, tables, _where(span, chunk), add, in_place)


def _index(blocks: tuple[Block, ...], branch: int | None) -> int | None:
    return next((i for i, b in enumerate(blocks) if b.branch == branch), None)


def _of_one_dtype(parts: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    """Convert parts to one dtype with contiguous rows, because the math engine returns fp32 for small blocks."""
    dtypes = {p.dtype for p in parts}
    dtype = dtypes.pop() if len(dtypes) == 1 else like.dtype
    parts = [p if p.dtype == dtype else p.to(dtype) for p in parts]
    return [p if p.stride(-1) == 1 and p.data_ptr() % 16 == 0 else p.contiguous().clone() for p in parts]
