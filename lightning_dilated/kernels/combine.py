"""Combines results of branches in one launch, by log-sum-exp (forward) or sum (backward), and writes each row once.

The results have one of two layouts: parts, a tensor (G, J, n, D) for each block (`merge_parts`, `sum_parts`), or the
buffer of a grouped launch (`merge_jobs`, `sum_jobs`). An entry is one head of a block: row i of its segment s has
position first + s * width + i * rate. A program computes output rows of one head, accumulates in fp32, and reads only
the entries that can contain these rows.
Shape letters: B batch, N tokens, H output heads, D head dim, G samples and segments, J heads and n rows of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dilated._device import send
from lightning_dilated.kernels.grouped import Outputs, Work, bound
from lightning_dilated.kernels.tiles import merge_part

#: columns of the table of entries: part, head in the part, first position, segments, width, rows, rate, distance of a
#: program's consecutive rows in the part (0 if the rate does not divide the step)
COLUMNS = 8
#: (output rows of a program, warps) of the merge and the sum of parts; the best of five tried on an H200
MERGE, SUM = (128, 4), (64, 4)
#: (output rows of a program, warps) of both kernels over the buffer of a grouped launch
CONFIG = 64, 4
_NAMES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Entries:
    """The table of entries, which give the positions of parts' rows.

    Rows of one head that are `step` positions apart form a class; its index is (position mod step) * heads + head. A
    program computes rows of one class, because most parts have all or none of these rows.

    Attributes:
        table: (entries, COLUMNS) int32, by class.
        classes: (heads * step + 1,) int32, the first entry of each class.
        several: indices of the classes with more than one entry, (n,) int32.
        every: indices of all classes, (heads * step,) int32.
        step: distance between the rows of a class, in positions.
    """

    table: Tensor
    classes: Tensor
    several: Tensor
    every: Tensor
    step: int


@triton.jit
def _program(order, classes, count, num_heads, start, stop, step, TOKENS: tl.constexpr):
    """Return this program's (head, first position, number of rows in the range, first entry, last entry + 1)."""
    number = tl.load(order + tl.program_id(0) % count)
    first = start + tl.program_id(0) // count * (step * TOKENS) + number // num_heads
    low, high = tl.load(classes + number), tl.load(classes + number + 1)
    return number % num_heads, first, tl.cdiv(stop - first, step), low, high


