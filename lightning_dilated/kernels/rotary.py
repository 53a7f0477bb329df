"""Rotary positions of q and k in one launch: from the joint tensor of both into one tensor each, and their gradients back.

Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dilated import kernels

#: elements of half a head that a program rotates at a time, and its warps; the best of five pairs tried on an H200
ELEMENTS, WARPS = 512, 4


@triton.jit
def _turn(source, s_sh, target, t_sh, heads, c, s, mask, HALF: tl.constexpr):
    """(a c - b s, b c + a s) of the halves a and b of every head."""
    for _ in range(heads):
        a = tl.load(source, mask=mask, other=0.0).to(c.dtype)
        b = tl.load(source + HALF, mask=mask, other=0.0).to(c.dtype)
        tl.store(target, (a * c - b * s).to(target.dtype.element_ty), mask=mask)
        tl.store(target + HALF, (b * c + a * s).to(target.dtype.element_ty), mask=mask)
        source += s_sh
        target += t_sh


@triton.jit(do_not_specialize=["tokens", "heads", "kv_heads"])
def _rotary(
    joint, j_sb, j_sn, j_sh, q, q_sb, q_sn, q_sh, k, k_sb, k_sn, k_sh, cos, sin, scale, table_sb, table_sn,
    tokens, heads, kv_heads,
    HALF: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, SCALED: tl.constexpr, BACK: tl.constexpr,
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
    if BACK:
        _turn(q, q_sh, joint, j_sh, heads, c, s, mask, HALF)
        _turn(k, k_sh, joint_k, j_sh, kv_heads, k_cos, k_sin, mask, HALF)
    else:
        _turn(joint, j_sh, q, q_sh, heads, c, s, mask, HALF)
        _turn(joint_k, j_sh, k, k_sh, kv_heads, k_cos, k_sin, mask, HALF)


def serves(x: Tensor, table: Tensor) -> bool:
    """Whether the kernel takes q and k of this dtype and device, and this table."""
    floats = x.dtype in (torch.bfloat16, torch.float16, torch.float32) and table.dtype == torch.float32
    return floats and x.shape[0] < 65536 and kernels.available(x.device)


def rotary(joint: Tensor, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | None, back: bool) -> None:
    """Fill q (B, N, H, D) and k (B, N, K, D) from joint (B, N, H + K, D); with `back` fill joint's gradient from theirs.

    Args:
        joint, q, k: any strides, but 1 along D.
        cos, sin: the table, (N, D/2) or (B, N, D/2), contiguous.
        scale: None, or xPos's scale, of the table's shape: it multiplies q and divides k.
    """
    batch, tokens, heads, dim = q.shape
    block = max(2, triton.next_power_of_2(dim // 2))
    size = max(1, ELEMENTS // block)
    per_sample = cos.stride(0) if cos.ndim == 3 else 0
    if batch and tokens:
        with kernels.on(q.device):
            _rotary[(triton.cdiv(tokens, size), batch)](
                joint, *joint.stride()[:3], q, *q.stride()[:3], k, *k.stride()[:3], cos, sin,
                cos if scale is None else scale, per_sample, cos.shape[-1], tokens, heads, k.shape[2],
                HALF=dim // 2, BLOCK=block, TOKENS=size, SCALED=scale is not None, BACK=back, num_warps=WARPS,
            )  # fmt: skip
