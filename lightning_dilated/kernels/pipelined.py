"""Flash attention's forward for Hopper: loads tiles through tensor descriptors, and overlaps products with the softmax.

The kernel issues the product for the scores of the next keys before the product of the last weights with their values,
so that the tensor cores work during the exponentials (FlashAttention-3, arXiv 2407.08608, 3.1).
Shape letters: G samples and segments, J heads, n query rows, m key rows, D head dim.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dilated.kernels.tiles import LN2, LOG2E, block_dim

#: {(columns of a tile, causal): (query rows, key rows, warps, stages)}; the best of nine on an H200 for 64 and 128 columns
CONFIGS = {
    **{(block, False): (64, 128, 4, 2) for block in (16, 32, 64)},
    **{(block, True): (128, 64, 4, 3) for block in (16, 32, 64)},
    **{(128, causal): (64, 64, 4, 3) for causal in (False, True)},
}


@triton.jit
def _load(source, g, h, i, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return ROWS rows of a view, from row i, as (ROWS, BLOCK); zeros beyond its rows and columns."""
    return source.load([g, h, i, 0]).reshape([ROWS, BLOCK])


@triton.jit
def _bits(p, DTYPE: tl.constexpr):
    """Return p as 16-bit integers, because the compiler would keep floats in shared memory across the loop."""
    return p.to(DTYPE).to(tl.int16, bitcast=True)


@triton.jit
def _softmax(score, most, total, i, first, m, scale, CAUSAL: tl.constexpr, EDGE: tl.constexpr, KEYS: tl.constexpr):
    """Update the online softmax with the scores of KEYS keys from `first` on: return (p, rescale, most, total)."""
    if EDGE:
        j = first + tl.arange(0, KEYS)
        if CAUSAL:
            score = tl.where(j[None, :] <= i[:, None], score, float("-inf"))
        else:
            score = tl.where((j < m)[None, :], score, float("-inf"))
    top = tl.maximum(most, tl.max(score, 1) * scale)
    p = tl.exp2(score * scale - top[:, None])
    rescale = tl.exp2(most - top)
    return p, rescale, top, total * rescale + tl.sum(p, 1)


@triton.jit
def _over(
    acc, most, total, p, q, k, v, g, h, i, low, high, m, scale,
    CAUSAL: tl.constexpr, EDGE: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Continue the online softmax over keys low..high. The caller must add the product of the last p and its values."""
    for first in tl.range(low, high, KEYS):
        key = _load(k, g, h, first, KEYS, BLOCK)
        score = tl.dot(q, tl.trans(key))
        value = _load(v, g, h, first - KEYS, KEYS, BLOCK)
        acc = tl.dot(p.to(value.dtype, bitcast=True), value, acc)
        wide, rescale, most, total = _softmax(score, most, total, i, first, m, scale, CAUSAL, EDGE, KEYS)
        acc = acc * rescale[:, None]
        p = _bits(wide, value.dtype)
    return acc, most, total, p


@triton.jit(do_not_specialize=["heads", "n", "m", "tiles"])
def _pipelined(
    out, lse, q, k, v, heads, n, m, tiles, scale,
    CAUSAL: tl.constexpr, RAGGED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    g, h, tile = pid // tiles // heads, pid // tiles % heads, pid % tiles
    high, whole = m, m
    if RAGGED:
        whole = m // KEYS * KEYS
    if CAUSAL:
        tile = tiles - 1 - tile  # tiles with most keys first
        high = tl.minimum((tile + 1) * ROWS, m)
        whole = tile * ROWS // KEYS * KEYS
    i, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    query = _load(q, g, h, tile * ROWS, ROWS, BLOCK)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    key = _load(k, g, h, 0, KEYS, BLOCK)  # the first keys, outside the loops
    score = tl.dot(query, tl.trans(key))
    wide, _, most, total = _softmax(score, most, total, i, 0, m, scale, CAUSAL, CAUSAL or RAGGED, KEYS)
    p = _bits(wide, key.dtype)
    acc, most, total, p = _over(
        acc, most, total, p, query, k, v, g, h, i, KEYS, whole, m, scale, CAUSAL, False, KEYS, BLOCK
    )
    if CAUSAL or RAGGED:
        acc, most, total, p = _over(
            acc, most, total, p, query, k, v, g, h, i, tl.maximum(whole, KEYS), high, m, scale, CAUSAL, True, KEYS, BLOCK
        )  # fmt: skip
    value = _load(v, g, h, (high - 1) // KEYS * KEYS, KEYS, BLOCK)
    acc = tl.dot(p.to(value.dtype, bitcast=True), value, acc) * (1 / total)[:, None]
    rows = (g.to(tl.int64) * heads + h) * n + i
    mask = (i < n)[:, None] & (column < DIM)[None, :]
    tl.store(out + rows[:, None] * DIM + column[None, :], acc.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + rows, (most + tl.log2(total)) * LN2, mask=i < n)


def serves(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Return whether the kernel supports a call: 16 bits, head dim up to 128, 16-byte alignment, Hopper or later."""
    if q.dtype not in (torch.bfloat16, torch.float16) or (block_dim(q.shape[3]), True) not in CONFIGS:
        return False
    if scale < 2**-100:  # a scale that is 0 in float32 would give NaN when it multiplies masked scores (-inf)
        return False
    if q.device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(q.device) < (9, 0)):
        return False
    return _descriptors() and all(map(_aligned, (q, k, v)))


@functools.cache
def _descriptors() -> bool:
    """Return whether this Triton has tensor descriptors made on the host (3.4 and later)."""
    return importlib.util.find_spec("triton.tools.tensor_descriptor") is not None


def _strides(x: Tensor) -> list[int]:
    """Return the strides of (G, J, n); an axis of length 1 gets an aligned stride, because it is never used."""
    return [step if size > 1 else 8 for step, size in zip(x.stride()[:3], x.shape[:3], strict=True)]


def _aligned(x: Tensor) -> bool:
    aligned = all(0 < step < 2**38 and step * x.element_size() % 16 == 0 for step in _strides(x))
    return aligned and x.numel() > 0 and x.stride(3) == 1 and x.data_ptr() % 16 == 0


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Compute `dense.forward` without dropout, for views that `serves` accepts."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    groups, heads, n, dim = q.shape
    m, block = k.shape[2], block_dim(dim)
    rows, keys, warps, stages = CONFIGS[block, causal]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    tiles = triton.cdiv(n, rows)
    views = [
        TensorDescriptor(x, list(x.shape), [*_strides(x), 1], [1, 1, size, block])
        for x, size in ((q, rows), (k, keys), (v, keys))
    ]
    _pipelined[(groups * heads * tiles,)](
        out, lse, *views, heads, n, m, tiles, scale * LOG2E.value, CAUSAL=causal, RAGGED=not causal and m % keys > 0,
        ROWS=rows, KEYS=keys, DIM=dim, BLOCK=block, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse
