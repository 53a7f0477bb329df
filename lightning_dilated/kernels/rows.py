"""Kernels over rows, one launch each: gather, add and merge rows by flat index, and rotate rows by position.

Flat indices count the rows of a contiguous (B, L, J) tensor. The rotary kernel reads the joint tensor of q and k and
writes two tensors; its backward reads two gradients and writes the joint gradient.
Shape letters: B batch, L or N tokens, J heads, D head dim, H query heads, K kv heads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dilated import kernels
from lightning_dilated.kernels.tiles import merge_factors

#: elements and warps of a program
ELEMENTS, WARPS = 2048, 4


@triton.jit
def _locate(numbers, length, heads):
    """Return (sample, token, head) of flat indices."""
    return numbers // heads // length, numbers // heads % length, numbers % heads


@triton.jit(do_not_specialize=["count", "length", "heads"])
def _pick(
    first, second, step, a, a_sb, a_sn, a_sh, b, b_sb, b_sn, b_sh, rows, at, count, length, heads,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ORDERED: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    i, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    sample, token, head = _locate(tl.load(rows + i, mask=i < count, other=0), length, heads)
    place = i
    if not ORDERED:
        place = tl.load(at + i, mask=i < count, other=0)
    target = place[:, None] * step + column[None, :]
    mask = (i < count)[:, None] & (column < DIM)[None, :]
    row = tl.load(a + (sample * a_sb + token * a_sn + head * a_sh)[:, None] + column[None, :], mask=mask)
    tl.store(first + target, row, mask=mask)
    if PAIR:
        row = tl.load(b + (sample * b_sb + token * b_sn + head * b_sh)[:, None] + column[None, :], mask=mask)
        tl.store(second + target, row, mask=mask)


@triton.jit(do_not_specialize=["count", "length"])
def _add(
    first, second, step, rows, a, a_sb, a_sn, b, b_sb, b_sn, count, length,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DISTINCT: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    i, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    mask = (i < count)[:, None] & (column < DIM)[None, :]
    target = tl.load(rows + i, mask=i < count, other=0)[:, None] * step + column[None, :]
    sample, token = i // length, i % length
    row = tl.load(a + (sample * a_sb + token * a_sn)[:, None] + column[None, :], mask=mask)
    row = row.to(first.dtype.element_ty)
    if DISTINCT:
        tl.store(first + target, tl.load(first + target, mask=mask) + row, mask=mask)
    else:
        tl.atomic_add(first + target, row, mask=mask, sem="relaxed")
    if PAIR:
        row = tl.load(b + (sample * b_sb + token * b_sn)[:, None] + column[None, :], mask=mask)
        row = row.to(second.dtype.element_ty)
        if DISTINCT:
            tl.store(second + target, tl.load(second + target, mask=mask) + row, mask=mask)
        else:
            tl.atomic_add(second + target, row, mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=["count", "queries", "length", "heads"])
def _merge(
    out, lse, rows, part, part_sb, part_sn, part_lse, count, queries, length, heads,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    i, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    number = tl.load(rows + i, mask=i < count, other=0)
    sample, token, head = _locate(number, length, heads)
    at = (sample * heads + head) * length + token
    row_lse = tl.load(lse + at, mask=i < count, other=0.0)
    new_lse = tl.load(part_lse + i, mask=i < count, other=0.0).to(row_lse.dtype)
    before, now, top = merge_factors(row_lse, new_lse)
    merged_lse = top + tl.log(before + now)
    finite = tl.where(merged_lse == float("-inf"), 0.0, merged_lse)
    mask = (i < count)[:, None] & (column < DIM)[None, :]
    target = out + number[:, None] * DIM + column[None, :]
    new = tl.load(part + (i // queries * part_sb + i % queries * part_sn)[:, None] + column[None, :], mask=mask)
    row = tl.load(target, mask=mask)
    row = row * tl.exp(row_lse - finite)[:, None] + new.to(row.dtype) * tl.exp(new_lse - finite)[:, None]
    tl.store(target, row, mask=mask)
    tl.debug_barrier()  # all warps must have read the row's lse before one of them replaces it
    tl.store(lse + at, merged_lse, mask=i < count)


def _sizes(dim: int) -> dict[str, int]:
    block = triton.next_power_of_2(dim)
    return {"DIM": dim, "BLOCK": block, "ROWS": max(1, ELEMENTS // block), "num_warps": WARPS}


def pick(sources: Sequence[Tensor], rows: Tensor, at: Tensor | None, into: Sequence[Tensor]) -> None:
    """Set into[i][at] = sources[i][rows], for one or two (B, L, J, D) tensors of equal shape, stride 1 along D.

    Args:
        rows: (n,) flat indices in the sources.
        at: (n,) rows of the results; None means 0, 1, ..., n - 1.
        into: (m, D) tensors with stride 1 along D and equal row strides.
    """
    a, b, count, sizes = sources[0], sources[-1], rows.numel(), _sizes(sources[0].shape[3])
    if count:
        with kernels.on(a.device):
            _pick[(triton.cdiv(count, sizes["ROWS"]),)](
                into[0], into[-1], into[0].stride(0), a, *a.stride()[:3], b, *b.stride()[:3], rows,
                rows if at is None else at, count, a.shape[1], a.shape[2],
                ORDERED=at is None, PAIR=len(sources) == 2, **sizes,
            )  # fmt: skip


def add(totals: Sequence[Tensor], rows: Tensor, parts: Sequence[Tensor], distinct: bool) -> None:
    """Add totals[i][rows] += parts[i], in the dtype of the totals, for one or two tensors.

    Args:
        totals: (m, D) tensors with stride 1 along D and equal row strides.
        rows: (G, n) rows of the totals, contiguous.
        parts: (G, n, D) tensors with stride 1 along D.
        distinct: whether no row occurs twice. If so, sums do not depend on the order of addition.
    """
    count, sizes = rows.numel(), _sizes(parts[0].shape[-1])
    a, b = parts[0], parts[-1]
    if count:
        with kernels.on(a.device):
            _add[(triton.cdiv(count, sizes["ROWS"]),)](
                totals[0], totals[-1], totals[0].stride(0), rows, a, *a.stride()[:2], b, *b.stride()[:2],
                count, rows.shape[1], DISTINCT=distinct, PAIR=len(parts) == 2, **sizes,
            )  # fmt: skip


def merge(rows: Tensor, part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge parts (G, n, D), stride 1 along D, and their log-sum-exp (G, n) into out (B, L, J, D) and lse (B, J, L).

    `rows` (G, n) are flat indices, each at most once. `rows`, out and lse are contiguous.
    """
    count, sizes = rows.numel(), _sizes(part.shape[-1])
    if count:
        with kernels.on(out.device):
            _merge[(triton.cdiv(count, sizes["ROWS"]),)](
                out, lse, rows, part, *part.stride()[:2], part_lse.to(torch.float32).contiguous(), count, rows.shape[1],
                out.shape[1], out.shape[2], **sizes,
            )  # fmt: skip


