"""recurrent_attention as one op of torch, which compiled blocks and recomputation know: nothing but its inputs is saved.

The backward computes the call once more and differentiates that, on many ranks with the exchange of their states. FLOPs
count the rule itself (`Recurrence.flops`), three times that with the backward.
Shape letters: B batch, L tokens of this rank, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_dilated._compat.torch import autograd_within_op, below_autograd
from lightning_dilated.recurrence.description import Recurrence
from lightning_dilated.recurrence.functional import recurrent_attention
from lightning_dilated.sequence.group import find_sequence, no_sequence

_ROWS = "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? beta"
_REST = "Tensor? lengths, Tensor? cu_seqlens, str spec"
_LIBRARY = torch.library.Library("lightning_dilated", "FRAGMENT")
_LIBRARY.define(f"recurrence({_ROWS}, {_REST}) -> Tensor")
_LIBRARY.define(f"recurrence_backward(Tensor grad, {_ROWS}, {_REST}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
RECURRENCE = torch.ops.lightning_dilated.recurrence.default
RECURRENCE_BACKWARD = torch.ops.lightning_dilated.recurrence_backward.default


class RecurrenceSpec(NamedTuple):
    """What a call asks for besides its tensors; torch carries it as a string, its code.

    Attributes:
        sequence: name of the `SequenceGroup` that shares the sequence; "" is one rank.
    """

    kind: str
    segment: int | None
    causal: bool
    sequence: str = ""

    @classmethod
    def decode(cls, code: str) -> RecurrenceSpec:
        """From `encode`'s string."""
        kind, segment, causal, sequence = code.split("|", 3)
        return cls(kind, int(segment) if segment else None, causal == "1", sequence)

    def settings(self) -> dict[str, Any]:
        """Arguments of `recurrent_attention`."""
        group = find_sequence(self.sequence) if self.sequence else None
        return {"kind": self.kind, "segment": self.segment, "causal": self.causal, "sequence": group}


def encode(kind: str, segment: int | None, causal: bool, sequence: str = "") -> str:
    """The code of a `RecurrenceSpec`; torch.compile traces it."""
    return f"{kind}|{'' if segment is None else segment}|{int(causal)}|{sequence}"


@contextlib.contextmanager
def differentiated(tensors: Sequence[Tensor | None]):
    """Within an op: (copies of tensors, None among them, that require gradients), while autograd records."""
    with autograd_within_op(), torch.enable_grad():
        yield [None if x is None else x.detach().requires_grad_() for x in tensors]


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor | None], grads: Sequence[Tensor]) -> list[Tensor]:
    """Of each input, zeros where the outputs do not depend on it; an empty tensor for None."""
    leaves = [x for x in inputs if x is not None]
    results = iter(torch.autograd.grad(outputs, leaves, grads, allow_unused=True, materialize_grads=True))
    return [outputs[0].new_empty(0) if x is None else next(results) for x in inputs]


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    spec: str,
) -> Tensor:
    """(B, L, H, D); `spec` is `RecurrenceSpec`'s code."""
    with no_sequence():
        settings = RecurrenceSpec.decode(spec).settings()
        return recurrent_attention(q, k, v, log_decay, beta, **settings, lengths=lengths, cu_seqlens=cu_seqlens)


def run_backward(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, log_decay and beta; empty tensors for those that are None."""
    *tensors, lengths, cu_seqlens, spec = args
    with differentiated(tensors) as inputs:
        out = run_forward(*inputs, lengths, cu_seqlens, spec)
        return tuple(gradients([out], inputs, [grad]))


for _name, _run in (("recurrence", run_forward), ("recurrence_backward", run_backward)):
    _LIBRARY.impl(_name, torch.compiler.disable(_run), "CompositeExplicitAutograd")


# -- shapes, for tracing -----------------------------------------------------------------------------------------------
def like_inputs(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """What gradients of q, k, v, log_decay and beta look like."""
    q = tensors[0]
    contiguous = torch.contiguous_format
    return tuple(q.new_empty(0) if x is None else torch.empty_like(x, memory_format=contiguous) for x in tensors)


@torch.library.register_fake("lightning_dilated::recurrence", lib=_LIBRARY)
def _(q, k, v, *others):
    return v.new_empty((*q.shape[:3], v.shape[3]))


@torch.library.register_fake("lightning_dilated::recurrence_backward", lib=_LIBRARY)
def _(grad, q, k, v, log_decay, beta, *others):
    return like_inputs(q, k, v, log_decay, beta)


# -- autograd ----------------------------------------------------------------------------------------------------------
class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        *tensors, ctx.spec = args
        ctx.save_for_backward(*tensors)
        return below_autograd(RECURRENCE, *args)

    @staticmethod
    def backward(ctx, grad):
        saved = ctx.saved_tensors
        grads = RECURRENCE_BACKWARD(grad, *saved, ctx.spec)
        return *(None if x is None else g for x, g in zip(saved[:5], grads, strict=True)), None, None, None


class Refused(torch.autograd.Function):
    """A backward as a node whose own gradient is refused: `Refused.apply(op, *args)`."""

    @staticmethod
    def forward(ctx, op, *args):
        return below_autograd(op, *args)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(
            "a layer's recurrence has no double backward: its gradient was asked to be differentiated again. Leave out "
            "create_graph=True, or call ld.recurrent_attention itself."
        )


def with_graph(op: Any, graph: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of an op for autograd: graph(*args) where a tensor requires a gradient, else the op alone."""

    def call(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            return graph(*args)
        return below_autograd(op, *args)

    return torch.compiler.disable(call)


_LIBRARY.impl("recurrence", with_graph(RECURRENCE, _Recurrence.apply), "Autograd")
_LIBRARY.impl(
    "recurrence_backward",
    with_graph(RECURRENCE_BACKWARD, lambda *args: Refused.apply(RECURRENCE_BACKWARD, *args)),
    "Autograd",
)


# -- FLOPs -------------------------------------------------------------------------------------------------------------
def rule_flops(q: Tensor, k: Tensor, spec: str) -> int:
    """Of a call, forward: padding is counted."""
    kind, segment, *_ = RecurrenceSpec.decode(spec)
    return q.shape[0] * q.shape[1] * Recurrence(kind, segment).flops(q.shape[2], k.shape[2], q.shape[3])


@register_flop_formula(torch.ops.lightning_dilated.recurrence, get_raw=True)
def _forward_flops(q, k, v, log_decay, beta, lengths, cu_seqlens, spec, *, out_val: Any = None, **options: Any) -> int:
    return rule_flops(q, k, spec)


@register_flop_formula(torch.ops.lightning_dilated.recurrence_backward, get_raw=True)
def _backward_flops(grad, q, k, v, log_decay, beta, lengths, cu_seqlens, spec, *, out_val: Any = None,
                    **options: Any) -> int:  # fmt: skip
    return 2 * rule_flops(q, k, spec)
