"""Triton kernels of hashed attention over tokens: codes and chances, sorted lists, and the merge of lookups.

They read each tensor once. With `kernels.py`, they compute a call of one rank without a wait of the host, because the
host knows the sizes of all tensors from the numbers of tokens.

Shape letters: B batch, N tokens, K kv heads, R = B N K rows, g query heads for each kv head, D head dim, G groups of M
codes, P lookups for each query, E entries (rows and lookups), L latest rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dilated import kernels
from lightning_dilated.ext.hashed.kernels import Lists, _rows, _store
from lightning_dilated.kernels.tiles import block_dim

#: tokens or rows of a program with up to 64 columns, and entries of a program without columns
TOKENS, ENTRIES = 64, 1024


@triton.jit(do_not_specialize=["tokens"])
def _codes(
    chance, keys, sums, z, documents, counted, tokens, limit, largest,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, CODES: tl.constexpr, WIDTH: tl.constexpr, KINDS: tl.constexpr,
    FIRST: tl.constexpr, PROBES: tl.constexpr, SOFT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the chances of a tile of tokens, their sum over counted tokens, and the keys of PROBES codes.

    `order.codes` defines the codes, and `order.keys` the keys.
    """
    sample, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    n = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = n < tokens
    place = sample * tokens + n
    document = tl.load(documents + place, mask=there, other=-1)
    counts = tl.load(counted + place, mask=there, other=0) != 0
    real, row = document >= 0, place * HEADS + head
    column = tl.arange(0, WIDTH)
    sums += ((sample * tl.num_programs(0) + tl.program_id(0)) * HEADS + head) * (GROUPS * CODES)
    code = tl.zeros([TOKENS], tl.int64)
    changes = ()
    margins = ()
    for g in tl.static_range(GROUPS):
        x = _rows(z + g * CODES, row * (GROUPS * CODES), real, CODES, WIDTH).to(tl.float32)
        x = tl.where((column < CODES)[None, :], x, float("-inf"))
        top = tl.max(x, 1)
        weight = tl.exp(x - top[:, None])
        share = weight / tl.sum(weight, 1)[:, None]
        _store(chance + g * CODES, row * (GROUPS * CODES), share, there, CODES, WIDTH)
        tl.store(sums + g * CODES + column, tl.sum(tl.where(counts[:, None], share, 0.0), 0), mask=column < CODES)
        first = tl.minimum(tl.argmax(x, 1), CODES - 1)
        code += first.to(tl.int64) * CODES**g
        if PROBES > 1:
            without = tl.where(column[None, :] == first[:, None], float("-inf"), x)
            second = tl.minimum(tl.argmax(without, 1), CODES - 1)
            second = tl.where(second == first, 1, second)  # only index 0 can occur twice, if all other logits are -inf
            margins = margins + (tl.minimum(top - tl.max(without, 1), 3.4028234663852886e38),)  # noqa: RUF005
            changes = changes + ((second - first).to(tl.int64) * CODES**g,)  # noqa: RUF005
    if SOFT:
        code = tl.zeros([TOKENS], tl.int64)
    base = (document * HEADS + head) * limit
    keys += row * KINDS + FIRST
    tl.store(keys, tl.where(real, base + code, largest).to(keys.dtype.element_ty), mask=there)
    for p in tl.static_range(PROBES - 1):
        least, change, group = margins[0], changes[0], tl.zeros([TOKENS], tl.int32)
        for g in tl.static_range(1, GROUPS):
            is_less = margins[g] < least
            least, change = tl.where(is_less, margins[g], least), tl.where(is_less, changes[g], change)
            group = tl.where(is_less, g, group)
        tl.store(keys + 1 + p, tl.where(real, base + code + change, largest).to(keys.dtype.element_ty), mask=there)
        later = ()
        for g in tl.static_range(GROUPS):
            later = later + (tl.where(group == g, float("inf"), margins[g]),)  # noqa: RUF005
        margins = later


