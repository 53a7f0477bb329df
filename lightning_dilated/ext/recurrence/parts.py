"""A part of the positions of a sequence on one rank, after the state before it: documents may begin within.

Shape letters: B batch, N tokens of the sequence, n tokens of the part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_dilated.ext.recurrence.compute import Output
from lightning_dilated.ext.recurrence.functional import recur
from lightning_dilated.ext.recurrence.state import RecurrentState, empty_state

#: q, k, v, log_decay and beta
Tensors = Sequence[Tensor | None]
#: recurrent_attention's arguments -> (rows, the state after them)
Call = Callable[..., tuple[Tensor, RecurrentState]]


class Part(NamedTuple):
    """Attributes:
    span: positions of the part.
    starts: of each sample, the positions of the whole sequence at which documents begin.
    lengths: tokens of each right-padded sample; None: all are as long as the sequence.
    """

    span: range
    starts: Sequence[Sequence[int]]
    lengths: Sequence[int] | None = None

    def split(self, tokens: int) -> list[Part]:
        """Parts of at most so many tokens, in their order."""
        starts = range(self.span.start, max(self.span.stop, self.span.start + 1), tokens)
        return [self._replace(span=range(at, min(at + tokens, self.span.stop))) for at in starts]

    def begins(self) -> list[bool]:
        """Of each sample, whether a document begins with the part."""
        return [self.span.start in starts for starts in self.starts]

    def before(self, known: RecurrentState | None, tensors: Tensors, settings: dict[str, Any]) -> RecurrentState:
        """The state before the part: `known`, and an empty one for samples that begin with it, or where None is known."""
        q, k, v = (x for x in tensors[:3] if x is not None)
        dtype, shape = torch.promote_types(q.dtype, torch.float32), (*k.shape[2:], v.shape[3])
        empty = empty_state(settings["kind"], settings["segment"] or 1, len(q), shape, q, dtype)
        return empty if known is None else known.to(q.device, dtype).where(self.begins(), empty)

    def run(
        self, tensors: Tensors, state: RecurrentState, settings: dict[str, Any], output: Output = Output.READ
    ) -> tuple[Tensor, RecurrentState]:
        """(out as `output` says, the state after the part) of the part's tensors; `settings` are those of
        `recurrent_attention`."""

        def call(*rows: Any, **options: Any) -> tuple[Tensor, RecurrentState]:
            out, after = recur(*rows, **options, output=output)
            assert after is not None
            return out, after

        return self._run(call, tensors, state, settings)

    def after(self, tensors: Tensors, state: RecurrentState, settings: dict[str, Any]) -> RecurrentState:
        """The state after the part alone."""
        return self.run(tensors, state, settings, Output.NONE)[1]

    def _run(
        self, call: Call, tensors: Tensors, state: RecurrentState, settings: dict[str, Any]
    ) -> tuple[Tensor, RecurrentState]:
        """(rows, the state after the part) of a call, sample by sample where documents begin within the part."""
        within = [[x for x in starts if x in self.span and x > self.span.start] for starts in self.starts]
        if any(within):
            each = [self._of_sample(call, i, tensors, state.select([i]), x, settings) for i, x in enumerate(within)]
            return torch.cat([rows for rows, _ in each]), RecurrentState.join([x for _, x in each])
        limits: dict[str, Any] = {}
        if self.lengths is not None:
            limits["lengths"] = [min(max(n - self.span.start, 0), len(self.span)) for n in self.lengths]
        return call(*tensors, **settings, **limits, state=state)

    def _of_sample(
        self,
        call: Call,
        sample: int,
        tensors: Tensors,
        state: RecurrentState,
        begins: list[int],
        settings: dict[str, Any],
    ) -> tuple[Tensor, RecurrentState]:
        """Of one sample, in which documents begin."""
        rows = [None if x is None else x[sample : sample + 1] for x in tensors]
        cuts = [0, *(x - self.span.start for x in begins), len(self.span)]
        fresh = state.detach().zeros()
        every = RecurrentState.join([state, *[fresh] * len(begins)])
        out, after = call(*rows, **settings, cu_seqlens=cuts, state=every)
        return out, after.select([len(begins)])
