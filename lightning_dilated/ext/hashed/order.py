"""The order of hashed attention: which rows a lookup reads, found by sorting; integers only.

Rows and lookups are merged by (document, kv head, code, position, row before lookup). A lookup reads the L rows before
its place, or fewer if the rows of its code begin later. So a block of T merged entries reads at most the rows among
them and the L rows before them, for any codes.

Shape letters: B batch, N tokens, K kv heads, G groups of M codes, L latest rows, P lookups of a query, T entries of a
block, E entries, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def codes(z: Tensor, probes: int = 1) -> Tensor:
    """Return (..., P) int64, the codes that logits (..., G, M) look up; `looked_up` of the oracle defines them."""
    place = z.shape[-1] ** torch.arange(z.shape[-2], device=z.device)
    if probes == 1:
        return (z.argmax(-1) * place).sum(-1, keepdim=True)
    values, index = z.sort(dim=-1, descending=True, stable=True)
    own = (index[..., 0] * place).sum(-1, keepdim=True)
    least = (values[..., 0] - values[..., 1]).sort(dim=-1, stable=True).indices[..., : probes - 1]
    return torch.cat([own, own + ((index[..., 1] - index[..., 0]) * place).gather(-1, least)], -1)


@dataclass(frozen=True)
class Order:
    """Rows and lookups in merged order, in whole blocks; a token is a number in (B, N, K)."""

    tokens: Tensor  # (E,), the token of each entry
    lookups: Tensor  # (E,), the number of a lookup in (B, N, K, P); B N K P for a row, and behind the last entry
    begin: Tensor  # (E,), the first row that a lookup reads, in sorted order
    end: Tensor  # (E,), one past the last; `begin` for other entries
    rows: Tensor  # (R,), the token of each row, in sorted order
    first: Tensor  # (E / T,), rows before each block
    reach: int  # L, or the tokens of the longest document if they are fewer
    block: int  # T


def merge(row_codes: Tensor, lookup_codes: Tensor, documents: Tensor, real: int, reach: int, block: int) -> Order:
    """Sort rows (B, N, K, 1) and lookups (B, N, K, P) by code, below 2**31, in documents (B, N), -1 for padding.

    `real` is the number of tokens that are not padding; the `Order` has `reach` and `block`.
    """
    kv_heads, kinds = row_codes.shape[2], 1 + lookup_codes.shape[3]
    head = documents[..., None] * kv_heads + torch.arange(kv_heads, device=documents.device)
    keys = head[..., None] * 2**31 + torch.cat([row_codes, lookup_codes], -1)
    keys = torch.where(documents[..., None, None] < 0, 2**62, keys).flatten()  # padding comes last
    # stable: equal keys stay in the order of positions, a row before the lookups of its token
    keys, entry = (x[: real * kv_heads * kinds] for x in keys.sort(stable=True))
    tokens, is_row = entry // kinds, entry % kinds == 0
    end = is_row.cumsum(0) - is_row.long()
    new_code = torch.ones_like(is_row)
    new_code[1:] = keys[1:] != keys[:-1]
    # `end` never falls, so the largest is the latest new code's
    first_of_code = torch.where(new_code, end, 0).cummax(0).values
    begin = torch.where(is_row, end, torch.maximum(first_of_code, end - reach))
    lookups = torch.where(is_row, lookup_codes.numel(), tokens * (kinds - 1) + entry % kinds - 1)
    rows = tokens[is_row]
    if filler := -len(entry) % block:  # by a real token, because padding may hold anything
        tokens, end = (torch.cat([x, x[-1:].expand(filler)]) for x in (tokens, end))
        begin = torch.cat([begin, end[-filler:]])
        lookups = torch.cat([lookups, lookups.new_full((filler,), lookup_codes.numel())])
    return Order(tokens, lookups, begin, end, rows, end[::block], reach, block)
