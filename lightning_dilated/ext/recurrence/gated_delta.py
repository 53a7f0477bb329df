"""Compute the gated delta rule in chunks of 64 tokens, forward: inverses of chunks, pass over chunks, output.

Let k be unit keys, total = cumsum(log_decay) in the chunk, and S the state before the chunk. Row i of `new` is
v_i - exp(total_i) k_i S - sum over j < i of B_ij beta_j new_j, with B_ij = k_i.k_j exp(total_i - total_j).
The solution is new = x - G (beta x) with x = v - exp(total) k S and G = B (1 + beta B)^-1, which is between -1 and 1.
Then S' = exp(total_last) S + sum over i of exp(total_last - total_i) k_i (beta_i new_i)^T.

Each total is stored as two numbers: an exact sum of multiples of 2^-10, and a sum of the remainders of log_decay.
Differences of totals are therefore as exact as sums of the log_decay between them.

Keys and queries are normalized after their products, which are exact for 16-bit rows. A run is passed chunk by chunk,
or in groups of chunks: a first pass computes the maps of all groups in parallel, a loop computes the state before each
group, and a last pass runs all groups in parallel from these states.
Shape letters: T chunks, C slots of a chunk, K kv heads, H query heads, D head dim, E value dim, W columns of the state
(the last E have values), n runs, m groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dilated.kernels.tiles import block_dim, read

#: number of slots of a chunk, C
SLOTS = 64
#: number of state columns per program; passes over chunks with wide tiles or fp32 rows take the smaller number,
#: because they need more registers
COLUMNS, FEW_COLUMNS = 64, 32
#: `input_precision` of products with factors that need more than TF32's 11 bits: three TF32 products keep 22 of 24
#: bits. "ieee" uses no tensor cores; it would spill thousands of bytes per thread and take minutes to compile
EXACT = "tf32x3"
#: `input_precision` of the inverse for 16-bit rows; its error for similar keys is at most 1.6e-3, under half of bf16's
SOLVED = "tf32"
#: (warps, stages) of each kernel for 16-bit rows, for each number of columns of a tile
CONFIGS = {
    "invert": {64: (2, 1), 128: (4, 1)},
    "pass": {64: (4, 2), 128: (8, 1)},
    "groups": {64: (4, 2), 128: (8, 1)},
    "read": {64: (4, 1), 128: (8, 1)},
    "sums": {64: (4, 1), 128: (8, 1)},
    "queries": {64: (4, 1), 128: (8, 1)},
    "gradients": {64: (4, 1), 128: (8, 1)},
}
#: number of warps for fp32 rows, where each product takes three (`EXACT`); the inverse has tiles of only 32
WIDE_WARPS = {kernel: 4 if kernel == "invert" else 8 for kernel in CONFIGS}


class Chunks(NamedTuple):
    """The tokens of each chunk, as int64 tensors on the device.

    Attributes:
        rows: (T, 2) first row and number of rows of each chunk.
        runs: (n, 2) chunks of each run, (first, stop).
        groups: (m, 2) chunks of each group, (first, stop), in the order of runs; None: runs have no groups.
        members: (n, 2) groups of each run, (first, stop); None without groups.
    """

    rows: Tensor
    runs: Tensor
    groups: Tensor | None
    members: Tensor | None


@dataclass(frozen=True)
class Rows:
    """The rows of a call: k (rows, K, D) and v (rows, K, E) with last stride 1, log_decay and beta (rows, K) fp32."""

    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor

    @property
    def heads(self) -> int:
        return self.k.shape[1]

    @property
    def dim(self) -> int:
        return self.k.shape[2]

    @property
    def wide(self) -> bool:
        """True for fp32 rows; their products take `EXACT`."""
        return self.k.dtype == torch.float32

    @property
    def block(self) -> int:
        """Number of columns of the widest tile."""
        return max(64, block_dim(max(self.dim, self.v.shape[2])))

    def config(self, kernel: str) -> dict[str, int]:
        """Return the launch options of a kernel: warps and stages."""
        warps, stages = CONFIGS[kernel][self.block]
        return {"num_warps": WIDE_WARPS[kernel] if self.wide else warps, "num_stages": stages}

    @property
    def stored(self) -> torch.dtype:
        """The dtype of tensors that one kernel writes for another: bf16 for bf16 rows, as memory limits the kernels;
        else fp32, because fp16 might overflow. While a state is passed from chunk to chunk, it is fp32."""
        return torch.bfloat16 if self.k.dtype == torch.bfloat16 else torch.float32

    def passed_columns(self, width: int) -> int:
        """Return how many columns of the state (D, `width`) a program passes through the chunks."""
        return min(FEW_COLUMNS if self.wide or self.block > 64 else COLUMNS, block_dim(width))

    def sizes(self) -> dict[str, object]:
        """Return the compile-time arguments that all kernels take."""
        products = EXACT if self.wide else "tf32"
        return {"SLOTS": SLOTS, "DIM": self.dim, "BLOCK": block_dim(self.dim), "PRECISION": products}


@dataclass(frozen=True)
class Inverse:
    """The part of a chunk's solution that does not depend on the state.

    Attributes:
        matrix: G (T, K, C, C). It is fp16 for 16-bit rows, which is as exact as a factor of a TF32 product.
        total: (T, K, 2, C) fp32, the sum of log_decay up to each slot, in two parts; see `halves`.
        rate: (T, K, C) fp32, 1 / length of each key.
    """

    matrix: Tensor
    total: Tensor
    rate: Tensor


@dataclass(frozen=True)
class Passed:
    """The states, and the rows that are added to them.

    Attributes:
        before: (T, K, D, W) the state before each chunk, in `Rows.stored`.
        new: (T, K, C, W) the rows `new`, without the factor beta, in `Rows.stored`.
        last: (n, K, D, W) the state after each run.
        maps: (m, K, D, D + E) the map S -> A S + B of each group; None without groups.
    """

    before: Tensor
    new: Tensor
    last: Tensor
    maps: Tensor | None


@triton.jit
def unit_rate(x):
    """Return 1 / length of each row (rows, BLOCK), as (rows,); finite for rows of zeros."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)


