"""Flash attention over one block of strided views, forward and backward, with the log-sum-exp; deterministic.

The backward has a kernel over keys for dk and dv and a kernel over query rows for dq, so one program writes each row.
Shape letters: G samples and segments, J heads, n query rows, m key rows, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dilated.kernels.tiles import (
    LN2,
    LOG2E,
    attend,
    block_dim,
    fold,
    key_gradients,
    precision,
    query_gradient,
    read,
)

# Each table maps the number of columns of a tile to (query rows, key rows, warps, stages).
#: the forward with 16-bit types; the entries for 64 and 128 columns are the best of six tried on an H200
CONFIGS = {16: (128, 64, 4, 3), 32: (128, 64, 4, 3), 64: (64, 64, 4, 3), 128: (128, 64, 8, 3), 256: (64, 32, 4, 2)}
#: the forward with float32, which needs more registers and shared memory for exact products
WIDE = {16: (64, 32, 4, 2), 32: (64, 32, 4, 2), 64: (64, 32, 4, 2), 128: (32, 32, 4, 2), 256: (16, 16, 4, 2)}
#: the backward over keys with 16-bit types; the entries for 64 and 128 columns are the best of six or seven on an H200
OVER_KEYS = {16: (64, 64, 4, 2), 32: (64, 64, 4, 2), 64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (32, 32, 4, 1)}
#: the causal backward over keys with 16-bit types
OVER_KEYS_CAUSAL = {**OVER_KEYS, 64: (32, 64, 4, 3)}
#: the backward over query rows with 16-bit types
OVER_ROWS = {16: (64, 64, 4, 2), 32: (64, 64, 4, 2), 64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (64, 32, 8, 1)}
#: both kernels of the backward with float32
WIDE_BACKWARD = {16: (32, 32, 4, 1), 32: (32, 32, 4, 1), 64: (32, 32, 4, 1), 128: (32, 32, 4, 1), 256: (16, 16, 4, 1)}
#: rows of a program that computes delta
DELTA_ROWS = 64
#: arguments for which Triton compiles one version for all values
COUNTS = ["heads", "n", "m", "tiles", "lower", "upper", "state", "threshold"]


def config(dtype: torch.dtype, dim: int) -> tuple[int, int, int, int]:
    """Return (query rows, key rows, warps, stages) of the forward."""
    return (WIDE if dtype == torch.float32 else CONFIGS)[block_dim(dim)]


def backward_config(dtype: torch.dtype, dim: int, causal: bool, over_keys: bool) -> tuple[int, int, int, int]:
    """Return (query rows, key rows, warps, stages) of the backward over keys, or over query rows."""
    table = WIDE_BACKWARD
    if dtype != torch.float32:
        table = OVER_ROWS if not over_keys else OVER_KEYS_CAUSAL if causal else OVER_KEYS
    return table[block_dim(dim)]


@dataclass(frozen=True)
class Drop:
    """Attention dropout of a block; see `attention.dropout` for the hash.

    Attributes:
        state: the 32-bit hash of seed and branch.
        threshold: pairs with a smaller hash are dropped.
        keep: 1 / (1 - p).
        sample, head: (G, J) int64.
        queries, keys: (G, J, n) and (G, J, m) int64 global positions.
    """

    state: int
    threshold: int
    keep: float
    sample: Tensor
    head: Tensor
    queries: Tensor
    keys: Tensor


def _drop_arguments(drop: Drop | None, q: Tensor) -> dict[str, object]:
    """Return the kernels' arguments for dropout; without dropout, placeholders that are not read."""
    names = ("sample", "head", "queries", "keys")
    if drop is None:
        return {"state": 0, "threshold": 0, "keep": 1.0, **dict.fromkeys(names, q), "DROP": False}
    tensors = {name: getattr(drop, name).contiguous() for name in names}
    return {"state": drop.state, "threshold": drop.threshold, "keep": drop.keep, **tensors, "DROP": True}


@dataclass(frozen=True)
class Into:
    """A running result that the forward updates in place.

    Attributes:
        out, lse: (B, L, H, D) and (B, H, L), float32, contiguous; 0 and -inf for rows without a key so far.
        rows: (G, J, n) int64, the index of each query row in out, flat over (B, L, H); all different.
        pads: number of additional zero keys with zero values that each row attends to.
    """

    out: Tensor
    lse: Tensor
    rows: Tensor
    pads: int = 0


