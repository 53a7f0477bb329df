"""Executors: the ways to compute a call, behind one protocol, and the choice between those for the blocks of a rank.

`Grouped` runs all blocks in a few launches, `Fused` writes each output row once, `Blockwise` serves everything, and
`BesideGlobal` adds the blocks of global tokens to what another computed. `remote` has those that wrap one of them on
several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_dilated._compat.cpython import with_room
from lightning_dilated.attention.dropout import Dropout
from lightning_dilated.attention.executors import fused, grouped
from lightning_dilated.attention.executors.base import Call, Executor, HeadWindow, Layout, empty_state
from lightning_dilated.attention.executors.blockwise import Blockwise
from lightning_dilated.attention.views import Span
from lightning_dilated.pattern.rows import without_global

__all__ = ["Call", "Executor", "HeadWindow", "Layout", "choose"]


def choose(call: Call, spans: Sequence[Span], q: Layout) -> Executor:
    """The executor of the blocks of `spans` in tensors like q."""
    if 0 in q.shape:
        return Nothing()
    if (two := _parted(call, spans, q)) is not None:
        return two
    if (works := grouped.plan(call, spans, q)) is not None:
        return grouped.Grouped(call, works)
    return (fused.Fused if fused.serves(call.window.pattern, q) else Blockwise)(call, tuple(spans))


def _parted(call: Call, spans: Sequence[Span], q: Layout) -> BesideGlobal | None:
    """Branches without global tokens by an executor of all their blocks together, where there is one for them.

    Dropout follows from the number of a branch, so with it these branches come first.
    """
    pattern = call.window.pattern
    others, numbers = without_global(pattern), [b.tokens is not None for b in pattern.branches]
    if others is None or not any(numbers) or (q.dropout and numbers != sorted(numbers)):
        return None
    first = choose(replace(call, window=call.window._replace(pattern=others)), spans, q)
    if isinstance(first, Blockwise):
        return None
    rest = frozenset(i for i, is_global in enumerate(numbers) if is_global)
    return BesideGlobal(first, Blockwise(replace(call, branches=rest), tuple(spans)))


@dataclass(frozen=True)
class BesideGlobal:
    """The executor of a pattern with global tokens: their blocks are merged into the result of the other branches."""

    others: Executor
    crossing: Blockwise

    def masked(self, mask: Dropout) -> BesideGlobal:
        return BesideGlobal(self.others.masked(mask), self.crossing.masked(mask))

    @with_room
    def forward(self, inputs: Sequence[Tensor], final: bool) -> tuple[Tensor, Tensor, None]:
        out, lse, _ = self.others.forward(inputs, False)
        self.crossing.merge(inputs, out, lse)
        return out, lse, None

    @with_room
    def backward(
        self, tensors: Sequence[Tensor], lse: Tensor, received: Tensor | None, total: list[Tensor] | None = None
    ) -> list[Tensor]:
        # in fp32: gradients of the others that were rounded before could not be added to
        total = total or [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in tensors[1:4]]
        return self.crossing.backward(tensors, lse, None, self.others.backward(tensors, lse, None, total))


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
