"""All rows of a call's output from the buffer of its jobs, in one launch: merged by log-sum-exp, or summed.

A program has rows of one span and one output head, and turns over the entries of that span and head only.
Shape letters: B batch, N tokens, H output heads, D head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_dilated.kernels.jobs import Outputs, Work

#: output rows of a program, and its warps
CONFIG = 64, 4


@triton.jit
def _place(spans, span_of, num_heads, TOKENS: tl.constexpr):
    """(span and head, head, sample in the span, sample, first position, which are in the span, step, start) of a program."""
    head, tile = tl.program_id(0) % num_heads, tl.program_id(0) // num_heads
    number = tl.load(span_of + tile)
    span = spans + number.to(tl.int64) * 6
    step, tiles = tl.load(span + 3).to(tl.int32), tl.load(span + 5).to(tl.int32)
    at = tile - tl.load(span + 4).to(tl.int32)
    sample, near = at // tiles, at % tiles
    first = near // step * (step * TOKENS) + near % step
    inside = first + step * tl.arange(0, TOKENS) < tl.load(span + 2).to(tl.int32)
    start = tl.load(span + 1)
    return number * num_heads + head, head.to(tl.int64), sample, tl.load(span) + sample, first, inside, step, start


@triton.jit
def _locate(jobs, entries, e, sample, first, inside, step, TOKENS: tl.constexpr):
    """(row of the buffer, rows beyond it of each position, which exist, whether any can) of an entry for a program.

    Within one segment, at a step that the rate divides, rows are as many apart each: no division by row.
    """
    at = entries + e * 7
    start, segments, width = tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    rows, rate, job = tl.load(at + 5), tl.load(at + 6), jobs + tl.load(at).to(tl.int64) * 16
    heads, t = tl.load(job + 6), tl.arange(0, TOKENS)
    x = first - start
    segment = tl.maximum(x, 0) // width
    rest = tl.maximum(x, 0) - segment * width
    row, apart = rest // rate, step // rate
    more = t * apart
    there = inside
    some = True
    if (x >= 0) & (apart * rate == step) & (rest + step * (TOKENS - 1) < width):
        some = (row * rate == rest) & (segment < segments)
        there = inside & (row + more < rows)
    else:
        at_x = x + step * t
        near = tl.maximum(at_x, 0)
        of_segment = near // width
        left = near - of_segment * width
        of_row = left // rate
        more = (of_segment - segment) * (heads.to(tl.int32) * rows) + of_row - row
        there = inside & (at_x >= 0) & (of_segment < segments) & (of_row * rate == left) & (of_row < rows)
    group = (sample * segments + segment).to(tl.int64)
    return tl.load(job + 12) + (group * heads + tl.load(at + 1)) * rows + row, more, there, some


@triton.jit
def _rows(parts, row, more, there, column, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """(TOKENS, BLOCK) fp32 rows of the buffer."""
    at = parts + row * DIM + (more * DIM)[:, None] + column[None, :]
    if DIM == BLOCK:
        return tl.load(at, mask=there[:, None], other=0.0).to(tl.float32)
    return tl.load(at, mask=there[:, None] & (column < DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _grouped_merge(
    out, out_sb, out_sn, out_sh, lse, lse_sb, lse_sh, lse_sn, parts, weights, jobs, spans, span_of, entries, starts,
    num_heads, TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    of, head, sample, batch, first, inside, step, start = _place(spans, span_of, num_heads, TOKENS)
    column = tl.arange(0, BLOCK)
    acc = tl.zeros([TOKENS, BLOCK], tl.float32)
    most = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    for e in range(tl.load(starts + of), tl.load(starts + of + 1)):
        row, more, there, some = _locate(jobs, entries, e, sample, first, inside, step, TOKENS)
        if some:
            weight = tl.load(weights + row + more, mask=there, other=float("-inf"))
            value = _rows(parts, row, more, there, column, DIM, BLOCK)
            high = tl.maximum(most, weight)
            finite = tl.where(high == float("-inf"), 0.0, high)
            before, now = tl.exp(most - finite), tl.exp(weight - finite)
            acc = acc * before[:, None] + value * now[:, None]
            total = total * before + now
            most = high
    known = total != 0  # a NaN is to show
    acc = acc / tl.where(known, total, 1.0)[:, None]
    target = start + first + step * tl.arange(0, TOKENS)
    to = out + batch * out_sb + head * out_sh + column[None, :] + target[:, None] * out_sn
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside[:, None] & (column < DIM)[None, :])
    found = tl.where(known, most + tl.log(tl.where(known, total, 1.0)), float("-inf"))
    tl.store(lse + batch * lse_sb + head * lse_sh + target * lse_sn, found, mask=inside)


@triton.jit
def _grouped_sum(
    out, out_sb, out_sn, out_sh, parts, jobs, spans, span_of, entries, starts, num_heads,
    ADD: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    of, head, sample, batch, first, inside, step, start = _place(spans, span_of, num_heads, TOKENS)
    column = tl.arange(0, BLOCK)
    target = start + first + step * tl.arange(0, TOKENS)
    to = out + batch * out_sb + head * out_sh + column[None, :] + target[:, None] * out_sn
    mask = inside[:, None] & (column < DIM)[None, :]
    acc = tl.zeros([TOKENS, BLOCK], tl.float32)
    if ADD:
        acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    for e in range(tl.load(starts + of), tl.load(starts + of + 1)):
        row, more, there, some = _locate(jobs, entries, e, sample, first, inside, step, TOKENS)
        if some:
            acc += _rows(parts, row, more, there, column, DIM, BLOCK)
    tl.store(to, acc.to(out.dtype.element_ty), mask=mask)


def _given(work: Work, found: Outputs, out: Tensor) -> tuple[tuple, dict[str, int]]:
    """The last arguments of both kernels, and their sizes."""
    block = triton.next_power_of_2(out.shape[3])
    sizes = {"TOKENS": work.tokens, "DIM": out.shape[3], "BLOCK": block, "num_warps": CONFIG[1]}
    return (work.jobs, work.spans, work.span, found.entries, found.starts, out.shape[2]), sizes


def merge_jobs(out: Tensor, lse: Tensor, parts: Tensor, weights: Tensor, work: Work) -> None:
    """Write the merge of parts (rows, D) and weights (rows,) to out (B, N, H, D) and lse (B, H, N) at all spans' positions.

    0 and -inf where no job has a row.
    """
    given, sizes = _given(work, work.queries, out)
    _grouped_merge[(out.shape[2] * work.tiles,)](
        out, *out.stride()[:3], lse, *lse.stride(), parts, weights, *given, **sizes
    )  # fmt: skip


def sum_jobs(out: Tensor, parts: Tensor, work: Work, kv: bool, add: bool) -> None:
    """Write the sum of parts (rows, D), or with `add` add it, to out (B, N, H or K, D) at all spans' positions."""
    given, sizes = _given(work, work.keys if kv else work.queries, out)
    _grouped_sum[(out.shape[2] * work.tiles,)](out, *out.stride()[:3], parts, *given, ADD=add, **sizes)