#: elements of half a head and warps of a rotary program; the best of five pairs tried on an H200
ROTARY_ELEMENTS, ROTARY_WARPS = 512, 4


@triton.jit
def _turn(source, s_sh, target, t_sh, heads, cos, sin, mask, copied, group, COPIES: tl.constexpr, HALF: tl.constexpr):
    """Write (a c - b s, b c + a s) for the halves a and b of each head, but (a, b) for heads of a copied kv head."""
    c, s = cos, sin
    for head in range(heads):
        if COPIES:
            copy = tl.load(copied + head // group) != 0
            c, s = tl.where(copy, 1.0, cos), tl.where(copy, 0.0, sin)
        a = tl.load(source, mask=mask, other=0.0).to(c.dtype)
        b = tl.load(source + HALF, mask=mask, other=0.0).to(c.dtype)
        tl.store(target, (a * c - b * s).to(target.dtype.element_ty), mask=mask)
        tl.store(target + HALF, (b * c + a * s).to(target.dtype.element_ty), mask=mask)
        source += s_sh
        target += t_sh


@triton.jit(do_not_specialize=["tokens", "heads", "kv_heads"])
def _rotary(
    joint, j_sb, j_sn, j_sh, q, q_sb, q_sn, q_sh, k, k_sb, k_sn, k_sh, cos, sin, scale, table_sb, table_sn,
    tokens, heads, kv_heads, copied,
    HALF: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, SCALED: tl.constexpr, BACK: tl.constexpr,
    COPIES: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(1).to(tl.int64)
    n, column = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    mask = (n < tokens)[:, None] & (column < HALF)[None, :]
    at = sample * table_sb + n[:, None] * table_sn + column[None, :]
    c, s = tl.load(cos + at, mask=mask, other=0.0), tl.load(sin + at, mask=mask, other=0.0)
    if BACK:  # the transpose of a rotation is its inverse
        s = -s
    joint += sample * j_sb + n[:, None] * j_sn + column[None, :]
    q += sample * q_sb + n[:, None] * q_sn + column[None, :]
    k += sample * k_sb + n[:, None] * k_sn + column[None, :]
    joint_k = joint + heads.to(tl.int64) * j_sh
    if SCALED:
        growth = tl.load(scale + at, mask=mask, other=1.0)
        k_cos, k_sin = c / growth, s / growth
        c, s = c * growth, s * growth
    else:
        k_cos, k_sin = c, s
    group = heads // kv_heads
    if BACK:
        _turn(q, q_sh, joint, j_sh, heads, c, s, mask, copied, group, COPIES, HALF)
        _turn(k, k_sh, joint_k, j_sh, kv_heads, k_cos, k_sin, mask, copied, 1, COPIES, HALF)
    else:
        _turn(joint, j_sh, q, q_sh, heads, c, s, mask, copied, group, COPIES, HALF)
        _turn(joint_k, j_sh, k, k_sh, kv_heads, k_cos, k_sin, mask, copied, 1, COPIES, HALF)


def rotary_serves(x: Tensor, table: Tensor) -> bool:
    """Return whether the kernel supports q and k with the dtype and device of x, and this table."""
    floats = x.dtype in (torch.bfloat16, torch.float16, torch.float32) and table.dtype == torch.float32
    return floats and x.shape[0] < 65536 and kernels.available(x.device)


@functools.cache
def flags(heads: tuple[int, ...], count: int, device: torch.device) -> Tensor:
    """Return (count,) int32, 1 for these heads, else 0. The cache keeps the tensors, because captured graphs read them."""
    return torch.tensor([head in heads for head in range(count)], dtype=torch.int32, device=device)


def rotary(
    joint: Tensor, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | None, back: bool,
    copied: Sequence[int] = (),
) -> None:  # fmt: skip
    """Rotate joint (B, N, H + K, D) into q (B, N, H, D) and k (B, N, K, D); if `back`, their gradients back into joint.

    Args:
        joint, q, k: tensors with stride 1 along D and any other strides.
        cos, sin: the table, (N, D/2) or (B, N, D/2), contiguous.
        scale: None, or xPos's scale, with the table's shape: it multiplies q and divides k.
        copied: kv heads that are copied, together with their query heads.
    """
    batch, tokens, heads, dim = q.shape
    block = max(2, triton.next_power_of_2(dim // 2))
    size = max(1, ROTARY_ELEMENTS // block)
    per_sample = cos.stride(0) if cos.ndim == 3 else 0
    if batch and tokens:
        with kernels.on(q.device):
            _rotary[(triton.cdiv(tokens, size), batch)](
                joint, *joint.stride()[:3], q, *q.stride()[:3], k, *k.stride()[:3], cos, sin,
                cos if scale is None else scale, per_sample, cos.shape[-1], tokens, heads, k.shape[2],
                flags(tuple(copied), k.shape[2], q.device) if copied else cos,
                HALF=dim // 2, BLOCK=block, TOKENS=size, SCALED=scale is not None, BACK=back, COPIES=bool(copied),
                num_warps=ROTARY_WARPS,
            )  # fmt: skip
