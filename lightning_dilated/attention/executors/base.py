"""What executors share: the call that they compute, the `Executor` protocol, and the state that a merge begins with.

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
from lightning_dilated.attention.views import Span
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import Block, blocks, global_tokens


class HeadWindow(NamedTuple):
    """Query heads from `heads[0]` to below `heads[1]`, of `num_heads` that attend by the pattern: tensors hold these.

    With `whole` only segments that a span holds whole are computed; other ranks compute the rest.
    """

    pattern: DilatedPattern
    num_heads: int
    num_kv_heads: int
    heads: tuple[int, int]
    whole: bool = False

    def blocks(self, document: int, part: tuple[int, int] | None) -> tuple[Block, ...]:
        """The blocks of a document of `document` tokens, or of its part `part`, branch by branch in a fixed order."""
        return blocks(self.pattern, document, self.num_heads, self.num_kv_heads, part, self.heads, self.whole)


@dataclass(frozen=True)
class Call:
    """Settings that all blocks of one call share.

    With `branches` only those of these numbers are computed. What arrives from other ranks or chunks is computed by triton
    up to `in_triton` (query, key) pairs of a head, forward and backward.
    """

    engine: Engine
    window: HeadWindow
    causal: bool
    scale: float
    mask: Dropout | None = None
    in_triton: tuple[float, float] = (0.0, 0.0)
    branches: frozenset[int] | None = None

    def blocks(self, span: Span) -> tuple[Block, ...]:
        """Those of a span, branch by branch in a fixed order."""
        every = self.window.blocks(span.document, span.part)
        if self.branches is not None:
            every = tuple(b for b in every if b.branch in self.branches)
        if self.causal and global_tokens(self.window.pattern):
            every = tuple(b for b in every if b.pairs(True))
        return every


class Layout(NamedTuple):
    """What is known of q (B, N, H, D) before it is there; whether weights are dropped, and lengths stay on the device, or
    the bounds of 2**bits documents."""

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    dropout: bool = False
    lengths: bool = False
    bits: int = 0


class Executor(Protocol):
    """Computes a call. One is chosen for the blocks that a rank holds; others wrap it and add what other ranks hold."""

    def masked(self, mask: Dropout) -> Self:
        """The same with a dropout mask."""

    def forward(self, inputs: Sequence[Tensor], final: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """(out (B, N, H, D), lse (B, H, N), rows to save for the backward or None) of q, k and v.

        Rows without a key are 0, and -inf in lse. Where nothing is merged into out afterwards (`final`) it may come in
        q's dtype, else it is fp32 (fp64 for float64), as lse is.
        """

    def backward(
        self, tensors: Sequence[Tensor], lse: Tensor, received: Tensor | None, total: list[Tensor] | None = None
    ) -> list[Tensor]:
        """dq, dk, dv from grad, q, k, v, the merged out and lse, and what the forward saved; added to `total` if given.

        Without `total` they may come in the dtype of q, k and v.
        """


def empty_state(q: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of no branch at all: zeros (B, N, H, D) and -inf (B, H, N), in fp32 (fp64 for float64 inputs)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, seq_len, heads, _ = q.shape
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    return out, torch.full((batch, heads, seq_len), -torch.inf, dtype=dtype, device=q.device)


def attend_pads(part: Tensor, part_lse: Tensor, pads: int) -> tuple[Tensor, Tensor]:
    """Let `pads` zero keys with zero values (score 0) into a block's softmax: out is scaled by exp(lse - lse')."""
    total, weight, _ = merge(part_lse, torch.full_like(part_lse, math.log(pads)))
    return part * weight.to(part.dtype)[..., None], total
