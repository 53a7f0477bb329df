"""Run a recurrence over a part of a sequence, which is a range of positions; documents may begin inside it.

Shape letters: B batch, N tokens of the sequence, n tokens of the part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_dilated.ext.recurrence.compute import Output
from lightning_dilated.ext.recurrence.functional import recur
from lightning_dilated.ext.recurrence.state import RecurrentState, empty_state

#: q, k, v, log_decay and beta
Tensors = Sequence[Tensor | None]


class Part(NamedTuple):
    """A part of a sequence.

    Attributes:
        span: positions of the part.
        starts: for each sample, the positions of the whole sequence at which documents begin.
        lengths: number of tokens of each right-padded sample; None: all samples are as long as the sequence."""

    span: range
    starts: Sequence[Sequence[int]]
    lengths: Sequence[int] | None = None

    def split(self, tokens: int) -> list[Part]:
        """Split the part into consecutive parts of at most `tokens` tokens."""
        starts = range(self.span.start, max(self.span.stop, self.span.start + 1), tokens)
        return [self._replace(span=range(at, min(at + tokens, self.span.stop))) for at in starts]

    def begins(self) -> list[bool]:
        """Return, for each sample, whether a document begins at the first position of the part."""
        return [self.span.start in starts for starts in self.starts]

    def before(self, known: RecurrentState | None, tensors: Tensors, settings: dict[str, Any]) -> RecurrentState:
        """Return the state before the part: `known`, but empty for samples with a document that begins at the part's
        first position. With `known=None`, all samples are empty."""
        q, k, v = (x for x in tensors[:3] if x is not None)
        dtype, shape = torch.promote_types(q.dtype, torch.float32), (*k.shape[2:], v.shape[3])
        empty = empty_state(settings["kind"], settings["segment"] or 1, len(q), shape, q, dtype)
        return empty if known is None else known.to(q.device, dtype).where(self.begins(), empty)

    def run(
        self, tensors: Tensors, state: RecurrentState, settings: dict[str, Any], output: Output = Output.READ
    ) -> tuple[Tensor, RecurrentState]:
        """Run the part from the state before it; return the output (see `Output`) and the state after the part.

        If documents begin inside the part, samples are computed one by one.
        """
        call: Callable[..., Any] = partial(recur, **settings, return_state=True, output=output)
        begins = [[x for x in starts if self.span.start < x < self.span.stop] for starts in self.starts]
        if not any(begins):
            lengths = self.lengths and [min(max(n - self.span.start, 0), len(self.span)) for n in self.lengths]
            return call(*tensors, lengths=lengths, state=state)
        results = []
        for sample, documents in enumerate(begins):
            rows = [None if x is None else x[sample : sample + 1] for x in tensors]
            cuts = [0, *(x - self.span.start for x in documents), len(self.span)]
            before = state.select([sample])
            every = RecurrentState.join([before, *[before.detach().zeros()] * len(documents)])
            out, after = call(*rows, cu_seqlens=cuts, state=every)
            results.append((out, after.select([len(documents)])))
        return torch.cat([out for out, _ in results]), RecurrentState.join([after for _, after in results])

    def after(self, tensors: Tensors, state: RecurrentState, settings: dict[str, Any]) -> RecurrentState:
        """Return the state after the part, without computing the output."""
        return self.run(tensors, state, settings, Output.NONE)[1]
