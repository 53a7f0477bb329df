"""The backward of all blocks of a call, one launch each for dk and dv and for dq, with `backward`'s loops.

A launch before them lays down what a row needs beside its tensors: its log-sum-exp and delta, in the order of the buffer,
because the loops read them without a stride.
Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim, n rows of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dilated.kernels import backward as dense
from lightning_dilated.kernels.backward import _keys_over, _rows_over
from lightning_dilated.kernels.jobs import PREPARED, GroupedDrop, Work, drop_state, dropping, find, positions_of
from lightning_dilated.kernels.tiles import LOG2E, block_dim, fold, precision, read

#: (query rows, key rows, warps, stages) over keys where `backward`'s would spill: here places take registers, too
OVER_KEYS = {128: (32, 64, 4, 2)}


def config(dtype: torch.dtype, dim: int, causal: bool, over_keys: bool) -> tuple[int, int, int, int]:
    """(query rows, key rows, warps, stages) of the kernel over keys, or over query rows."""
    if dtype == torch.float32:
        return dense.WIDE[block_dim(dim)]
    over = {**(dense.OVER_KEYS_CAUSAL if causal else dense.OVER_KEYS), **OVER_KEYS}
    return (over if over_keys else dense.OVER_ROWS)[block_dim(dim)]


@triton.jit
def _grouped_delta(
    delta, row_lse, grad, g_sb, g_sn, g_sh, out, o_sb, o_sn, o_sh, lse, l_sb, l_sh, l_sn, jobs, job_of, first_of,
    FAR: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """delta = sum over D of grad * out, and the log-sum-exp, of each row of the buffer."""
    _, tile, n, rate, row, sample, position, head, _ = find(jobs, job_of, first_of, ROWS, FAR)
    i, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    grad += sample * g_sb + position * g_sn + head * g_sh
    out += sample * o_sb + position * o_sn + head * o_sh
    a = read(grad, i, rate * g_sn, column, n, DIM, BLOCK, False).to(tl.float32)
    b = read(out, i, rate * o_sn, column, n, DIM, BLOCK, False).to(tl.float32)
    tl.store(delta + row + i, tl.sum(a * b, 1), mask=i < n)
    lse += sample * l_sb + position * l_sn + head * l_sh
    tl.store(row_lse + row + i, tl.load(lse + i.to(tl.int64) * (rate * l_sn), mask=i < n), mask=i < n)


@triton.jit(do_not_specialize=["threshold", "first_head"])
def _grouped_keys(
    dk, dv, q, q_sb, q_sn, q_sh, k, k_sb, k_sn, k_sh, v, v_sb, v_sn, v_sh, grad, g_sb, g_sn, g_sh, lse, delta,
    jobs, job_of, first_of, scale, plain_scale, states, threshold, keep, first_head, positions,
    CAUSAL: tl.constexpr, DROP: tl.constexpr, FAR: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    job, tile, n, rate, row, sample, position, head, kv_head = find(jobs, job_of, first_of, KEYS, FAR)
    j, column = tile * KEYS + tl.arange(0, KEYS), tl.arange(0, BLOCK)
    k += sample * k_sb + position * k_sn + kv_head * k_sh
    v += sample * v_sb + position * v_sn + kv_head * v_sh
    key = read(k, j, rate * k_sn, column, n, DIM, BLOCK, False)
    value = read(v, j, rate * v_sn, column, n, DIM, BLOCK, False)
    q += sample * q_sb + position * q_sn + head * q_sh
    grad += sample * g_sb + position * g_sn + head * g_sh
    q_sn, g_sn = rate * q_sn, rate * g_sn
    lse += row
    delta += row
    state_of = tl.zeros([1], tl.uint32)
    keys_at = tl.zeros([KEYS], tl.int64)
    if DROP:
        state_of = drop_state(states, job, sample, head + first_head)
        positions += row
        keys_at = tl.load(job + 13) + position + j * rate
    acc_k = tl.zeros([KEYS, BLOCK], tl.float32)
    acc_v = tl.zeros([KEYS, BLOCK], tl.float32)
    begin = 0
    whole = n // ROWS * ROWS
    if CAUSAL:  # rows before the tile see none of its keys; those beside it some
        begin = tl.minimum(tl.cdiv((tile + 1) * KEYS, ROWS) * ROWS, n)
        acc_k, acc_v = _keys_over(
            acc_k, acc_v, key, value, q, grad, q_sn, g_sn, lse, delta, j, tile * KEYS // ROWS * ROWS, begin, n, n,
            scale, state_of, positions, keys_at, threshold, keep, CAUSAL, True, DROP, PRECISION, ROWS, DIM, BLOCK,
        )  # fmt: skip
        whole = tl.maximum(whole, begin)
    # keys beyond n are zeros here and are not stored, so only rows beyond n need care
    acc_k, acc_v = _keys_over(
        acc_k, acc_v, key, value, q, grad, q_sn, g_sn, lse, delta, j, begin, whole, n, n,
        scale, state_of, positions, keys_at, threshold, keep, CAUSAL, False, DROP, PRECISION, ROWS, DIM, BLOCK,
    )  # fmt: skip
    acc_k, acc_v = _keys_over(
        acc_k, acc_v, key, value, q, grad, q_sn, g_sn, lse, delta, j, whole, n, n, n,
        scale, state_of, positions, keys_at, threshold, keep, CAUSAL, True, DROP, PRECISION, ROWS, DIM, BLOCK,
    )  # fmt: skip
    tl.debug_barrier()  # the place again, so that the loops need not hold it in registers
    _, tile, n, _, row, _, _, _, _ = find(jobs, job_of, first_of, KEYS, FAR)
    j = tile * KEYS + tl.arange(0, KEYS)
    rows = (row + j)[:, None] * DIM + column[None, :]
    mask = (j < n)[:, None] & (column < DIM)[None, :]
    tl.store(dk + rows, (acc_k * plain_scale).to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + rows, acc_v.to(dv.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["threshold", "first_head"])
def _grouped_rows(
    dq, q, q_sb, q_sn, q_sh, k, k_sb, k_sn, k_sh, v, v_sb, v_sn, v_sh, grad, g_sb, g_sn, g_sh, lse, delta,
    jobs, job_of, first_of, scale, plain_scale, states, threshold, keep, first_head, positions,
    CAUSAL: tl.constexpr, DROP: tl.constexpr, FAR: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    job, tile, n, rate, row, sample, position, head, kv_head = find(jobs, job_of, first_of, ROWS, FAR)
    if CAUSAL:
        tile = tl.cdiv(n, ROWS) - 1 - tile  # the longest first
    i, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    q += sample * q_sb + position * q_sn + head * q_sh
    grad += sample * g_sb + position * g_sn + head * g_sh
    query = read(q, i, rate * q_sn, column, n, DIM, BLOCK, False)
    do = read(grad, i, rate * g_sn, column, n, DIM, BLOCK, False)
    k += sample * k_sb + position * k_sn + kv_head * k_sh
    v += sample * v_sb + position * v_sn + kv_head * v_sh
    k_sn, v_sn = rate * k_sn, rate * v_sn
    row_lse = tl.load(lse + row + i, mask=i < n, other=float("inf")) * LOG2E
    row_delta = tl.load(delta + row + i, mask=i < n, other=0.0)
    row_state = tl.zeros([ROWS], tl.uint32)
    if DROP:
        begun = drop_state(states, job, sample, head + first_head)
        row_state = fold(begun, tl.load(job + 13) + position + i * rate)
        positions += row
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    high = n
    whole = n // KEYS * KEYS
    if CAUSAL:
        high = tl.minimum((tile + 1) * ROWS, n)
        whole = tile * ROWS // KEYS * KEYS
    acc = _rows_over(
        acc, query, do, row_lse, row_delta, k, v, k_sn, v_sn, i, 0, whole, n, scale, row_state, positions, threshold,
        keep, CAUSAL, False, DROP, PRECISION, KEYS, DIM, BLOCK,
    )  # fmt: skip
    acc = _rows_over(
        acc, query, do, row_lse, row_delta, k, v, k_sn, v_sn, i, whole, high, n, scale, row_state, positions, threshold,
        keep, CAUSAL, True, DROP, PRECISION, KEYS, DIM, BLOCK,
    )  # fmt: skip
    mask = (i < n)[:, None] & (column < DIM)[None, :]
    into = dq + (row + i)[:, None] * DIM + column[None, :]
    tl.store(into, (acc * plain_scale).to(dq.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Backward:
    """What both kernels read: grad, q, k, v, and (rows,) fp32 log-sum-exp and delta in the order of the buffer."""

    work: Work
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    lse: Tensor
    delta: Tensor
    causal: bool
    scale: float
    drop: GroupedDrop | None
    positions: Tensor | None

    @classmethod
    def of(
        cls, work: Work, tensors: list[Tensor], lse: Tensor, causal: bool, scale: float, drop: GroupedDrop | None
    ) -> Backward:
        """From grad, q (B, N, H, D), k, v (B, N, K, D) and the merged out (B, N, H, D) and lse (B, H, N)."""
        grad, q, k, v, out = tensors
        delta, row_lse = (torch.empty(work.rows, dtype=torch.float32, device=q.device) for _ in range(2))
        if work.rows:
            _grouped_delta[(work.grids[PREPARED].programs,)](
                delta, row_lse, grad, *grad.stride()[:3], out, *out.stride()[:3], lse, *lse.stride(),
                *work.place(PREPARED), FAR=work.far(grad, out), ROWS=PREPARED, DIM=q.shape[3],
                BLOCK=block_dim(q.shape[3]),
            )  # fmt: skip
        return cls(work, (grad, q, k, v), row_lse, delta, causal, scale, drop, positions_of(work, drop))

    def keys(self) -> tuple[Tensor, Tensor]:
        """dk, dv (rows, D), of each query head its own."""
        return self._run(_grouped_keys, 2, True)

    def queries(self) -> Tensor:
        """dq (rows, D)."""
        return self._run(_grouped_rows, 1, False)[0]

    def _run(self, kernel, results: int, over_keys: bool) -> tuple[Tensor, ...]:
        grad, q, k, v = self.tensors
        dim = q.shape[3]
        rows, keys, warps, stages = config(q.dtype, dim, self.causal, over_keys)
        tile = keys if over_keys else rows
        into = tuple(torch.empty(self.work.rows, dim, dtype=q.dtype, device=q.device) for _ in range(results))
        sizes = {
            "ROWS": rows,
            "KEYS": keys,
            "DIM": dim,
            "BLOCK": block_dim(dim),
            "num_warps": warps,
            "num_stages": stages,
        }
        if self.work.rows:
            kernel[(self.work.grids[tile].programs,)](
                *into, q, *q.stride()[:3], k, *k.stride()[:3], v, *v.stride()[:3], grad, *grad.stride()[:3], self.lse,
                self.delta, *self.work.place(tile), self.scale * LOG2E.value, self.scale,
                **dropping(self.drop, self.positions, q), CAUSAL=self.causal, FAR=self.work.far(*self.tensors),
                PRECISION=precision(q), **sizes,
            )  # fmt: skip
        return into
