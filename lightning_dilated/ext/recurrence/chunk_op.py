"""Compute a layer's recurrence in a chunk of a stream as one op, which stores states and gradients for other chunks.

Exact training differentiates the chunks in falling order. Each chunk computes its part again from the state before it,
and uses the gradient of the state after it, which the later chunk stored.
Shape letters: B batch, L tokens of this rank's piece of a chunk, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_dilated._ops import Op
from lightning_dilated.attention.context import find_context
from lightning_dilated.ext.recurrence import op
from lightning_dilated.ext.recurrence.parts import Part
from lightning_dilated.memory.recompute import KEPT
from lightning_dilated.recurrence import RecurrentState
from lightning_dilated.sequence.group import no_sequence

if TYPE_CHECKING:
    from lightning_dilated.ext.streams.stream import Stream


class _Chunk:
    """The call of one layer in one chunk; `place`: (2,) indices of the layer and of the chunk."""

    def __init__(
        self, samples: int, lengths: Tensor | None, cu_seqlens: Tensor | None, place: Tensor, stream: str, spec: str
    ) -> None:
        layer, self.number = place.tolist()
        self.stream: Stream = find_context(stream)
        self.states = self.stream.states_of(layer)
        kind, segment, *_ = op.RecurrenceSpec.decode(spec)
        self.settings = {"kind": kind, "segment": segment, "sequence": self.stream.group}
        shard = self.stream.shard
        span = range(shard.begin(self.number), min(shard.begin(self.number + 1), shard.stop))
        starts = self.stream.document_starts(samples, cu_seqlens)
        self.part = Part(span, starts, None if lengths is None else lengths.tolist())

    def before(self, tensors: Sequence[Tensor | None]) -> RecurrentState:
        """Return the state before the chunk, without an autograd graph."""
        return self.part.before(self.states.before(self.number), tensors, self.settings)


def run_forward(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, *extra: Any) -> Tensor:
    """Return the output (B, L, H, D). In the first pass over the stream, store the state for the next chunk."""
    tensors, chunk = (q, k, v, log_decay, beta), _Chunk(len(q), *extra)
    with no_sequence():
        out, after = op.part_forward(chunk.part, tensors, chunk.before(tensors), chunk.settings)
    if chunk.stream.rising:
        chunk.states.leave(chunk.number, after.detach(), chunk.stream.exact)
    return out


def run_backward(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, log_decay and beta. Exact training stores the earlier state's gradient."""
    tensors, chunk = args[:5], _Chunk(len(grad), *args[5:])
    exact, before = chunk.stream.exact, chunk.before(tensors)
    later = chunk.states.pop_grad(chunk.number) if exact else None
    with no_sequence():
        results, earlier = op.part_backward(chunk.part, tensors, before, chunk.settings, grad, later)
    if exact:
        chunk.states.store_grad(chunk.number, [x.clone() for x in earlier])
    return results


_EXTRA = "Tensor place, str stream, str spec"
_OP = Op(
    "chunk_recurrence",
    schemas=(f"({op.ROWS}, {_EXTRA}) -> Tensor", f"(Tensor grad, {op.ROWS}, {_EXTRA}) -> {op.GRADIENTS}"),
    caller=op.CALLER,
    remedy=op.REMEDY,
    run=(run_forward, run_backward),
    fake=(op.fake_forward, op.fake_backward),
    saves=lambda args, out: (args[:-2], args[-2:]),
    arguments=lambda grad, saved, extra: (grad, *saved, *extra),
    flops=(op.rule_flops, op.twice_rule_flops),
)
CHUNK, CHUNK_BACKWARD = _OP.forward, _OP.backward
KEPT.append(CHUNK)
