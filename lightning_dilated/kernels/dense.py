"""Flash attention's forward in Triton over strided views (arXiv 2307.08691, algorithm 1), with the log-sum-exp.

Flash attention's backward in Triton over strided views, from any out and log-sum-exp; the same bits in every run.

One kernel runs over keys for dk and dv, one over query rows for dq, so no two programs write one row (arXiv 2307.08691,
algorithm 2, with its loops in two orders).

Shape letters: G samples and segments, J heads, n query rows, m key rows, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dilated.kernels.tiles import (
    LN2,
    LOG2E,
    Drop,
    block_dim,
    dropping,
    fold,
    head_of,
    hilbert,
    precision,
    read,
    row_state_of,
)

TileOrder = Literal["linear", "hilbert", "sawtooth"]
#: (query rows, key rows, warps, stages) by columns of a tile, 16-bit types; 64 and 128 are the best of six tried on an H200
CONFIGS = {16: (128, 64, 4, 3), 32: (128, 64, 4, 3), 64: (64, 64, 4, 3), 128: (128, 64, 8, 3), 256: (64, 32, 4, 2)}
#: for float32, whose exact products take more registers and shared memory
WIDE = {16: (64, 32, 4, 2), 32: (64, 32, 4, 2), 64: (64, 32, 4, 2), 128: (32, 32, 4, 2), 256: (16, 16, 4, 2)}


@triton.jit
def _forward_over(
    acc, most, total, q, k, v, k_sn, v_sn, i, low, high, m, scale, row_state, keys, threshold,
    CAUSAL: tl.constexpr, EDGE: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, turned=False,
):  # fmt: skip
    """The online softmax over keys low..high (`turned`: from the last tile to the first); with EDGE some may be masked."""
    column = tl.arange(0, BLOCK)
    for step in tl.range(low, high, KEYS):
        first = step
        if turned:
            first = low + high - KEYS - step
        j = first + tl.arange(0, KEYS)
        key = read(k, j, k_sn, column, m, DIM, BLOCK, not EDGE)
        score = tl.dot(q, tl.trans(key), input_precision=PRECISION) * scale
        if EDGE:
            seen = (j < m)[None, :]
            if CAUSAL:
                seen = seen & (j[None, :] <= i[:, None])
            score = tl.where(seen, score, float("-inf"))
        top = tl.maximum(most, tl.max(score, 1))
        p = tl.exp2(score - top[:, None])
        rescale = tl.exp2(most - top)
        total = total * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        if DROP:
            kept = fold(row_state[:, None], tl.load(keys + j, mask=j < m, other=0)[None, :])
            p = tl.where(kept >= threshold, p, 0.0)
        value = read(v, j, v_sn, column, m, DIM, BLOCK, not EDGE)
        acc = tl.dot(p.to(value.dtype), value, acc, input_precision=PRECISION)
        most = top
    return acc, most, total


@triton.jit
def _places(into, rows, mask, all_heads, length):
    """(flat rows of a running out (B, L, H, D), places in its lse (B, H, L)) of query rows."""
    at = tl.load(into + rows, mask=mask, other=0)
    token, head = at // all_heads, at % all_heads
    return at, (token // length * all_heads + head) * length + token % length


@triton.jit(do_not_specialize=["heads", "n", "m", "tiles", "state", "threshold", "all_heads", "length"])
def _forward(
    out, lse, q, q_sg, q_sj, q_sn, k, k_sg, k_sj, k_sn, v, v_sg, v_sj, v_sn,
    heads, n, m, tiles, order, scale, state, threshold, keep, sample, head, queries, keys,
    into, all_heads, length, pads,
    CAUSAL: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, ORDER: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if ORDER == "hilbert":
        pid = tl.load(order + pid)
    g, h, tile = head_of(heads, tiles, pid)
    i, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    query = read(q + g * q_sg + h * q_sj, i, q_sn, column, n, DIM, BLOCK, False)
    k += g * k_sg + h * k_sj
    v += g * v_sg + h * v_sj
    at = g * heads + h
    row_state = tl.zeros([ROWS], tl.uint32)
    if DROP:
        row_state = row_state_of(state, sample, head, queries, at, i, n)
        keys += at * m
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    rows, mask = at * n + i, (i < n)[:, None] & (column < DIM)[None, :]
    at_lse = rows
    if CHAIN:  # the state so far is what earlier tiles of keys would have left
        rows, at_lse = _places(into, rows, i < n, all_heads, length)
        most = tl.load(lse + at_lse, mask=i < n, other=0.0) * LOG2E
        total = tl.where(most > float("-inf"), 1.0, 0.0)
        acc = tl.load(out + rows[:, None] * DIM + column[None, :], mask=mask, other=0.0) / keep
        if pads > 0:  # zero keys with zero values: scores of 0
            top = tl.maximum(most, 0.0)
            rescale = tl.exp2(most - top)
            total = total * rescale + pads * tl.exp2(-top)
            acc = acc * rescale[:, None]
            most = top
    high = m
    whole = m // KEYS * KEYS
    if CAUSAL:
        high = tl.minimum((tile + 1) * ROWS, m)
        whole = tile * ROWS // KEYS * KEYS
    turned = False
    if ORDER == "sawtooth":
        turned = tile % 2 == 1
    acc, most, total = _forward_over(
        acc, most, total, query, k, v, k_sn, v_sn, i, 0, whole, m, scale, row_state, keys, threshold,
        CAUSAL, False, DROP, PRECISION, KEYS, DIM, BLOCK, turned,
    )  # fmt: skip
    acc, most, total = _forward_over(
        acc, most, total, query, k, v, k_sn, v_sn, i, whole, high, m, scale, row_state, keys, threshold,
        CAUSAL, True, DROP, PRECISION, KEYS, DIM, BLOCK,
    )  # fmt: skip
    acc = acc * tl.where(total > 0, keep / total, 0.0)[:, None]
    tl.store(out + rows[:, None] * DIM + column[None, :], acc.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + at_lse, (most + tl.log2(total)) * LN2, mask=i < n)


@dataclass(frozen=True)
class Into:
    """A running state to go on from, in place.

    Attributes:
        out, lse: (B, L, H, D) and (B, H, L), float32, contiguous; 0 and -inf where nothing was attended yet.
        rows: (G, J, n) int64, the flat row of out, as in (B, L, H), of each query row; none occurs twice.
        pads: zero keys with zero values that each row attends besides.
    """

    out: Tensor
    lse: Tensor
    rows: Tensor
    pads: int = 0


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    drop: Drop | None = None,
    tile_order: TileOrder = "linear",
    into: Into | None = None,
) -> tuple[Tensor, Tensor]:
    """(out (G, J, n, D), natural log-sum-exp (G, J, n) fp32) of q (G, J, n, D) and k, v (G, J, m, D); m = n where causal.

    Any strides, but 1 along D. The log-sum-exp is that without dropout. `tile_order`: programs run head by head and tile by
    tile ("linear"); along Hilbert curves over heads and tiles ("hilbert"), to the same bits; or every second tile takes its
    keys from the last to the first ("sawtooth", arXiv 2601.16032), to the same result but for rounding. With `into` the
    attention goes on from its state, which is changed and returned: no merge is needed afterwards.
    """
    groups, heads, n, dim = q.shape
    block = block_dim(dim)
    rows, keys, warps, stages = (WIDE if q.dtype == torch.float32 else CONFIGS)[block]
    if into is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        chain = {"into": q, "all_heads": 1, "length": 1, "pads": 0, "CHAIN": False}
    else:
        out, lse = into.out, into.lse
        if not (out.is_contiguous() and lse.is_contiguous() and out.dtype == lse.dtype == torch.float32):
            raise ValueError("the state of `into` must be contiguous float32 tensors: they are changed in place.")
        chain = {"into": into.rows.contiguous(), "all_heads": lse.shape[1], "length": lse.shape[2], "CHAIN": True}
        chain["pads"] = into.pads
    tiles = triton.cdiv(n, rows)
    _forward[(groups * heads * tiles,)](
        out, lse, q, *q.stride()[:3], k, *k.stride()[:3], v, *v.stride()[:3], heads, n, k.shape[2], tiles,
        hilbert(groups * heads, tiles, q.device) if tile_order == "hilbert" else q, scale * LOG2E.value,
        **dropping(drop, q), **chain, CAUSAL=causal, PRECISION=precision(q), ROWS=rows, KEYS=keys, DIM=dim, BLOCK=block,
        ORDER=tile_order, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse


#: (query rows, key rows, warps, stages) of the kernel over keys, by columns of a tile, 16-bit types; 64 and 128 are the best
#: of six or seven tried on an H200
OVER_KEYS = {16: (64, 64, 4, 2), 32: (64, 64, 4, 2), 64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (32, 32, 4, 1)}
#: where causal
OVER_KEYS_CAUSAL = {**OVER_KEYS, 64: (32, 64, 4, 3)}
#: the same of the kernel over query rows
OVER_ROWS = {16: (64, 64, 4, 2), 32: (64, 64, 4, 2), 64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (64, 32, 8, 1)}
#: of both, for float32
WIDE_BACKWARD = {16: (32, 32, 4, 1), 32: (32, 32, 4, 1), 64: (32, 32, 4, 1), 128: (32, 32, 4, 1), 256: (16, 16, 4, 1)}


@triton.jit(do_not_specialize=["heads", "n", "tiles"])
def _delta(
    delta, grad, g_sg, g_sj, g_sn, out, o_sg, o_sj, o_sn, heads, n, tiles,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """delta = sum over D of grad * out, of each row."""
    g, h, tile = head_of(heads, tiles, tl.program_id(0))
    i, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    a = read(grad + g * g_sg + h * g_sj, i, g_sn, column, n, DIM, BLOCK, False).to(tl.float32)
    b = read(out + g * o_sg + h * o_sj, i, o_sn, column, n, DIM, BLOCK, False).to(tl.float32)
    tl.store(delta + (g * heads + h) * n + i, tl.sum(a * b, 1), mask=i < n)


@triton.jit
def _keys_over(
    dk, dv, key, value, q, grad, q_sn, g_sn, lse, delta, j, low, high, n, m, scale, state_of, queries, keys_at,
    threshold, keep,
    CAUSAL: tl.constexpr, EDGE: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dk and dv of some keys over query rows low..high."""
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
            seen = (i < n)[None, :] & (j < m)[:, None]
            if CAUSAL:
                seen = seen & (j[:, None] <= i[None, :])
            p = tl.where(seen, p, 0.0)
        dp = tl.dot(value, tl.trans(do), input_precision=PRECISION)
        weight = p
        if DROP:
            row_state = fold(state_of, tl.load(queries + i, mask=i < n, other=0))
            kept = fold(row_state[None, :], keys_at[:, None]) >= threshold
            weight = tl.where(kept, p * keep, 0.0)
            dp = tl.where(kept, dp * keep, 0.0)
        dv = tl.dot(weight.to(do.dtype), do, dv, input_precision=PRECISION)
        ds = p * (dp - row_delta[None, :])
        dk = tl.dot(ds.to(query.dtype), query, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["heads", "n", "m", "tiles", "state", "threshold"])
