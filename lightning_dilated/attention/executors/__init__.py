"""Executors: the ways to compute a call, with one protocol, and the choice of an executor for the blocks of a rank.

`Grouped` runs all blocks in a few launches, `Fused` writes each output row once, `Blockwise` serves every call, and
`WithGlobalTokens` adds the blocks of global tokens to another executor. The executors in `remote` wrap one of these on
several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_dilated._compat.cpython import avoid_frame_chunk_edge
from lightning_dilated.attention.dropout import Dropout
from lightning_dilated.attention.executors import fused, grouped
from lightning_dilated.attention.executors.base import Call, Executor, HeadWindow, Layout, empty_state
from lightning_dilated.attention.executors.blockwise import Blockwise
from lightning_dilated.attention.spans import Span
from lightning_dilated.pattern.rows import without_global

__all__ = ["Call", "Executor", "HeadWindow", "Layout", "choose"]


def choose(call: Call, spans: Sequence[Span], q: Layout) -> Executor:
    """Return the executor for the blocks of `spans` in tensors like q."""
    if 0 in q.shape:
        return EmptyExecutor()
    if (executor := _with_global_tokens(call, spans, q)) is not None:
        return executor
    if (works := grouped.plan(call, spans, q)) is not None:
        return grouped.Grouped(call, works)
    return (fused.Fused if fused.serves(call.window.pattern, q) else Blockwise)(call, tuple(spans))


def _with_global_tokens(call: Call, spans: Sequence[Span], q: Layout) -> WithGlobalTokens | None:
    """Return an executor that computes global tokens separately; None if there are none, or if it gains nothing.

    With dropout, the other branches must come first in the pattern, because the mask depends on a branch's index.
    """
    pattern = call.window.pattern
    local_pattern, is_global = without_global(pattern), [b.tokens is not None for b in pattern.branches]
    if local_pattern is None or not any(is_global) or (q.dropout and is_global != sorted(is_global)):
        return None
    local = choose(replace(call, window=call.window._replace(pattern=local_pattern)), spans, q)
    if isinstance(local, Blockwise):
        return None
    branches = frozenset(i for i, has_tokens in enumerate(is_global) if has_tokens)
    return WithGlobalTokens(local, Blockwise(replace(call, branches=branches), tuple(spans)))


@dataclass(frozen=True)
class WithGlobalTokens:
    """The executor of a pattern with global tokens, which merges their blocks into the result of the other branches."""

    local: Executor
    global_blocks: Blockwise

    def masked(self, mask: Dropout) -> WithGlobalTokens:
        return WithGlobalTokens(self.local.masked(mask), self.global_blocks.masked(mask))

    @avoid_frame_chunk_edge
    def forward(self, inputs: Sequence[Tensor], final: bool) -> tuple[Tensor, Tensor, None]:
        out, lse, _ = self.local.forward(inputs, False)
        self.global_blocks.merge(inputs, out, lse)
        return out, lse, None

    @avoid_frame_chunk_edge
    def backward(
        self, tensors: Sequence[Tensor], lse: Tensor, received: Tensor | None, total: list[Tensor] | None = None
    ) -> list[Tensor]:
        # in fp32, because both executors add to these gradients
        total = total or [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in tensors[1:4]]
        return self.global_blocks.backward(tensors, lse, None, self.local.backward(tensors, lse, None, total))


@dataclass(frozen=True)
class EmptyExecutor:
    """The executor of a rank without tokens or heads."""

    def masked(self, mask: Dropout) -> EmptyExecutor:
        return self

    def forward(self, inputs: Sequence[Tensor], final: bool) -> tuple[Tensor, Tensor, None]:
        return *empty_state(inputs[0]), None

    def backward(
        self, tensors: Sequence[Tensor], lse: Tensor, received: Tensor | None, total: list[Tensor] | None = None
    ) -> list[Tensor]:
        return total or [torch.zeros_like(x) for x in tensors[1:4]]
