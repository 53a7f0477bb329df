"""Triton kernels of hashed attention's lookups, forward and backward; deterministic, without atomics.

Lookups are in sorted order, so `begin` and `end` of the rows that they read never decrease. A forward program computes
a tile of T lookups. It loops over tiles of S rows, and each tile of rows begins with a row that a lookup reads. So a
program computes at most T (L / S + 2) tiles of rows. All programs together compute at most R / S + Q / T (L / S + 1):
a tile of lookups covers the rows from its first `begin` to its last `end`, and this `begin` is at least the last `end`
of the tile before, minus L. The cost is O(R T + Q (L + S)) for any codes.

With w = exp(score - lse), G groups' chances c_g, match = sum of log max(c_g, FLOOR), and the gradients do, dmatch and
dchance of the results that a query has from all its lookups, the gradients are, for each pair of a lookup and a row that
it reads:

    ds = w (do.v - do.out)                 dq += scale ds k       dk += scale ds q       dv += w do
    dm = ds (with code_scores) + w dmatch + dchance exp(match - chance)
    d chance_q_g += dm / c_g chance_k_g    d chance_k_g += dm / c_g chance_q_g           if c_g >= FLOOR, else 0

One kernel sums over rows for each lookup. Another kernel sums over lookups for each row, because the lookups that read a
tile of rows are consecutive. Many lookups may read one row; the lookups of a tile of rows are cut into parts of at most
`PART`, and a last kernel adds the sums of the parts in order.

Shape letters: R rows, Q lookups that read rows, P lookups for each query, g query heads for each kv head, D head dim,
G groups of M codes, L latest rows. Kernels compute T pairs of a lookup and a query head at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dilated import kernels
from lightning_dilated.kernels.tiles import LN2, LOG2E, block_dim

if TYPE_CHECKING:
    from lightning_dilated.ext.hashed.lookup import Inputs

#: `input_precision` of products, and of products of chances, for 16-bit and for fp32 rows. Chances are positive, so
#: three products of bf16 (TF32) parts keep 16 (22) bits of each sum, also of a sum near the floor
PRECISIONS = ("tf32", "tf32"), ("tf32x3", "tf32x3")
#: (lookups and query heads, rows) of a tile for 16-bit rows with up to 64 columns, by 2 warps, and with up to 128 columns,
#: by 4 warps; both with up to 16 codes in a group. No tile has 64 lookups or rows: with 4 warps, Triton 3.6 multiplies
#: such tiles by wgmma on Hopper. `_forward` then had wrong results, with NaN, that differed between runs, and other kernels
#: read beyond the shared memory (benchmarks/results/2026-11-28_h200_hashed.md)
TILES = {"forward": ((32, 32), (32, 16)), "over rows": ((32, 32), (32, 16)), "over lookups": ((32, 32), (16, 32))}
#: the same for other calls, which need more registers and shared memory for each pair, by 4 warps; the gated delta rule's
#: kernels found tiles of 16 columns wrong with 8 warps on Hopper
SMALL = (16, 16)
#: maximum number of lookups that a program adds to the gradients of a tile of rows
PART = 4096


class Lists(NamedTuple):
    """Lookups in sorted order, and the sorted rows. A lookup may read no row.

    Attributes:
        index: (Q,) integers, the indices of the lookups, P times a query's index plus the number of the probe.
        begin, end: (Q,) int32, the range of `rows` that a lookup reads; both never decrease.
        rows: (R,) integers, the index of each row in k and v.
        reach: largest number of rows that a lookup reads.
    """

    index: Tensor
    begin: Tensor
    end: Tensor
    rows: Tensor
    reach: int


@triton.jit
def _rows(base, first, there, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows (A, WIDTH) that begin at `first` (A,); 0 outside of `there` (A,) and beyond the columns."""
    column = tl.arange(0, WIDTH)
    if COLUMNS == WIDTH:
        return tl.load(base + first[:, None] + column[None, :], mask=there[:, None], other=0.0)
    mask = there[:, None] & (column < COLUMNS)[None, :]
    return tl.load(base + first[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _store(base, first, x, there, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Store rows x (A, WIDTH), as `_rows` loads them."""
    column = tl.arange(0, WIDTH)
    at = base + first[:, None] + column[None, :]
    if COLUMNS == WIDTH:
        tl.store(at, x.to(base.dtype.element_ty), mask=there[:, None])
    else:
        tl.store(at, x.to(base.dtype.element_ty), mask=there[:, None] & (column < COLUMNS)[None, :])


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    """Return a @ b in fp32. Products of 16-bit factors are exact; a factor of another dtype makes both fp32."""
    if a.dtype == b.dtype:
        result = tl.dot(a, b, input_precision=PRECISION)
    else:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    return result


@triton.jit
def _match(
    a, first_a, there_a, b, first_b, there_b, floor,
    GROUPS: tl.constexpr, CODES: tl.constexpr, WIDTH: tl.constexpr, CHANCES: tl.constexpr,
):  # fmt: skip
    """Return the log, in base 2, of the chances (A, B) that codes agree, from the chances of codes of A and B rows.

    Chances of a group are loaded when they are used, because registers are few.
    """
    total = tl.zeros([first_a.shape[0], first_b.shape[0]], tl.float32)
    for g in tl.range(0, GROUPS, num_stages=4):
        left = _rows(a + g * CODES, first_a, there_a, CODES, WIDTH)
        right = _rows(b + g * CODES, first_b, there_b, CODES, WIDTH)
        chance = tl.dot(left, tl.trans(right), input_precision=CHANCES)
        total += tl.log2(tl.where(chance < floor, floor, chance))  # keeps NaN
    return total


@triton.jit
def _added(
    sums, change, a, first_a, there_a, b, first_b, there_b, floor,
    GROUPS: tl.constexpr, CODES: tl.constexpr, WIDTH: tl.constexpr, CHANCES: tl.constexpr,
):  # fmt: skip
    """Add to `sums`, G tensors (A, WIDTH), the gradients of a's chances from `change`, the gradient of log chances."""
    every = ()
    for g in tl.static_range(GROUPS):
        left = _rows(a + g * CODES, first_a, there_a, CODES, WIDTH)
        right = _rows(b + g * CODES, first_b, there_b, CODES, WIDTH)
        chance = tl.dot(left, tl.trans(right), input_precision=CHANCES)
        factor = tl.where(chance < floor, 0.0, change / chance)
        every = every + (tl.dot(factor.to(right.dtype), right, sums[g], input_precision=CHANCES),)  # noqa: RUF005
    return every


@triton.jit
def _zeros(LENGTH: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    every = ()
    for _ in tl.static_range(GROUPS):
        every = every + (tl.zeros([LENGTH, WIDTH], tl.float32),)  # noqa: RUF005
    return every


@triton.jit
def _store_all(base, first, sums, there, GROUPS: tl.constexpr, CODES: tl.constexpr, WIDTH: tl.constexpr):
    """Store G tensors (A, WIDTH), the groups of a row one after another."""
    for g in tl.static_range(GROUPS):
        _store(base + g * CODES, first, sums[g], there, CODES, WIDTH)


@triton.jit
def _places(index, begin, end, i, there, GROUP: tl.constexpr):
    """Return, for pairs i of a lookup and a query head: index of the lookup, query head, first row, last row + 1."""
    first = tl.load(begin + i // GROUP, mask=there, other=2147483647)
    last = tl.load(end + i // GROUP, mask=there, other=0)
    return tl.load(index + i // GROUP, mask=there, other=0).to(tl.int64), i % GROUP, first, last


@triton.jit
def _next(first, last, row):
    """Return the first row from `row` on that a lookup of the tile reads; the largest number if there is none."""
    return tl.min(tl.where(last > row, tl.maximum(first, row), 2147483647), 0)


@triton.jit
def _grown(most, total, score):
    """Return the maximum so far, the scaled sum of 2^score (A, B), its rescaling, and 2^(score - maximum)."""
    top = tl.maximum(most, tl.max(score, 1))
    finite = tl.where(top == float("-inf"), 0.0, top)  # a lookup may have read no row so far
    rescale, p = tl.exp2(most - finite), tl.exp2(score - finite[:, None])
    return top, total * rescale + tl.sum(p, 1), rescale, p


@triton.jit(do_not_specialize=["count"])
def _forward(
    out, lse, match, chance, q, q_st, q_sh, k, k_st, v, v_st, chance_q, chance_k, index, begin, end, rows,
    count, scale, floor,
    GROUP: tl.constexpr, PROBES: tl.constexpr, GROUPS: tl.constexpr, CODES: tl.constexpr, WIDTH: tl.constexpr,
    SCORES: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, CHANCES: tl.constexpr,
    LOOKUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * LOOKUPS + tl.arange(0, LOOKUPS)
    there = i < count
    lookup, head, first, last = _places(index, begin, end, i, there, GROUP)
    at, token = lookup * GROUP + head, lookup // PROBES
    query = _rows(q, token * q_st + head * q_sh, there, DIM, BLOCK)
    acc = tl.zeros([LOOKUPS, BLOCK], tl.float32)
    most, most_chance = tl.full([LOOKUPS], float("-inf"), tl.float32), tl.full([LOOKUPS], float("-inf"), tl.float32)
    total, total_chance = tl.zeros([LOOKUPS], tl.float32), tl.zeros([LOOKUPS], tl.float32)
    mean = tl.zeros([LOOKUPS], tl.float32)
    stop = tl.max(last, 0)
    row = _next(first, last, 0)
    while row < stop:
        j = row + tl.arange(0, ROWS)
        inside = j < stop
        of_row = tl.load(rows + j, mask=inside, other=0).to(tl.int64)
        seen = (j[None, :] >= first[:, None]) & (j[None, :] < last[:, None])
        key = _rows(k, of_row * k_st, inside, DIM, BLOCK)
        agree = _match(
            chance_q, token * (GROUPS * CODES), there, chance_k, of_row * (GROUPS * CODES), inside, floor,
            GROUPS, CODES, WIDTH, CHANCES,
        )  # fmt: skip
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        if SCORES:
            score += agree
        most, total, rescale, p = _grown(most, total, tl.where(seen, score, float("-inf")))
        mean = mean * rescale + tl.sum(p * agree, 1)
        value = _rows(v, of_row * v_st, inside, DIM, BLOCK)
        acc = acc * rescale[:, None] + _product(p.to(value.dtype), value, PRECISION)
        most_chance, total_chance, _, _ = _grown(most_chance, total_chance, tl.where(seen, agree, float("-inf")))
        row = _next(first, last, row + ROWS)
    total = tl.where(last > first, total, 1.0)
    _store(out, at * DIM, acc / total[:, None], there, DIM, BLOCK)
    tl.store(lse + at, (most + tl.log2(total)) * LN2, mask=there)
    tl.store(match + at, mean / total * LN2, mask=there)
    tl.store(chance + lookup, (most_chance + tl.log2(total_chance)) * LN2, mask=there & (head == 0))


@triton.jit
def _numbers(delta, lse, chance, d_match, d_chance, lookup, head, there, GROUP: tl.constexpr):
    """Load the numbers of each lookup (or query) and query head that `_gradients` takes; logs are in base 2."""
    at = lookup * GROUP + head
    return (
        tl.load(delta + at, mask=there, other=0.0),
        tl.load(lse + at, mask=there, other=0.0) * LOG2E,
        tl.load(d_match + at, mask=there, other=0.0),
        tl.load(chance + lookup, mask=there, other=0.0) * LOG2E,
        tl.load(d_chance + lookup, mask=there & (head == 0), other=0.0),
    )


@triton.jit
def _gradients(score, agree, dw, delta, lse, d_match, chance, d_chance, seen, SCORES: tl.constexpr):
    """Return the softmax weight, and the gradients of the score and of the log chance, for each pair."""
    weight = tl.where(seen, tl.exp2(score - lse), 0.0)
    ds = tl.where(seen, weight * (dw - delta), 0.0)
    change = tl.where(seen, weight * d_match + tl.exp2(agree - chance) * d_chance, 0.0)
    if SCORES:
        change += ds
    return weight, ds, change


@triton.jit(do_not_specialize=["count"])
def _over_rows(
    dq, d_chance_q, delta, lse, chance, d_match, d_chance, d_out,
    q, q_st, q_sh, k, k_st, v, v_st, chance_q, chance_k, index, begin, end, rows, count, scale, plain_scale, floor,
    GROUP: tl.constexpr, PROBES: tl.constexpr, GROUPS: tl.constexpr, CODES: tl.constexpr, WIDTH: tl.constexpr,
    MERGED: tl.constexpr, SCORES: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    CHANCES: tl.constexpr, LOOKUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write dq and d chance_q of a tile of lookups and query heads, summed over the rows that they read."""
    i = tl.program_id(0).to(tl.int64) * LOOKUPS + tl.arange(0, LOOKUPS)
    there = i < count
    lookup, head, first, last = _places(index, begin, end, i, there, GROUP)
    at, token = lookup * GROUP + head, lookup // PROBES
    query = _rows(q, token * q_st + head * q_sh, there, DIM, BLOCK)
    number = lookup // MERGED
    do = _rows(d_out, (number * GROUP + head) * DIM, there, DIM, BLOCK)
    less, of_lse, dm, of_chance, dc = _numbers(delta, lse, chance, d_match, d_chance, number, head, there, GROUP)
    acc, acc_codes = tl.zeros([LOOKUPS, BLOCK], tl.float32), _zeros(LOOKUPS, GROUPS, WIDTH)
    stop = tl.max(last, 0)
    row = _next(first, last, 0)
    while row < stop:
        j = row + tl.arange(0, ROWS)
        inside = j < stop
        of_row = tl.load(rows + j, mask=inside, other=0).to(tl.int64)
        seen = (j[None, :] >= first[:, None]) & (j[None, :] < last[:, None])
        key, value = _rows(k, of_row * k_st, inside, DIM, BLOCK), _rows(v, of_row * v_st, inside, DIM, BLOCK)
        agree = _match(
            chance_q, token * (GROUPS * CODES), there, chance_k, of_row * (GROUPS * CODES), inside, floor,
            GROUPS, CODES, WIDTH, CHANCES,
        )  # fmt: skip
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        if SCORES:
            score += agree
        _, ds, change = _gradients(
            score, agree, _product(do, tl.trans(value), PRECISION), less[:, None], of_lse[:, None], dm[:, None],
            of_chance[:, None], dc[:, None], seen, SCORES,
        )  # fmt: skip
        acc += _product(ds.to(key.dtype), key, PRECISION)
        acc_codes = _added(
            acc_codes, change, chance_q, token * (GROUPS * CODES), there, chance_k, of_row * (GROUPS * CODES), inside,
            floor, GROUPS, CODES, WIDTH, CHANCES,
        )  # fmt: skip
        row = _next(first, last, row + ROWS)
    _store(dq, at * DIM, acc * plain_scale, there, DIM, BLOCK)
    _store_all(d_chance_q, at * (GROUPS * CODES), acc_codes, there, GROUPS, CODES, WIDTH)


@triton.jit(do_not_specialize=["size"])
def _over_lookups(
    dk, dv, d_chance_k, parts, work, delta, lse, chance, d_match, d_chance, d_out,
    q, q_st, q_sh, k, k_st, v, v_st, chance_q, chance_k, index, begin, end, rows, size, scale, plain_scale, floor,
    GROUP: tl.constexpr, PROBES: tl.constexpr, GROUPS: tl.constexpr, CODES: tl.constexpr, WIDTH: tl.constexpr,
    MERGED: tl.constexpr, SCORES: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    CHANCES: tl.constexpr, LOOKUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write dk, dv and d chance_k of a tile of rows, summed over a range of lookups; see `Work`."""
    COLUMNS: tl.constexpr = 2 * DIM + GROUPS * CODES
    work += tl.program_id(0).to(tl.int64) * 4
    low, high, place = tl.load(work + 1) * GROUP, tl.load(work + 2) * GROUP, tl.load(work + 3)
    j = tl.load(work) * ROWS + tl.arange(0, ROWS)
    inside = j < tl.where(place > -2, size, 0)
    row = tl.load(rows + j, mask=inside, other=0).to(tl.int64)
    key, value = _rows(k, row * k_st, inside, DIM, BLOCK), _rows(v, row * v_st, inside, DIM, BLOCK)
    acc_k, acc_v = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    acc_codes = _zeros(ROWS, GROUPS, WIDTH)
    for start in tl.range(low, high, LOOKUPS):
        i = start + tl.arange(0, LOOKUPS)
        there = i < high
        lookup, head, first, last = _places(index, begin, end, i, there, GROUP)
        number, token = lookup // MERGED, lookup // PROBES
        seen = (j[:, None] >= first[None, :]) & (j[:, None] < last[None, :])
        query = _rows(q, token * q_st + head * q_sh, there, DIM, BLOCK)
        do = _rows(d_out, (number * GROUP + head) * DIM, there, DIM, BLOCK)
        less, of_lse, dm, of_chance, dc = _numbers(delta, lse, chance, d_match, d_chance, number, head, there, GROUP)
        agree = _match(
            chance_k, row * (GROUPS * CODES), inside, chance_q, token * (GROUPS * CODES), there, floor,
            GROUPS, CODES, WIDTH, CHANCES,
        )  # fmt: skip
        score = tl.dot(key, tl.trans(query), input_precision=PRECISION) * scale
        if SCORES:
            score += agree
        weight, ds, change = _gradients(
            score, agree, _product(value, tl.trans(do), PRECISION), less[None, :], of_lse[None, :], dm[None, :],
            of_chance[None, :], dc[None, :], seen, SCORES,
        )  # fmt: skip
        acc_v += _product(weight.to(do.dtype), do, PRECISION)
        acc_k += _product(ds.to(query.dtype), query, PRECISION)
        acc_codes = _added(
            acc_codes, change, chance_k, row * (GROUPS * CODES), inside, chance_q, token * (GROUPS * CODES), there,
            floor, GROUPS, CODES, WIDTH, CHANCES,
        )  # fmt: skip
    if place < 0:
        _store(dk, row * DIM, acc_k * plain_scale, inside, DIM, BLOCK)
        _store(dv, row * DIM, acc_v, inside, DIM, BLOCK)
        _store_all(d_chance_k, row * (GROUPS * CODES), acc_codes, inside, GROUPS, CODES, WIDTH)
    else:
        part = (place * ROWS + tl.arange(0, ROWS)) * COLUMNS
        _store(parts, part, acc_k * plain_scale, inside, DIM, BLOCK)
        _store(parts + DIM, part, acc_v, inside, DIM, BLOCK)
        _store_all(parts + 2 * DIM, part, acc_codes, inside, GROUPS, CODES, WIDTH)


@triton.jit(do_not_specialize=["size"])
def _add_parts(
    dk, dv, d_chance_k, parts, tiles, rows, size,
    GROUPS: tl.constexpr, CODES: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Add the parts of a tile of rows, if it has parts: dk, dv, or the chances of a group."""
    COLUMNS: tl.constexpr = 2 * DIM + GROUPS * CODES
    tile, what = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count = tl.load(tiles + tile * 2), tl.load(tiles + tile * 2 + 1)
    j = tile * ROWS + tl.arange(0, ROWS)
    inside = j < tl.where(count > 0, size, 0)
    row = tl.load(rows + j, mask=inside, other=0).to(tl.int64)
    place = (first * ROWS + tl.arange(0, ROWS)) * COLUMNS
    if what < 2:
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for part in tl.range(0, count):
            total += _rows(parts + what * DIM, place + part * (ROWS * COLUMNS), inside, DIM, BLOCK)
        if what == 0:
            _store(dk, row * DIM, total, inside, DIM, BLOCK)
        else:
            _store(dv, row * DIM, total, inside, DIM, BLOCK)
    else:
        group = (what - 2) * CODES
        chances = tl.zeros([ROWS, WIDTH], tl.float32)
        for part in tl.range(0, count):
            chances += _rows(parts + 2 * DIM + group, place + part * (ROWS * COLUMNS), inside, CODES, WIDTH)
        _store(d_chance_k + group, row * (GROUPS * CODES), chances, inside, CODES, WIDTH)


def tile(kernel: str, dtype: torch.dtype, dim: int, codes: int) -> tuple[int, int]:
    """Return the sizes of a kernel's tile: lookups and query heads, and rows; both are powers of two."""
    return SMALL if dtype == torch.float32 or dim > 128 or codes > 16 else TILES[kernel][dim > 64]


class Work(NamedTuple):
    """The programs that sum over lookups.

    Attributes:
        programs: (n, 4) int64: tile of rows, first lookup, last lookup + 1, and place in the sums of parts. The place is
            -1 if the tile has one program only, and -2 if the program has no work.
        tiles: (m, 2) int64 for each tile, the place of its first part and the number of its parts; 0 if it has no parts.
        parts: number of places.
    """

    programs: Tensor
    tiles: Tensor
    parts: int


def work(read: Lists, rows: int) -> Work:
    """Return the programs for tiles of `rows` rows. A program sums over at most `PART` lookups.

    The numbers of programs and of places are upper bounds, which the host knows: a lookup reads `reach` rows, in a few
    tiles, and a tile with several programs has at most two for each `PART` lookups.
    """
    edges = torch.arange(0, len(read.rows), rows, dtype=read.end.dtype, device=read.begin.device)
    tiles = min(len(edges), (read.reach + rows - 2) // rows + 1)
    most = len(read.index) * tiles // PART
    low = torch.searchsorted(read.end, edges, right=True)  # the first lookup that ends after the tile's first row
    high = torch.searchsorted(read.begin, edges + rows)  # the first lookup that begins after the tile
    numbers = ((high - low + PART - 1) // PART).clamp_min(1)
    stops, parts = numbers.cumsum(0), torch.where(numbers > 1, numbers, 0)
    starts, places = stops - numbers, parts.cumsum(0) - parts
    program = torch.arange(len(edges) + most, device=edges.device)
    tile = torch.searchsorted(stops, program, right=True)
    is_used, tile = tile < len(edges), tile.clamp_max(len(edges) - 1)
    part = program - starts[tile]
    first = torch.where(is_used, low[tile] + part * PART, 0)
    last = torch.where(is_used, torch.minimum(first + PART, high[tile]), 0)
    place = torch.where(is_used, torch.where(parts[tile] > 0, places[tile] + part, -1), -2)
    return Work(torch.stack([tile, first, last, place], 1), torch.stack([places, parts], 1), 2 * most)


@dataclass(frozen=True)
class Call:
    """A call of the kernels.

    Attributes:
        inputs: tensors with stride 1 in the last dimension; the chances are contiguous and fp32.
        read: the lookups that are computed.
        probes: P.
        scale, code_scores: see `hashed_attention`.
        floor: smaller chances are raised to this number; see `FLOOR`.
    """

    inputs: Inputs
    read: Lists
    probes: int
    scale: float
    code_scores: bool
    floor: float

    def arguments(self) -> tuple[Tensor | int, ...]:
        """Return the arguments for inputs and lists that all kernels take."""
        q, k, v, chance_q, chance_k = self.inputs
        return q, *q.stride()[:2], k, k.stride(0), v, v.stride(0), chance_q, chance_k, *self.read[:4]

    def options(self, kernel: str) -> dict[str, Any]:
        """Return the constants of a kernel and its launch options."""
        (_, group, dim), (_, groups, codes) = self.inputs.q.shape, self.inputs.chance_q.shape
        lookups, rows = tile(kernel, self.inputs.q.dtype, dim, codes)
        products, chances = PRECISIONS[self.inputs.q.dtype == torch.float32]
        return {
            "GROUP": group, "PROBES": self.probes, "GROUPS": groups, "CODES": codes, "WIDTH": block_dim(codes),
            "SCORES": self.code_scores, "DIM": dim, "BLOCK": block_dim(dim), "PRECISION": products,
            "CHANCES": chances, "LOOKUPS": lookups, "ROWS": rows, "num_stages": 1,
            "num_warps": 2 if (lookups, rows) == (32, 32) else 4,
        }  # fmt: skip


def forward(call: Call, results: Sequence[Tensor]) -> None:
    """Write the results of the listed lookups into `results`: out, lse, match and chance, flat over lookups."""
    options = call.options("forward")
    count = len(call.read.index) * call.inputs.q.shape[1]
    if count:
        with kernels.on(call.inputs.q.device):
            _forward[(triton.cdiv(count, options["LOOKUPS"]),)](
                *results, *call.arguments(), count, call.scale * LOG2E.value, call.floor, **options
            )


class Numbers(NamedTuple):
    """The numbers of each lookup and query head that gradients need; or of each query, which all its lookups share."""

    delta: Tensor  # do.out
    lse: Tensor
    chance: Tensor  # without query heads, as d_chance
    d_match: Tensor
    d_chance: Tensor
    d_out: Tensor


def backward(call: Call, numbers: Numbers, merged: int, padded: bool) -> tuple[Tensor, ...]:
    """Return the gradients of k, v and chance_k, and of q and chance_q for each lookup and query head.

    Args:
        merged: number of lookups that share their `Numbers`: 1 or P.
        padded: whether some tokens are not listed. They get gradients of 0 for k, v and chance_k, and for each lookup.
    """
    q, k, v, chance_q, chance_k = call.inputs
    new, (group, dim), size = torch.zeros if padded else torch.empty, q.shape[1:], len(q) * call.probes * q.shape[1]
    float32 = {"dtype": torch.float32, "device": q.device}
    dq = new(size, dim, dtype=q.dtype if call.probes == 1 else torch.float32, device=q.device)
    d_chance_q = new(size, *chance_q.shape[1:], **float32)
    dk, dv, d_chance_k = (new(x.shape, dtype=x.dtype, device=x.device) for x in (k, v, chance_k))
    count, of_rows = len(call.read.index) * group, len(call.read.rows)
    if not (count and of_rows):
        return tuple(x.zero_() for x in (dq, dk, dv, d_chance_q, d_chance_k))
    common = *numbers, *call.arguments()
    scales = call.scale * LOG2E.value, call.scale, call.floor
    with kernels.on(q.device):
        options = call.options("over rows")
        _over_rows[(triton.cdiv(count, options["LOOKUPS"]),)](
            dq, d_chance_q, *common, count, *scales, MERGED=merged, **options
        )
        options = call.options("over lookups")
        todo, columns = work(call.read, options["ROWS"]), 2 * dim + chance_k.shape[1:].numel()
        parts = torch.empty(todo.parts, options["ROWS"], columns, **float32)
        _over_lookups[(len(todo.programs),)](
            dk, dv, d_chance_k, parts, todo.programs, *common, of_rows, *scales, MERGED=merged, **options
        )
        if todo.parts:
            sizes = {name: options[name] for name in ("GROUPS", "CODES", "WIDTH", "DIM", "BLOCK", "ROWS")}
            _add_parts[(len(todo.tiles), 2 + options["GROUPS"])](
                dk, dv, d_chance_k, parts, todo.tiles, call.read.rows, of_rows, **sizes
            )
    return dq, dk, dv, d_chance_q, d_chance_k
