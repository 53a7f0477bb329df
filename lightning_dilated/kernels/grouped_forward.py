"""The forward of all blocks of a call in one launch: `forward`'s loop over keys, with the place of each tile from a table.

Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim, n rows of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dilated.kernels import forward as dense
from lightning_dilated.kernels.forward import _forward_over
from lightning_dilated.kernels.jobs import GroupedDrop, Work, drop_state, dropping, find, positions_of
from lightning_dilated.kernels.tiles import LN2, LOG2E, block_dim, fold, precision, read


def config(dtype: torch.dtype, dim: int) -> tuple[int, int, int, int]:
    """(query rows, key rows, warps, stages)."""
    return (dense.WIDE if dtype == torch.float32 else dense.CONFIGS)[block_dim(dim)]


@triton.jit(do_not_specialize=["threshold", "first_head"])
def _grouped_forward(
    out, lse, q, q_sb, q_sn, q_sh, k, k_sb, k_sn, k_sh, v, v_sb, v_sn, v_sh, jobs, job_of, first_of,
    scale, states, threshold, keep, first_head, positions,
    CAUSAL: tl.constexpr, PADS: tl.constexpr, DROP: tl.constexpr, FAR: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    job, tile, n, rate, row, sample, position, head, kv_head = find(jobs, job_of, first_of, ROWS, FAR)
    if CAUSAL:
        tile = tl.cdiv(n, ROWS) - 1 - tile  # the longest first
    i, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    query = read(
        q + sample * q_sb + position * q_sn + head * q_sh, i, rate * q_sn, column, n, DIM, BLOCK, False
    )  # fmt: skip
    k += sample * k_sb + position * k_sn + kv_head * k_sh
    v += sample * v_sb + position * v_sn + kv_head * v_sh
    k_sn, v_sn = rate * k_sn, rate * v_sn
    row_state = tl.zeros([ROWS], tl.uint32)
    if DROP:
        begun = drop_state(states, job, sample, head + first_head)
        row_state = fold(begun, tl.load(job + 13) + position + i * rate)
        positions += row
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    high = n
    whole = n // KEYS * KEYS
    if CAUSAL:
        high = tl.minimum((tile + 1) * ROWS, n)
        whole = tile * ROWS // KEYS * KEYS
    acc, most, total = _forward_over(
        acc, most, total, query, k, v, k_sn, v_sn, i, 0, whole, n, scale, row_state, positions, threshold,
        CAUSAL, False, DROP, PRECISION, KEYS, DIM, BLOCK,
    )  # fmt: skip
    acc, most, total = _forward_over(
        acc, most, total, query, k, v, k_sn, v_sn, i, whole, high, n, scale, row_state, positions, threshold,
        CAUSAL, True, DROP, PRECISION, KEYS, DIM, BLOCK,
    )  # fmt: skip
    if PADS:  # zero keys with zero values: scores of 0
        pads = tl.load(job + 15).to(tl.float32)
        top = tl.where(pads > 0, tl.maximum(most, 0.0), most)
        rescale = tl.exp2(most - top)
        total = total * rescale + tl.where(pads > 0, pads * tl.exp2(-top), 0.0)
        acc = acc * rescale[:, None]
        most = top
    acc = acc * (keep / total)[:, None]
    mask = (i < n)[:, None] & (column < DIM)[None, :]
    tl.store(out + (row + i)[:, None] * DIM + column[None, :], acc.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + row + i, (most + tl.log2(total)) * LN2, mask=i < n)


def forward(
    q: Tensor, k: Tensor, v: Tensor, work: Work, causal: bool, scale: float, drop: GroupedDrop | None = None
) -> tuple[Tensor, Tensor]:
    """(rows (rows, D), natural log-sum-exp (rows,) fp32) of all jobs from q (B, N, H, D) and k, v (B, N, K, D).

    Any strides, but 1 along D. The log-sum-exp is that without dropout, and has the zero pads of a job.
    """
    dim = q.shape[3]
    rows, keys, warps, stages = config(q.dtype, dim)
    out = torch.empty(work.rows, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(work.rows, dtype=torch.float32, device=q.device)
    if work.rows:
        _grouped_forward[(work.grids[rows].programs,)](
            out, lse, q, *q.stride()[:3], k, *k.stride()[:3], v, *v.stride()[:3], *work.place(rows),
            scale * LOG2E.value, **dropping(drop, positions_of(work, drop), q), CAUSAL=causal,
            PADS=work.pads and not causal, FAR=work.far(q, k, v), PRECISION=precision(q), ROWS=rows, KEYS=keys, DIM=dim,
            BLOCK=block_dim(dim), num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out, lse
