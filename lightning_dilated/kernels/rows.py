"""Rows picked by number from two tensors into one buffer, in one launch: what the exchange sends.

Shape letters: B batch, L tokens, J heads, D head dim; rows are numbered as in a contiguous (B, L, J) tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_dilated import kernels

#: elements of a row that a program moves at a time, and its warps
ELEMENTS, WARPS = 2048, 4


@triton.jit
def _locate(numbers, length, heads):
    """(sample, token, head) of flat numbers."""
    return numbers // heads // length, numbers // heads % length, numbers % heads


@triton.jit(do_not_specialize=["count", "length", "heads"])
def _pack(
    buffer, a, a_sb, a_sn, a_sh, b, b_sb, b_sn, b_sh, rows, at, count, length, heads,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    i, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    sample, token, head = _locate(tl.load(rows + i, mask=i < count, other=0), length, heads)
    place = i
    if not ORDERED:
        place = tl.load(at + i, mask=i < count, other=0)
    target = buffer + place[:, None] * (2 * DIM) + column[None, :]
    mask = (i < count)[:, None] & (column < DIM)[None, :]
    first = tl.load(a + (sample * a_sb + token * a_sn + head * a_sh)[:, None] + column[None, :], mask=mask)
    second = tl.load(b + (sample * b_sb + token * b_sn + head * b_sh)[:, None] + column[None, :], mask=mask)
    tl.store(target, first, mask=mask)
    tl.store(target + DIM, second, mask=mask)


def pack(a: Tensor, b: Tensor, rows: Tensor, at: Tensor | None, buffer: Tensor) -> None:
    """buffer[at] = (a[rows], b[rows]) of a and b (B, L, J, D), any strides but 1 along D; buffer (n, 2, D), contiguous.

    Without `at`, row after row.
    """
    dim, count = a.shape[3], len(rows)
    block = triton.next_power_of_2(dim)
    size = max(1, ELEMENTS // block)
    if count:
        with kernels.on(a.device):
            _pack[(triton.cdiv(count, size),)](
                buffer, a, *a.stride()[:3], b, *b.stride()[:3], rows, rows if at is None else at, count,
                a.shape[1], a.shape[2], DIM=dim, BLOCK=block, ROWS=size, ORDERED=at is None, num_warps=WARPS,
            )  # fmt: skip
