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
from lightning_dilated.ext.recurrence.op import (
    RecurrenceSpec,
    Refused,
    encode,
    like_inputs,
    part_backward,
    part_forward,
    rule_flops,
    with_graph,
)
from lightning_dilated.ext.recurrence.parts import Part
from lightning_dilated.memory.recompute import KEPT
from lightning_dilated.recurrence import RecurrentState
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
KEPT.append(CHUNK)


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


class _Chunk:
    """One layer's call in one chunk.

    Args:
        place: (2,) the numbers of layer and chunk.
    """

    def __init__(
        self, samples: int, lengths: Tensor | None, cu_seqlens: Tensor | None, place: Tensor, stream: str, spec: str
    ) -> None:
        layer, self.number = place.tolist()
        self.stream: Stream = find_stream(stream)
        self.states = self.stream.states_of(layer)
        kind, segment, *_ = RecurrenceSpec.decode(spec)
        self.settings = {"kind": kind, "segment": segment, "sequence": self.stream.group}
        shard = self.stream.shard
        span = range(shard.begin(self.number), min(shard.begin(self.number + 1), shard.stop))
        starts = _starts(self.stream, samples, cu_seqlens)
        self.part = Part(span, starts, None if lengths is None else lengths.tolist())

    def before(self, tensors: Sequence[Tensor | None]) -> RecurrentState:
        """The state before the chunk, without a graph."""
        return self.part.before(self.states.before(self.number), tensors, self.settings)


def _starts(stream: Stream, samples: int, cu_seqlens: Tensor | None) -> list[list[int]]:
    """Of each sample, the positions at which documents begin."""
    if stream.documents is not None:
        starts: list[list[int]] = [[] for _ in range(samples)]
        for document in stream.documents:
            for sample in range(document.sample, document.sample + document.samples):
                starts[sample].append(document.start)
        return starts
    return [[0]] * samples if cu_seqlens is None else [cu_seqlens.tolist()[:-1]]


def run_forward(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, *rest: Any) -> Tensor:
    """(B, L, H, D); rising, the chunk leaves its state for the next one."""
    tensors, chunk = (q, k, v, log_decay, beta), _Chunk(len(q), *rest)
    with no_sequence():
        out, after = part_forward(chunk.part, tensors, chunk.before(tensors), chunk.settings)
    if chunk.stream.rising:
        chunk.states.leave(chunk.number, after, chunk.stream.exact)
    return out


def run_backward(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, log_decay and beta; that of the state before the chunk is left for the chunk before it."""
    tensors, chunk = args[:5], _Chunk(len(grad), *args[5:])
    exact, before = chunk.stream.exact, chunk.before(tensors)
    later = chunk.states.take_grad(chunk.number) if exact else None
    with no_sequence():
        results, earlier = part_backward(chunk.part, tensors, before, chunk.settings, grad, later)
    if exact:
        chunk.states.leave_grad(chunk.number, earlier)
    return results


for _name, _run in (("chunk_recurrence", run_forward), ("chunk_recurrence_backward", run_backward)):
    _LIBRARY.impl(_name, torch.compiler.disable(_run), "CompositeExplicitAutograd")


@torch.library.register_fake("lightning_dilated::chunk_recurrence", lib=_LIBRARY)
def _(q, k, v, *others):
    return v.new_empty((*q.shape[:3], v.shape[3]))


@torch.library.register_fake("lightning_dilated::chunk_recurrence_backward", lib=_LIBRARY)
def _(grad, q, k, v, log_decay, beta, *others):
    return like_inputs(q, k, v, log_decay, beta)


class _Recurrence(torch.autograd.Function):
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


_LIBRARY.impl("chunk_recurrence", with_graph(CHUNK, _Recurrence.apply), "Autograd")
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
