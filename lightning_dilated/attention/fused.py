"""Attention over a rank's own blocks with each output row written once: parts of the branches, then one kernel.

Stretches of positions that no narrow segment crosses are done one after another, so that only the parts of a stretch, and
the thin ones of wide segments, are held beside the results.
Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_dilated import kernels
from lightning_dilated.attention.blockwise import Call, block_backward, block_forward
from lightning_dilated.attention.views import Span, folds
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import Block, blocks

#: parts of about this many (position, head, feature) triples are held at a time: 131,072 tokens of 12 heads of 64. The
#: forward holds one tensor where the backward holds three and the engine's workspace, so it may take longer stretches.
HELD = 131072 * 12 * 64
FORWARD = 4
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


#: parts may have this many rows for each of q; branches that overlap more are merged one by one, to hold one part at a time
OVERLAP = 2.5


def serves(pattern: DilatedPattern, q: Tensor) -> bool:
    """Whether the kernels take tensors like q, and the parts of the pattern's branches are few enough to be held."""
    overlap = sum(len(b.heads or range(q.shape[2])) / q.shape[2] / b.dilation_rate for b in pattern.branches)
    fits = q.shape[0] < 2**16 and q.shape[1] < 2**31 - 2**16  # of a launch's grid, and of positions in 32 bits
    return overlap <= OVERLAP and fits and q.dtype in DTYPES and kernels.available(q.device) and not _captured(q)


def _captured(q: Tensor) -> bool:
    """Whether a CUDA graph records the call: its replay would read addresses from a table that is gone by then."""
    return q.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class Stretch:
    """Positions [start, stop) of a span, and the blocks of narrow segments in it."""

    start: int
    stop: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Layout:
    """A span's blocks: wide ones first, then stretch by stretch."""

    wide: tuple[Block, ...]
    stretches: tuple[Stretch, ...]


@functools.lru_cache(maxsize=1024)
def layout(call_key: tuple, part: tuple[int, int], held: int) -> Layout:
    """Blocks of a span, cut where no narrow segment is; `held` positions a stretch at most, if that can be."""
    pattern, document, num_heads, num_kv_heads, heads, whole = call_key
    every = blocks(pattern, document, num_heads, num_kv_heads, part, heads, whole)
    length = part[1] - part[0]
    narrow, step = _narrow(pattern, held) if length > held else (frozenset(range(len(pattern.branches))), length)
    if not narrow or step >= length:
        return Layout((), (Stretch(0, length, every),))
    cuts = [0, *range(step - part[0] % step, length, step), length]
    stretches = []
    for start, stop in itertools.pairwise(cuts):
        where = part[0] + start, part[0] + stop
        found = blocks(pattern, document, num_heads, num_kv_heads, where, heads, whole)
        inside = tuple(replace(b, first=b.first + start) for b in found if b.branch in narrow)
        stretches.append(Stretch(start, stop, inside))
    return Layout(tuple(b for b in every if b.branch not in narrow), tuple(stretches))


