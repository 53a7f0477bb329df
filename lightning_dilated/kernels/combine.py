"""The branches' results into one: merged by their log-sum-exp (forward), or summed (gradients), each row written once.

A block's result is a part (G, J, n, D): G samples and segments, J heads, n rows, D head dim; row i of segment s of a head
lies at position first + s * width + i * rate. An entry is one head of one part, and a head's output row is made of the rows
of its entries at that position, in fp32, whatever their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

#: columns of the table of entries: part, head in it, first position, segments, width, rows, rate
COLUMNS = 7
#: output rows of a program, and its warps
CONFIG = 64, 4


@dataclass(frozen=True)
class Entries:
    """Where the rows of parts lie.

    Attributes:
        table: (entries, COLUMNS) int32, by output head.
        heads: (heads + 1,) int32, where the entries of each head begin.
        step: rows of a program are this many positions apart: a multiple of most rates, so a part has all or none of them.
    """

    table: Tensor
    heads: Tensor
    step: int


@triton.jit
def _positions(num_heads, start, stop, step, TOKENS: tl.constexpr):
    """(head, first position of this program, which of its positions are in the range); heads of a tile are neighbours."""
    head, tile = tl.program_id(0) % num_heads, tl.program_id(0) // num_heads
    first = start + tile // step * (step * TOKENS) + tile % step
    return head, first, first + step * tl.arange(0, TOKENS) < stop


@triton.jit
def _locate(entries, e, first, inside, step, TOKENS: tl.constexpr):
    """(part, head in it, segments, rows, which of them exist, whether any can) of an entry at a program's positions.

    Within one segment, at a step that the rate divides, rows are as many apart each: no division by row.
    """
    at = entries + e * 7
    start, segments, width = tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    rows, rate = tl.load(at + 5), tl.load(at + 6)
    x = first - start
    t = tl.arange(0, TOKENS)
    segment = tl.where(x >= 0, x, 0) // width
    rest = x - segment * width
    row = tl.where(x >= 0, rest, 0) // rate
    per = step // rate
    there = inside
    segment_of = tl.full([TOKENS], 0, tl.int32) + segment
    row_of = row + per * t
    some = True
    if (x >= 0) & (per * rate == step) & (rest + step * (TOKENS - 1) < width):
        some = (row * rate == rest) & (segment < segments)
        there = inside & (row_of < rows)
    else:
        at_x = x + step * t
        near = tl.where(at_x >= 0, at_x, 0)
        segment_of = near // width
        left = near - segment_of * width
        row_of = left // rate
        there = inside & (at_x >= 0) & (segment_of < segments) & (row_of * rate == left) & (row_of < rows)
    return tl.load(at), tl.load(at + 1), segment_of, row_of, there, some


@triton.jit
def _rows(at, segment, j, row, there, column, PART: tl.constexpr, ALIGN: tl.constexpr, DIM: tl.constexpr):
    """(TOKENS, BLOCK) fp32 rows of a part; the compiler is told what their addresses are multiples of."""
    values = tl.multiple_of(tl.load(at).to(tl.pointer_type(PART)), 16)
    by_segment = tl.multiple_of(tl.load(at + 1), ALIGN)
    by_head = tl.multiple_of(tl.load(at + 2), ALIGN)
    by_row = tl.multiple_of(tl.load(at + 3), ALIGN)
    values += j * by_head + column[None, :] + (segment.to(tl.int64) * by_segment + row.to(tl.int64) * by_row)[:, None]
    return tl.load(values, mask=there[:, None] & (column < DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["start", "stop", "origin"])
def _merge(
    out, out_sb, out_sn, out_sh,
    lse, lse_sb, lse_sn, lse_sh,
    parts, entries, heads, num_heads, start, stop, step, origin,
    PART: tl.constexpr, ALIGN: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, first, inside = _positions(num_heads, start, stop, step, TOKENS)
    sample, column = tl.program_id(1), tl.arange(0, BLOCK)
    acc = tl.zeros([TOKENS, BLOCK], tl.float32)
    most = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    for e in range(tl.load(heads + head), tl.load(heads + head + 1)):
        part, j, segment, row, there, some = _locate(entries, e, first, inside, step, TOKENS)
        if some:
            at = parts + part * 8
            segment += sample * tl.load(entries + e * 7 + 3)
            theirs = tl.load(at + 4).to(tl.pointer_type(tl.float32)) + j * tl.load(at + 6)
            theirs += segment.to(tl.int64) * tl.load(at + 5) + row.to(tl.int64) * tl.load(at + 7)
            weight = tl.load(theirs, mask=there, other=float("-inf"))
            value = _rows(at, segment, j, row, there, column, PART, ALIGN, DIM)
            high = tl.maximum(most, weight)
            finite = tl.where(high == float("-inf"), 0.0, high)
            before, now = tl.exp(most - finite), tl.exp(weight - finite)
            acc = acc * before[:, None] + value * now[:, None]
            total = total * before + now
            most = high
    known = total != 0  # a NaN is to show
    acc = acc / tl.where(known, total, 1.0)[:, None]
    target = (first + origin + step * tl.arange(0, TOKENS)).to(tl.int64)
    to = out + sample.to(tl.int64) * out_sb + head * out_sh + column[None, :] + target[:, None] * out_sn
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside[:, None] & (column < DIM)[None, :])
    found = tl.where(known, most + tl.log(tl.where(known, total, 1.0)), float("-inf"))
    tl.store(lse + sample.to(tl.int64) * lse_sb + head.to(tl.int64) * lse_sh + target * lse_sn, found, mask=inside)


@triton.jit(do_not_specialize=["start", "stop", "origin"])
def _sum(
    out, out_sb, out_sn, out_sh,
    parts, entries, heads, num_heads, start, stop, step, origin,
    PART: tl.constexpr, ALIGN: tl.constexpr, ADD: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    head, first, inside = _positions(num_heads, start, stop, step, TOKENS)
    sample, column = tl.program_id(1), tl.arange(0, BLOCK)
    target = (first + origin + step * tl.arange(0, TOKENS)).to(tl.int64)
    to = out + sample.to(tl.int64) * out_sb + head * out_sh + column[None, :] + target[:, None] * out_sn
    mask = inside[:, None] & (column < DIM)[None, :]
    acc = tl.zeros([TOKENS, BLOCK], tl.float32)
    if ADD:
        acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    for e in range(tl.load(heads + head), tl.load(heads + head + 1)):
        part, j, segment, row, there, some = _locate(entries, e, first, inside, step, TOKENS)
        if some:
            segment += sample * tl.load(entries + e * 7 + 3)
            acc += _rows(parts + part * 8, segment, j, row, there, column, PART, ALIGN, DIM)
    tl.store(to, acc.to(out.dtype.element_ty), mask=mask)


_NAMES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def _addresses(parts: Sequence[Tensor], weights: Sequence[Tensor], device: torch.device) -> Tensor:
    """(parts, 8) int64: address and strides of each part, and of its log-sum-exp."""
    found = [
        [p.data_ptr(), *p.stride()[:3], *((w.data_ptr(), *w.stride()) if w is not None else (0, 0, 0, 0))]
        for p, w in zip(parts, weights or [None] * len(parts), strict=True)
    ]
    if device.type != "cuda" or not found:
        return torch.tensor(found, dtype=torch.int64, device=device)
    # pinned, so that the host does not wait for the device
    return torch.tensor(found, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


def _launch(
    kernel, out: Tensor, between: tuple, parts: Sequence[Tensor], weights, entries: Entries, span, options
) -> None:
    samples, start, stop, origin = span
    tokens, warps = CONFIG
    tiles = -(-(stop - start) // (tokens * entries.step)) * entries.step
    dim, dtype = out.shape[3], parts[0].dtype if parts else out.dtype
    align = 8 if all(x % 8 == 0 for p in parts for x in p.stride()[:3]) else 1
    kernel[(out.shape[2] * tiles, samples)](
        out, *out.stride()[:3], *between, _addresses(parts, weights, out.device), entries.table, entries.heads,
        out.shape[2], start, stop, entries.step, origin, PART=_NAMES[dtype], ALIGN=align, TOKENS=tokens, DIM=dim,
        BLOCK=triton.next_power_of_2(dim), num_warps=warps, **options,
    )  # fmt: skip


def merge_parts(
    out: Tensor,
    lse: Tensor,
    parts: Sequence[Tensor],
    weights: Sequence[Tensor],
    entries: Entries,
    span: tuple[int, int, int, int],
) -> None:
    """Write the merge of parts to rows of out and lse; 0 and -inf where no part has a row.

    Args:
        out: (samples, N, H, D), unit stride along D.
        lse: (samples, H, N) fp32.
        parts: (G, J, n, D) each, of one dtype, unit stride along D.
        weights: their log-sum-exp, (G, J, n) fp32 each.
        entries: where their rows lie.
        span: (samples, start, stop, origin): positions start..stop are written, to rows origin + position.
    """
    between = lse, lse.stride(0), lse.stride(2), lse.stride(1)
    _launch(_merge, out, between, parts, weights, entries, span, {})


def sum_parts(
    out: Tensor, parts: Sequence[Tensor], entries: Entries, span: tuple[int, int, int, int], add: bool = False
) -> None:
    """Write the sum of parts to rows of out (with `add`, add it to them); arguments as in `merge_parts`."""
    _launch(_sum, out, (), parts, (), entries, span, {"ADD": add})