@triton.jit
def halves(decay):
    """Split numbers <= 0, clamped to -128 (exp(-128) is 0 in fp32), into (multiples of 2^-10, remainders).

    Sums of 64 multiples are exact, because they are at most 2^23 units.
    """
    decay = tl.where(decay < -128, -128.0, decay)  # keeps NaN
    coarse = (decay * 1024).to(tl.int32).to(tl.float32) / 1024
    return coarse, decay - coarse


@triton.jit
def totals(total, at, i, SLOTS: tl.constexpr):
    """Return the (coarse, fine) totals of slots i of a chunk."""
    return tl.load(total + 2 * at * SLOTS + i), tl.load(total + (2 * at + 1) * SLOTS + i)


@triton.jit
def decays(total, at, i, SLOTS: tl.constexpr):
    """Return exp(total_i), exp(total_last - total_i) and exp(total_last) for slots i of a chunk."""
    coarse, fine = totals(total, at, i, SLOTS)
    end, end_fine = totals(total, at, SLOTS - 1, SLOTS)
    return tl.exp(coarse + fine), tl.exp((end - coarse) + (end_fine - fine)), tl.exp(end + end_fine)


@triton.jit
def fade(coarse_i, fine_i, coarse_j, fine_j, visible):
    """Return exp(total_i - total_j) where `visible`, else 0. Each exp alone could exceed the range of fp32."""
    between = (coarse_i[:, None] - coarse_j[None, :]) + (fine_i[:, None] - fine_j[None, :])
    return tl.exp(tl.where(visible, between, float("-inf")))


@triton.jit
def column_of(x, x_sr, first, count, i):
    """Load the numbers of a (rows, K) tensor for slots i of a chunk; 0 in empty slots."""
    return tl.load(x + (first + i) * x_sr, mask=i < count, other=0.0)


