"""The parts that executors share: the call, the `Executor` protocol, and the initial state of a merge.

Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim, n rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from lightning_dilated.attention.backends.base import Engine, merge
from lightning_dilated.attention.dropout import Dropout
from lightning_dilated.attention.spans import Span
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import Block, blocks, global_tokens


class HeadWindow(NamedTuple):
    """The query heads [heads[0], heads[1]) of a pattern for `num_heads` heads; tensors contain only these heads.

    With `whole`, only segments that are complete in a span are computed; other ranks compute the cut segments.
    """

    pattern: DilatedPattern
    num_heads: int
    num_kv_heads: int
    heads: tuple[int, int]
    whole: bool = False

    def blocks(self, document: int, part: tuple[int, int] | None) -> tuple[Block, ...]:
        """Return the blocks of a document of `document` tokens, or of its part, branch by branch in a fixed order."""
        return blocks(self.pattern, document, self.num_heads, self.num_kv_heads, part, self.heads, self.whole)


@dataclass(frozen=True)
class Call:
    """Settings that all blocks of one call share.

    If `branches` is set, only the branches with these indices are computed. Triton computes batches of keys from other
    ranks or chunks up to `max_triton_pairs` (limits for forward and backward on the pairs per head).
    """

    engine: Engine
    window: HeadWindow
    causal: bool
    scale: float
    mask: Dropout | None = None
    max_triton_pairs: tuple[float, float] = (0.0, 0.0)
    branches: frozenset[int] | None = None

    def blocks(self, span: Span) -> tuple[Block, ...]:
        """Return the blocks of a span, branch by branch in a fixed order."""
        span_blocks = self.window.blocks(span.document, span.part)
        if self.branches is not None:
            span_blocks = tuple(b for b in span_blocks if b.branch in self.branches)
        if self.causal and global_tokens(self.window.pattern):
            span_blocks = tuple(b for b in span_blocks if b.pairs(True))
        return span_blocks


class Layout(NamedTuple):
    """Facts for planning: properties of q (B, N, H, D), and whether there is dropout. `lengths`: whether the device has
    lengths, or bounds of 2**bits documents if `bits` is not 0."""

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    dropout: bool = False
    lengths: bool = False
    bits: int = 0


class Executor(Protocol):
    """Computes a call. One executor computes a rank's local blocks; others wrap it and add rows from other ranks."""

    def masked(self, mask: Dropout) -> Self:
        """Return this executor with a dropout mask."""

    def forward(self, inputs: Sequence[Tensor], final: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (out (B, N, H, D), lse (B, H, N), rows to save for the backward or None); `inputs`: q, k, v.

        A row without a key is 0 in out and -inf in lse. Both are fp32 (fp64 for float64). If `final`, nothing will be
        merged into out, and out may have q's dtype.
        """

    def backward(
        self, tensors: Sequence[Tensor], lse: Tensor, received: Tensor | None, total: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Return dq, dk, dv from (grad, q, k, v, merged out), the merged lse and the rows saved by the forward.

        With `total`, add the gradients to it. Without it, the gradients may have the dtype of q, k and v.
        """


def empty_state(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the initial (out, lse) of a merge: zeros (B, N, H, D) and -inf (B, H, N), fp32 (fp64 for float64)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, seq_len, heads, _ = q.shape
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    return out, torch.full((batch, heads, seq_len), -torch.inf, dtype=dtype, device=q.device)


def attend_pads(part: Tensor, part_lse: Tensor, pads: int) -> tuple[Tensor, Tensor]:
    """Add `pads` zero keys with zero values (score 0) to a block's softmax: scale out by exp(lse - new lse)."""
    total, weight, _ = merge(part_lse, torch.full_like(part_lse, math.log(pads)))
    return part * weight.to(part.dtype)[..., None], total
