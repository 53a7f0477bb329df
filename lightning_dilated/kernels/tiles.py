"""Device functions shared by kernels: flash attention's loops over tiles, the dropout hash, the log-sum-exp merge.

Shape letters: n query rows, m key rows, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


def precision(q: Tensor) -> str:
    """Return the `input_precision` of `tl.dot`: exact for float32; it has no effect on 16-bit types."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


def block_dim(dim: int) -> int:
    """Return the columns of a tile for a head dim: a power of two, at least the 16 that `tl.dot` needs."""
    return max(16, triton.next_power_of_2(dim))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def fold(state, value):
    """Chain a 64-bit value into a 32-bit state; equals `attention.dropout.fold`."""
    low, high = (value & 0xFFFFFFFF).to(tl.uint32), (value >> 32).to(tl.uint32)
    state = _mix(state ^ low)
    return _mix(state + high + 0x9E3779B1)


@triton.jit
def read(base, i, stride, column, rows, DIM: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr):
    """Return rows i of a strided view, (len(i), BLOCK); zeros beyond its rows and columns. ALL: every row exists."""
    at = base + i.to(tl.int64)[:, None] * stride + column[None, :]
    if ALL and DIM == BLOCK:
        return tl.load(at)
    if ALL:
        return tl.load(at, mask=(column < DIM)[None, :], other=0.0)
    if DIM == BLOCK:
        return tl.load(at, mask=(i < rows)[:, None], other=0.0)
    return tl.load(at, mask=(i < rows)[:, None] & (column < DIM)[None, :], other=0.0)


@triton.jit
def _seen(there, i, j, lower, upper, CAUSAL: tl.constexpr, BAND: tl.constexpr):
    """Restrict the mask of existing pairs to pairs in which query row i sees key row j."""
    if BAND:
        there = there & (j - i >= lower) & (j - i <= upper)
    elif CAUSAL:
        there = there & (j <= i)
    return there


