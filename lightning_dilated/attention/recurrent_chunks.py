"""A layer's recurrence in a chunk of a stream, as one op: the state before a chunk is kept, and its gradient passed back.

In exact training the chunks are differentiated from the last to the first: each computes its part once more from the state
before it, with the gradient that the chunk after it has left for the state between them.
Shape letters: B batch, L tokens of this rank's piece of a chunk, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_dilated._compat.torch import below_autograd
from lightning_dilated.attention.stream import ChunkLayer, Stream, find_stream
from lightning_dilated.recurrence import RecurrentState, recurrent_attention
from lightning_dilated.recurrence.op import (
    RecurrenceSpec,
    Refused,
    differentiated,
    encode,
    gradients,
    like_inputs,
    rule_flops,
    with_graph,
)
from lightning_dilated.recurrence.state import empty_state
from lightning_dilated.sequence.group import no_sequence

_ARGS = (
    "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? beta, Tensor? lengths, Tensor? cu_seqlens, Tensor place, "
    "str stream, str spec"
)
_LIBRARY = torch.library.Library("lightning_dilated", "FRAGMENT")
_LIBRARY.define(f"chunk_recurrence({_ARGS}) -> Tensor")
_LIBRARY.define(f"chunk_recurrence_backward(Tensor grad, {_ARGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
CHUNK = torch.ops.lightning_dilated.chunk_recurrence.default
CHUNK_BACKWARD = torch.ops.lightning_dilated.chunk_recurrence_backward.default


def chunk_recurrence(
    rows: Sequence[Tensor | None],
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk: ChunkLayer,
    kind: str,
    segment: int | None,
) -> Tensor:
    """(B, L, H, D) of q, k, v, log_decay and beta of a chunk."""
    return CHUNK(*rows, lengths, cu_seqlens, chunk.place, chunk.stream, encode(kind, segment, True))


class _Part:
    """One layer's call in one chunk.

    Args:
        place: (2,) the numbers of layer and chunk.
    """

    def __init__(
        self, lengths: Tensor | None, cu_seqlens: Tensor | None, place: Tensor, stream: str, spec: str
    ) -> None:
        layer, self.chunk = place.tolist()
        self.stream: Stream = find_stream(stream)
        self.states = self.stream.states_of(layer)
        self.lengths, self.cu_seqlens = lengths, cu_seqlens
        kind, self.segment, *_ = RecurrenceSpec.decode(spec)
        self.settings = {"kind": kind, "segment": self.segment, "sequence": self.stream.group, "return_state": True}

    def before(self, q: Tensor, k: Tensor, v: Tensor) -> RecurrentState:
        """The state before the chunk, without a graph: of samples that begin with it, empty."""
        dtype, shape = torch.promote_types(q.dtype, torch.float32), (*k.shape[2:], v.shape[3])
        empty = empty_state(self.settings["kind"], self.segment or 1, len(q), shape, q, dtype)
        known = self.states.before(self.chunk)
        if known is None:
            return empty
        return known.to(q.device, dtype).where(self.begins(len(q)), empty)

    def begins(self, samples: int) -> list[bool]:
        """Of each sample, whether a document begins with the chunk."""
        return [self.span.start in starts for starts in self._starts(samples)]

    @property
    def span(self) -> range:
        """Positions of the whole chunk."""
        shard = self.stream.shard
        return range(shard.begin(self.chunk), min(shard.begin(self.chunk + 1), shard.stop))

    def _starts(self, samples: int) -> list[list[int]]:
        """Of each sample, the positions at which documents begin."""
        starts: list[list[int]] = [[] for _ in range(samples)]
        if self.stream.documents is not None:
            for document in self.stream.documents:
                for sample in range(document.sample, document.sample + document.samples):
                    starts[sample].append(document.start)
        elif self.cu_seqlens is not None:
            starts[0] = self.cu_seqlens.tolist()[:-1]
        else:
            starts = [[0] for _ in range(samples)]
        return starts

    def run(self, tensors: Sequence[Tensor | None], state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """(out (B, L, H, D), the state after the chunk)."""
        with no_sequence():
            samples, span = len(tensors[0]), self.span
            bounds = [[x for x in starts if x in span and x > span.start] for starts in self._starts(samples)]
            if not any(bounds):
                limits: dict[str, Any] = {}
                if self.lengths is not None:
                    limits["lengths"] = [min(max(n - span.start, 0), len(span)) for n in self.lengths.tolist()]
                return recurrent_attention(*tensors, **self.settings, **limits, state=state)
            parts = [self._of_sample(i, tensors, state.select([i]), bounds[i]) for i in range(samples)]
            return torch.cat([out for out, _ in parts]), RecurrentState.join([x for _, x in parts])

    def _of_sample(
        self, sample: int, tensors: Sequence[Tensor | None], state: RecurrentState, begins: list[int]
    ) -> tuple[Tensor, RecurrentState]:
        """Of one sample, in which documents begin."""
        rows = [None if x is None else x[sample : sample + 1] for x in tensors]
        cuts = [0, *(x - self.span.start for x in begins), len(self.span)]
        fresh = state.detach().zeros()
        every = RecurrentState.join([state, *[fresh] * len(begins)])
        out, after = recurrent_attention(*rows, **self.settings, cu_seqlens=cuts, state=every)
        return out, after.select([len(begins)])


def run_forward(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, *rest: Any) -> Tensor:
    """(B, L, H, D); rising, the chunk leaves its state for the next one."""
    part = _Part(*rest)
    out, after = part.run((q, k, v, log_decay, beta), part.before(q, k, v))
    if part.stream.rising:
        part.states.leave(part.chunk, after, part.stream.exact)
    return out


def run_backward(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, log_decay and beta; that of the state before the chunk is left for the chunk before it."""
    tensors, part = args[:5], _Part(*args[5:])
    before = part.before(*tensors[:3])
    with differentiated([*tensors, *before.floating()]) as inputs:
        out, after = part.run(inputs[:5], before.with_tensors(inputs[5:]))
        outputs, grads = [out], [grad]
        later = part.states.take_grad(part.chunk) if part.stream.exact else None
        if later is not None:
            outputs += after.floating()
            grads += later
        results = gradients(outputs, inputs, grads)
    if part.stream.exact:
        state = before.with_tensors(results[5:])  # that of the chunk before is not read where a document begins
        part.states.leave_grad(part.chunk, state.where(part.begins(len(grad)), state.zeros()).floating())
    return tuple(results[:5])