@triton.jit
def _program(heads, tiles):
    """Return (group, head, tile) of this program; tiles of a head are consecutive."""
    pid = tl.program_id(0)
    return (pid // tiles // heads).to(tl.int64), (pid // tiles % heads).to(tl.int64), pid % tiles


@triton.jit
def _hash_state(state, sample, head, at):
    """Return the dropout hash of seed, branch, sample and head, (1,) uint32."""
    start = tl.full([1], 0, tl.int64) + state
    return fold(fold(start.to(tl.uint32), tl.load(sample + at)), tl.load(head + at))


@triton.jit
def _into_rows(into, rows, mask, all_heads, length):
    """Return the flat indices of query rows in a running out (B, L, H, D) and in its lse (B, H, L)."""
    at = tl.load(into + rows, mask=mask, other=0)
    token, head = at // all_heads, at % all_heads
    return at, (token // length * all_heads + head) * length + token % length


@triton.jit(do_not_specialize=[*COUNTS, "all_heads", "length"])
def _forward(
    out, lse, q, q_sg, q_sj, q_sn, k, k_sg, k_sj, k_sn, v, v_sg, v_sj, v_sn,
    heads, n, m, tiles, lower, upper, scale, state, threshold, keep, sample, head, queries, keys,
    into, all_heads, length, pads,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    g, h, tile = _program(heads, tiles)
    i, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    query = read(q + g * q_sg + h * q_sj, i, q_sn, column, n, DIM, BLOCK, False)
    k += g * k_sg + h * k_sj
    v += g * v_sg + h * v_sj
    at = g * heads + h
    row_state = tl.zeros([ROWS], tl.uint32)
    if DROP:
        row_state = fold(_hash_state(state, sample, head, at), tl.load(queries + at * n + i, mask=i < n, other=0))
        keys += at * m
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    rows, mask = at * n + i, (i < n)[:, None] & (column < DIM)[None, :]
    at_lse = rows
    if CHAIN:  # start from the running result, as if it came from earlier tiles of keys
        rows, at_lse = _into_rows(into, rows, i < n, all_heads, length)
        most = tl.load(lse + at_lse, mask=i < n, other=0.0) * LOG2E
        total = tl.where(most > float("-inf"), 1.0, 0.0)
        acc = tl.load(out + rows[:, None] * DIM + column[None, :], mask=mask, other=0.0) / keep
        if pads > 0:  # zero keys with zero values: scores of 0
            top = tl.maximum(most, 0.0)
            rescale = tl.exp2(most - top)
            total = total * rescale + pads * tl.exp2(-top)
            acc = acc * rescale[:, None]
            most = top
    acc, most, total = attend(
        acc, most, total, query, k, v, k_sn, v_sn, i, tile, m, lower, upper, scale, row_state, keys, threshold,
        CAUSAL, BAND, DROP, PRECISION, ROWS, KEYS, DIM, BLOCK,
    )  # fmt: skip
    acc = acc * tl.where(total > 0, keep / total, 0.0)[:, None]
    tl.store(out + rows[:, None] * DIM + column[None, :], acc.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + at_lse, (most + tl.log2(total)) * LN2, mask=i < n)


def _band_arguments(band: tuple[int, int] | None) -> dict[str, object]:
    """Return the kernels' arguments for a band; without a band, placeholders that are not read."""
    lower, upper = band or (0, 0)
    return {"lower": lower, "upper": upper, "BAND": band is not None}


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    drop: Drop | None = None,
    into: Into | None = None,
    band: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out (G, J, n, D), natural log-sum-exp (G, J, n) fp32) of q (G, J, n, D) and k, v (G, J, m, D).

    m = n if causal. The stride along D must be 1; other strides are free. The log-sum-exp ignores dropout. With `into`
    the kernel updates this running result in place and returns it, so no merge is needed. With `band` = (lower, upper)
    row i sees key j if lower <= j - i <= upper, whether or not `causal` is set.
    """
    groups, heads, n, dim = q.shape
    rows, keys, warps, stages = config(q.dtype, dim)
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
        scale=scale * LOG2E.value, **_drop_arguments(drop, q), **_band_arguments(band), **chain, CAUSAL=causal,
        PRECISION=precision(q), ROWS=rows,
        KEYS=keys, DIM=dim, BLOCK=block_dim(dim), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse


@triton.jit(do_not_specialize=["heads", "n", "tiles"])
def _delta(
    delta, grad, g_sg, g_sj, g_sn, out, o_sg, o_sj, o_sn, heads, n, tiles,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write delta, the sum over D of grad * out, for each row."""
    g, h, tile = _program(heads, tiles)
    i, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    a = read(grad + g * g_sg + h * g_sj, i, g_sn, column, n, DIM, BLOCK, False).to(tl.float32)
    b = read(out + g * o_sg + h * o_sj, i, o_sn, column, n, DIM, BLOCK, False).to(tl.float32)
    tl.store(delta + (g * heads + h) * n + i, tl.sum(a * b, 1), mask=i < n)


@triton.jit(do_not_specialize=COUNTS)
def _backward_keys(
    dk, dv, q, q_sg, q_sj, q_sn, k, k_sg, k_sj, k_sn, v, v_sg, v_sj, v_sn, grad, g_sg, g_sj, g_sn, lse, delta,
    heads, n, m, tiles, lower, upper, scale, plain_scale, state, threshold, keep, sample, head, queries, keys,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    g, h, tile = _program(heads, tiles)
    j, column = tile * KEYS + tl.arange(0, KEYS), tl.arange(0, BLOCK)
    key = read(k + g * k_sg + h * k_sj, j, k_sn, column, m, DIM, BLOCK, False)
    value = read(v + g * v_sg + h * v_sj, j, v_sn, column, m, DIM, BLOCK, False)
    q += g * q_sg + h * q_sj
    grad += g * g_sg + h * g_sj
    at = g * heads + h
    lse += at * n
    delta += at * n
    hash_state = tl.zeros([1], tl.uint32)
    key_positions = tl.zeros([KEYS], tl.int64)
    if DROP:
        hash_state = _hash_state(state, sample, head, at)
        queries += at * n
        key_positions = tl.load(keys + at * m + j, mask=j < m, other=0)
    acc_k, acc_v = key_gradients(
        key, value, q, grad, q_sn, g_sn, lse, delta, j, tile, n, m, lower, upper, scale, hash_state, queries,
        key_positions, threshold, keep, CAUSAL, BAND, DROP, PRECISION, ROWS, KEYS, DIM, BLOCK,
    )  # fmt: skip
    rows = (at * m + j)[:, None] * DIM + column[None, :]
    mask = (j < m)[:, None] & (column < DIM)[None, :]
    tl.store(dk + rows, (acc_k * plain_scale).to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + rows, acc_v.to(dv.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=COUNTS)
def _backward_rows(
    dq, q, q_sg, q_sj, q_sn, k, k_sg, k_sj, k_sn, v, v_sg, v_sj, v_sn, grad, g_sg, g_sj, g_sn, lse, delta,
    heads, n, m, tiles, lower, upper, scale, plain_scale, state, threshold, keep, sample, head, queries, keys,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    g, h, tile = _program(heads, tiles)
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
        row_state = fold(_hash_state(state, sample, head, at), tl.load(queries + at * n + i, mask=i < n, other=0))
        keys += at * m
    acc = query_gradient(
        query, do, row_lse, row_delta, k, v, k_sn, v_sn, i, tile, m, lower, upper, scale, row_state, keys, threshold,
        keep, CAUSAL, BAND, DROP, PRECISION, ROWS, KEYS, DIM, BLOCK,
    )  # fmt: skip
    rows = (at * n + i)[:, None] * DIM + column[None, :]
    mask = (i < n)[:, None] & (column < DIM)[None, :]
    tl.store(dq + rows, (acc * plain_scale).to(dq.dtype.element_ty), mask=mask)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float,
    drop: Drop | None = None, band: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk, dv of q (G, J, n, D) and k, v (G, J, m, D) from out's gradient, out, and lse (G, J, n).

    lse must be contiguous. If out and lse include more keys than k, dq is the part of the gradient that these k and v
    contribute. `band`: see `forward`.
    """
    groups, heads, n, dim = q.shape
    m, block = k.shape[2], block_dim(dim)
    delta = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    tiles = triton.cdiv(n, DELTA_ROWS)
    _delta[(groups * heads * tiles,)](
        delta, grad, *grad.stride()[:3], out, *out.stride()[:3], heads, n, tiles, ROWS=DELTA_ROWS, DIM=dim, BLOCK=block
    )
    views = [argument for x in (q, k, v, grad) for argument in (x, *x.stride()[:3])]
    options = {**_drop_arguments(drop, q), **_band_arguments(band), "scale": scale * LOG2E.value, "plain_scale": scale}
    options |= {"CAUSAL": causal, "PRECISION": precision(q), "DIM": dim, "BLOCK": block}
    for kernel, over_keys, results in ((_backward_keys, True, (dk, dv)), (_backward_rows, False, (dq,))):
        rows, keys, warps, stages = backward_config(q.dtype, dim, causal, over_keys)
        tiles = triton.cdiv(m, keys) if over_keys else triton.cdiv(n, rows)
        kernel[(groups * heads * tiles,)](
            *results, *views, lse, delta, heads, n, m, tiles, **options, ROWS=rows, KEYS=keys,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return dq, dk, dv
