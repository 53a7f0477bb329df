"""Decode one new token of each sample in two launches: store its rows in a cache, and attend to rows of all branches.

A slot contains rows 0, 1, ... of the current segment, in order. The query heads of one kv head and one residue of a
branch share a slot. A token at position p has the index (p + shift) mod width in its segment. It uses only the slots of
its residue, index mod rate. Its row is index div rate, minus the rows that a shift cuts off the first segment. Each
program has one sample, one branch, the n-th slot of the token's residue and a share of the slot's rows, and exits if it
has no rows. Therefore the grid and the tables do not depend on positions, and a CUDA graph can replay both launches.
Shape letters: B batch, H query heads, K kv heads, D head dim, R rows of a sample's cache.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dilated.kernels.rows import flags
from lightning_dilated.kernels.tiles import LOG2E, block_dim, precision

#: limits for one step of a loop: rows that a program reads, bytes of these rows' keys, results that the merge reads
KEYS, TILE, ENTRIES = 64, 1 << 14, 64
#: largest head dim, because a row must fit into registers
MOST_DIM = 256
#: minimum number of rows of a program, by batch size; a small batch needs more programs to keep the GPU busy
SHARE = {1: 128, 2: 128, 4: 256, 8: 256}
MOST_SHARE = 512
#: maximum number of programs of a slot, unless a program would then read more than WIDE rows
PROGRAMS, WIDE = 256, 2048
#: minimum number of rows of a program for which loads are pipelined
DEEP = 512


class Slot(NamedTuple):
    """The description of one slot in integers.

    The slots of a branch are consecutive, ordered by residue.

    Attributes:
        branch: index of the branch.
        width: segment length; for one segment over the whole sequence, any number above all positions.
        window: number of rows in a window's ring buffer; `NO_WINDOW` for a segment; -x: keep the first x rows.
        skipped: number of rows that a shift cuts off the first segment.
        base: first of the slot's `capacity` rows in the cache.
        heads: the query heads that use the slot.
    """

    branch: int
    width: int
    rate: int
    shift: int
    window: int
    residue: int
    skipped: int
    base: int
    capacity: int
    kv_head: int
    heads: tuple[int, ...]


#: `window` of a branch that is not a window
NO_WINDOW = 2**31 - 1
#: columns of the tables. Branches: width, rate, shift, first row of the lookup, its rows, window. Slots: residue,
#: skipped, base, kv head, programs, first part, first user, users. Entries: width, rate, shift, residue, first part,
#: step, parts
BRANCH, SLOT, ENTRY = 6, 8, 7
#: largest rate of a branch with a lookup by residue; with larger rates, each slot counts as a branch
LOOKUP = 4096


@dataclass(frozen=True)
class Launch:
    """The tables of both launches.

    Attributes:
        programs: (programs, 3) int32: branch, index among the residue's slots, share.
        branches: (branches, BRANCH) int64.
        lookup: (rows, 2) int32, by branch and residue: first slot, number of slots.
        slots: (slots, SLOT) int64.
        users: int32, the query heads of all slots, in the order of slots.
        entries: (entries, ENTRY) int64, the slots of each query head, in the order of heads.
        starts: (H + 1,) int32, the first entry of each head.
        parts: number of results of a sample: one for each slot, share and query head.
        group: largest number of query heads of a slot.
        deep: whether a program may read `DEEP` rows or more.
    """

    programs: Tensor
    branches: Tensor
    lookup: Tensor
    slots: Tensor
    users: Tensor
    entries: Tensor
    starts: Tensor
    parts: int
    group: int
    deep: bool


def shares(capacity: int, batch: int) -> int:
    """Return the number of programs that share the rows of a slot."""
    rows = SHARE.get(1 << (batch - 1).bit_length(), MOST_SHARE)
    return max(1, min(-(-capacity // rows), max(PROGRAMS, -(-capacity // WIDE))))


def _branches(slots: tuple[Slot, ...]) -> list[list[int]]:
    """Return lists of the indices of slots that share a lookup."""
    groups: dict[tuple[int, int], list[int]] = {}
    for number, slot in enumerate(slots):
        groups.setdefault((slot.branch, number if slot.rate > LOOKUP else -1), []).append(number)
    return list(groups.values())


@functools.lru_cache(maxsize=64)
def launch(slots: tuple[Slot, ...], heads: int, batch: int, device: torch.device) -> Launch:
    """Return the tables for the slots of a cache and H query heads."""
    programs: list[tuple[int, ...]] = []
    branches: list[tuple[int, ...]] = []
    lookup: list[tuple[int, int]] = []
    for numbers in _branches(slots):
        first = slots[numbers[0]]
        lanes = Counter(slots[i].residue for i in numbers)
        each, rows = range(shares(first.capacity, batch)), first.rate if first.rate <= LOOKUP else 1
        programs += [(len(branches), i, share) for i in range(max(lanes.values())) for share in each]
        branches.append((first.width, first.rate, first.shift, len(lookup), rows, first.window))
        begin = {slots[i].residue: i for i in reversed(numbers)}
        residues = range(rows) if rows == first.rate else [first.residue]
        lookup += [(begin.get(residue, 0), lanes[residue]) for residue in residues]
    table: list[tuple[int, ...]] = []
    users: list[int] = []
    of_head: list[list[tuple[int, ...]]] = [[] for _ in range(heads)]
    parts = 0
    for slot in slots:
        count, size = shares(slot.capacity, batch), len(slot.heads)
        table.append((slot.residue, slot.skipped, slot.base, slot.kv_head, count, parts, len(users), size))
        users += slot.heads
        for i, head in enumerate(slot.heads):
            of_head[head].append((slot.width, slot.rate, slot.shift, slot.residue, parts + i, size, count))
        parts += count * size
    starts = [0, *itertools.accumulate(map(len, of_head))]

    def ints(rows: Sequence[object], columns: int = 1, kind: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(rows or [[0] * columns], dtype=kind).view(-1, columns).to(device)

    return Launch(
        ints(programs, 3), ints(branches, BRANCH, torch.int64), ints(lookup, 2), ints(table, SLOT, torch.int64),
        ints(users), ints([x for entries in of_head for x in entries], ENTRY, torch.int64), ints(starts), parts,
        max((len(slot.heads) for slot in slots), default=1),
        any(slot.capacity >= DEEP * shares(slot.capacity, batch) for slot in slots),
    )  # fmt: skip


def serves(q: Tensor) -> bool:
    """Return whether the kernels support q (B, H, D)."""
    return q.dtype in (torch.float16, torch.bfloat16, torch.float32) and q.shape[-1] <= MOST_DIM


@triton.jit
def _place(branch, position):
    """Return (whether a position is in the first segment, its row, its residue); `branch`: width, rate, shift, ..."""
    width, rate = tl.load(branch), tl.load(branch + 1)
    index = position + tl.load(branch + 2)
    segment = index // width
    index -= segment * width
    row = index // rate
    return segment == 0, row, index - row * rate


@triton.jit
def _rotated(x, head_stride, heads, column, cos, sin, ROTARY: tl.constexpr, DIM: tl.constexpr):
    """Return the rows of x, (heads, columns) fp32, rotated by a row of cosines and a row of sines."""
    inside = (column < DIM)[None, :]
    at = x + heads[:, None] * head_stride
    value = tl.load(at + column[None, :], mask=inside & (heads >= 0)[:, None], other=0.0).to(tl.float32)
    if ROTARY:
        half: tl.constexpr = DIM // 2
        other = tl.where(column < half, column + half, column - half)
        partner = tl.load(at + other[None, :], mask=inside & (heads >= 0)[:, None], other=0.0).to(tl.float32)
        partner = tl.where((column < half)[None, :], -partner, partner)
        value = value * cos[None, :] + partner * sin[None, :]
    return value


@triton.jit
def _attend(
    part, part_lse, parts,
    q, q_sb, q_sh, k, k_sb, k_sh, v, v_sb, v_sh, rows_k, rows_v, rows_sb,
    positions, cos, sin, factor, table_sb, unrotated, programs, branches, lookup, slots, users, scale,
    ROTARY: tl.constexpr, XPOS: tl.constexpr, UNROTATED: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    sample, program = tl.program_id(1).to(tl.int64), programs + 3 * tl.program_id(0)
    branch = branches + tl.load(program).to(tl.int64) * 6
    which, share = tl.load(program + 1), tl.load(program + 2)
    in_first, row, residue = _place(branch, tl.load(positions + sample))
    lookup_row = lookup + (tl.load(branch + 3) + residue % tl.load(branch + 4)) * 2
    slot = slots + (tl.load(lookup_row) + which).to(tl.int64) * 8
    used = which < tl.load(lookup_row + 1)
    used = used & (tl.load(slot, mask=used, other=-1) == residue)
    count, size = tl.load(slot + 4, mask=used, other=1).to(tl.int32), tl.load(slot + 7, mask=used, other=0).to(tl.int32)
    row = row - tl.where(in_first, tl.load(slot + 1, mask=used, other=0), 0)
    window = tl.load(branch + 5)
    room = tl.abs(window)
    rows = tl.minimum(row + 1, room).to(tl.int32)
    # in a window, the new row replaces the oldest row; rows after the global tokens are not kept (-1)
    row = tl.where(window > 0, row % room, tl.where(row < room, row, -1)).to(tl.int32)
    each = tl.cdiv(tl.cdiv(rows, KEYS), count) * KEYS
    begin = share * each
    end = tl.minimum(begin + each, rows)
    g, column, j = tl.arange(0, GROUP), tl.arange(0, BLOCK), tl.arange(0, KEYS)
    inside = column < DIM
    to = sample * parts + tl.load(slot + 5, mask=used, other=0) + share * size + g
    if used & (begin < end):
        kv = tl.load(slot + 3)
        cosine = tl.zeros([BLOCK], tl.float32)
        sine = tl.zeros([BLOCK], tl.float32)
        grown = tl.full([BLOCK], 1.0, tl.float32)
        if ROTARY:
            half: tl.constexpr = DIM // 2
            angle = sample * table_sb + tl.where(column < half, column, column - half)
            cosine = tl.load(cos + angle, mask=inside, other=0.0)
            sine = tl.load(sin + angle, mask=inside, other=0.0)
            if XPOS:
                grown = tl.load(factor + angle, mask=inside, other=1.0)
            if UNROTATED:
                same = tl.load(unrotated + kv) != 0
                cosine, sine = tl.where(same, 1.0, cosine), tl.where(same, 0.0, sine)
                grown = tl.where(same, 1.0, grown)
        # rows of the block without a query head have the index -1
        heads = tl.load(users + tl.load(slot + 6) + g, mask=g < size, other=-1)
        query = _rotated(q + sample * q_sb, q_sh, heads, column, cosine * grown, sine * grown, ROTARY, DIM)
        query = query.to(rows_k.dtype.element_ty)
        one = tl.full([1], 0, tl.int32) + kv.to(tl.int32)
        new_key = _rotated(k + sample * k_sb, k_sh, one, column, cosine / grown, sine / grown, ROTARY, DIM)
        new_key = new_key.to(rows_k.dtype.element_ty)
        new_value = tl.load(v + sample * v_sb + kv * v_sh + column, mask=inside, other=0.0)[None, :]
        cache = sample * rows_sb + tl.load(slot + 2) * DIM
        if (begin <= row) & (row < end):
            last = cache + row.to(tl.int64) * DIM + column[None, :]
            tl.store(rows_k + last, new_key, mask=inside[None, :])
            tl.store(rows_v + last, new_value, mask=inside[None, :])
        acc = tl.zeros([GROUP, BLOCK], tl.float32)
        most = tl.full([GROUP], float("-inf"), tl.float32)
        total = tl.zeros([GROUP], tl.float32)
        for start in tl.range(begin, end, KEYS, num_stages=STAGES):
            number = start + j
            at = cache + number.to(tl.int64)[:, None] * DIM + column[None, :]
            stored = ((number < end) & (number != row))[:, None]
            if DIM != BLOCK:
                stored = stored & inside[None, :]
            key = tl.load(rows_k + at, mask=stored, other=0.0)
            value = tl.load(rows_v + at, mask=stored, other=0.0)
            key = tl.where((number == row)[:, None], new_key, key)
            value = tl.where((number == row)[:, None], new_value, value)
            if GROUP == 1:
                score = tl.sum(key.to(tl.float32) * query.to(tl.float32), 1)[None, :] * scale
            else:
                score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
            score = tl.where((number < end)[None, :], score, float("-inf"))
            top = tl.maximum(most, tl.max(score, 1))
            p = tl.exp2(score - top[:, None])
            rescale = tl.exp2(most - top)
            total = total * rescale + tl.sum(p, 1)
            if GROUP == 1:
                acc = acc * rescale[:, None] + tl.sum(tl.trans(p) * value.to(tl.float32), 0)[None, :]
            else:
                acc = tl.dot(p.to(value.dtype), value, acc * rescale[:, None], input_precision=PRECISION)
            most = top
        mask = (g < size)[:, None] & inside[None, :]
        tl.store(part + to[:, None] * DIM + column[None, :], acc / total[:, None], mask=mask)
        tl.store(part_lse + to, most + tl.log2(total), mask=g < size)
    else:
        tl.store(part_lse + to, tl.full([GROUP], float("-inf"), tl.float32), mask=g < size)


@triton.jit
def _merge(
    out, out_sb, out_sh, part, part_lse, parts, positions, entries, starts,
    ENTRIES: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column, i = tl.arange(0, BLOCK), tl.arange(0, ENTRIES)
    inside = column < DIM
    position = tl.load(positions + sample)
    acc = tl.zeros([BLOCK], tl.float32)
    most = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for e in range(tl.load(starts + head), tl.load(starts + head + 1)):
        entry = entries + e * 7
        _, _, residue = _place(entry, position)
        first, step, count = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6).to(tl.int32)
        count = tl.where(residue == tl.load(entry + 3), count, 0)  # other residues' parts hold old results
        for start in tl.range(0, count, ENTRIES):
            at = sample * parts + first + (start + i) * step
            lse = tl.load(part_lse + at, mask=start + i < count, other=float("-inf"))
            value = tl.load(
                part + at[:, None] * DIM + column[None, :],
                mask=(lse > float("-inf"))[:, None] & inside[None, :],
                other=0.0,
            )
            top = tl.maximum(most, tl.max(lse, 0))
            finite = tl.where(top == float("-inf"), 0.0, top)
            weight, rescale = tl.exp2(lse - finite), tl.exp2(most - finite)
            acc = acc * rescale + tl.sum(value * weight[:, None], 0)
            total = total * rescale + tl.sum(weight, 0)
            most = top
    acc = acc / tl.where(total == 0, 1.0, total)
    tl.store(out + sample * out_sb + head * out_sh + column, acc.to(out.dtype.element_ty), mask=inside)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: tuple[Tensor, Tensor],
    positions: Tensor,
    tables: Launch,
    scale: float,
    table: tuple[Tensor, Tensor, Tensor | None] | None = None,
    unrotated: tuple[int, ...] = (),
) -> Tensor:
    """Store the new token of each sample in the cache; return its attention (B, H, D).

    Args:
        q: (B, H, D), unit stride along D.
        k, v: (B, K, D), unit stride along D, in q's dtype.
        rows: keys and values of the cache, (B, R, D) each, contiguous, in q's dtype; changed in place.
        positions: (B,) int64, the position of each sample's token.
        tables: the tables of the cache.
        scale: scale of the scores.
        table: rotary table for q and k: (cosines, sines, xPos scale or None), (B or 1, D/2) fp32; None: no rotation.
        unrotated: kv heads; their keys and queries are not rotated.
    """
    batch, heads, dim = q.shape
    block, group = block_dim(dim), 1 if tables.group == 1 else max(16, triton.next_power_of_2(tables.group))
    keys = min(KEYS, max(16, TILE // (block * q.element_size())))
    part = torch.empty(batch, tables.parts, dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(batch, tables.parts, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, heads, dim, dtype=q.dtype, device=q.device)
    cos, sin, factor = table or (part_lse, part_lse, None)
    stride = cos.stride(0) if table is not None and len(cos) > 1 else 0
    if tables.parts:
        _attend[(len(tables.programs), batch)](
            part, part_lse, tables.parts, q, *q.stride()[:2], k, *k.stride()[:2], v, *v.stride()[:2], *rows,
            rows[0].stride(0), positions, cos, sin, cos if factor is None else factor, stride,
            flags(unrotated, k.shape[1], k.device) if unrotated else cos, tables.programs, tables.branches,
            tables.lookup, tables.slots, tables.users, scale * LOG2E.value, ROTARY=table is not None,
            XPOS=factor is not None, UNROTATED=bool(unrotated), PRECISION=precision(q), GROUP=group, KEYS=keys,
            STAGES=3 if tables.deep else 1, DIM=dim, BLOCK=block, num_warps=4,
        )  # fmt: skip
    _merge[(heads, batch)](
        out, *out.stride()[:2], part, part_lse, tables.parts, positions, tables.entries, tables.starts, ENTRIES=ENTRIES,
        DIM=dim, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out
