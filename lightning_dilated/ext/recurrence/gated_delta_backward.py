"""Compute the gated delta rule in chunks of 64 tokens, backward: gradients of outputs, reverse pass, gradients of rows.

Let dN be the gradient of the added rows, beta new. The pass computes X = dN - G^T (beta dN). The gradients of k, v,
beta and log_decay are products of X with rows, states and `new` (see `gated_delta`). One kernel writes each of these
tensors and the next kernel reads it, so no kernel transposes a product, which Triton 3.4 to 3.7.0 may do wrongly on
Hopper. Sums have a fixed order, so results are bitwise reproducible.
Shape letters: T chunks, C slots of a chunk, K kv heads, H query heads, D head dim, E value dim, W columns of the state
(the last E have values), n runs, m groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dilated.ext.recurrence.gated_delta import (
    COLUMNS,
    EXACT,
    SLOTS,
    Chunks,
    Inverse,
    Passed,
    Rows,
    column_of,
    decays,
    fade,
    pass_groups,
    product,
    read_turned,
    totals,
    unit_rate,
)
from lightning_dilated.kernels.tiles import block_dim, read


class Reading(NamedTuple):
    """Queries q (rows, H, D), and the gradient of their outputs, grad (rows, H, E). Last strides are 1, and W is E."""

    q: Tensor
    grad: Tensor


class Gradients(NamedTuple):
    """Gradients of a call's inputs: `q`, `k` and `v` are contiguous and have the shapes of the rows (`q` is None if no
    query reads the state), `log_decay` and `beta` are (rows, K) fp32, `begin` is (n, K, D, W) fp32."""

    q: Tensor | None
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    begin: Tensor


@triton.jit
def _sums(
    to_new, to_state, rows, total, rate, q, q_sr, q_sh, grad, g_sr, g_sh, k, k_sr, k_sh, heads, width,
    GROUP: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients that outputs give to the rows that a chunk adds (C, W) and to the state before it (D, W)."""
    at, head = tl.program_id(0).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    chunk = at // heads
    first, count = tl.load(rows + 2 * chunk), tl.load(rows + 2 * chunk + 1)
    d, i = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    key = read(k + first * k_sr + head * k_sh, i, k_sr, d, count, DIM, BLOCK, False)
    coarse, fine = totals(total, at, i, SLOTS)
    past, r = tl.exp(coarse + fine), tl.load(rate + at * SLOTS + i)
    later = fade(-coarse, -fine, -coarse, -fine, i[:, None] <= i[None, :]) * r[:, None]  # one row per key
    of_new = tl.zeros([SLOTS, COLUMNS], tl.float32)
    of_state = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for g in range(GROUP):
        query_head = head * GROUP + g
        query = read(q + first * q_sr + query_head * q_sh, i, q_sr, d, count, DIM, BLOCK, False)
        there = (i < count)[:, None] & (column < width)[None, :]
        do = tl.load(grad + (first + i)[:, None] * g_sr + query_head * g_sh + column[None, :], mask=there, other=0.0)
        do = do.to(tl.float32) * unit_rate(query)[:, None]
        scores = tl.dot(key, tl.trans(query), input_precision=PRECISION) * later
        of_new = tl.dot(scores, do, of_new, input_precision=PRECISION)
        turned = read_turned(q + first * q_sr + query_head * q_sh, i, q_sr, d, count, DIM).to(tl.float32)
        of_state = tl.dot(turned, past[:, None] * do, of_state, input_precision=PRECISION)
    to = to_new + at * SLOTS * width + i[:, None] * width + column[None, :]
    tl.store(to, of_new.to(to_new.dtype.element_ty), mask=(column < width)[None, :])
    to = to_state + at * DIM * width + d[:, None] * width + column[None, :]
    tl.store(to, of_state.to(to_state.dtype.element_ty), mask=(d < DIM)[:, None] & (column < width)[None, :])


