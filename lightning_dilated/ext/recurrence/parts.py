"""A part of the positions of a sequence on one rank, after the state before it: documents may begin within.

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
        """(out as `output` says, the state after the part) of the part's tensors.

        Samples are computed one by one where documents begin within the part.
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
        """The state after the part alone."""
        return self.run(tensors, state, settings, Output.NONE)[1]
