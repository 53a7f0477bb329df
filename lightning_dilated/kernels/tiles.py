"""What the attention kernels share: tiles of strided views, and the hash of attention dropout.

Shape letters: G samples and segments, J heads, n query rows, m key rows, D head dim.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class Drop:
    """Attention dropout of a call; see `attention.dropout` for the hash.

    Attributes:
        state: 32-bit state of the hash after seed and branch.
        threshold: pairs whose hash is below are dropped.
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


@triton.jit
def mix(x):
    """A bijection of 32-bit integers."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def fold(state, value):
    """Chain a 64-bit value into a 32-bit state."""
    low, high = (value & 0xFFFFFFFF).to(tl.uint32), (value >> 32).to(tl.uint32)
    state = mix(state ^ low)
    return mix(state + high + 0x9E3779B1)


@triton.jit
def row_state_of(state, sample, head, queries, at, i, n):
    """The hash's state of each query row (uint32)."""
    start = tl.full([1], 0, tl.int64) + state
    begun = fold(fold(start.to(tl.uint32), tl.load(sample + at)), tl.load(head + at))
    return fold(begun, tl.load(queries + at * n + i, mask=i < n, other=0))


@triton.jit
def head_of(heads, tiles, pid):
    """(group, head, tile) of program `pid`; tiles of a head are neighbours."""
    return (pid // tiles // heads).to(tl.int64), (pid // tiles % heads).to(tl.int64), pid % tiles


@triton.jit
def read(base, i, stride, column, rows, DIM: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr):
    """(rows, BLOCK) of a view; zeros beyond its rows and columns."""
    at = base + i.to(tl.int64)[:, None] * stride + column[None, :]
    if ALL and DIM == BLOCK:
        return tl.load(at)
    if ALL:
        return tl.load(at, mask=(column < DIM)[None, :], other=0.0)
    if DIM == BLOCK:
        return tl.load(at, mask=(i < rows)[:, None], other=0.0)
    return tl.load(at, mask=(i < rows)[:, None] & (column < DIM)[None, :], other=0.0)


@functools.lru_cache(maxsize=64)
def hilbert(heads: int, tiles: int, device: torch.device) -> Tensor:
    """(heads * tiles,) int32: programs head * tiles + tile along Hilbert curves over squares of as many heads as tiles."""
    side = triton.next_power_of_2(tiles)
    curve = torch.arange(side * side)
    x, y, rest, width = torch.zeros_like(curve), torch.zeros_like(curve), curve, 1
    while width < side:
        right, up = rest // 2 % 2, (rest ^ rest // 2) % 2
        turned, mirrored = up == 0, (up == 0) & (right == 1)
        x, y = torch.where(mirrored, width - 1 - x, x), torch.where(mirrored, width - 1 - y, y)
        x, y = torch.where(turned, y, x) + width * right, torch.where(turned, x, y) + width * up
        rest, width = rest // 4, width * 2
    first = torch.arange(0, heads, side)[:, None]
    order = torch.where((first + x < heads) & (y < tiles), (first + x) * tiles + y, -1).flatten()
    return order[order >= 0].to(torch.int32).to(device)


def dropping(drop: Drop | None, q: Tensor) -> dict[str, object]:
    """The kernels' arguments of dropout; without any, stand-ins that are not read."""
    if drop is None:
        none = {name: q for name in ("sample", "head", "queries", "keys")}
        return {"state": 0, "threshold": 0, "keep": 1.0, **none, "DROP": False}
    given = {name: getattr(drop, name).contiguous() for name in ("sample", "head", "queries", "keys")}
    return {"state": drop.state, "threshold": drop.threshold, "keep": drop.keep, **given, "DROP": True}


def precision(q: Tensor) -> str:
    """How float32 products are taken: exactly; the two 16-bit types have one way only."""
    return "ieee" if q.dtype == torch.float32 else "tf32"


def block_dim(dim: int) -> int:
    """Columns of a tile: the matrix units take 16 at least."""
    return max(16, triton.next_power_of_2(dim))