def _narrow(pattern: DilatedPattern, held: int) -> tuple[frozenset[int], int]:
    """Branches whose segments all end at multiples of a step of at most `held` positions, and the step."""
    found, step = set(), 1
    for i in sorted(range(len(pattern.branches)), key=lambda i: pattern.branches[i].segment_length or math.inf):
        branch = pattern.branches[i]
        if branch.segment_length is None or branch.shift or math.lcm(step, branch.segment_length) > held:
            continue
        step = math.lcm(step, branch.segment_length)
        found.add(i)
    return frozenset(found), step * (held // step)


@functools.lru_cache(maxsize=4096)
def entries(found: tuple[Block, ...], heads: int, kv: bool, device: torch.device, length: int) -> object:
    """The table of the rows of blocks in `length` positions by output head (kv head with `kv`), see `kernels.combine`."""
    from lightning_dilated.kernels.combine import COLUMNS, CONFIG, Entries

    rows: list[list[tuple[int, ...]]] = [[] for _ in range(heads)]
    for number, b in enumerate(found):
        for j in range(b.heads):
            head = b.kv_head + j * b.kv_head_step if kv else b.head + j * b.head_step
            first = b.first + j * b.position_step
            # one segment may be wider than these positions, and than 32 bits
            width = b.segment_stride if b.segments > 1 else first + b.rows * b.row_stride
            rows[head].append((number, j, first, b.segments, width, b.rows, b.row_stride))
    starts = [0]
    for of_head in rows:
        starts.append(starts[-1] + len(of_head))
    table = torch.tensor([x for of_head in rows for x in of_head], dtype=torch.int32).reshape(-1, COLUMNS)
    step = 1
    for rate in sorted({b.row_stride for b in found}):
        together = math.lcm(step, rate)
        step = together if together <= 64 and together * CONFIG[0] <= length else step
    return Entries(table.to(device), torch.tensor(starts, dtype=torch.int32).to(device), step)


def _pieces(
    call: Call, found: list[Span], q: Tensor, tensors: Sequence[Tensor], limit: int
) -> Iterator[tuple[Span, Layout]]:
    """Spans with their layouts; samples one by one where blocks cannot fold them into one axis."""
    for span in found:
        part = span.part or (0, span.length)
        key = call.pattern, span.document, call.num_heads, call.num_kv_heads, call.heads, call.whole
        held = max(1, limit // (span.batches * q.shape[2] * q.shape[3]))
        made = layout(key, part, held)
        every = [*made.wide, *(b for s in made.stretches for b in s.blocks)]
        if span.batches == 1 or all(folds(span, b, *tensors) for b in every):
            yield span, made
        else:
            alone = layout(key, part, held * span.batches)
            yield from ((replace(span, batch=span.batch + i, batches=1), alone) for i in range(span.batches))


def _where(span: Span, stretch: Stretch) -> tuple[int, int, int, int]:
    return span.batches, stretch.start, stretch.stop, span.start


def forward(call: Call, found: list[Span], inputs: list[Tensor], out: Tensor, lse: Tensor) -> None:
    """Write out (B, N, H, D) and lse (B, H, N) fp32 of the blocks of q, k, v at every position of the spans."""
    from lightning_dilated.kernels.combine import merge_parts

    q = inputs[0]
    for span, made in _pieces(call, found, q, inputs, FORWARD * HELD):
        wide = [block_forward(call, inputs, span, b) for b in made.wide]
        mine = slice(span.batch, span.batch + span.batches)
        for stretch in made.stretches:
            parts = wide + [block_forward(call, inputs, span, b) for b in stretch.blocks]
            table = entries(made.wide + stretch.blocks, q.shape[2], False, q.device, stretch.stop - stretch.start)
            values, weights = [x for x, _ in parts], [x.float() for _, x in parts]
            with kernels.on(q.device):
                merge_parts(out[mine], lse[mine], _alike(values, q), weights, table, _where(span, stretch))


def backward(
    call: Call, found: list[Span], tensors: list[Tensor], lse: Tensor, total: Sequence[Tensor], add: bool = True
) -> None:
    """Add to (or, without `add`, write) dq, dk, dv at every position of the spans; `tensors`: grad, q, k, v, merged out."""
    from lightning_dilated.kernels.combine import sum_parts

    q = tensors[1]
    for span, made in _pieces(call, found, q, tensors, HELD):
        wide = [block_backward(call, tensors, lse, span, b) for b in made.wide]
        mine = slice(span.batch, span.batch + span.batches)
        for stretch in made.stretches:
            parts = wide + [block_backward(call, tensors, lse, span, b) for b in stretch.blocks]
            for i, x in enumerate(total):
                table = entries(made.wide + stretch.blocks, x.shape[2], i > 0, q.device, stretch.stop - stretch.start)
                with kernels.on(q.device):
                    sum_parts(x[mine], _alike([p[i] for p in parts], q), table, _where(span, stretch), add)


def _alike(parts: list[Tensor], q: Tensor) -> list[Tensor]:
    """Parts of one dtype (the math engine, which serves blocks too small for another, makes fp32), rows in one piece."""
    found = {p.dtype for p in parts}
    dtype = found.pop() if len(found) == 1 else q.dtype
    parts = [p.to(dtype) for p in parts]
    return [p if p.stride(-1) == 1 and p.data_ptr() % 16 == 0 else p.contiguous().clone() for p in parts]
