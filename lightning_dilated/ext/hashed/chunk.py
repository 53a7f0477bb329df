"""Compute hashed attention in a chunk of a stream; the stream carries rows and gradients to other chunks.

Exact training differentiates the chunks in falling order. Each chunk then adds the gradients that later chunks computed
for its rows, and stores the gradients of earlier rows. The losses balance and spread are of the whole sequence, because
the first pass sums the chances of all chunks. If gradients end at chunks, each chunk has its own balance and spread.

If ranks share the stream, each rank carries the rows that it computed. In a chunk, `ranks.py` shares the work of all
ranks' lookups and of the carried rows that they look up.

Shape letters: B batch, n tokens of a chunk on this rank, K kv heads, S earlier rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_dilated._device import send
from lightning_dilated.attention.context import find_context
from lightning_dilated.ext.hashed import ranks
from lightning_dilated.ext.hashed.functional import Options, Result, compute
from lightning_dilated.ext.hashed.order import codes, keys
from lightning_dilated.ext.hashed.rows import HashedRows, numbered, slots

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
        self.layer, self.number = place.tolist()
        self.stream: Stream = find_context(context)
        self.tensors, self.carry = tensors, self.stream.hashed_of(self.layer)
        # soft lookups read all rows, so all rows are carried
        self.options = options._replace(latest=self.stream.seq_len) if options.soft else options
        self.samples, k = len(tensors[1]), tensors[1]
        self.lengths = [self.stream.seq_len] * self.samples if lengths is None else lengths.tolist()
        self.codes = 1 if options.soft else tensors[4].shape[4] ** tensors[4].shape[3]
        self.call = 0
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
        span, chunk = self.stream.tokens(self.number), self.stream.shard.positions(self.number)
        samples, starts = self.samples, self.stream.document_starts(self.samples, cu_seqlens)
        at = torch.arange(span.start, span.stop)
        positions = torch.cat([at, torch.tensor([chunk.start - 1, chunk.stop - 1])])
        count = torch.stack([torch.searchsorted(torch.tensor(x), positions, right=True) for x in starts])
        began, last = (count - count[:, -2:-1]).tensor_split([len(at)], 1)
        last = last[:, 1]
        real = torch.ones_like(began, dtype=torch.bool) if lengths is None else at < lengths.cpu()[:, None]
        documents = torch.where(real, began * samples + torch.arange(samples)[:, None], -1)
        results = documents, last == 0, real & (began == last[:, None])
        documents, stays, is_open = (send(x, device) for x in results)
        return documents, int(real.sum()), stays, is_open

    def run(self, tensors: Sequence[Tensor], before: HashedRows, labelled: Tensor) -> Result:
        """Compute the chunk from its tensors and the rows of earlier chunks that it reads."""
        group, chunk, place = self.stream.group, self.stream.shard.positions(self.number), None
        if group is not None and max(self.lengths) > chunk.start:
            shard, number = self.stream.shard, self.stream.number(self.number)
            pieces = [shard.piece(peer) for peer in shard.peers(number)]
            place = ranks.Place.of_chunk(group, self.call, pieces, self.lengths, before, self.options.lookups)
        words = {"before": before, "place": place}
        return compute(tensors, self.options, self.documents, self.real, chunk.stop, labelled, **words)

    def agree(self, backward: bool) -> None:
        """Compare the call on all ranks that share the stream."""
        if (group := self.stream.group) is not None:
            facts = {"call": "hashed heads of a chunk", "backward": backward, "options": tuple(self.options)}
            facts |= {"shapes": [(*x.shape[:1], *x.shape[2:]) for x in self.tensors], **ranks.same_kind(self.tensors)}
            tokens, name = len(self.stream.shard.positions(self.number)), f"layer {self.layer}, chunk {self.number}"
            self.call = group.agree(facts, self.tensors[0].shape[1], call_id=name, later=True, chunk=tokens).number

    def sums(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of x (n,) over all ranks, and over lower ranks."""
        return (x, torch.zeros_like(x)) if self.stream.group is None else ranks.sums(self.stream.group, x)

    def count(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Count each key of a document that began before the chunk, on all ranks and on lower ranks; see `slots`."""
        size = self.samples * self.rows.heads * self.codes
        index = slots(keys.flatten(), self.codes).clamp_max(size)
        counts = torch.zeros(size + 1, dtype=torch.int32, device=keys.device)
        return self.sums(counts.scatter_add_(0, index, torch.ones_like(index, dtype=torch.int32))[:-1])

    def read(self) -> Tensor:
        """Return the indices of earlier rows with codes that a rank looks up in the chunk."""
        z_q, options = self.tensors[3], self.options
        lookups = options.row_codes(z_q) if options.soft else codes(z_q, options.probes)
        looked_up = self.count(keys(lookups, self.documents))[0] > 0
        return looked_up[slots(self.rows.keys, self.codes)].nonzero()[:, 0]

    def leave(self, result: Result) -> None:
        """Let later chunks read the chunk's rows."""
        (_, k, v, _, z_k, _), heads = self.tensors, self.rows.heads
        index = self.is_open[..., None].expand(-1, -1, heads).flatten().nonzero()[:, 0]
        samples = torch.arange(self.samples, device=k.device)[:, None].expand_as(self.documents)
        row_keys = keys(self.options.row_codes(z_k), samples)
        row_keys, *rows = (x.flatten(0, 2)[index].detach() for x in (row_keys[..., 0], k, v, result.chance_k))
        rows = self.rows.with_tensors([row_keys, numbered(row_keys), *rows])
        self.carry.leave(rows, index, self.stays, self.options.latest, *self.count(row_keys))

    def forward(self, terms: LossTerms | None) -> tuple[Tensor, Tensor]:
        """Return the output, and the queries that the losses count, (B, n) bool; see `run_forward` of op.py."""
        self.agree(False)
        q = self.tensors[0]
        counted = q.new_zeros(q.shape[:2], dtype=torch.bool)
        if terms is not None and terms.labelled is not None:
            counted = send(terms.labelled[:, self.stream.local(self.number)], q.device).clone()
        result = self.run(self.tensors, self.rows.at(self.read()), counted)
        if self.stream.rising:
            self.leave(result)
        if terms is not None and terms.labelled is not None:
            statistics = torch.cat([terms.statistics(result, counted), self.totals(result, counted)])
            totals = self.carry.totals
            totals[self.number] = statistics + totals.get(self.number - 1, 0)
            terms.latest = totals[max(totals)][:4]
        return result.out, counted

    def backward(self, grad: Tensor, labelled: Tensor, terms: LossTerms | None) -> tuple[Tensor, ...]:
        """Return the gradients of the chunk's tensors, and store the gradients of earlier rows."""
        self.agree(True)
        index = self.read()
        inputs = [x.detach().requires_grad_() for x in self.tensors]
        row_keys, numbers, *before = (rows := self.rows.at(index)).tensors()
        before = [x.detach().requires_grad_() for x in before]
        result = self.run(inputs, rows.with_tensors([row_keys, numbers, *before]), labelled)
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
        # kernels return parts of longer tensors; a compiled block needs tensors of their own
        results = [x.clone() if x.storage_offset() else x.contiguous() for x in results[: len(inputs)]]
        for i, x in enumerate(later[:2] if later else [], 1):
            total = results[i].to(x.dtype).flatten(0, 2)
            results[i] = total.index_add(0, left, x).view_as(results[i]).to(results[i].dtype)
        return tuple(results)

    def totals(self, result: Result, labelled: Tensor) -> Tensor:
        """Return the numbers of labelled queries and `Result.totals` of all ranks, in one fp64 vector."""
        return self.sums(torch.cat([labelled.sum(1), result.totals.detach().flatten()]).double())[0]

    def _loss(self, result: Result, labelled: Tensor, terms: LossTerms) -> Tensor:
        """Return the weighted sum of losses; its gradient with respect to the chunk is the whole sequence's."""
        exact, own = self.stream.exact, result.totals
        whole = self.carry.totals[self.stream.chunks - 1][4:] if exact else self.totals(result, labelled)
        count, whole = whole.to(own).split([self.samples, own.numel()])
        return terms.total(result.losses(whole.view_as(own) + (own - own.detach())), count)
