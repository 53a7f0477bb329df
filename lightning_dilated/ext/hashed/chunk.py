"""Compute hashed attention in a chunk of a stream; the stream carries rows and gradients to other chunks.

Exact training differentiates the chunks in falling order. Each chunk then adds the gradients that later chunks computed
for its rows, and stores the gradients of earlier rows. The losses balance and spread are of the whole sequence, because
the first pass sums the chances of all chunks. If gradients end at chunks, each chunk has its own balance and spread.

Shape letters: B batch, n tokens of a chunk, K kv heads, S earlier rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_dilated._device import send
from lightning_dilated.attention.context import find_context
from lightning_dilated.ext.hashed.functional import Options, Result, compute
from lightning_dilated.ext.hashed.order import codes, keys
from lightning_dilated.ext.hashed.rows import HashedRows

if TYPE_CHECKING:
    from lightning_dilated.ext.hashed.op import LossTerms
    from lightning_dilated.ext.streams.stream import Stream


class HashedChunk:
    """A layer's call in a chunk.

    Args:
        tensors: q, k, v, z_q, z_k and null of the chunk.
        lengths, cu_seqlens: of the whole sequence, on the CPU.
        place: (2,) indices of the layer and of the chunk.
        context: name of the stream.
    """

    def __init__(
        self, tensors: Sequence[Tensor], lengths: Tensor | None, cu_seqlens: Tensor | None, place: Tensor, context: str,
        options: Options,
    ) -> None:  # fmt: skip
        layer, self.number = place.tolist()
        self.stream: Stream = find_context(context)
        self.tensors, self.carry = tensors, self.stream.hashed_of(layer)
        # soft lookups read all rows, so all rows are carried
        self.options = options._replace(latest=self.stream.seq_len) if options.soft else options
        self.samples, k = len(tensors[1]), tensors[1]
        make = lambda: self._documents(lengths, cu_seqlens, k.device)  # noqa: E731
        self.documents, self.real, self.stays, self.is_open = self.stream.remember(
            self.number, ("hashed", len(k)), make
        )
        self.rows = self.carry.enter(self.number, HashedRows.empty(k, tensors[4]))

    def _documents(self, lengths: Tensor | None, cu_seqlens: Tensor | None, device: torch.device) -> tuple[Any, ...]:
        """Return documents (B, n), the number of real tokens, (B,) `stays` of `HashedCarry.leave`, and (B, n) bool.

        Documents d B + b belong to sample b; d is 0 if the document began before the chunk. -1 is padding. The last
        result tells which tokens belong to a document that may continue after the chunk.
        """
        span, samples = self.stream.tokens(self.number), self.samples
        at, starts = torch.arange(span.start, span.stop), self.stream.document_starts(samples, cu_seqlens)
        count = lambda x, positions: torch.searchsorted(torch.tensor(x), positions, right=True)  # noqa: E731
        began = torch.stack([count(x, at) - count(x, at[:1] - 1) for x in starts])
        real = torch.ones_like(began, dtype=torch.bool) if lengths is None else at < lengths.cpu()[:, None]
        documents = torch.where(real, began * samples + torch.arange(samples)[:, None], -1)
        results = documents, began[:, -1] == 0, real & (began == began[:, -1:])
        documents, stays, is_open = (send(x, device) for x in results)
        return documents, int(real.sum()), stays, is_open

    def run(self, tensors: Sequence[Tensor], before: HashedRows, labelled: Tensor) -> Result:
        """Compute the chunk from its tensors and the rows of earlier chunks that it reads."""
        longest = self.stream.tokens(self.number).stop
        return compute(tensors, self.options, self.documents, self.real, longest, labelled, before=before)

    def read(self) -> Tensor:
        """Return the indices of earlier rows with codes that the chunk looks up."""
        z_q, options = self.tensors[3], self.options
        lookups = options.row_codes(z_q) if options.soft else codes(z_q, options.probes)
        return torch.isin(self.rows.keys, keys(lookups, self.documents)).nonzero()[:, 0]

    def leave(self, result: Result) -> None:
        """Let later chunks read the chunk's rows."""
        (_, k, v, _, z_k, _), heads = self.tensors, self.rows.heads
        index = self.is_open[..., None].expand(-1, -1, heads).flatten().nonzero()[:, 0]
        samples = torch.arange(self.samples, device=k.device)[:, None].expand_as(self.documents)
        row_keys = keys(self.options.row_codes(z_k), samples)
        rows = [x.flatten(0, 2)[index].detach() for x in (row_keys[..., 0], k, v, result.chance_k)]
        self.carry.leave(self.rows.with_tensors(rows), index, self.stays, self.options.latest)

    def forward(self, terms: LossTerms | None) -> tuple[Tensor, Tensor]:
        """Return the output, and the queries that the losses count, (B, n) bool; see `run_forward` of op.py."""
        q = self.tensors[0]
        counted = q.new_zeros(q.shape[:2], dtype=torch.bool)
        if terms is not None and terms.labelled is not None:
            counted = send(terms.labelled[:, self.stream.local(self.number)], q.device).clone()
        result = self.run(self.tensors, self.rows.at(self.read()), counted)
        if self.stream.rising:
            self.leave(result)
        if terms is not None and terms.labelled is not None:
            statistics = torch.cat([terms.statistics(result, counted), result.totals.double().flatten()])
            totals = self.carry.totals
            totals[self.number] = statistics + totals.get(self.number - 1, 0)
            terms.latest = totals[max(totals)][:4]
        return result.out, counted

    def backward(self, grad: Tensor, labelled: Tensor, terms: LossTerms | None) -> tuple[Tensor, ...]:
        """Return the gradients of the chunk's tensors, and store the gradients of earlier rows."""
        index = self.read()
        inputs = [x.detach().requires_grad_() for x in self.tensors]
        rows = self.rows.at(index)
        before = [x.detach().requires_grad_() for x in rows.tensors()[1:]]
        result = self.run(inputs, rows.with_tensors([rows.keys, *before]), labelled)
        outputs, grads = [result.out], [grad]
        if terms is not None and self.number in self.carry.totals:
            outputs.append(self._loss(result, labelled, terms))
            grads.append(torch.ones_like(outputs[1]))
        left, later = (index[:0], None) if self.carry.own is None else self.carry.own
        if later is not None:
            outputs.append(result.chance_k.flatten(0, 2)[left])
            grads.append(later[2])
        results = torch.autograd.grad(outputs, [*inputs, *before], grads, allow_unused=True, materialize_grads=True)
        if self.stream.exact:
            self.carry.add_grads(index, results[len(inputs) :])
        results = [x.contiguous() for x in results[: len(inputs)]]
        for i, x in enumerate(later[:2] if later else [], 1):
            total = results[i].to(x.dtype).flatten(0, 2)
            results[i] = total.index_add(0, left, x).view_as(results[i]).to(results[i].dtype)
        return tuple(results)

    def _loss(self, result: Result, labelled: Tensor, terms: LossTerms) -> Tensor:
        """Return the weighted sum of losses; its gradient with respect to the chunk is the whole sequence's."""
        totals, count = result.totals, labelled.sum(1)
        if self.stream.exact:
            whole = self.carry.totals[self.stream.chunks - 1][-totals.numel() :].view_as(totals).to(totals)
            totals, count = whole + (totals - totals.detach()), terms.labelled.sum(1).to(totals.device)
        return terms.total(result.losses(totals), count)
