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
#: output rows of a program
TOKENS = tl.constexpr(32)


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
def _place(entries, e, position, inside, sample):
    """(part, head, segment of all samples, row, whether it exists) of an entry at positions."""
    at = entries + e * 7
    part = tl.load(at)
    head = tl.load(at + 1)
    first = tl.load(at + 2)
    segments = tl.load(at + 3)
    width = tl.load(at + 4)
    rows = tl.load(at + 5)
    rate = tl.load(at + 6)
    x = position - first
    near = tl.where(x >= 0, x, 0)
    segment = near // width
    rest = near - segment * width
    row = rest // rate
    there = inside & (x >= 0) & (segment < segments) & (row * rate == rest) & (row < rows)
    return part, head, sample * segments + segment, row, there


@triton.jit
def _apart(entries, e, first_position, step):
    """Whether an entry surely has no row at positions that are `step` apart."""
    at = entries + e * 7
    rate = tl.load(at + 6)
    same = (step % rate == 0) & (tl.load(at + 4) % rate == 0)
    return same & (first_position % rate != tl.load(at + 2) % rate)


@triton.jit
def _positions(start, stop, step, TOKENS: tl.constexpr):
    """(positions of this program, whether each is in the range, the first)."""
    tile = tl.program_id(1)
    first = start + tile // step * (step * TOKENS) + tile % step
    position = first + step * tl.arange(0, TOKENS)
    return position, position < stop, first


@triton.jit
def _rows(
    at, segment, j, row, there, column, PART: tl.constexpr, ALIGN: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """(TOKENS, BLOCK) fp32 rows of a part; the compiler is told what their addresses are multiples of."""
    values = tl.multiple_of(tl.load(at).to(tl.pointer_type(PART)), 16)
    by_segment = tl.multiple_of(tl.load(at + 1), ALIGN)
    by_head = tl.multiple_of(tl.load(at + 2), ALIGN)
    by_row = tl.multiple_of(tl.load(at + 3), ALIGN)
    values += (segment * by_segment + j * by_head + row * by_row)[:, None] + column[None, :]
    return tl.load(values, mask=there[:, None] & (column < DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _merge(
    out, out_sb, out_sn, out_sh,
    lse, lse_sb, lse_sn, lse_sh,
    parts, entries, heads, start, stop, step, origin,
    PART: tl.constexpr, ALIGN: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    position, inside, first = _positions(start, stop, step, TOKENS)
    head, sample = tl.program_id(0), tl.program_id(2)
    column = tl.arange(0, BLOCK)
    acc = tl.zeros([TOKENS, BLOCK], tl.float32)
    most = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    for e in range(tl.load(heads + head), tl.load(heads + head + 1)):
        if not _apart(entries, e, first, step):
            part, j, segment, row, there = _place(entries, e, position, inside, sample)
            at = parts + part * 8
            segment, row, j = segment.to(tl.int64), row.to(tl.int64), j.to(tl.int64)
            theirs = tl.load(at + 4).to(tl.pointer_type(tl.float32))
            theirs += segment * tl.load(at + 5) + j * tl.load(at + 6) + row * tl.load(at + 7)
            weight = tl.load(theirs, mask=there, other=float("-inf"))
            value = _rows(at, segment, j, row, there, column, PART, ALIGN, DIM)
            high = tl.maximum(most, weight)
            finite = tl.where(high == float("-inf"), 0.0, high)
            before, now = tl.exp(most - finite), tl.exp(weight - finite)
            acc = acc * before[:, None] + value * now[:, None]
            total = total * before + now
            most = high
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    target = (position + origin).to(tl.int64)
    to = out + sample.to(tl.int64) * out_sb + target[:, None] * out_sn + head * out_sh + column[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside[:, None] & (column < DIM)[None, :])
    found = tl.where(some, most + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(lse + sample.to(tl.int64) * lse_sb + target * lse_sn + head.to(tl.int64) * lse_sh, found, mask=inside)


@triton.jit
def _sum(
    out, out_sb, out_sn, out_sh,
    parts, entries, heads, start, stop, step, origin,
    PART: tl.constexpr, ALIGN: tl.constexpr, ADD: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    position, inside, first = _positions(start, stop, step, TOKENS)
    head, sample = tl.program_id(0), tl.program_id(2)
    column = tl.arange(0, BLOCK)
    target = (position + origin).to(tl.int64)
    to = out + sample.to(tl.int64) * out_sb + target[:, None] * out_sn + head * out_sh + column[None, :]
    mask = inside[:, None] & (column < DIM)[None, :]
    acc = tl.zeros([TOKENS, BLOCK], tl.float32)
    if ADD:
        acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    for e in range(tl.load(heads + head), tl.load(heads + head + 1)):
        if not _apart(entries, e, first, step):
            part, j, segment, row, there = _place(entries, e, position, inside, sample)
            at = parts + part * 8
            acc += _rows(at, segment.to(tl.int64), j.to(tl.int64), row.to(tl.int64), there, column, PART, ALIGN, DIM)
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
    tiles = -(-(stop - start) // (TOKENS.value * entries.step)) * entries.step
    dim = out.shape[3]
    strides = [x for p in parts for x in p.stride()[:3]]
    align = 8 if all(x % 8 == 0 for x in strides) else 1
    kernel[(out.shape[2], tiles, samples)](
        out, *out.stride()[:3], *between, _addresses(parts, weights, out.device), entries.table, entries.heads,
        start, stop, entries.step, origin, PART=_NAMES[parts[0].dtype if parts else out.dtype], ALIGN=align, TOKENS=TOKENS.value, DIM=dim,
        BLOCK=triton.next_power_of_2(dim), **options,
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
