"""Flash attention's forward in Triton over strided views (arXiv 2307.08691, algorithm 1), with the log-sum-exp.

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
