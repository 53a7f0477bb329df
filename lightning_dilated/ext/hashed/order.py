"""Find, by sorting, which rows each lookup of hashed attention reads. This file computes only with integers.

Rows and lookups are sorted into one list of entries by document, kv head, code and position; a row comes before its own
token's lookups. A lookup reads the last L rows before it that have its code. So a block of T entries reads at most its
own rows and the L rows before the block, whatever the codes are.

Shape letters: B batch, N tokens, K kv heads, G groups of M codes, L latest rows, P lookups for each query, E entries
in blocks of T, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def codes(z: Tensor, probes: int = 1) -> Tensor:
    """Return the codes (..., P) int64 that logits (..., G, M) look up; `looked_up` in `oracle.py` defines them."""
    place = z.shape[-1] ** torch.arange(z.shape[-2], device=z.device)
    first = z.argmax(-1, keepdim=True)
    own = (first[..., 0] * place).sum(-1, keepdim=True)
    if probes == 1:
        return own
    second = z.scatter(-1, first, -torch.inf).argmax(-1, keepdim=True)
    second = torch.where(second == first, 1, second)  # only index 0 can occur twice, if all other logits are -inf
    change, looked_up = ((second - first)[..., 0] * place), [own]
    margin = (z.gather(-1, first) - z.gather(-1, second))[..., 0].clamp_max(torch.finfo(z.dtype).max)
    for _ in range(probes - 1):  # a sort of so few groups takes longer
        least = margin.argmin(-1, keepdim=True)
        looked_up.append(own + change.gather(-1, least))
        margin = margin.scatter(-1, least, torch.inf)
    return torch.cat(looked_up, -1)


@dataclass(frozen=True)
class Entries:
    """Rows and lookups, sorted by document, kv head, code and position; a row comes before its own token's lookups."""

    keys: Tensor  # (E,), the document, kv head and code in one number
    is_row: Tensor  # (E,)
    queries: Tensor  # (E,), the index of a lookup's query; for a row, the index of any query that is not padding
    lookups: Tensor  # (E,), the index of a lookup's results; `number` if the entry is a row
    rows: Tensor  # (R,), the index of each row
    number: int  # number of results


@dataclass(frozen=True)
class Order:
    """The sorted list of rows and lookups, filled up to whole blocks; see `Entries`."""

    tokens: Tensor  # (E,), the query of each entry; a lookup's query is its index // P
    lookups: Tensor  # (E,), the index of a lookup's results, such as its index in a flattened (B, N, K, P)
    begin: Tensor  # (E,), the index in `rows` of the first row that a lookup reads
    end: Tensor  # (E,), one more than the index of the last row that it reads; `begin` if it reads none
    rows: Tensor  # (R,), the token of each row, in sorted order
    first: Tensor  # (E / T,), the number of rows before each block
    reach: int  # L, or the length of the longest document if this is less
    block: int  # T

    def counts(self, number: int) -> Tensor:
        """Return the number of rows that each of `number` lookups reads."""
        counts = torch.zeros(number + 1, dtype=torch.int64, device=self.end.device)
        return counts.scatter(0, self.lookups, self.end - self.begin)[:-1]


#: numbers of documents and of codes that keys allow; smaller numbers may allow int32, which is sorted in half the time
LIMITS = 2**31, 2**31


def largest_key(documents: int, kv_heads: int, codes: int) -> int:
    """Return the key of padding, above all keys."""
    return min(documents * kv_heads * codes, 2**62)


def keys(codes: Tensor, documents: Tensor, limits: tuple[int, int] = LIMITS) -> Tensor:
    """Return the keys of codes (B, N, K, P); `documents` (B, N): the index of each token's document, -1 for padding."""
    kv_heads = codes.shape[2]
    largest = largest_key(limits[0], kv_heads, limits[1])
    head = documents[..., None] * kv_heads + torch.arange(kv_heads, device=documents.device)
    result = torch.where(
        documents[..., None, None] < 0, largest, head[..., None] * limits[1] + codes
    )  # padding is last
    return result.to(torch.int32 if largest < 2**31 else torch.int64)


def sort(keys: Tensor, real: int, before: Tensor | None = None) -> Entries:
    """Sort rows and lookups by their keys (B, N, K, 1 + P): the key of each token's row, and of its lookups.

    Indices of lookups refer to a flattened (B, N, K, P), and indices of rows to the rows before and a flattened
    (B, N, K).

    Args:
        real: number of tokens without padding.
        before: (S,), the keys of rows of earlier tokens, in the order of positions.
    """
    (*_, heads, kinds), earlier = keys.shape, 0 if before is None else len(before)
    number = keys.numel() // kinds * (kinds - 1)
    every = keys.flatten() if before is None else torch.cat([before, keys.flatten()])
    # a stable sort keeps equal keys in the order of positions, with a row before the lookups of its token
    size = real * heads * kinds + earlier if real else 0
    sorted_keys, entry = (x[:size] for x in every.sort(stable=True))
    entry = entry - earlier
    tokens, kind, is_before = entry // kinds, entry % kinds, entry < 0
    is_row = is_before | (kind == 0)
    rows = torch.where(is_before, entry, tokens) + earlier
    if size and earlier:
        tokens = torch.where(is_before, tokens.max(), tokens)
    lookups = torch.where(is_row, number, tokens * (kinds - 1) + kind - 1)
    return Entries(sorted_keys, is_row, tokens, lookups, rows[is_row], number)


def merge(entries: Entries, reach: int, block: int) -> Order:
    """Find the rows that each lookup reads: the last `reach` rows with its key."""
    keys, is_row, queries, lookups = entries.keys, entries.is_row, entries.queries, entries.lookups
    end = is_row.cumsum(0) - is_row.long()
    new_code = torch.ones_like(is_row)
    new_code[1:] = keys[1:] != keys[:-1]
    first_of_code = end[new_code.nonzero()[:, 0]][new_code.cumsum(0) - 1]
    begin = torch.where(is_row, end, torch.maximum(first_of_code, end - reach))
    if filler := -len(keys) % block:  # fill with a real token, because padding may contain any values
        queries, end = (torch.cat([x, x[-1:].expand(filler)]) for x in (queries, end))
        begin = torch.cat([begin, end[-filler:]])
        lookups = torch.cat([lookups, lookups.new_full((filler,), entries.number)])
    return Order(queries, lookups, begin, end, entries.rows, end[::block], reach, block)