def _backward_keys(
    dk, dv, q, q_sg, q_sj, q_sn, k, k_sg, k_sj, k_sn, v, v_sg, v_sj, v_sn, grad, g_sg, g_sj, g_sn, lse, delta,
    heads, n, m, tiles, scale, plain_scale, state, threshold, keep, sample, head, queries, keys,
    CAUSAL: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    g, h, tile = head_of(heads, tiles, tl.program_id(0))
    j, column = tile * KEYS + tl.arange(0, KEYS), tl.arange(0, BLOCK)
    key = read(k + g * k_sg + h * k_sj, j, k_sn, column, m, DIM, BLOCK, False)
    value = read(v + g * v_sg + h * v_sj, j, v_sn, column, m, DIM, BLOCK, False)
    q += g * q_sg + h * q_sj
    grad += g * g_sg + h * g_sj
    at = g * heads + h
    lse += at * n
    delta += at * n
    state_of = tl.zeros([1], tl.uint32)
    keys_at = tl.zeros([KEYS], tl.int64)
    if DROP:
        start = tl.full([1], 0, tl.int64) + state
        state_of = fold(fold(start.to(tl.uint32), tl.load(sample + at)), tl.load(head + at))
        queries += at * n
        keys_at = tl.load(keys + at * m + j, mask=j < m, other=0)
    acc_k = tl.zeros([KEYS, BLOCK], tl.float32)
    acc_v = tl.zeros([KEYS, BLOCK], tl.float32)
    low = 0
    begin = 0
    whole = n // ROWS * ROWS
    if CAUSAL:  # rows before the tile see none of its keys; those beside it some
        low = tile * KEYS // ROWS * ROWS
        begin = tl.minimum(tl.cdiv((tile + 1) * KEYS, ROWS) * ROWS, n)
        acc_k, acc_v = _keys_over(
            acc_k, acc_v, key, value, q, grad, q_sn, g_sn, lse, delta, j, low, begin, n, m, scale, state_of, queries,
            keys_at, threshold, keep, CAUSAL, True, DROP, PRECISION, ROWS, DIM, BLOCK,
        )  # fmt: skip
        whole = tl.maximum(whole, begin)
    # keys beyond m are zeros here and are not stored, so only rows beyond n need care
    acc_k, acc_v = _keys_over(
        acc_k, acc_v, key, value, q, grad, q_sn, g_sn, lse, delta, j, begin, whole, n, m, scale, state_of, queries,
        keys_at, threshold, keep, CAUSAL, False, DROP, PRECISION, ROWS, DIM, BLOCK,
    )  # fmt: skip
    acc_k, acc_v = _keys_over(
        acc_k, acc_v, key, value, q, grad, q_sn, g_sn, lse, delta, j, whole, n, n, m, scale, state_of, queries,
        keys_at, threshold, keep, CAUSAL, True, DROP, PRECISION, ROWS, DIM, BLOCK,
    )  # fmt: skip
    rows = (at * m + j)[:, None] * DIM + column[None, :]
    mask = (j < m)[:, None] & (column < DIM)[None, :]
    tl.store(dk + rows, (acc_k * plain_scale).to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + rows, acc_v.to(dv.dtype.element_ty), mask=mask)


@triton.jit
def _rows_over(
    dq, query, do, row_lse, row_delta, k, v, k_sn, v_sn, i, low, high, m, scale, row_state, keys, threshold, keep,
    CAUSAL: tl.constexpr, EDGE: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
    KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dq of some rows over keys low..high."""
    column = tl.arange(0, BLOCK)
    for first in tl.range(low, high, KEYS):
        j = first + tl.arange(0, KEYS)
        key = read(k, j, k_sn, column, m, DIM, BLOCK, not EDGE)
        value = read(v, j, v_sn, column, m, DIM, BLOCK, not EDGE)
        p = tl.exp2(tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale - row_lse[:, None])
        if EDGE:
            seen = (j < m)[None, :]
            if CAUSAL:
                seen = seen & (j[None, :] <= i[:, None])
            p = tl.where(seen, p, 0.0)
        dp = tl.dot(do, tl.trans(value), input_precision=PRECISION)
        if DROP:
            kept = fold(row_state[:, None], tl.load(keys + j, mask=j < m, other=0)[None, :]) >= threshold
            dp = tl.where(kept, dp * keep, 0.0)
        ds = p * (dp - row_delta[:, None])
        dq = tl.dot(ds.to(key.dtype), key, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["heads", "n", "m", "tiles", "state", "threshold"])
def _backward_rows(
    dq, q, q_sg, q_sj, q_sn, k, k_sg, k_sj, k_sn, v, v_sg, v_sj, v_sn, grad, g_sg, g_sj, g_sn, lse, delta,
    heads, n, m, tiles, scale, plain_scale, state, threshold, keep, sample, head, queries, keys,
    CAUSAL: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    g, h, tile = head_of(heads, tiles, tl.program_id(0))
    i, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    query = read(q + g * q_sg + h * q_sj, i, q_sn, column, n, DIM, BLOCK, False)
    do = read(grad + g * g_sg + h * g_sj, i, g_sn, column, n, DIM, BLOCK, False)
    k += g * k_sg + h * k_sj
    v += g * v_sg + h * v_sj
    at = g * heads + h
    row_lse = tl.load(lse + at * n + i, mask=i < n, other=float("inf")) * LOG2E
    row_delta = tl.load(delta + at * n + i, mask=i < n, other=0.0)
    row_state = tl.zeros([ROWS], tl.uint32)
    if DROP:
        row_state = row_state_of(state, sample, head, queries, at, i, n)
        keys += at * m
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    high = m
    whole = m // KEYS * KEYS
    if CAUSAL:
        high = tl.minimum((tile + 1) * ROWS, m)
        whole = tile * ROWS // KEYS * KEYS
    acc = _rows_over(
        acc, query, do, row_lse, row_delta, k, v, k_sn, v_sn, i, 0, whole, m, scale, row_state, keys, threshold, keep,
        CAUSAL, False, DROP, PRECISION, KEYS, DIM, BLOCK,
    )  # fmt: skip
    acc = _rows_over(
        acc, query, do, row_lse, row_delta, k, v, k_sn, v_sn, i, whole, high, m, scale, row_state, keys, threshold, keep,
        CAUSAL, True, DROP, PRECISION, KEYS, DIM, BLOCK,
    )  # fmt: skip
    rows = (at * n + i)[:, None] * DIM + column[None, :]
    mask = (i < n)[:, None] & (column < DIM)[None, :]
    tl.store(dq + rows, (acc * plain_scale).to(dq.dtype.element_ty), mask=mask)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    drop: Drop | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of q (G, J, n, D) and k, v (G, J, m, D) from the gradient of out, out and lse (G, J, n), contiguous.

    out and lse may be those of a softmax over more keys than these: then this is their share of its gradient.
    """
    groups, heads, n, dim = q.shape
    m, block = k.shape[2], block_dim(dim)
    delta = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    tiles = triton.cdiv(n, 64)
    _delta[(groups * heads * tiles,)](
        delta, grad, *grad.stride()[:3], out, *out.stride()[:3], heads, n, tiles, ROWS=64, DIM=dim, BLOCK=block
    )
    given = [
        q,
        *q.stride()[:3],
        k,
        *k.stride()[:3],
        v,
        *v.stride()[:3],
        grad,
        *grad.stride()[:3],
        lse,
        delta,
        heads,
        n,
        m,
    ]
    options = {**dropping(drop, q), "CAUSAL": causal, "PRECISION": precision(q), "DIM": dim, "BLOCK": block}
    over_keys = OVER_KEYS_CAUSAL if causal else OVER_KEYS
    for kernel, table, into in ((_backward_keys, over_keys, (dk, dv)), (_backward_rows, OVER_ROWS, (dq,))):
        rows, keys, warps, stages = (WIDE_BACKWARD if q.dtype == torch.float32 else table)[block]
        tiles = triton.cdiv(m, keys) if kernel is _backward_keys else triton.cdiv(n, rows)
        kernel[(groups * heads * tiles,)](
            *into, *given, tiles, scale * LOG2E.value, scale, **options, ROWS=rows, KEYS=keys,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return dq, dk, dv