@triton.jit
def _locate(entries, e, sample, first, inside, step, TOKENS: tl.constexpr):
    """Return an entry's (part, head in the part, segment, row, more segments, more rows, exists).

    Segment and row locate the program's first row in the part. `more segments` and `more rows` are each row's offsets
    from the first row. If all rows are in one segment and the rate divides the step, no row needs a division.
    """
    at = entries + e * 8
    start, segments, width = tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    rows, rate, apart = tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
    x, t = first - start, tl.arange(0, TOKENS)
    segment = tl.maximum(x, 0) // width
    index = x - segment * width
    row = index // rate
    more_segments, more_rows = t * 0, t * apart
    exists = t < 0
    if (x >= 0) & (apart > 0) & (index + step * (TOKENS - 1) < width):
        # if the rate does not divide the width, a class has rows in some segments only
        if (segment < segments) & (row * rate == index):
            exists = t < tl.minimum(inside, tl.cdiv(rows - row, apart))
    else:
        each_x = x + step * t
        positive = tl.maximum(each_x, 0)
        each_segment = positive // width
        left = positive - each_segment * width
        more_segments, more_rows = each_segment - segment, left // rate - row
        fits = (each_segment < segments) & (left % rate == 0) & (left // rate < rows)
        exists = (t < inside) & (each_x >= 0) & fits
    return tl.load(at), tl.load(at + 1), segment + sample * segments, row, more_segments, more_rows, exists


@triton.jit
def _part_rows(
    at, segment, j, row, more_segments, more_rows, exists, column,
    PART: tl.constexpr, ALIGN: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return (TOKENS, BLOCK) fp32 rows of a part, with hints on the alignment of their addresses for the compiler."""
    values = tl.multiple_of(tl.load(at).to(tl.pointer_type(PART)), 16)
    by_segment = tl.multiple_of(tl.load(at + 1), ALIGN)
    by_head = tl.multiple_of(tl.load(at + 2), ALIGN)
    by_row = tl.multiple_of(tl.load(at + 3), ALIGN)
    values += segment * by_segment + j * by_head + row * by_row
    values = values + (more_segments * by_segment + more_rows * by_row)[:, None] + column[None, :]
    if DIM == BLOCK:
        return tl.load(values, mask=exists[:, None], other=0.0).to(tl.float32)
    return tl.load(values, mask=exists[:, None] & (column < DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _target(out, out_sb, out_sn, out_sh, sample, head, first, origin, step, column, TOKENS: tl.constexpr):
    out += sample.to(tl.int64) * out_sb + head.to(tl.int64) * out_sh + (first + origin).to(tl.int64) * out_sn
    return out + (tl.arange(0, TOKENS) * (step * out_sn))[:, None] + column[None, :]


@triton.jit(do_not_specialize=["start", "stop", "origin"])
def _merge(
    out, out_sb, out_sn, out_sh,
    lse, lse_sb, lse_sn, lse_sh,
    parts, entries, classes, order, count, num_heads, start, stop, step, origin,
    PART: tl.constexpr, ALIGN: tl.constexpr, IN_PLACE: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    head, first, inside, low, high = _program(order, classes, count, num_heads, start, stop, step, TOKENS)
    sample, column, t = tl.program_id(1), tl.arange(0, BLOCK), tl.arange(0, TOKENS)
    written = inside
    if IN_PLACE:  # rows of a single part are in `out` already and need only their log-sum-exp
        written = inside * (high - low > 1)
    acc = tl.zeros([TOKENS, BLOCK], tl.float32)
    most = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    for e in range(low, high):
        part, j, segment, row, more_segments, more_rows, exists = _locate(
            entries, e, sample, first, inside, step, TOKENS
        )
        at = parts + part * 8
        by_segment, by_row = tl.load(at + 5), tl.load(at + 7)
        part_lse = (
            tl.load(at + 4).to(tl.pointer_type(tl.float32)) + segment * by_segment + j * tl.load(at + 6) + row * by_row
        )
        part_lse = tl.load(part_lse + more_segments * by_segment + more_rows * by_row, mask=exists, other=float("-inf"))
        value = _part_rows(
            at, segment, j, row, more_segments, more_rows, exists & (t < written), column, PART, ALIGN, DIM, BLOCK
        )
        acc, most, total = merge_part(acc, most, total, value, part_lse)
    known = total != 0  # true for NaN, so that NaN reaches the output
    share = 1 / tl.where(known, total, 1.0)
    acc = acc * share[:, None]
    to = _target(out, out_sb, out_sn, out_sh, sample, head, first, origin, step, column, TOKENS)
    mask = (t < written)[:, None]
    if DIM != BLOCK:
        mask = mask & (column < DIM)[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=mask)
    merged_lse = tl.where(known, most - tl.log(share), float("-inf"))
    lse += sample.to(tl.int64) * lse_sb + head.to(tl.int64) * lse_sh + (first + origin).to(tl.int64) * lse_sn
    tl.store(lse + t * (step * lse_sn), merged_lse, mask=t < inside)


@triton.jit(do_not_specialize=["start", "stop", "origin"])
def _sum(
    out, out_sb, out_sn, out_sh,
    parts, entries, classes, order, count, num_heads, start, stop, step, origin,
    PART: tl.constexpr, ALIGN: tl.constexpr, ADD: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    head, first, inside, low, high = _program(order, classes, count, num_heads, start, stop, step, TOKENS)
    sample, column = tl.program_id(1), tl.arange(0, BLOCK)
    to = _target(out, out_sb, out_sn, out_sh, sample, head, first, origin, step, column, TOKENS)
    mask = (tl.arange(0, TOKENS) < inside)[:, None]
    if DIM != BLOCK:
        mask = mask & (column < DIM)[None, :]
    acc = tl.zeros([TOKENS, BLOCK], tl.float32)
    if ADD:
        acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    for e in range(low, high):
        part, j, segment, row, more_segments, more_rows, exists = _locate(
            entries, e, sample, first, inside, step, TOKENS
        )
        acc += _part_rows(
            parts + part * 8, segment, j, row, more_segments, more_rows, exists, column, PART, ALIGN, DIM, BLOCK
        )
    tl.store(to, acc.to(out.dtype.element_ty), mask=mask)


def _addresses(parts: Sequence[Tensor], weights: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return (parts, 8) int64: address and strides of each part and of its log-sum-exp."""
    rows = [
        [p.data_ptr(), *p.stride()[:3], *((w.data_ptr(), *w.stride()) if w is not None else (0, 0, 0, 0))]
        for p, w in zip(parts, weights or [None] * len(parts), strict=True)
    ]
    return send(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)


def _launch(
    kernel, config: tuple[int, int], out: Tensor, lse: tuple, parts: Sequence[Tensor], addresses: Tensor,
    entries: Entries, order: Tensor, span: tuple[int, int, int, int], options: dict[str, bool],
) -> None:  # fmt: skip
    samples, start, stop, origin = span
    tokens, warps = config
    tiles, count = triton.cdiv(stop - start, tokens * entries.step), order.shape[0]
    dim, dtype = out.shape[3], parts[0].dtype if parts else out.dtype
    align = 8 if math.gcd(8, *[x for p in parts for x in p.stride()[:3]]) == 8 else 1
    kernel[(count * tiles, samples)](
        out, *out.stride()[:3], *lse, addresses, entries.table, entries.classes, order,
        count, out.shape[2], start, stop, entries.step, origin, PART=_NAMES[dtype], ALIGN=align, TOKENS=tokens, DIM=dim,
        BLOCK=triton.next_power_of_2(dim), num_warps=warps, **options,
    )  # fmt: skip


def merge_parts(
    out: Tensor,
    lse: Tensor,
    parts: Sequence[Tensor],
    weights: Sequence[Tensor],
    entries: Entries,
    span: tuple[int, int, int, int],
    in_place: bool = False,
) -> None:
    """Merge parts and write the result to rows of out and lse; rows that are in no part get 0 and -inf.

    Args:
        out: (samples, N, H, D), unit stride along D.
        lse: (samples, H, N) fp32.
        parts: (G, J, n, D) each, of one dtype, unit stride along D.
        weights: log-sum-exp of the parts, (G, J, n) fp32 each.
        entries: the table of the parts' rows.
        span: (samples, start, stop, origin): positions start..stop are written to rows origin + position.
        in_place: whether one part has all rows and shares memory with `out`. If so, only rows in other parts are written.
    """
    lse_views, addresses = (lse, lse.stride(0), lse.stride(2), lse.stride(1)), _addresses(parts, weights, out.device)
    _launch(_merge, MERGE, out, lse_views, parts, addresses, entries, entries.every, span, {"IN_PLACE": in_place})


def sum_parts(
    outs: Sequence[Tensor],
    parts: Sequence[Sequence[Tensor]],
    entries: Sequence[Entries],
    span: tuple[int, int, int, int],
    add: bool = False,
    in_place: Sequence[bool] = (False, False, False),
) -> None:
    """Write the sum of parts[i] to rows of outs[i], or add it to them if `add`; other arguments: see `merge_parts`."""
    orders = [x.several if shared else x.every for x, shared in zip(entries, in_place, strict=True)]
    needed = [i for i, order in enumerate(orders) if len(order)]
    if not needed:
        return
    # one table for all outs, because each copy to the device takes host time
    table = _addresses([p for i in needed for p in parts[i]], (), outs[0].device)
    for i, addresses in zip(needed, table.split([len(parts[i]) for i in needed]), strict=True):
        _launch(_sum, SUM, outs[i], (), parts[i], addresses, entries[i], orders[i], span, {"ADD": add})


@triton.jit
def _span_program(
    spans, span_of, lengths, num_heads, LENGTHS: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Return a program's (index of span and head, head, sample in the span, sample, first position, inside, live, step,
    start, document, begin).

    For each row, `inside` is True in the span, `live` in the span and in the sample, and its document begins at `begin`.
    """
    head, tile = tl.program_id(0) % num_heads, tl.program_id(0) // num_heads
    number = tl.load(span_of + tile)
    span = spans + number.to(tl.int64) * 6
    step, tiles = tl.load(span + 3).to(tl.int32), tl.load(span + 5).to(tl.int32)
    at = tile - tl.load(span + 4).to(tl.int32)
    sample, near = at // tiles, at % tiles
    first = near // step * (step * TOKENS) + near % step
    inside = first + step * tl.arange(0, TOKENS) < tl.load(span + 2).to(tl.int32)
    start, batch, live = tl.load(span + 1), tl.load(span) + sample, inside
    document = tl.zeros([TOKENS], tl.int32)
    begin = document
    if BITS:
        at, tokens = first + step * tl.arange(0, TOKENS), tl.load(span + 2).to(tl.int32)
        for bit in tl.static_range(BITS):
            later = document + (1 << (BITS - 1 - bit))
            document = tl.where(bound(lengths, later, tokens) <= at, later, document)
        begin = bound(lengths, document, tokens)
        live = inside & (at >= begin) & (at < bound(lengths, document + 1, tokens))
    elif LENGTHS:
        live = inside & (start + first + step * tl.arange(0, TOKENS) < tl.load(lengths + batch))
    head_number = number * num_heads + head
    return head_number, head.to(tl.int64), sample, batch, first, inside, live, step, start, document, begin


@triton.jit
def _locate_in_document(job, first, live, step, document, begin, TOKENS: tl.constexpr):
    """Return the results of `_locate_job` for a job over all documents; each document has its own segments."""
    width, shift = tl.load(job + 3).to(tl.int32), tl.load(job + 1).to(tl.int32)
    rate, numbers = tl.load(job + 5).to(tl.int32), tl.load(job + 8).to(tl.int32)
    at = first + step * tl.arange(0, TOKENS)
    index = tl.maximum(at - begin, 0) + shift
    segment = index // width
    exists = live & ((index - segment * width) % rate == tl.load(job + 2).to(tl.int32))
    more_rows = at // rate
    if numbers > 0:
        more_rows += begin // width + document * numbers + segment
    return tl.load(job + 12), more_rows, exists, tl.max(exists.to(tl.int32), 0) > 0


@triton.jit
def _locate_job(
    jobs, entries, e, sample, first, inside, step, document, begin, BITS: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Return an entry's (row of the buffer, more rows, exists, whether any row can exist); see `_locate`."""
    at = entries + e * 7
    if BITS:
        job = jobs + tl.load(at).to(tl.int64) * 16
        return _locate_in_document(job, first, inside, step, document, begin, TOKENS)
    start, segments, width = tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    rows, rate, job = tl.load(at + 5), tl.load(at + 6), jobs + tl.load(at).to(tl.int64) * 16
    heads, t = tl.load(job + 6), tl.arange(0, TOKENS)
    x = first - start
    segment = tl.maximum(x, 0) // width
    index = tl.maximum(x, 0) - segment * width
    row, apart = index // rate, step // rate
    more_rows = t * apart
    exists = inside
    any_can = True
    if (x >= 0) & (apart * rate == step) & (index + step * (TOKENS - 1) < width):
        any_can = (row * rate == index) & (segment < segments)
        exists = inside & (row + more_rows < rows)
    else:
        each_x = x + step * t
        positive = tl.maximum(each_x, 0)
        each_segment = positive // width
        left = positive - each_segment * width
        each_row = left // rate
        more_rows = (each_segment - segment) * (heads.to(tl.int32) * rows) + each_row - row
        exists = inside & (each_x >= 0) & (each_segment < segments) & (each_row * rate == left) & (each_row < rows)
    group = (sample * segments + segment).to(tl.int64)
    return tl.load(job + 12) + (group * heads + tl.load(at + 1)) * rows + row, more_rows, exists, any_can


@triton.jit
def _job_rows(parts, row, more_rows, exists, column, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return (TOKENS, BLOCK) fp32 rows of the buffer."""
    at = parts + row * DIM + (more_rows * DIM)[:, None] + column[None, :]
    if DIM == BLOCK:
        return tl.load(at, mask=exists[:, None], other=0.0).to(tl.float32)
    return tl.load(at, mask=exists[:, None] & (column < DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _grouped_merge(
    out, out_sb, out_sn, out_sh, lse, lse_sb, lse_sh, lse_sn, parts, weights, jobs, spans, span_of, lengths, entries, starts,
    num_heads, LENGTHS: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number, head, sample, batch, first, inside, live, step, start, document, begin = _span_program(
        spans, span_of, lengths, num_heads, LENGTHS, BITS, TOKENS
    )
    column = tl.arange(0, BLOCK)
    acc = tl.zeros([TOKENS, BLOCK], tl.float32)
    most = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    for e in range(tl.load(starts + number), tl.load(starts + number + 1)):
        row, more_rows, exists, any_can = _locate_job(
            jobs, entries, e, sample, first, live, step, document, begin, BITS, TOKENS
        )
        if any_can:
            part_lse = tl.load(weights + row + more_rows, mask=exists, other=float("-inf"))
            value = _job_rows(parts, row, more_rows, exists, column, DIM, BLOCK)
            acc, most, total = merge_part(acc, most, total, value, part_lse)
    known = total != 0  # true for NaN, so that NaN reaches the output
    acc = acc / tl.where(known, total, 1.0)[:, None]
    target = start + first + step * tl.arange(0, TOKENS)
    to = out + batch * out_sb + head * out_sh + column[None, :] + target[:, None] * out_sn
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside[:, None] & (column < DIM)[None, :])
    merged_lse = tl.where(known, most + tl.log(tl.where(known, total, 1.0)), float("-inf"))
    tl.store(lse + batch * lse_sb + head * lse_sh + target * lse_sn, merged_lse, mask=inside)


@triton.jit(do_not_specialize=["part_rows"])
def _grouped_sum(
    out, second, out_sb, out_sn, out_sh, parts, part_rows, jobs, spans, span_of, lengths, entries, starts, num_heads,
    ADD: tl.constexpr, LENGTHS: tl.constexpr, BITS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    number, head, sample, batch, first, inside, live, step, start, document, begin = _span_program(
        spans, span_of, lengths, num_heads, LENGTHS, BITS, TOKENS
    )
    if tl.program_id(1) == 1:
        out = second
        parts += part_rows.to(tl.int64) * DIM
    column = tl.arange(0, BLOCK)
    target = start + first + step * tl.arange(0, TOKENS)
    to = out + batch * out_sb + head * out_sh + column[None, :] + target[:, None] * out_sn
    mask = inside[:, None] & (column < DIM)[None, :]
    acc = tl.zeros([TOKENS, BLOCK], tl.float32)
    if ADD:
        acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    for e in range(tl.load(starts + number), tl.load(starts + number + 1)):
        row, more_rows, exists, any_can = _locate_job(
            jobs, entries, e, sample, first, live, step, document, begin, BITS, TOKENS
        )
        if any_can:
            acc += _job_rows(parts, row, more_rows, exists, column, DIM, BLOCK)
    tl.store(to, acc.to(out.dtype.element_ty), mask=mask)


def _tables(work: Work, outputs: Outputs, out: Tensor, lengths: Tensor | None) -> tuple[tuple, dict[str, int]]:
    """Return the last positional arguments of both kernels over the buffer, and their keyword arguments."""
    dim, options = out.shape[3], {"LENGTHS": lengths is not None, "BITS": work.bits, "TOKENS": work.tokens}
    options |= {"DIM": dim, "BLOCK": triton.next_power_of_2(dim), "num_warps": CONFIG[1]}
    tables = work.jobs, work.spans, work.span, work.jobs if lengths is None else lengths
    return (*tables, outputs.entries, outputs.starts, out.shape[2]), options


def merge_jobs(
    out: Tensor, lse: Tensor, parts: Tensor, weights: Tensor, work: Work, lengths: Tensor | None = None
) -> None:
    """Merge parts (rows, D) with log-sum-exp `weights` (rows,) and write out (B, N, H, D) and lse (B, H, N).

    All positions of the spans are written. Positions without a row in any job, or beyond a sample's length in `lengths`
    (B,), get 0 and -inf. If `work` is for bounds of documents, `lengths` are these bounds.
    """
    tables, sizes = _tables(work, work.queries, out, lengths)
    _grouped_merge[(out.shape[2] * work.tiles,)](
        out, *out.stride()[:3], lse, *lse.stride(), parts, weights, *tables, **sizes
    )  # fmt: skip


def sum_jobs(
    outs: Sequence[Tensor], parts: Tensor, work: Work, kv: bool, add: bool, lengths: Tensor | None = None
) -> None:
    """Write the sum of parts[i] (rows, D) to outs[i] (B, N, H or K, D), or add it to them if `add`; one or two outs.

    All positions of the spans are written; see `merge_jobs`.
    """
    tables, sizes = _tables(work, work.keys if kv else work.queries, outs[0], lengths)
    per_launch = len(outs) if outs[0].stride() == outs[-1].stride() else 1
    for first in range(0, len(outs), per_launch):
        launched = outs[first : first + per_launch]
        _grouped_sum[(launched[0].shape[2] * work.tiles, len(launched))](
            launched[0], launched[-1], *launched[0].stride()[:3], parts[first], parts.shape[1], *tables, ADD=add, **sizes
        )  # fmt: skip
