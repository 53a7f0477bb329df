"""Decoding: one new token against the cache of keys and values, equal to the last row of the full sequence.

Shape letters: B batch, T tokens so far (the new one included), H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dilated.pattern import Branch, DilatedPattern


class KVCache:
    """Keys and values of the tokens so far: (B, capacity, K, D), grown by doubling."""

    def __init__(self) -> None:
        self.length = 0
        self._k: Tensor | None = None
        self._v: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add (B, n, K, D) keys and values."""
        stop = self.length + k.shape[1]
        self._k, self._v = self._room(self._k, k, stop), self._room(self._v, v, stop)
        self._k[:, self.length : stop], self._v[:, self.length : stop] = k, v
        self.length = stop

    def _room(self, old: Tensor | None, like: Tensor, stop: int) -> Tensor:
        if old is not None and old.shape[1] >= stop:
            return old
        size = max(stop, 2 * self.length, 64)
        new = like.new_empty((like.shape[0], size, *like.shape[2:]))
        if old is not None:
            new[:, : self.length] = old[:, : self.length]
        return new

    def upto(self, length: int) -> tuple[Tensor, Tensor]:
        """Views of the first `length` keys and values."""
        if self._k is None or self._v is None or length > self.length:
            raise ValueError(f"the cache holds {self.length} tokens, so {length} cannot be read from it.")
        return self._k[:, :length], self._v[:, :length]


def visible(branch: Branch, position: int) -> slice:
    """The keys a query at `position` sees in a causal branch that its head uses there: from the segment's start, by r."""
    width = position + branch.shift + 1 if branch.segment_length is None else branch.segment_length
    index = (position + branch.shift) % width
    oldest = max(position - index, 0)
    first = position - (position - oldest) // branch.dilation_rate * branch.dilation_rate
    return slice(first, position + 1, branch.dilation_rate)


def using_heads(pattern: DilatedPattern, branch: Branch, position: int, num_heads: int, num_kv_heads: int) -> list[int]:
    """The query heads that use `position` in the branch."""
    width = position + branch.shift + 1 if branch.segment_length is None else branch.segment_length
    residue = (position + branch.shift) % width % branch.dilation_rate
    served = range(num_heads) if branch.heads is None else branch.heads
    return [h for h in served if pattern.offset(branch, h, num_heads, num_kv_heads) == residue]


def decode_attention(q: Tensor, k: Tensor, v: Tensor, pattern: DilatedPattern, scale: float | None = None) -> Tensor:
    """Causal dilated attention of the last token: q (B, 1, H, D) against k and v (B, T, K, D), in O(sum of w/r).

    Returns:
        (B, 1, H, D) in q's dtype; 0 for a head that no branch serves at this position.
    """
    batch, _, heads, dim = q.shape
    kv_heads, position = k.shape[2], k.shape[1] - 1
    group = heads // kv_heads
    wide = torch.promote_types(q.dtype, torch.float32)
    query = q[:, 0].to(wide) * (dim**-0.5 if scale is None else scale)
    out = torch.zeros(batch, heads, dim, dtype=wide, device=q.device)
    lse = torch.full((batch, heads), -torch.inf, dtype=wide, device=q.device)
    for branch in pattern.branches:
        rows = visible(branch, position)
        using = using_heads(pattern, branch, position, heads, kv_heads)
        for kv in sorted({h // group for h in using}):
            mine = [h for h in using if h // group == kv]
            s = query[:, mine] @ k[:, rows, kv].to(wide).transpose(-1, -2)
            part_lse = torch.logsumexp(s, -1)
            part = torch.softmax(s, -1) @ v[:, rows, kv].to(wide)
            total = torch.logaddexp(lse[:, mine], part_lse)
            old, new = torch.exp(lse[:, mine] - total), torch.exp(part_lse - total)
            out[:, mine] = out[:, mine] * old[..., None] + part * new[..., None]
            lse[:, mine] = total
    return out[:, None].to(q.dtype)
