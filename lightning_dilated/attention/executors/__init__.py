"""Executors: the ways to compute a call, behind one protocol, and the choice between those for the blocks of a rank.

`Grouped` runs all blocks in a few launches, `Fused` writes each output row once, `Blockwise` serves everything. `remote` has
those that wrap one of them on several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dilated.attention.dropout import Dropout
from lightning_dilated.attention.executors import fused, grouped
from lightning_dilated.attention.executors.base import Call, Executor, Layout, empty_state
from lightning_dilated.attention.executors.blockwise import Blockwise
from lightning_dilated.attention.views import Span

__all__ = ["Call", "Executor", "Layout", "choose"]


def choose(call: Call, spans: Sequence[Span], q: Layout) -> Executor:
    """The executor of the blocks of `spans` in tensors like q."""
    if 0 in q.shape:
        return Nothing()
    if (works := grouped.plan(call, spans, q)) is not None:
        return grouped.Grouped(call, works)
    return (fused.Fused if fused.serves(call.pattern, q) else Blockwise)(call, tuple(spans))


@dataclass(frozen=True)
class Nothing:
    """The executor of a rank without a token or a head."""

    def masked(self, mask: Dropout) -> Nothing:
        return self

    def forward(self, inputs: Sequence[Tensor], final: bool) -> tuple[Tensor, Tensor, None]:
        return *empty_state(inputs[0]), None

    def backward(
        self, tensors: Sequence[Tensor], lse: Tensor, received: Tensor | None, total: list[Tensor] | None = None
    ) -> list[Tensor]:
        return total or [torch.zeros_like(x) for x in tensors[1:4]]