for _name, _run in (("chunk_recurrence", run_forward), ("chunk_recurrence_backward", run_backward)):
    _LIBRARY.impl(_name, torch.compiler.disable(_run), "CompositeExplicitAutograd")


@torch.library.register_fake("lightning_dilated::chunk_recurrence", lib=_LIBRARY)
def _(q, k, v, *others):
    return v.new_empty((*q.shape[:3], v.shape[3]))


@torch.library.register_fake("lightning_dilated::chunk_recurrence_backward", lib=_LIBRARY)
def _(grad, q, k, v, log_decay, beta, *others):
    return like_inputs(q, k, v, log_decay, beta)


class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        *tensors, ctx.stream, ctx.spec = args
        ctx.save_for_backward(*tensors)
        return below_autograd(CHUNK, *args)

    @staticmethod
    def backward(ctx, grad):
        saved = ctx.saved_tensors
        grads = CHUNK_BACKWARD(grad, *saved, ctx.stream, ctx.spec)
        return *(None if x is None else g for x, g in zip(saved[:5], grads, strict=True)), *[None] * 5


_LIBRARY.impl("chunk_recurrence", with_graph(CHUNK, _Chunk.apply), "Autograd")
_LIBRARY.impl(
    "chunk_recurrence_backward",
    with_graph(CHUNK_BACKWARD, lambda *args: Refused.apply(CHUNK_BACKWARD, *args)),
    "Autograd",
)


@register_flop_formula(torch.ops.lightning_dilated.chunk_recurrence, get_raw=True)
def _forward_flops(q, k, *args, out_val: Any = None, **options: Any) -> int:
    return rule_flops(q, k, args[-1])


@register_flop_formula(torch.ops.lightning_dilated.chunk_recurrence_backward, get_raw=True)
def _backward_flops(grad, q, k, *args, out_val: Any = None, **options: Any) -> int:
    return 2 * rule_flops(q, k, args[-1])