@triton.jit
def _band(first, size, count, lower, upper, STEP: tl.constexpr):
    """Return (begin, inner, whole, end) of the columns that rows first .. first + size - 1 see, of `count` columns.

    A row sees column c if lower <= c - row <= upper. All rows see the columns from `inner` to below `whole`. `begin`,
    `inner` and `whole` are multiples of STEP, or equal to `end`."""
    begin = tl.minimum(tl.maximum(first + lower, 0), count) // STEP * STEP
    end = tl.maximum(begin, tl.minimum(count, first + size + upper))
    inner = tl.minimum(tl.cdiv(tl.maximum(first + size - 1 + lower, begin), STEP) * STEP, end)
    whole = tl.maximum(inner, tl.minimum(count, first + upper + 1) // STEP * STEP)
    return begin, inner, whole, end


@triton.jit
def _attend(
    acc, most, total, query, k, v, k_sn, v_sn, i, low, high, m, lower, upper, scale, row_state, keys, threshold,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, EDGE: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Run `attend` over keys low..high; EDGE: some keys may be masked."""
    column = tl.arange(0, BLOCK)
    for first in tl.range(low, high, KEYS):
        j = first + tl.arange(0, KEYS)
        key = read(k, j, k_sn, column, m, DIM, BLOCK, not EDGE)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        if EDGE:
            seen = _seen((j < m)[None, :], i[:, None], j[None, :], lower, upper, CAUSAL, BAND)
            score = tl.where(seen, score, float("-inf"))
        top = tl.maximum(most, tl.max(score, 1))
        finite = top
        if BAND and EDGE:  # a row may have seen no key so far
            finite = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(score - finite[:, None])
        rescale = tl.exp2(most - finite)
        total = total * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        if DROP:
            hashed = fold(row_state[:, None], tl.load(keys + j, mask=j < m, other=0)[None, :])
            p = tl.where(hashed >= threshold, p, 0.0)
        value = read(v, j, v_sn, column, m, DIM, BLOCK, not EDGE)
        acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)
        most = top
    return acc, most, total


@triton.jit
def attend(
    acc, most, total, query, k, v, k_sn, v_sn, i, tile, m, lower, upper, scale, row_state, keys, threshold,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the online softmax of query rows i of a tile over all keys that they see (arXiv 2307.08691, algorithm 1).

    The state is acc (ROWS, BLOCK), the weighted sum of values; `most`, the largest score, as an exponent of 2; and
    `total`, the sum of the weights. `row_state`: the dropout hash of each row; `keys`: global positions of the keys.
    With BAND query row i sees key row j if lower <= j - i <= upper, whether or not CAUSAL is set.
    """
    inner, high = 0, m
    whole = m // KEYS * KEYS
    if BAND:
        begin, inner, whole, high = _band(tile * ROWS, ROWS, m, lower, upper, KEYS)
        acc, most, total = _attend(
            acc, most, total, query, k, v, k_sn, v_sn, i, begin, inner, m, lower, upper, scale, row_state, keys, threshold,
            CAUSAL, BAND, True, DROP, PRECISION, KEYS, DIM, BLOCK,
        )  # fmt: skip
    elif CAUSAL:
        high = tl.minimum((tile + 1) * ROWS, m)
        whole = tile * ROWS // KEYS * KEYS
    acc, most, total = _attend(
        acc, most, total, query, k, v, k_sn, v_sn, i, inner, whole, m, lower, upper, scale, row_state, keys, threshold,
        CAUSAL, BAND, False, DROP, PRECISION, KEYS, DIM, BLOCK,
    )  # fmt: skip
    return _attend(
        acc, most, total, query, k, v, k_sn, v_sn, i, whole, high, m, lower, upper, scale, row_state, keys, threshold,
        CAUSAL, BAND, True, DROP, PRECISION, KEYS, DIM, BLOCK,
    )  # fmt: skip


@triton.jit
def _key_gradients(
    dk, dv, key, value, q, grad, q_sn, g_sn, lse, delta, j, low, high, n, m, lower, upper, scale, hash_state, queries,
    key_positions, threshold, keep,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, EDGE: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Run `key_gradients` over query rows low..high; EDGE: some rows may be masked."""
    column = tl.arange(0, BLOCK)
    for first in tl.range(low, high, ROWS):
        i = first + tl.arange(0, ROWS)
        query = read(q, i, q_sn, column, n, DIM, BLOCK, not EDGE)
        do = read(grad, i, g_sn, column, n, DIM, BLOCK, not EDGE)
        if EDGE:
            row_lse = tl.load(lse + i, mask=i < n, other=float("inf"))
            row_delta = tl.load(delta + i, mask=i < n, other=0.0)
        else:
            row_lse = tl.load(lse + i)
            row_delta = tl.load(delta + i)
        score = tl.dot(key, tl.trans(query), input_precision=PRECISION) * scale
        p = tl.exp2(score - (row_lse * LOG2E)[None, :])
        if EDGE:
            seen = _seen((i < n)[None, :] & (j < m)[:, None], i[None, :], j[:, None], lower, upper, CAUSAL, BAND)
            p = tl.where(seen, p, 0.0)
        dp = tl.dot(value, tl.trans(do), input_precision=PRECISION)
        weight = p
        if DROP:
            row_state = fold(hash_state, tl.load(queries + i, mask=i < n, other=0))
            keeps = fold(row_state[None, :], key_positions[:, None]) >= threshold
            weight = tl.where(keeps, p * keep, 0.0)
            dp = tl.where(keeps, dp * keep, 0.0)
        dv = tl.dot(weight.to(do.dtype), do, dv, input_precision=PRECISION)
        ds = p * (dp - row_delta[None, :])
        dk = tl.dot(ds.to(query.dtype), query, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def key_gradients(
    key, value, q, grad, q_sn, g_sn, lse, delta, j, tile, n, m, lower, upper, scale, hash_state, queries, key_positions,
    threshold, keep,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return (dk without the scale, dv), (KEYS, BLOCK) each, of keys j of a tile (arXiv 2307.08691, algorithm 2).

    `hash_state`: the dropout hash of seed, branch, sample and head; `queries`: global positions of the query rows.
    CAUSAL and BAND: see `attend`.
    """
    dk = tl.zeros([KEYS, BLOCK], tl.float32)
    dv = tl.zeros([KEYS, BLOCK], tl.float32)
    inner, high = 0, n
    whole = n // ROWS * ROWS
    if BAND or CAUSAL:
        if BAND:
            begin, inner, whole, high = _band(tile * KEYS, KEYS, n, -upper, -lower, ROWS)
        else:  # rows before the tile see none of its keys; rows in the tile see some
            begin, inner = tile * KEYS // ROWS * ROWS, tl.minimum(tl.cdiv((tile + 1) * KEYS, ROWS) * ROWS, n)
            whole = tl.maximum(whole, inner)
        dk, dv = _key_gradients(
            dk, dv, key, value, q, grad, q_sn, g_sn, lse, delta, j, begin, inner, n, m, lower, upper, scale, hash_state,
            queries, key_positions, threshold, keep, CAUSAL, BAND, True, DROP, PRECISION, ROWS, DIM, BLOCK,
        )  # fmt: skip
    # keys beyond m are zeros and their gradients are not stored, so only rows beyond n need a mask
    dk, dv = _key_gradients(
        dk, dv, key, value, q, grad, q_sn, g_sn, lse, delta, j, inner, whole, n, m, lower, upper, scale, hash_state,
        queries, key_positions, threshold, keep, CAUSAL, BAND, False, DROP, PRECISION, ROWS, DIM, BLOCK,
    )  # fmt: skip
    return _key_gradients(
        dk, dv, key, value, q, grad, q_sn, g_sn, lse, delta, j, whole, high, n, m, lower, upper, scale, hash_state,
        queries, key_positions, threshold, keep, CAUSAL, BAND, True, DROP, PRECISION, ROWS, DIM, BLOCK,
    )  # fmt: skip


@triton.jit
def _query_gradient(
    dq, query, do, row_lse, row_delta, k, v, k_sn, v_sn, i, low, high, m, lower, upper, scale, row_state, keys, threshold,
    keep,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, EDGE: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Run `query_gradient` over keys low..high; EDGE: some keys may be masked."""
    column = tl.arange(0, BLOCK)
    for first in tl.range(low, high, KEYS):
        j = first + tl.arange(0, KEYS)
        key = read(k, j, k_sn, column, m, DIM, BLOCK, not EDGE)
        value = read(v, j, v_sn, column, m, DIM, BLOCK, not EDGE)
        p = tl.exp2(tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale - row_lse[:, None])
        if EDGE:
            seen = _seen((j < m)[None, :], i[:, None], j[None, :], lower, upper, CAUSAL, BAND)
            p = tl.where(seen, p, 0.0)
        dp = tl.dot(do, tl.trans(value), input_precision=PRECISION)
        if DROP:
            keeps = fold(row_state[:, None], tl.load(keys + j, mask=j < m, other=0)[None, :]) >= threshold
            dp = tl.where(keeps, dp * keep, 0.0)
        ds = p * (dp - row_delta[:, None])
        dq = tl.dot(ds.to(key.dtype), key, dq, input_precision=PRECISION)
    return dq


@triton.jit
def query_gradient(
    query, do, row_lse, row_delta, k, v, k_sn, v_sn, i, tile, m, lower, upper, scale, row_state, keys, threshold, keep,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return dq without the scale, (ROWS, BLOCK), of query rows i of a tile. `row_lse` is in base 2. See `attend`."""
    dq = tl.zeros([ROWS, BLOCK], tl.float32)
    inner, high = 0, m
    whole = m // KEYS * KEYS
    if BAND:
        begin, inner, whole, high = _band(tile * ROWS, ROWS, m, lower, upper, KEYS)
        dq = _query_gradient(
            dq, query, do, row_lse, row_delta, k, v, k_sn, v_sn, i, begin, inner, m, lower, upper, scale, row_state, keys,
            threshold, keep, CAUSAL, BAND, True, DROP, PRECISION, KEYS, DIM, BLOCK,
        )  # fmt: skip
    elif CAUSAL:
        high = tl.minimum((tile + 1) * ROWS, m)
        whole = tile * ROWS // KEYS * KEYS
    dq = _query_gradient(
        dq, query, do, row_lse, row_delta, k, v, k_sn, v_sn, i, inner, whole, m, lower, upper, scale, row_state, keys,
        threshold, keep, CAUSAL, BAND, False, DROP, PRECISION, KEYS, DIM, BLOCK,
    )  # fmt: skip
    return _query_gradient(
        dq, query, do, row_lse, row_delta, k, v, k_sn, v_sn, i, whole, high, m, lower, upper, scale, row_state, keys,
        threshold, keep, CAUSAL, BAND, True, DROP, PRECISION, KEYS, DIM, BLOCK,
    )  # fmt: skip


@triton.jit
def merge_factors(a, b):
    """Return (exp(a - top), exp(b - top), top) of two log-sum-exps, top = max(a, b); (0, 0, -inf) if both are -inf."""
    top = tl.maximum(a, b)
    finite = tl.where(top == float("-inf"), 0.0, top)
    return tl.exp(a - finite), tl.exp(b - finite), top


@triton.jit
def merge_part(acc, most, total, part, part_lse):
    """Add a part (rows, D) with log-sum-exp (rows,) to (weighted sum, largest log-sum-exp, sum of weights)."""
    before, now, top = merge_factors(most, part_lse)
    return acc * before[:, None] + part * now[:, None], top, total * before + now
