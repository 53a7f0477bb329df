"""Decoding: new tokens against a bounded cache of keys and values, equal to the same rows of the full sequence.

In a branch a head uses only its own residue of the current segment, so the cache keeps at most ceil(w / r) rows for each
branch, kv head and residue, whatever the number of tokens.
Shape letters: B batch, n new tokens, H query heads, K kv heads, D head dim; S slots of a branch (a slot holds one residue's
rows of one kv head); w segment length, r dilation rate.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_dilated.attention.backends.base import merge
from lightning_dilated.attention.functional import autocast, dilated_attention
from lightning_dilated.pattern import Branch, DilatedPattern
from lightning_dilated.pattern.pattern import LARGEST
from lightning_dilated.pattern.rows import check_padding, head_rows

#: rows of a new buffer, if its branch can need that many
SMALLEST = 64
#: most scores of cached keys that are formed at once
SCORES = 1 << 26


@dataclass(frozen=True)
class _Lane:
    """One residue of a branch: its slots, their kv heads, and the query heads that use them, slot by slot.

    All slots have the same number of query heads: where fewer use a slot, a head is repeated and computed twice.
    """

    slots: slice
    kv_heads: tuple[int, ...]
    heads: tuple[int, ...]


def _lanes(pattern: DilatedPattern, branch: Branch, num_heads: int, num_kv_heads: int) -> dict[int, _Lane]:
    """Residue -> its lane, for every residue that any head uses."""
    users: dict[tuple[int, int], list[int]] = {}
    for h in range(num_heads) if branch.heads is None else branch.heads:
        residue = pattern.offset(branch, h, num_heads, num_kv_heads)
        users.setdefault((residue, h * num_kv_heads // num_heads), []).append(h)
    slots, lanes = sorted(users), {}
    for residue in sorted({o for o, _ in slots}):
        numbers = [i for i, (o, _) in enumerate(slots) if o == residue]
        most = max(len(users[slots[i]]) for i in numbers)
        heads = tuple(h for i in numbers for h in (users[slots[i]] * most)[:most])
        lanes[residue] = _Lane(slice(numbers[0], numbers[-1] + 1), tuple(slots[i][1] for i in numbers), heads)
    return lanes


class _BranchRows:
    """The rows of one branch's current segment: k and v (B, S, capacity, D), grown by doubling up to ceil(w / r) rows."""

    def __init__(self, pattern: DilatedPattern, branch: Branch, num_heads: int, num_kv_heads: int) -> None:
        self.width, self.shift, self.rate = branch.segment_length, branch.shift, branch.dilation_rate
        self.lanes = _lanes(pattern, branch, num_heads, num_kv_heads)
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def first(self, position: int) -> int:
        """The position of index 0 of the segment of `position`; negative in a first segment that a shift cuts."""
        return 0 if self.width is None else (position + self.shift) // self.width * self.width - self.shift

    def count(self, residue: int, first: int, stop: int) -> int:
        """Number of positions below `stop` of a residue in the segment whose index 0 is `first`."""
        return len(head_rows(max(first, 0), stop, first, self.rate, residue))

    def append(self, k: Tensor, v: Tensor, start: int) -> None:
        """Store the (B, n, K, D) keys and values of positions from `start` on that later positions can use.

        Rows of earlier segments are overwritten.
        """
        stop = start + k.shape[1]
        first = self.first(stop - 1)
        begin = max(first, start)
        self._make_room(k, -(-(stop - max(first, 0)) // self.rate))
        for skip in range(min(stop - begin, self.rate)):
            residue = (begin + skip - first) % self.rate
            lane = self.lanes.get(residue)
            if lane is None:
                continue
            at = self.count(residue, first, begin)
            for buffer, new in ((self.k, k), (self.v, v)):
                rows = new[:, begin - start + skip :: self.rate]
                rows = rows[:, :, _index(lane.kv_heads, k.device)].transpose(1, 2)
                buffer[:, lane.slots, at : at + rows.shape[2]] = rows

    def _make_room(self, like: Tensor, rows: int) -> None:
        old = 0 if self.k is None else self.k.shape[2]
        if rows <= old:
            return
        most = rows if self.width is None else -(-self.width // self.rate)
        size = max(rows, 2 * old, SMALLEST)
        size = size if self.width is None else min(size, most)
        slots = sum(len(lane.kv_heads) for lane in self.lanes.values())
        for name in ("k", "v"):
            new = like.new_empty((like.shape[0], slots, size, like.shape[3]))
            if old:
                new[:, :, :old] = getattr(self, name)
            setattr(self, name, new)

    def attend(self, q: Tensor, out: Tensor, lse: Tensor, start: int, stop: int) -> None:
        """Merge the attention of scaled queries (B, n, H, D) from position `start` on to the rows below `stop`.

        All of those rows must lie at or before the queries. out (B, n, H, D) and lse (B, n, H) are changed in place.
        """
        first = self.first(stop - 1)
        end = q.shape[1] if self.width is None else min(q.shape[1], first + self.width - start)
        for skip in range(min(end, self.rate)):
            residue = (start + skip - first) % self.rate
            lane, count = self.lanes.get(residue), self.count(residue, first, stop)
            if lane is None or count == 0:
                continue
            heads = _index(lane.heads, q.device)
            keys, values = (x[:, lane.slots, :count].to(q.dtype) for x in (self.k, self.v))
            tile = max(1, SCORES // (len(lane.heads) * count * q.shape[0])) * self.rate
            for at in range(skip, end, tile):
                rows = slice(at, min(at + tile, end), self.rate)
                _merge(out[:, rows], lse[:, rows], heads, *_dense(q[:, rows][:, :, heads], keys, values))


class KVCache:
    """The keys and values of one layer that later tokens can use; `length` tokens have been added.

    Memory is O(sum over branches of w / r) rows for each kv head: (rows of the widest residue) x slots for each branch.
    Branches over the whole sequence (segment_length None) keep every row of the residues in use.

    Args:
        pattern: the layer's pattern.
        num_heads: H of the layer.
        num_kv_heads: K of the layer; None means H.

    Raises:
        ValueError: for numbers of heads that the pattern does not allow.
    """

    def __init__(self, pattern: DilatedPattern, num_heads: int, num_kv_heads: int | None = None) -> None:
        self.pattern = pattern
        self.num_heads, self.num_kv_heads = pattern.check_heads(num_heads, num_kv_heads)
        self.length = 0
        #: (B, W - 1, 2 K D) last keys and values before the layer's `kv_conv`; None without one, or before the first token
        self.recent: Tensor | None = None
        self._shape: tuple[int, int, int] | None = None
        self._branches = [_BranchRows(pattern, b, self.num_heads, self.num_kv_heads) for b in pattern.branches]

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add (B, n, K, D) keys and values, rotated to their positions if the layer has rotary positions.

        Raises:
            ValueError: for shapes other than those of the layer and of earlier calls.
        """
        shape = (k.shape[0], *k.shape[2:])
        if k.shape != v.shape or k.shape[2] != self.num_kv_heads or shape != (self._shape or shape):
            expected = self._shape or ("B", self.num_kv_heads, "D")
            raise ValueError(
                f"the cache takes k and v of (B, n, kv heads, D) with (B, kv heads, D) = {expected}; "
                f"got {tuple(k.shape)} and {tuple(v.shape)}. Every sequence takes a cache of its own."
            )
        self._shape = shape
        if k.shape[1]:
            for branch in self._branches:
                branch.append(k, v, self.length)
        self.length += k.shape[1]

    def attend(self, q: Tensor, out: Tensor, lse: Tensor, start: int) -> None:
        """Merge the attention of scaled queries (B, n, H, D), from position `start` on, to the cache into out and lse.

        out (B, n, H, D) and lse (B, n, H) are changed in place.
        """
        for branch in self._branches if self.length else ():
            branch.attend(q, out, lse, start, self.length)

    def rows(self) -> list[dict[int, int]]:
        """For each branch: kv head -> rows in the cache, over all its residues."""
        branches = []
        for branch in self._branches:
            count: Counter[int] = Counter()
            first = branch.first(self.length - 1)
            for residue, lane in branch.lanes.items():
                count.update(dict.fromkeys(lane.kv_heads, branch.count(residue, first, self.length)))
            branches.append(dict(count))
        return branches

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        rows = [x for b in self._branches for x in (b.k, b.v)]
        return sum(x.nbytes for x in (*rows, self.recent) if x is not None)


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, cache: KVCache, scale: float | None = None, engine: str = "auto"
) -> Tensor:
    """Causal dilated attention of n new tokens that follow those in `cache`, to which they are added.

    One token costs O(sum over branches of w / r) for each head. Several tokens (a prompt, or its next chunk) attend to each
    other by `dilated_attention` and to the cache by matrix products; the two are merged by their log-sum-exp.

    Args:
        q: (B, n, H, D), rotated to its global positions if positions are rotary.
        k, v: (B, n, K, D), likewise.
        cache: earlier tokens of the same sequences and layer; changed in place.
        scale, engine: as in `dilated_attention`.

    Returns:
        (B, n, H, D) in q's dtype; 0 for a head that no branch serves at a position.

    Raises:
        ValueError: for shapes that differ from the cache's, and for tensors that require a gradient.
    """
    q, k, v = autocast(q, k, v)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise ValueError("a cache serves inference, without gradients: call under torch.no_grad().")
    start, new = cache.length, q.shape[1]
    check_padding(cache.pattern, start + new)
    wide = torch.promote_types(q.dtype, torch.float32)
    query = q.to(wide) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if new == 1:
        cache.append(k, v)
        out, lse = torch.zeros_like(query), query.new_full(query.shape[:3], -torch.inf)
        cache.attend(query, out, lse, start)
        return out.to(q.dtype)
    pattern = _continued(cache.pattern, start)
    out, lse = dilated_attention(q, k, v, pattern, causal=True, scale=scale, return_lse=True, engine=engine)
    if start:
        out, lse = out.to(wide), lse.transpose(1, 2).contiguous()
        cache.attend(query, out, lse, start)
        out = out.to(q.dtype)
    cache.append(k, v)
    return out


@functools.lru_cache(maxsize=256)
def _continued(pattern: DilatedPattern, start: int) -> DilatedPattern:
    """The causal pattern for tokens from position `start` on, numbered from 0; causal attention has no padding."""
    if start == 0:
        return pattern
    cut = lambda b: b.segment_length or LARGEST["segment_length"]  # noqa: E731 - the whole sequence: an endless segment
    branches = (replace(b, segment_length=cut(b), shift=(b.shift + start) % cut(b)) for b in pattern.branches)
    return replace(pattern, branches=tuple(branches), padding="masked")


@functools.lru_cache(maxsize=4096)
def _index(heads: tuple[int, ...], device: torch.device) -> slice | Tensor:
    """An index of these heads: a slice, which makes views, where their numbers are evenly spaced."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    if step > 0 and heads == tuple(range(heads[0], heads[-1] + 1, step)):
        return slice(heads[0], heads[-1] + 1, step)
    return torch.tensor(heads, device=device)


def _dense(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out (B, n, S g, D), lse (B, n, S g)) of queries (B, n, S g, D) against k, v (B, S, rows, D), g queries a slot."""
    batch, new, _, dim = q.shape
    slots = k.shape[1]
    grouped = q.unflatten(2, (slots, -1)).transpose(1, 2).reshape(batch, slots, -1, dim)
    s = grouped @ k.transpose(-1, -2)
    lse = torch.logsumexp(s, -1)
    out = torch.softmax(s, -1) @ v
    back = lambda x: x.unflatten(2, (new, -1)).transpose(1, 2).flatten(2, 3)  # noqa: E731
    return back(out), back(lse)


def _merge(out: Tensor, lse: Tensor, heads: slice | Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the part of these heads into the running out (B, n, H, D) and lse (B, n, H), in place."""
    total, weight, part_weight = merge(lse[:, :, heads], part_lse)
    out[:, :, heads] = (out[:, :, heads] * weight[..., None]).addcmul_(part, part_weight[..., None])
    lse[:, :, heads] = total