@triton.jit
def _pass_back(
    first_grad, after, solved, last, to_new, to_state, rows, items, matrix, total, rate, k, k_sr, k_sh, beta, b_sr, b_sh,
    heads, width,
    ZERO: tl.constexpr, STORE: tl.constexpr, READ: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Pass a block of columns of the state's gradient through an item's chunks, in falling order."""
    item, head = tl.program_id(0).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    d, i = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    low, high = tl.load(items + item // heads * 2), tl.load(items + item // heads * 2 + 1)
    place = d[:, None] * width + column[None, :]
    slot = i[:, None] * width + column[None, :]
    there = (column < width)[None, :]
    inside = (d < DIM)[:, None] & there
    if ZERO:
        state = tl.zeros([BLOCK, COLUMNS], tl.float32)
    else:
        state = tl.load(last + item * DIM * width + place, mask=inside, other=0.0)
    k += head * k_sh
    beta += head * b_sh
    for step in tl.range(0, high - low):
        chunk = high - 1 - step
        first, count = tl.load(rows + 2 * chunk), tl.load(rows + 2 * chunk + 1)
        at = chunk * heads + head
        key = read(k + first * k_sr, i, k_sr, d, count, DIM, BLOCK, False).to(tl.float32)
        turned = tl.load(matrix + at * SLOTS * SLOTS + i[None, :] * SLOTS + i[:, None]).to(tl.float32)
        b, r = column_of(beta, b_sr, first, count, i), tl.load(rate + at * SLOTS + i)
        past, left, whole = decays(total, at, i, SLOTS)
        if STORE:
            tl.store(after + at * DIM * width + place, state.to(after.dtype.element_ty), mask=inside)
        x = (left * r)[:, None] * tl.dot(key, state, input_precision=PRECISION)
        state = whole * state
        if READ:
            x += tl.load(to_new + at * SLOTS * width + slot, mask=there, other=0.0).to(tl.float32)
            state += tl.load(to_state + at * DIM * width + place, mask=inside, other=0.0).to(tl.float32)
        x -= tl.dot(turned, b[:, None] * x, input_precision=PRECISION)
        if STORE:
            tl.store(solved + at * SLOTS * width + slot, x.to(solved.dtype.element_ty), mask=there)
        taken = (-past * r * b)[:, None] * x
        turned = read_turned(k + first * k_sr, i, k_sr, d, count, DIM).to(tl.float32)
        state = tl.dot(turned, taken, state, input_precision=PRECISION)
    tl.store(first_grad + item * DIM * width + place, state, mask=inside)


@triton.jit
def _queries(
    dq, to_key, to_total, before, new, rows, total, rate, q, q_sr, q_sh, grad, g_sr, g_sh, k, k_sr, k_sh,
    beta, b_sr, b_sh, heads, width,
    GROUP: tl.constexpr, BLOCKS: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq, and the gradients that outputs give to unit keys (C, D) and, through the queries' rows, to totals."""
    at, head = tl.program_id(0).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    chunk = at // heads
    first, count = tl.load(rows + 2 * chunk), tl.load(rows + 2 * chunk + 1)
    d, i, c = tl.arange(0, BLOCK), tl.arange(0, SLOTS), tl.arange(0, COLUMNS)
    there = i < count
    key = read(k + first * k_sr + head * k_sh, i, k_sr, d, count, DIM, BLOCK, False).to(tl.float32)
    b, r = column_of(beta + head * b_sh, b_sr, first, count, i), tl.load(rate + at * SLOTS + i)
    coarse, fine = totals(total, at, i, SLOTS)
    past = tl.exp(coarse + fine)
    before += at * DIM * width + d[:, None] * width
    new += at * SLOTS * width + i[:, None] * width
    read_keys = tl.zeros([SLOTS, BLOCK], tl.float32)
    along = tl.zeros([SLOTS], tl.float32)
    for g in range(GROUP):
        query_head = head * GROUP + g
        query = read(q + first * q_sr + query_head * q_sh, i, q_sr, d, count, DIM, BLOCK, False).to(tl.float32)
        rate_q = unit_rate(query)
        reading = tl.zeros([SLOTS, BLOCK], tl.float32)
        for block in tl.static_range(BLOCKS):
            column = block * COLUMNS + c
            known = (column < width)[None, :]
            do = tl.load(
                grad + (first + i)[:, None] * g_sr + query_head * g_sh + column[None, :],
                mask=there[:, None] & known, other=0.0,
            )  # fmt: skip
            n = tl.load(new + column[None, :], mask=known, other=0.0)
            pairs = product(n, tl.trans(do), PRECISION)
            pairs *= fade(-coarse, -fine, -coarse, -fine, i[:, None] <= i[None, :]) * b[:, None] * rate_q[None, :]
            read_keys = tl.dot(pairs, query, read_keys, input_precision=PRECISION)
            state = tl.load(before + column[None, :], mask=(d < DIM)[:, None] & known, other=0.0)
            reading += past[:, None] * product(do, tl.trans(state), PRECISION)
            pairs = product(do, tl.trans(n), PRECISION)
            pairs *= fade(coarse, fine, coarse, fine, i[:, None] >= i[None, :]) * (b * r)[None, :]
            reading = tl.dot(pairs, key, reading, input_precision=PRECISION)
        along_q = rate_q * tl.sum(query * reading, 1)
        along += along_q
        result = rate_q[:, None] * (reading - (rate_q * along_q)[:, None] * query)
        to = dq + (first + i)[:, None] * (heads * GROUP * DIM) + query_head * DIM + d[None, :]
        tl.store(to, result.to(dq.dtype.element_ty), mask=there[:, None] & (d < DIM)[None, :])
    to = to_key + at * SLOTS * DIM + i[:, None] * DIM + d[None, :]
    tl.store(to, read_keys.to(to_key.dtype.element_ty), mask=(d < DIM)[None, :])
    tl.store(to_total + at * SLOTS + i, along)


@triton.jit
def _gradients(
    dk, dv, d_decay, d_beta, before, new, after, solved, to_key, to_total, rows, total, rate, k, k_sr, k_sh,
    beta, b_sr, b_sh, heads, width, extra,
    READ: tl.constexpr, BLOCKS: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a chunk's keys, values and gates. Row i has the factor exp(total_i), and row j has the
    factor exp(-total_j), so the gradient of a total is the product of a row with its own gradient."""
    at, head = tl.program_id(0).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    chunk = at // heads
    first, count = tl.load(rows + 2 * chunk), tl.load(rows + 2 * chunk + 1)
    d, i, c = tl.arange(0, BLOCK), tl.arange(0, SLOTS), tl.arange(0, COLUMNS)
    there = i < count
    values = width - extra
    key = read(k + first * k_sr + head * k_sh, i, k_sr, d, count, DIM, BLOCK, False).to(tl.float32)
    b, r = column_of(beta + head * b_sh, b_sr, first, count, i), tl.load(rate + at * SLOTS + i)
    coarse, fine = totals(total, at, i, SLOTS)
    past, left, whole = decays(total, at, i, SLOTS)
    before += at * DIM * width + d[:, None] * width
    after += at * DIM * width + d[:, None] * width
    new += at * SLOTS * width + i[:, None] * width
    solved += at * SLOTS * width + i[:, None] * width
    dv += (first + i)[:, None] * (heads * values) + head * values - extra
    changed = tl.zeros([SLOTS, BLOCK], tl.float32)  # gradients of keys that read the state or earlier keys
    stored = tl.zeros([SLOTS, BLOCK], tl.float32)  # gradients of keys that later keys read
    to_beta = tl.zeros([SLOTS], tl.float32)
    at_end = 0.0
    # the sums are over columns, and one block of columns at a time takes the fewest registers
    for block in tl.static_range(BLOCKS):
        column = block * COLUMNS + c
        known = (column < width)[None, :]
        n = tl.load(new + column[None, :], mask=known, other=0.0)
        x = tl.load(solved + column[None, :], mask=known, other=0.0)
        to_beta += tl.sum(x.to(tl.float32) * n.to(tl.float32), 1)
        valued = there[:, None] & ((column >= extra) & (column < width))[None, :]
        tl.store(dv + column[None, :], (b[:, None] * x).to(dv.dtype.element_ty), mask=valued)
        later = tl.load(after + column[None, :], mask=(d < DIM)[:, None] & known, other=0.0)
        ended = (left * b)[:, None] * product(n, tl.trans(later), PRECISION)
        at_end += tl.sum(r * tl.sum(key * ended, 1), 0)
        stored += ended
        state = tl.load(before + column[None, :], mask=(d < DIM)[:, None] & known, other=0.0)
        at_end += whole * tl.sum(tl.sum(state.to(tl.float32) * later.to(tl.float32), 1), 0)
        changed -= (past * b)[:, None] * product(x, tl.trans(state), PRECISION)
        pairs = product(x, tl.trans(n), PRECISION)
        pairs *= fade(coarse, fine, coarse, fine, i[:, None] > i[None, :]) * -b[:, None] * (b * r)[None, :]
        changed = tl.dot(pairs, key, changed, input_precision=PRECISION)
        pairs = product(n, tl.trans(x), PRECISION)
        pairs *= fade(-coarse, -fine, -coarse, -fine, i[:, None] < i[None, :]) * -b[:, None] * (b * r)[None, :]
        stored = tl.dot(pairs, key, stored, input_precision=PRECISION)
    total_grad = tl.where(i == SLOTS - 1, at_end, 0.0)
    if READ:
        total_grad += tl.load(to_total + at * SLOTS + i)
        from_key = to_key + at * SLOTS * DIM + i[:, None] * DIM + d[None, :]
        stored += tl.load(from_key, mask=(d < DIM)[None, :], other=0.0).to(tl.float32)
    along_changed, along_stored = r * tl.sum(key * changed, 1), r * tl.sum(key * stored, 1)
    total_grad += along_changed - along_stored
    result = r[:, None] * (changed + stored - (r * (along_changed + along_stored))[:, None] * key)
    to = dk + (first + i)[:, None] * (heads * DIM) + head * DIM + d[None, :]
    tl.store(to, result.to(dk.dtype.element_ty), mask=there[:, None] & (d < DIM)[None, :])
    to = (first + i) * heads + head
    tl.store(d_beta + to, to_beta, mask=there)
    tl.store(d_decay + to, tl.cumsum(total_grad, 0, reverse=True), mask=there)


def backward(
    rows: Rows, chunks: Chunks, inverse: Inverse, passed: Passed, reading: Reading | None, last: Tensor, covered: bool
) -> Gradients:
    """Compute the gradients of a call.

    Args:
        last: (n, K, D, W) fp32, contiguous, the gradient of the state after each run.
        covered: whether all rows belong to chunks; if not, gradients of the other rows are set to 0.
    """
    sums = None if reading is None else launch_sums(rows, chunks, inverse, reading)
    begin, after, solved = launch_back(rows, chunks, inverse, passed, sums, last)
    del sums
    width, number, columns = last.shape[3], len(chunks.rows) * rows.heads, min(COLUMNS, block_dim(last.shape[3]))
    dk, dv, decay, beta = (_empty(x, covered) for x in (rows.k, rows.v, rows.log_decay, rows.beta))
    dq, to_key, to_total = (None, after, after)
    if reading is not None:
        dq, to_key, to_total = launch_queries(rows, chunks, inverse, passed, reading, covered)
    _gradients[(number,)](
        dk, dv, decay, beta, passed.before, passed.new, after, solved, to_key, to_total, chunks.rows, inverse.total,
        inverse.rate, rows.k, *rows.k.stride()[:2], rows.beta, *rows.beta.stride(), rows.heads, width,
        width - rows.v.shape[2], READ=reading is not None, BLOCKS=triton.cdiv(width, columns), COLUMNS=columns,
        **rows.sizes(), **rows.config("gradients"),
    )  # fmt: skip
    return Gradients(dq, dk, dv, decay, beta, begin)


def _empty(x: Tensor, covered: bool) -> Tensor:
    """Return a contiguous tensor like x; it is filled with zeros unless all rows are `covered`."""
    return (torch.empty if covered else torch.zeros)(x.shape, dtype=x.dtype, device=x.device)


def launch_queries(
    rows: Rows, chunks: Chunks, inverse: Inverse, passed: Passed, reading: Reading, covered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq and the gradients of unit keys (T, K, C, D) and of totals (T, K, C); see `_queries`."""
    (q, grad), width, number = reading, reading.grad.shape[2], (len(chunks.rows), rows.heads)
    dq, columns = _empty(q, covered), min(COLUMNS, block_dim(width))
    to_key = inverse.total.new_empty(*number, SLOTS, rows.dim, dtype=rows.stored)
    to_total = torch.empty_like(inverse.rate)
    _queries[(number[0] * number[1],)](
        dq, to_key, to_total, passed.before, passed.new, chunks.rows, inverse.total, inverse.rate, q, *q.stride()[:2],
        grad, *grad.stride()[:2], rows.k, *rows.k.stride()[:2], rows.beta, *rows.beta.stride(), rows.heads, width,
        GROUP=q.shape[1] // rows.heads, BLOCKS=triton.cdiv(width, columns), COLUMNS=columns, **rows.sizes(),
        **rows.config("queries"),
    )  # fmt: skip
    return dq, to_key, to_total


def launch_sums(rows: Rows, chunks: Chunks, inverse: Inverse, reading: Reading) -> tuple[Tensor, Tensor]:
    """Return the gradients of added rows (T, K, C, E) and of states (T, K, D, E); see `_sums`."""
    (q, grad), width = reading, reading.grad.shape[2]
    number, columns = (len(chunks.rows), rows.heads), min(COLUMNS, block_dim(width))
    to_new = inverse.total.new_empty(*number, SLOTS, width, dtype=rows.stored)
    to_state = inverse.total.new_empty(*number, rows.dim, width, dtype=rows.stored)
    _sums[(number[0] * number[1], triton.cdiv(width, columns))](
        to_new, to_state, chunks.rows, inverse.total, inverse.rate, q, *q.stride()[:2], grad, *grad.stride()[:2],
        rows.k, *rows.k.stride()[:2], rows.heads, width, GROUP=q.shape[1] // rows.heads, COLUMNS=columns, **rows.sizes(),
        **rows.config("sums"),
    )  # fmt: skip
    return to_new, to_state


def launch_back(
    rows: Rows, chunks: Chunks, inverse: Inverse, passed: Passed, sums: tuple[Tensor, Tensor] | None, last: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `begin` and of the state after each chunk, (T, K, D, W), and X (T, K, C, W)."""
    width, columns = last.shape[3], rows.passed_columns(last.shape[3])
    after, solved = torch.empty_like(passed.before), torch.empty_like(passed.new)
    to_new, to_state = sums or (after, after)
    blocks = triton.cdiv(width, columns)

    def launch(items: Tensor, later: Tensor | None, store: bool) -> Tensor:
        result = last.new_empty(len(items), *last.shape[1:])
        _pass_back[(len(items) * rows.heads, blocks)](
            result, after, solved, result if later is None else later, to_new, to_state, chunks.rows, items,
            inverse.matrix, inverse.total, inverse.rate, rows.k, *rows.k.stride()[:2], rows.beta, *rows.beta.stride(),
            rows.heads, width, ZERO=later is None, STORE=store, READ=sums is not None, COLUMNS=columns, **rows.sizes(),
            **rows.config("pass"),
        )  # fmt: skip
        return result

    if chunks.groups is None or chunks.members is None or passed.maps is None:
        return launch(chunks.runs, last, True), after, solved
    groups = last if sums is None else launch(chunks.groups, None, False)
    begin, ends = torch.empty_like(last), last.new_empty(len(chunks.groups), *last.shape[1:])
    pass_groups[(len(last) * rows.heads, blocks)](
        begin, ends, last, chunks.members, passed.maps, groups, rows.heads, width, 0, passed.maps.shape[3], width, 0,
        BACK=True, SUMS=sums is not None, DIM=rows.dim, BLOCK=block_dim(rows.dim), COLUMNS=columns, PRECISION=EXACT,
        **rows.config("groups"),
    )  # fmt: skip
    launch(chunks.groups, ends, True)
    return begin, after, solved