@triton.jit
def read_turned(base, i, stride, column, rows, DIM: tl.constexpr):
    """Load the transpose of `read`'s tile, as a first factor: Triton 3.4 to 3.7.0 may transpose registers wrongly."""
    at = base + i.to(tl.int64)[None, :] * stride + column[:, None]
    return tl.load(at, mask=(i < rows)[None, :] & (column < DIM)[:, None], other=0.0)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Return a @ b in fp32. Factors of equal dtype are not converted; for 16 bits their products are exact."""
    if a.dtype == b.dtype:
        result = tl.dot(a, b, input_precision=PRECISION)
    else:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    return result


@triton.jit
def _solve(system, beta, i, PRECISION: tl.constexpr):
    """Compute G of a strictly lower triangular B (32, 32), for blocks of 2 rows, then of 4, 8, 16 and 32.

    Each step joins two blocks: the part below the diagonal becomes (1 - G beta) B (1 - beta G). Unlike powers of B,
    intermediate numbers are small.
    """
    row, column = i[:, None], i[None, :]
    g = tl.where(row // 2 == column // 2, system, 0.0)
    for level in range(1, 5):  # unrolling would take long to compile
        corner = (row >> (level + 1) == column >> (level + 1)) & (row >> level != column >> level)
        below = tl.where(corner, system, 0.0)
        below -= tl.dot(below, beta[:, None] * g, input_precision=PRECISION)
        g += below - tl.dot(g, beta[:, None] * below, input_precision=PRECISION)
    return g


@triton.jit
def _invert(
    matrix, total, rate, rows, k, k_sr, k_sh, log_decay, d_sr, d_sh, beta, b_sr, b_sh, heads,
    SLOTS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, SOLVE: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = SLOTS // 2
    at, head = tl.program_id(0).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    chunk = at // heads
    first, count = tl.load(rows + 2 * chunk), tl.load(rows + 2 * chunk + 1)
    i, column = tl.arange(0, HALF), tl.arange(0, BLOCK)
    log_decay += head * d_sh
    beta += head * b_sh
    coarse, fine = halves(column_of(log_decay, d_sr, first, count, i))
    upper_coarse, upper_fine = tl.cumsum(coarse, 0), tl.cumsum(fine, 0)
    lower_coarse, lower_fine = halves(column_of(log_decay, d_sr, first, count, i + HALF))
    lower_coarse = tl.sum(coarse, 0) + tl.cumsum(lower_coarse, 0)
    lower_fine = tl.sum(fine, 0) + tl.cumsum(lower_fine, 0)
    upper_beta = column_of(beta, b_sr, first, count, i)
    lower_beta = column_of(beta, b_sr, first, count, i + HALF)
    k += first * k_sr + head * k_sh
    upper = read(k, i, k_sr, column, count, DIM, BLOCK, False)
    lower = read(k, i + HALF, k_sr, column, count, DIM, BLOCK, False)
    upper_rate, lower_rate = unit_rate(upper), unit_rate(lower)
    earlier = i[:, None] > i[None, :]
    everywhere = i[:, None] >= 0
    upper_turned = read_turned(k, i, k_sr, column, count, DIM)
    first_half = tl.dot(upper, upper_turned, input_precision=PRECISION)
    first_half *= fade(upper_coarse, upper_fine, upper_coarse, upper_fine, earlier)
    first_half *= upper_rate[:, None] * upper_rate[None, :]
    g = _solve(first_half, upper_beta, i, SOLVE)
    second_half = tl.dot(lower, read_turned(k, i + HALF, k_sr, column, count, DIM), input_precision=PRECISION)
    second_half *= fade(lower_coarse, lower_fine, lower_coarse, lower_fine, earlier)
    second_half *= lower_rate[:, None] * lower_rate[None, :]
    h = _solve(second_half, lower_beta, i, SOLVE)
    below = tl.dot(lower, upper_turned, input_precision=PRECISION)
    below *= fade(lower_coarse, lower_fine, upper_coarse, upper_fine, everywhere)
    below *= lower_rate[:, None] * upper_rate[None, :]
    below -= tl.dot(below, upper_beta[:, None] * g, input_precision=SOLVE)
    below -= tl.dot(h, lower_beta[:, None] * below, input_precision=SOLVE)
    to = matrix + at * SLOTS * SLOTS + i[:, None] * SLOTS + i[None, :]
    kind = matrix.dtype.element_ty
    tl.store(to, g.to(kind))
    tl.store(to + HALF, tl.zeros([HALF, HALF], kind))
    tl.store(to + HALF * SLOTS, below.to(kind))
    tl.store(to + HALF * SLOTS + HALF, h.to(kind))
    total += 2 * at * SLOTS
    tl.store(total + i, upper_coarse)
    tl.store(total + HALF + i, lower_coarse)
    tl.store(total + SLOTS + i, upper_fine)
    tl.store(total + SLOTS + HALF + i, lower_fine)
    tl.store(rate + at * SLOTS + i, upper_rate)
    tl.store(rate + at * SLOTS + HALF + i, lower_rate)


@triton.jit
def _pass(
    last, before, new, begin, rows, items, matrix, total, rate, k, k_sr, k_sh, v, v_sr, v_sh, beta, b_sr, b_sh, heads,
    width, extra,
    MAPS: tl.constexpr, STORE: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Pass a block of the state's columns through chunks of a run or group, from `begin`, or from [1 | 0] if MAPS."""
    item, head = tl.program_id(0).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    d, i = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    low, high = tl.load(items + item // heads * 2), tl.load(items + item // heads * 2 + 1)
    place = d[:, None] * width + column[None, :]
    inside = (d < DIM)[:, None] & (column < width)[None, :]
    if MAPS:
        state = tl.where((d[:, None] == column[None, :]) & (column < extra)[None, :], 1.0, 0.0)
    else:
        state = tl.load(begin + item * DIM * width + place, mask=inside, other=0.0)
    k += head * k_sh
    v += head * v_sh - extra
    beta += head * b_sh
    valued = (column >= extra) & (column < width)
    for chunk in tl.range(low, high):
        first, count = tl.load(rows + 2 * chunk), tl.load(rows + 2 * chunk + 1)
        at = chunk * heads + head
        key = read(k + first * k_sr, i, k_sr, d, count, DIM, BLOCK, False).to(tl.float32)
        there = (i < count)[:, None] & valued[None, :]
        x = tl.load(v + (first + i)[:, None] * v_sr + column[None, :], mask=there, other=0.0).to(tl.float32)
        g = tl.load(matrix + at * SLOTS * SLOTS + i[:, None] * SLOTS + i[None, :]).to(tl.float32)
        b, r = column_of(beta, b_sr, first, count, i), tl.load(rate + at * SLOTS + i)
        past, left, whole = decays(total, at, i, SLOTS)
        if STORE:
            tl.store(before + at * DIM * width + place, state.to(before.dtype.element_ty), mask=inside)
        x -= (past * r)[:, None] * tl.dot(key, state, input_precision=PRECISION)
        x -= tl.dot(g, b[:, None] * x, input_precision=PRECISION)
        if STORE:
            to = new + at * SLOTS * width + i[:, None] * width + column[None, :]
            tl.store(to, x.to(new.dtype.element_ty), mask=(column < width)[None, :])
        added = (left * r * b)[:, None] * x
        turned = read_turned(k + first * k_sr, i, k_sr, d, count, DIM).to(tl.float32)
        state = tl.dot(turned, added, whole * state, input_precision=PRECISION)
    tl.store(last + item * DIM * width + place, state, mask=inside)


@triton.jit
def pass_groups(
    last, begins, begin, members, maps, sums, heads, width, extra, maps_width, sums_width, sums_first,
    BACK: tl.constexpr, SUMS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Pass a block of the state's columns through a run's groups by S -> A S + B; if BACK, in reverse by A^T S + B.

    Column c of B is column sums_first + c - extra of `sums`, or 0 if c < extra.
    """
    item, head = tl.program_id(0).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    d, e = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    low, high = tl.load(members + item // heads * 2), tl.load(members + item // heads * 2 + 1)
    place = d[:, None] * width + column[None, :]
    inside = (d < DIM)[:, None] & (column < width)[None, :]
    square = (d < DIM)[:, None] & (e < DIM)[None, :]
    state = tl.load(begin + item * DIM * width + place, mask=inside, other=0.0)
    for step in tl.range(0, high - low):
        group = low + step
        if BACK:
            group = high - 1 - step
        at = group * heads + head
        tl.store(begins + at * DIM * width + place, state, mask=inside)
        a = maps + at * DIM * maps_width
        if BACK:
            a += e[None, :] * maps_width + d[:, None]
        else:
            a += d[:, None] * maps_width + e[None, :]
        state = tl.dot(tl.load(a, mask=square, other=0.0), state, input_precision=PRECISION)
        if SUMS:
            b = sums + at * DIM * sums_width + d[:, None] * sums_width + (sums_first - extra + column)[None, :]
            state += tl.load(b, mask=inside & (column >= extra)[None, :], other=0.0)
    tl.store(last + item * DIM * width + place, state, mask=inside)


@triton.jit
def _read(
    out, o_sr, o_sh, before, new, rows, total, rate, q, q_sr, q_sh, k, k_sr, k_sh, beta, b_sr, b_sh, heads, width,
    GROUP: tl.constexpr, SLOTS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the output of the query heads of a kv head, in one chunk and one block of columns."""
    at, head = tl.program_id(0).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    chunk = at // heads
    first, count = tl.load(rows + 2 * chunk), tl.load(rows + 2 * chunk + 1)
    d, i = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = (column < width)[None, :]
    key = read(k + first * k_sr + head * k_sh, i, k_sr, d, count, DIM, BLOCK, False)
    b, r = column_of(beta + head * b_sh, b_sr, first, count, i), tl.load(rate + at * SLOTS + i)
    coarse, fine = totals(total, at, i, SLOTS)
    past = tl.exp(coarse + fine)
    weight = fade(coarse, fine, coarse, fine, i[:, None] >= i[None, :]) * (r * b)[None, :]
    state = tl.load(before + at * DIM * width + d[:, None] * width + column[None, :], mask=(d < DIM)[:, None] & there,
                    other=0.0)  # fmt: skip
    x = tl.load(new + at * SLOTS * width + i[:, None] * width + column[None, :], mask=there, other=0.0).to(tl.float32)
    for g in range(GROUP):
        query_head = head * GROUP + g
        query = read(q + first * q_sr + query_head * q_sh, i, q_sr, d, count, DIM, BLOCK, False)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * weight
        value = past[:, None] * product(query, state, PRECISION)
        value = tl.dot(scores, x, value, input_precision=PRECISION) * unit_rate(query)[:, None]
        to = out + (first + i)[:, None] * o_sr + query_head * o_sh + column[None, :]
        tl.store(to, value.to(out.dtype.element_ty), mask=(i < count)[:, None] & there)


def invert(rows: Rows, chunks: Chunks) -> Inverse:
    """Compute the `Inverse` of all chunks."""
    number, device = (len(chunks.rows), rows.heads), rows.k.device
    narrow = torch.float32 if rows.wide else torch.float16
    total = torch.empty(*number, 2, SLOTS, dtype=torch.float32, device=device)
    rate = torch.empty(*number, SLOTS, dtype=torch.float32, device=device)
    inverse = Inverse(torch.empty(*number, SLOTS, SLOTS, dtype=narrow, device=device), total, rate)
    _invert[(number[0] * number[1],)](
        inverse.matrix, total, rate, chunks.rows, rows.k, *rows.k.stride()[:2], rows.log_decay, *rows.log_decay.stride(),
        rows.beta, *rows.beta.stride(), rows.heads, SOLVE=EXACT if rows.wide else SOLVED, **rows.sizes(),
        **rows.config("invert"),
    )  # fmt: skip
    return inverse


def _launch_pass(
    rows: Rows, chunks: Chunks, inverse: Inverse, items: Tensor, begin: Tensor | None, width: int, passed: Passed | None
) -> Tensor:
    """Return the state after each item, (items, K, D, W); `begin`: the state before each item, or None for [1 | 0]."""
    last = torch.empty(len(items), rows.heads, rows.dim, width, dtype=torch.float32, device=rows.k.device)
    columns = rows.passed_columns(width)
    _pass[(len(items) * rows.heads, triton.cdiv(width, columns))](
        last, last if passed is None else passed.before, last if passed is None else passed.new,
        last if begin is None else begin, chunks.rows, items, inverse.matrix, inverse.total, inverse.rate,
        rows.k, *rows.k.stride()[:2], rows.v, *rows.v.stride()[:2], rows.beta, *rows.beta.stride(), rows.heads, width,
        width - rows.v.shape[2], MAPS=begin is None, STORE=passed is not None, COLUMNS=columns, **rows.sizes(),
        **rows.config("pass"),
    )  # fmt: skip
    return last


def maps_of_groups(rows: Rows, chunks: Chunks, inverse: Inverse, begin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the maps of groups, the states before groups, and the states after runs; `begin`: states before runs."""
    assert chunks.groups is not None and chunks.members is not None
    dim, values, width = rows.dim, rows.v.shape[2], begin.shape[3]
    maps = _launch_pass(rows, chunks, inverse, chunks.groups, None, dim + values, None)
    begins = begin.new_empty(len(chunks.groups), *begin.shape[1:])
    last, columns = torch.empty_like(begin), rows.passed_columns(width)
    pass_groups[(len(begin) * rows.heads, triton.cdiv(width, columns))](
        last, begins, begin, chunks.members, maps, maps, rows.heads, width, width - values, dim + values, dim + values, dim,
        BACK=False, SUMS=True, DIM=dim, BLOCK=block_dim(dim), COLUMNS=columns, PRECISION=EXACT,
        **rows.config("groups"),
    )  # fmt: skip
    return maps, begins, last


def pass_chunks(rows: Rows, chunks: Chunks, inverse: Inverse, begin: Tensor) -> Passed:
    """Compute the states of all chunks; `begin`: the state before each run, (n, K, D, W) fp32, contiguous."""
    width, number = begin.shape[3], (len(chunks.rows), rows.heads)
    before = begin.new_empty(*number, rows.dim, width, dtype=rows.stored)
    passed = Passed(before, begin.new_empty(*number, SLOTS, width, dtype=rows.stored), begin, None)
    if chunks.groups is None:
        last = _launch_pass(rows, chunks, inverse, chunks.runs, begin, width, passed)
        return Passed(before, passed.new, last, None)
    maps, begins, last = maps_of_groups(rows, chunks, inverse, begin)
    _launch_pass(rows, chunks, inverse, chunks.groups, begins, width, passed)
    return Passed(before, passed.new, last, maps)


def last_states(rows: Rows, chunks: Chunks, inverse: Inverse, begin: Tensor) -> Tensor:
    """Return only `Passed.last`."""
    if chunks.groups is None:
        return _launch_pass(rows, chunks, inverse, chunks.runs, begin, begin.shape[3], None)
    return maps_of_groups(rows, chunks, inverse, begin)[2]


def output(q: Tensor, rows: Rows, chunks: Chunks, inverse: Inverse, passed: Passed, out: Tensor) -> None:
    """Write the output to `out` (rows, H, E), contiguous; q: (rows, H, D) with last stride 1."""
    width = passed.new.shape[3]
    columns = min(COLUMNS, block_dim(width))
    _read[(len(chunks.rows) * rows.heads, triton.cdiv(width, columns))](
        out, *out.stride()[:2], passed.before, passed.new, chunks.rows, inverse.total, inverse.rate, q, *q.stride()[:2],
        rows.k, *rows.k.stride()[:2], rows.beta, *rows.beta.stride(), rows.heads, width,
        GROUP=q.shape[1] // rows.heads, COLUMNS=columns, **rows.sizes(), **rows.config("read"),
    )  # fmt: skip