@triton.jit
def _entries(entry, i, there, earlier, OWN: tl.constexpr, KINDS: tl.constexpr):
    """Load entries; return whether each is a row, the index of the row, and the index of the lookup; see `listed`."""
    which = tl.load(entry + i, mask=there, other=0)
    is_earlier = which < earlier
    of_token = tl.maximum(which - earlier, 0)
    token, kind = of_token // KINDS, of_token % KINDS
    is_row = is_earlier | (kind < OWN)
    return is_row, tl.where(is_earlier, which, earlier + token), token * (KINDS - OWN) + kind - OWN


@triton.jit(do_not_specialize=["size", "earlier"])
def _split(
    rows, row_keys, index, keys, entry, rows_before, size, earlier,
    OWN: tl.constexpr, KINDS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Write the rows, their keys, and the lookups of a sorted list; `rows_before` includes the entry itself."""
    i = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    there = i < size
    before = tl.load(rows_before + i, mask=there, other=1)
    is_row, row, lookup = _entries(entry, i, there, earlier, OWN, KINDS)
    tl.store(rows + before - 1, row.to(rows.dtype.element_ty), mask=there & is_row)
    tl.store(row_keys + before - 1, tl.load(keys + i, mask=there, other=0), mask=there & is_row)
    tl.store(index + i - before, lookup.to(index.dtype.element_ty), mask=there & ~is_row)


@triton.jit(do_not_specialize=["size", "earlier", "reach"])
def _ranges(
    begin, end, reads, row_keys, keys, entry, rows_before, size, earlier, reach,
    OWN: tl.constexpr, KINDS: tl.constexpr, STEPS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Write the range of rows that each lookup reads, in sorted order, and the number of rows, by lookup."""
    i = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    there = i < size
    is_row, _, lookup = _entries(entry, i, there, earlier, OWN, KINDS)
    there = there & ~is_row
    stop = tl.load(rows_before + i, mask=there, other=0)
    key = tl.load(keys + i, mask=there, other=0)
    low = tl.maximum(stop - reach, 0)
    high = stop
    for _ in tl.static_range(STEPS):  # search the first of the latest rows with the key
        middle = (low + high) // 2
        is_less = tl.load(row_keys + middle, mask=there & (low < high), other=0) < key
        is_open = low < high
        high = tl.where(is_open & ~is_less, middle, high)
        low = tl.where(is_open & is_less, middle + 1, low)
    tl.store(begin + i - stop, low, mask=there)
    tl.store(end + i - stop, stop, mask=there)
    tl.store(reads + lookup, stop - low, mask=there)


@triton.jit(do_not_specialize=["size"])
def _merge(
    out, agree, contrast, lse, chance, rows, read_out, read_lse, read_match, read_chance, reads, null, documents, counted,
    size, HEADS: tl.constexpr, GROUP: tl.constexpr, PROBES: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Merge the lookups of a tile of rows and query heads with the null key; see `merge_lookups`."""
    i = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there = i < size
    row, head = i // GROUP, i % GROUP
    token = row // HEADS
    real = there & (tl.load(documents + token, mask=there, other=-1) >= 0)
    counts = tl.load(counted + token, mask=real, other=0) != 0
    score = tl.load(null + row % HEADS * GROUP + head, mask=there, other=0.0).to(tl.float32)
    most, most_chance = score, tl.full([TOKENS], float("-inf"), tl.float32)
    for p in tl.static_range(PROBES):
        lookup = row * PROBES + p
        most = tl.maximum(most, tl.load(read_lse + lookup * GROUP + head, mask=real, other=float("-inf")))
        most_chance = tl.maximum(most_chance, tl.load(read_chance + lookup, mask=real, other=float("-inf")))
    is_empty = most_chance == float("-inf")
    most_chance = tl.where(is_empty, 0.0, most_chance)
    total, total_chance = tl.exp(score - most), tl.zeros([TOKENS], tl.float32)
    weights, match = tl.zeros([TOKENS], tl.float32), tl.zeros([TOKENS], tl.float32)
    number = tl.zeros([TOKENS], tl.int64)
    acc = tl.zeros([TOKENS, BLOCK], tl.float32)
    for p in tl.static_range(PROBES):
        lookup = row * PROBES + p
        at = lookup * GROUP + head
        weight = tl.exp(tl.load(read_lse + at, mask=real, other=float("-inf")) - most)
        weights += weight
        match += weight * tl.load(read_match + at, mask=real, other=0.0)
        total_chance += tl.exp(tl.load(read_chance + lookup, mask=real, other=float("-inf")) - most_chance)
        number += tl.load(reads + lookup, mask=real, other=0)
        acc += weight[:, None] * _rows(read_out, at * DIM, real, DIM, BLOCK).to(tl.float32)
    total += weights
    log_chance = tl.where(is_empty, 0.0, most_chance + tl.log(total_chance))
    match = match / total
    _store(out, i * DIM, acc / total[:, None], there, DIM, BLOCK)
    tl.store(agree + i, tl.where(counts, -match, 0.0), mask=there)
    tl.store(contrast + i, tl.where(counts, weights / total * log_chance - match, 0.0), mask=there)
    tl.store(lse + i, most + tl.log(total), mask=there)
    tl.store(chance + row, log_chance, mask=there & (head == 0))
    tl.store(rows + row, number, mask=there & (head == 0))


@triton.jit(do_not_specialize=["size"])
def _split_gradients(
    delta, d_match, d_chance, d_null, d_out, d_agree, d_contrast, out, lse, null, documents, counted, size,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the numbers of a tile of rows that the lookups' gradients need (see `Numbers`), and terms of d null."""
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there = row < size
    token = row // HEADS
    real = there & (tl.load(documents + token, mask=there, other=-1) >= 0)
    counts = real & (tl.load(counted + token, mask=there, other=0) != 0)
    of_chance = tl.zeros([TOKENS], tl.float32)
    for head in tl.static_range(GROUP):
        at = row * GROUP + head
        do = _rows(d_out, at * DIM, real, DIM, BLOCK).to(tl.float32)
        product = tl.sum(do * _rows(out, at * DIM, real, DIM, BLOCK).to(tl.float32), 1)
        score = tl.load(null + row % HEADS * GROUP + head, mask=there, other=0.0).to(tl.float32)
        weight = tl.exp(score - tl.load(lse + at, mask=there, other=0.0))
        change = tl.load(d_contrast + at, mask=counts, other=0.0)
        tl.store(delta + at, product, mask=there)
        tl.store(d_match + at, -change - tl.load(d_agree + at, mask=counts, other=0.0), mask=there)
        tl.store(d_null + at, -weight * product, mask=there)
        of_chance += (1 - weight) * change
    tl.store(d_chance + row, of_chance, mask=there)


@triton.jit(do_not_specialize=["size"])
def _add_lookups(
    dq, parts, documents, size,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PROBES: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Add the gradients that a query gets from its lookups."""
    i = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there = i < size
    row, head = i // GROUP, i % GROUP
    real = there & (tl.load(documents + row // HEADS, mask=there, other=-1) >= 0)
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for p in tl.static_range(PROBES):
        total += _rows(parts, ((row * PROBES + p) * GROUP + head) * DIM, real, DIM, BLOCK).to(tl.float32)
    _store(dq, i * DIM, total, there, DIM, BLOCK)


@triton.jit(do_not_specialize=["size", "tokens"])
def _of_logits(
    dz, parts, chance, d_sums, documents, counted, size, tokens,
    HEADS: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, CODES: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of logits: add PARTS gradients of chances and the sums' gradient, through the softmax."""
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there = row < size
    token = row // HEADS
    real = there & (tl.load(documents + token, mask=there, other=-1) >= 0)
    counts = real & (tl.load(counted + token, mask=there, other=0) != 0)
    of_sums = (token // tokens * HEADS + row % HEADS) * (GROUPS * CODES)
    for g in tl.static_range(GROUPS):
        share = _rows(chance + g * CODES, row * (GROUPS * CODES), real, CODES, WIDTH)
        change = _rows(d_sums + g * CODES, of_sums, counts, CODES, WIDTH)
        for part in tl.static_range(PARTS):
            change += _rows(parts + g * CODES, (row * PARTS + part) * (GROUPS * CODES), real, CODES, WIDTH)
        change = share * (change - tl.sum(share * change, 1)[:, None])
        _store(dz + g * CODES, row * (GROUPS * CODES), change, there, CODES, WIDTH)


class Logits(NamedTuple):
    """Sizes of logits: B, N, K, G, M."""

    batch: int
    tokens: int
    heads: int
    groups: int
    codes: int

    @property
    def rows(self) -> int:
        return self.batch * self.tokens * self.heads

    def options(self) -> dict[str, int]:
        """Return the constants that the kernels of logits take."""
        return {"HEADS": self.heads, "GROUPS": self.groups, "CODES": self.codes, "WIDTH": block_dim(self.codes)}


class Coded(NamedTuple):
    """The chances (R, G, M) of queries and keys, their sums (2, B, K G M), and the keys (E,) of rows and lookups."""

    chance_q: Tensor
    chance_k: Tensor
    sums: Tensor
    keys: Tensor


def code(
    z_q: Tensor, z_k: Tensor, documents: Tensor, counted: Tensor, probes: int, soft: bool, limit: int, largest: int
) -> Coded:
    """Return the chances and keys of contiguous logits (B, N, K, G, M); `limit`, `largest`: see `order.keys`.

    The sums are over tokens of a document for keys, and over `counted` tokens for queries.
    """
    sizes, new = Logits(*z_q.shape), torch.empty
    blocks = triton.cdiv(sizes.tokens, TOKENS)
    keys = new(sizes.rows * (1 + probes), dtype=torch.int32 if largest < 2**31 else torch.int64, device=z_q.device)
    shape = sizes.rows, sizes.groups, sizes.codes
    chances = [new(shape, dtype=torch.float32, device=z_q.device) for _ in range(2)]
    parts = new(2, sizes.batch, blocks, z_q.shape[2:].numel(), dtype=torch.float32, device=z_q.device)
    real = documents >= 0
    if sizes.rows:
        with kernels.on(z_q.device):
            pairs = (z_k, chances[1], parts[0], real, 0, 1), (z_q, chances[0], parts[1], counted, 1, probes)
            for z, chance, sums, tokens, first, count in pairs:
                _codes[(blocks, sizes.batch, sizes.heads)](
                    chance, keys, sums, z, documents, tokens.view(torch.uint8), sizes.tokens, limit, largest,
                    **sizes.options(), KINDS=1 + probes, FIRST=first, PROBES=count, SOFT=soft, TOKENS=TOKENS,
                )  # fmt: skip
    return Coded(*chances, parts.sum(2), keys)


def listed(
    keys: Tensor, entry: Tensor, probes: int, earlier: int, own: bool, reach: int, number: int
) -> tuple[Lists, Tensor]:
    """Return the lists of sorted entries, and how many rows each of `number` lookups reads.

    A lookup that is not listed gets no number.

    Args:
        keys, entry: (E,), the keys in sorted order and the index of each entry. The first `earlier` indices are rows.
            The indices after them are each token's row, if `own`, and its P lookups.
    """
    kinds, size = own + probes, len(entry)
    is_row = entry < earlier if earlier or not own else entry % kinds == 0
    if own and earlier:
        is_row |= (entry - earlier) % kinds == 0
    before = is_row.cumsum(0, dtype=torch.int32)
    tokens = (size - earlier) // kinds
    rows, lookups = earlier + tokens * own, tokens * probes
    whole = torch.int32 if earlier + number < 2**31 else torch.int64
    new = lambda n, dtype=torch.int32: torch.empty(n, dtype=dtype, device=keys.device)  # noqa: E731
    row, index, row_keys = new(rows, whole), new(lookups, whole), new(rows, keys.dtype)
    begin, end, reads = new(lookups), new(lookups), new(number)
    if size:
        with kernels.on(keys.device):
            grid, common = (triton.cdiv(size, ENTRIES),), (keys, entry, before, size, earlier)
            options = {"OWN": int(own), "KINDS": kinds, "ENTRIES": ENTRIES}
            _split[grid](row, row_keys, index, *common, **options)
            _ranges[grid](begin, end, reads, row_keys, *common, reach, STEPS=reach.bit_length(), **options)
    return Lists(index, begin, end, row, reach), reads
