"""Counter-based attention dropout from a hash of (seed, branch, sample, head, query position, key position).

The mask does not depend on tiles, engines or ranks, so the backward, a recomputation and all ranks use the same mask.
The hash chains a 32-bit integer finaliser (two odd multipliers, three xor-shifts); all arithmetic is exact in int64.
Shape letters: G samples and segments, J heads, n rows of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dilated._device import send
from lightning_dilated.attention.spans import Span
from lightning_dilated.pattern.rows import Block

_MASK = 0xFFFFFFFF
_STEP = 0x9E3779B1
START = 0x243F6A88


def _mix(x: Tensor) -> Tensor:
    """Map 32-bit integers in int64 one to one. Products may overflow, but their low 32 bits stay exact."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def fold(state: Tensor, *values: Tensor | int) -> Tensor:
    """Chain 64-bit values (int64 tensors that broadcast) into a 32-bit state. The initial state is START."""
    for value in values:
        state = _mix((state ^ (value & _MASK)) & _MASK)
        state = _mix((state + (value >> 32) + _STEP) & _MASK)
    return state


@dataclass(frozen=True)
class Dropout:
    """Drop each (query, key) pair of each branch with probability `p`; `seed` chooses the mask."""

    p: float
    seed: int

    def keep(self, branch: Tensor | int, sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return a bool tensor, True for pairs that are kept; the arguments are int64 tensors that broadcast."""
        start = torch.full((), START, dtype=torch.int64, device=query.device)
        row = fold(start, self.seed, branch, sample, head, query)
        return fold(row, key) >= self.threshold

    @property
    def threshold(self) -> int:
        """Return the smallest hash of a pair that is kept."""
        return round(self.p * 2**32)

    def state(self, branch: int) -> int:
        """Return the hash of seed and branch. Kernels fold the other values into it."""
        return int(self.states(branch + 1)[branch])

    def states(self, branches: int) -> Tensor:
        """Return `state` of each branch, (branches,) int64."""
        start = torch.full((), START, dtype=torch.int64, device="cpu")
        return fold(start, self.seed, torch.arange(branches, device="cpu"))

    def factors(self, keep: Tensor, like: Tensor) -> Tensor:
        """Return factors of attention weights, 0 or 1/(1-p), in the dtype of `like`."""
        return keep.to(like.dtype) / (1 - self.p)


class PairDropout:
    """Dropout of the (query, key) pairs of a block or batch; engines ask for the factors of any rectangle of scores."""

    dropout: Dropout
    branch: int

    def positions(self, device: torch.device, groups: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return sample and head (g, J), and global positions of queries (g, J, n) and keys (g, J, m), all int64."""
        raise NotImplementedError

    def factors(self, groups: slice, rows: slice, keys: slice, like: Tensor) -> Tensor:
        """Return (g, J, rows, keys) factors in the dtype and on the device of `like`."""
        sample, head, queries, key_positions = self.positions(like.device, groups)
        sample, head = sample[:, :, None, None], head[:, :, None, None]
        keep = self.dropout.keep(self.branch, sample, head, queries[:, :, rows, None], key_positions[:, :, None, keys])
        return self.dropout.factors(keep, like)


@dataclass(frozen=True)
class BlockDropout(PairDropout):
    """Dropout of one block."""

    dropout: Dropout
    span: Span
    block: Block
    first_head: int = 0

    @property
    def branch(self) -> int:
        return self.block.branch

    def positions(self, device: torch.device, groups: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        s, b = self.span, self.block
        arange = lambda n: torch.arange(n, device=device)  # noqa: E731
        group, j = arange(s.batches * b.segments)[groups][:, None], arange(b.heads)
        first = s.origin + s.start + b.first + group % b.segments * b.segment_stride + j * b.position_step
        queries = keys = first[..., None] + arange(b.rows) * b.row_stride
        if b.keys is not None:
            keys = (first - b.first + b.keys[0])[..., None] + arange(b.keys[1]) * b.row_stride
        sample, head = s.batch + group // b.segments, self.first_head + b.head + j * b.head_step
        return sample.expand(first.shape), head.expand(first.shape), queries, keys


@dataclass(frozen=True)
class BatchDropout(PairDropout):
    """Dropout of a batch (G, 1, n, m) of rows from other ranks.

    Attributes:
        sample, head: (G,) int64.
        queries, keys: (G, n) and (G, m) int64 global positions.
    """

    dropout: Dropout
    branch: int
    sample: Tensor
    head: Tensor
    queries: Tensor
    keys: Tensor

    def positions(self, device: torch.device, groups: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return tuple(send(x[groups], device)[:, None] for x in (self.sample, self.head, self.queries, self.keys))
