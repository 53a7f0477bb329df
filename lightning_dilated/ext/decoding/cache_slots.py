"""Compute, in integers, which rows of keys and values a layer's cache keeps and where new tokens are stored.

Shape letters: B batch, n new tokens, H query heads, K kv heads; w segment length, t shift, r dilation rate; a slot
contains the rows of one residue and one kv head in a branch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_dilated._device import send
from lightning_dilated._validation import integer
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.branch import AnyBranch
from lightning_dilated.pattern.rows import head_rows

#: minimum number of rows of a slot in a growing buffer, unless its branch needs fewer
SMALLEST = 64


@dataclass(frozen=True)
class Lane:
    """One residue of a branch: its slots, their kv heads, and the query heads that use each slot.

    All slots list the same number of query heads. If a slot has fewer, its heads are repeated and computed twice.
    """

    slots: slice
    kv_heads: tuple[int, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True)
class BranchSlots:
    """The slots of one branch, ordered by residue and kv head.

    Attributes:
        width, shift, rate: w (None: the whole sequence), t and r.
        window: number of rows of a window, stored in a ring buffer; None: a segment, stored in order.
        limit: number of global tokens, if only their positions are kept; None: no limit.
        users: (residue, kv head) of each slot -> the query heads that use it.
        lanes: residue -> its lane, for each residue that a head uses.
    """

    width: int | None
    shift: int
    rate: int
    window: int | None
    limit: int | None
    users: dict[tuple[int, int], tuple[int, ...]]
    lanes: dict[int, Lane] = field(default_factory=dict)

    @classmethod
    def of(cls, pattern: DilatedPattern, branch: AnyBranch, num_heads: int, num_kv_heads: int) -> BranchSlots:
        """Find the slots that the pattern's heads use."""
        users: dict[tuple[int, int], list[int]] = {}
        for h in range(num_heads) if branch.heads is None else branch.heads:
            residue = pattern.offset(branch, h, num_heads, num_kv_heads)
            users.setdefault((residue, h * num_kv_heads // num_heads), []).append(h)
        slots, lanes = sorted(users), {}
        for residue in sorted({o for o, _ in slots}):
            numbers = [i for i, (o, _) in enumerate(slots) if o == residue]
            most = max(len(users[slots[i]]) for i in numbers)
            heads = tuple(h for i in numbers for h in (users[slots[i]] * most)[:most])
            lanes[residue] = Lane(slice(numbers[0], numbers[-1] + 1), tuple(slots[i][1] for i in numbers), heads)
        sizes = branch.segment_length, branch.shift, branch.dilation_rate, branch.width, branch.tokens
        return cls(*sizes, {slot: tuple(users[slot]) for slot in slots}, lanes)

    def first(self, position: int) -> int:
        """Return the position of index 0 in the segment of `position`; negative if a shift cuts the first segment."""
        return 0 if self.width is None else (position + self.shift) // self.width * self.width - self.shift

    def positions(self, residue: int, first: int, stop: int) -> range:
        """Return the positions of a residue below `stop`, in the segment that begins at position `first`."""
        stop = stop if self.limit is None else min(stop, self.limit)
        return head_rows(max(first, 0), stop, first, self.rate, residue)

    def count(self, residue: int, first: int, stop: int) -> int:
        """Return how many of `positions(residue, first, stop)` are kept."""
        rows = len(self.positions(residue, first, stop))
        return rows if self.window is None else min(rows, self.window)

    @property
    def longest(self) -> int | None:
        """The sequence length at which slots stop growing; None if they grow with every token."""
        if self.limit is not None:
            return self.limit
        return self.width if self.window is None else self.window * self.rate

    def rows(self, length: int) -> int:
        """Return the largest number of rows that a slot has in sequences of up to `length` tokens."""
        return -(-(length if self.longest is None else min(self.longest, length)) // self.rate)

    def places(self, residue: int, first: int, begin: int, stop: int) -> tuple[range, Tensor]:
        """Return (the kept positions from `begin` to below `stop`, their rows in a slot)."""
        rows = self.positions(residue, first, stop)
        new = rows[len(self.positions(residue, first, begin)) :]
        if self.window is None:
            start = len(rows) - len(new)
            return new, torch.arange(start, start + len(new))
        new = new[-self.window :]
        return new, (len(rows) - len(new) + torch.arange(len(new))) % self.window

    def grown(self, capacity: int, stop: int) -> int:
        """Return `capacity` if all rows below `stop` fit, else at least twice as much, up to the longest slot's rows."""
        rows = -(-(stop - max(self.first(stop - 1), 0)) // self.rate)
        rows = min(x for x in (rows, self.window, self.limit) if x is not None)
        if rows <= capacity:
            return capacity
        larger = max(rows, 2 * capacity, SMALLEST)
        return larger if self.longest is None else min(larger, -(-self.longest // self.rate))


@functools.lru_cache(maxsize=256)
def layer_slots(pattern: DilatedPattern, num_heads: int, num_kv_heads: int) -> tuple[BranchSlots, ...]:
    return tuple(BranchSlots.of(pattern, branch, num_heads, num_kv_heads) for branch in pattern.branches)


class Places:
    """The rows of a layer's buffer in which new tokens are stored. Layers with equal slots share the cached indices.

    Attributes:
        branches: the slots of each branch.
        capacities: number of rows of a slot in each branch.
        bases: the first row of each branch in the buffer.
        total: number of rows of the buffer for each sample.
    """

    def __init__(self, branches: tuple[BranchSlots, ...], capacities: tuple[int, ...]) -> None:
        self.branches, self.capacities = branches, capacities
        sizes = [len(b.users) * capacity for b, capacity in zip(branches, capacities, strict=True)]
        self.bases = [sum(sizes[:i]) for i in range(len(sizes))]
        self.total = sum(sizes)
        self._latest: tuple[object, tuple[Tensor, Tensor]] | None = None

    def indices(self, spans: Sequence[tuple[int, int]], shape: tuple[int, ...], device: torch.device):
        """Return indices for a copy: (rows of the flat buffer, rows of new keys viewed as (B n K, D)), int64.

        Args:
            spans: (start, stop) of the positions of each sample's new tokens.
            shape: (B, n, K).
        """
        key = tuple(spans), shape, device
        if self._latest is None or self._latest[0] != key:
            self._latest = key, self._indices(*key)
        return self._latest[1]

    def forget(self) -> None:
        """Free the cached indices."""
        self._latest = None

    def _indices(self, spans: Sequence[tuple[int, int]], shape: tuple[int, ...], device: torch.device):
        _, new, kv_heads = shape
        to: list[Tensor] = []
        source: list[Tensor] = []
        for sample, (start, stop) in enumerate(spans):
            if sample and spans[sample] == spans[sample - 1]:
                rows, token = to[-1] + self.total, source[-1] + new * kv_heads
            else:
                rows, token = self._of_sample(start, stop, kv_heads)
                rows, token = rows + sample * self.total, token + sample * new * kv_heads
            to.append(rows)
            source.append(token)
        return send(torch.cat(to), device), send(torch.cat(source), device)

    def _of_sample(self, start: int, stop: int, kv_heads: int) -> tuple[Tensor, Tensor]:
        """Return (rows of the buffer, rows of the new keys) for one sample."""
        to, source = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
        for branch, capacity, base in zip(self.branches, self.capacities, self.bases, strict=True):
            if stop <= start:
                continue
            first = branch.first(stop - 1)
            begin = max(first, start)
            for skip in range(min(stop - begin, branch.rate)):
                residue = (begin + skip - first) % branch.rate
                lane = branch.lanes.get(residue)
                if lane is None:
                    continue
                positions, row = branch.places(residue, first, begin, stop)
                token = torch.arange(positions.start, positions.stop, positions.step) - start
                slots = torch.arange(lane.slots.start, lane.slots.stop)[:, None]
                to.append((base + slots * capacity + row).flatten())
                source.append((token * kv_heads + torch.tensor(lane.kv_heads)[:, None]).flatten())
        return torch.cat(to), torch.cat(source)


class Clock:
    """The position of each sample's next token, shared by the caches of a model.

    Samples may have prompts of different lengths, padded on the right. Padding is not kept. In each sample, the first
    token after all prompts gets the position after the last token of that sample's prompt.

    Args:
        lengths: number of tokens of each prompt; None: all prompts have the same length.
    """

    def __init__(self, lengths: Sequence[int] | None = None) -> None:
        self.lengths = None if lengths is None else tuple(integer(x, "each of lengths", 1) for x in lengths)
        #: number of tokens of the longest prompt; 0 without `lengths`
        self.longest = max(self.lengths) if self.lengths else 0
        self._places: dict[object, Places] = {}
        self._tensor: Tensor | None = None
        self._columns = 0  # number of added tokens for which `_tensor` is up to date

    @property
    def ragged(self) -> bool:
        """True if positions differ between samples."""
        return self.lengths is not None and len(set(self.lengths)) > 1

    def kept(self, columns: int, batch: int) -> list[int]:
        """Return the number of kept tokens of each sample after `columns` tokens, including padding, were added."""
        if self.lengths is None:
            return [columns] * batch
        return [min(columns, x) + max(0, columns - self.longest) for x in self.lengths]

    def added(self, columns: int, new: int, batch: int) -> list[int]:
        """Return how many of the `new` tokens after `columns` tokens are kept in each sample."""
        return [b - a for a, b in zip(self.kept(columns, batch), self.kept(columns + new, batch), strict=True)]

    def positions(self, columns: int, batch: int, device: torch.device) -> Tensor:
        """Return the position of each sample's token after `columns` tokens, (B,) int64. Call it only after prompts.

        The tensor keeps its address, so that a captured CUDA graph can read it. A step of one token needs no copy from
        the host."""
        tensor = self._tensor
        if tensor is None or tensor.device != device or len(tensor) != batch:
            self._tensor = tensor = torch.tensor(self.kept(columns, batch), device=device)
        elif columns == self._columns + 1 and self._columns >= self.longest:
            tensor.add_(1)
        elif columns != self._columns:
            tensor.copy_(send(torch.tensor(self.kept(columns, batch)), device))
        self._columns = columns
        return tensor

    def places(self, slots_key: tuple[DilatedPattern, int, int], capacities: tuple[int, ...]) -> Places:
        """Return the `Places` of layers with these slots (pattern, H, K) and capacities."""
        key = slots_key, capacities
        if key not in self._places:
            self._places[key] = Places(layer_slots(*slots_key), capacities)
        return self._places[key]

    def count(self, tokens: int) -> None:
        """Add tokens that a replayed graph does not count; a negative number removes tokens of trial runs and a capture."""
        self._columns += tokens

    def begin(self, lengths: Sequence[int] | None) -> None:
        """Restart with other prompts; tensors keep their addresses."""
        fresh = Clock(lengths)
        self.lengths, self.longest, self._columns = fresh.lengths, fresh.longest, -1
