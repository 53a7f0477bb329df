"""Define recurrent_attention as one torch op, for compiled blocks and recomputation. The op saves only its inputs.

The backward computes the call again and differentiates it, including the exchange of states if ranks share the
sequence. On one rank a long sequence is computed window by window, and the backward starts at the last window. The
FLOPs of a forward follow from the rule (`Recurrence.flops`); a backward counts twice this number.
Shape letters: B batch, L tokens of this rank, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_dilated._ops import Op
from lightning_dilated.ext._compat.torch import autograd_within_op
from lightning_dilated.ext.recurrence import triton_chunks
from lightning_dilated.ext.recurrence.compute import Output
from lightning_dilated.ext.recurrence.functional import recur, recurrent_attention
from lightning_dilated.ext.recurrence.parts import Part
from lightning_dilated.ext.recurrence.state import RecurrentState
from lightning_dilated.memory.recompute import KEPT
from lightning_dilated.pattern.rows import check_bounds
from lightning_dilated.recurrence.description import Recurrence
from lightning_dilated.sequence.group import find_sequence, no_sequence

#: number of tokens per sample that a rank computes in one window. With 12 heads of 64, intermediate results of
#: gated_delta take about 50 KiB per token in the forward and 90 KiB in the backward
WINDOW = 1 << 14


class RecurrenceSpec(NamedTuple):
    """Non-tensor arguments of a call. `encode` converts them to a string, because an op takes no Python objects.
    `sequence`: name of the `SequenceGroup` that shares the sequence, or "" for one rank."""

    kind: str
    segment: int | None
    causal: bool
    sequence: str = ""

    @classmethod
    def decode(cls, code: str) -> RecurrenceSpec:
        """Decode a string that `encode` returned."""
        kind, segment, causal, sequence = code.split("|", 3)
        return cls(kind, int(segment) if segment else None, causal == "1", sequence)

    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments of `recurrent_attention`."""
        group = find_sequence(self.sequence) if self.sequence else None
        return {"kind": self.kind, "segment": self.segment, "causal": self.causal, "sequence": group}


def encode(kind: str, segment: int | None, causal: bool, sequence: str = "") -> str:
    """Encode a `RecurrenceSpec` as a string. torch.compile can trace this function."""
    return f"{kind}|{'' if segment is None else segment}|{int(causal)}|{sequence}"


@contextlib.contextmanager
def differentiated(tensors: Sequence[Tensor | None]):
    """Let autograd record inside an op; yield detached tensors that require gradients (None remains None)."""
    with autograd_within_op(), torch.enable_grad():
        yield [None if x is None else x.detach().requires_grad_() for x in tensors]


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor | None], grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient of each input: zeros if no output depends on it, an empty tensor if the input is None."""
    leaves = [x for x in inputs if x is not None]
    results = iter(torch.autograd.grad(outputs, leaves, grads, allow_unused=True, materialize_grads=True))
    return [outputs[0].new_empty(0) if x is None else next(results) for x in inputs]


def part_forward(
    part: Part, tensors: Sequence[Tensor | None], before: RecurrentState, settings: dict[str, Any]
) -> tuple[Tensor, RecurrentState]:
    """Compute a part, window by window if on one rank; return its output (B, n, H, D) and the state after it."""
    windows = _windows(part, tensors, settings)
    if len(windows) == 1:
        return part.run(tensors, before, settings)
    q, v = tensors[0], tensors[2]
    assert q is not None and v is not None
    out, state = v.new_empty((*q.shape[:3], v.shape[3])), before
    for window in windows:
        rows = _cut(tensors, part, window)
        state = window.before(state, rows, settings)
        out[:, _place(part, window)], state = window.run(rows, state, settings)
    return out, state


def part_backward(
    part: Part,
    tensors: Sequence[Tensor | None],
    before: RecurrentState,
    settings: dict[str, Any],
    grad: Tensor,
    later: Sequence[Tensor] | None,
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Compute the part again; return the gradients of q, k, v, log_decay and beta, and of the state before the part.

    Args:
        later: gradients of the state after the part, in the order of `RecurrentState.floating`; None: no gradients.
    """
    windows, results = _windows(part, tensors, settings), like_inputs(*tensors)
    befores = [before]
    for window, following in itertools.pairwise(windows):
        state = window.after(_cut(tensors, part, window), befores[-1], settings)
        befores.append(following.before(state, _cut(tensors, part, following), settings))
    for window, state in zip(reversed(windows), reversed(befores), strict=True):
        rows, at = _cut(tensors, part, window), _place(part, window)
        later = _window_backward(window, rows, state, settings, grad[:, at], later, [x[:, at] for x in _rows(results)])
    return results, list(later or ())


def _rows(results: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients without the empty tensors that represent None."""
    return [x for x in results if x.ndim > 1]


def _window_backward(
    window: Part,
    rows: Sequence[Tensor | None],
    before: RecurrentState,
    settings: dict[str, Any],
    grad: Tensor,
    later: Sequence[Tensor] | None,
    into: Sequence[Tensor],
) -> list[Tensor]:
    """Write the gradients of a window's rows to `into`; return the gradients of the state before the window."""
    with differentiated([*rows, *before.floating()]) as inputs:
        begin = before.with_tensors([x for x in inputs[5:] if x is not None])
        out, after = window.run(inputs[:5], begin, settings, Output.UNREAD)
        outputs = [out] if later is None else [out, *after.floating()]
        grads = gradients(outputs, inputs, [grad, *(later or ())])
    for total, x in zip(into, _rows(grads[:5]), strict=True):
        total.copy_(x)
    state = before.with_tensors(grads[5:])  # samples in which a document begins here did not read the state
    return list(state.where(window.begins(), state.zeros()).floating())


def _windows(part: Part, tensors: Sequence[Tensor | None], settings: dict[str, Any]) -> list[Part]:
    """Split a part into windows; ranks that share the part compute it in one window."""
    return [part] if settings["sequence"] is not None else part.split(_window(settings["kind"], *tensors[:3]))


def _window(kind: str, q: Tensor | None, k: Tensor | None, v: Tensor | None) -> int:
    """Return the number of tokens of each sample that one rank computes in one window."""
    assert q is not None and k is not None and v is not None
    if not triton_chunks.serves(kind, q, k, v):
        return WINDOW
    return triton_chunks.window(len(q), (q.shape[2], k.shape[2]), (k.shape[3], v.shape[3]), q.dtype)


def _place(part: Part, window: Part) -> slice:
    return slice(window.span.start - part.span.start, window.span.stop - part.span.start)


def _cut(tensors: Sequence[Tensor | None], part: Part, window: Part) -> list[Tensor | None]:
    return [None if x is None else x[:, _place(part, window)] for x in tensors]


def run_forward(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, *extra: Any) -> Tensor:
    """Return the output (B, L, H, D); `extra`: lengths, cu_seqlens and an encoded `RecurrenceSpec`."""
    tensors, settings = (q, k, v, log_decay, beta), RecurrenceSpec.decode(extra[-1]).settings()
    with no_sequence():
        part = _long(tensors, *extra)
        if part is None:
            return recurrent_attention(*tensors, **settings, lengths=extra[0], cu_seqlens=extra[1])
        return part_forward(part, tensors, part.before(None, tensors, settings), settings)[0]


def run_backward(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, log_decay and beta; an empty tensor for an input that is None."""
    tensors, extra = args[:5], args[5:]
    settings = RecurrenceSpec.decode(extra[-1]).settings()
    with no_sequence():
        part = _long(tensors, *extra)
        if part is not None:
            return part_backward(part, tensors, part.before(None, tensors, settings), settings, grad, None)[0]
        with differentiated(tensors) as inputs:
            limits = {"lengths": extra[0], "cu_seqlens": extra[1]}
            out, _ = recur(*inputs, **settings, **limits, output=Output.UNREAD)
            return tuple(x.contiguous() for x in gradients([out], inputs, [grad]))


def _long(
    tensors: Sequence[Tensor | None], lengths: Tensor | None, cu_seqlens: Tensor | None, spec: str
) -> Part | None:
    """Return a long causal call of one rank as a `Part`, to be computed window by window; None for other calls."""
    kind, _, causal, sequence = RecurrenceSpec.decode(spec)
    q = tensors[0]
    assert q is not None
    length = q.shape[1]
    if not causal or sequence or length <= _window(kind, *tensors[:3]):
        return None
    starts: list[list[int]] = [[0]] * len(q)
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        check_bounds(bounds, length)
        starts = [bounds[:-1]]
    return Part(range(length), starts, None if lengths is None else lengths.tolist())


# -- functions that torch needs to register an op ----------------------------------------------------------------------
def like_inputs(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Return uninitialized tensors for the gradients of q, k, v, log_decay and beta."""
    q = tensors[0]
    contiguous = torch.contiguous_format
    return tuple(q.new_empty(0) if x is None else torch.empty_like(x, memory_format=contiguous) for x in tensors)


def fake_forward(q, k, v, *others):
    return v.new_empty((*q.shape[:3], v.shape[3]))


def fake_backward(grad, q, k, v, log_decay, beta, *others):
    return like_inputs(q, k, v, log_decay, beta)


def rule_flops(q: Tensor, k: Tensor, *others: Any) -> int:
    """Return the FLOPs of a forward, including padding; the last argument is the encoded spec."""
    kind, segment, *_ = RecurrenceSpec.decode(others[-1])
    return q.shape[0] * q.shape[1] * Recurrence(kind, segment).flops(q.shape[2], k.shape[2], q.shape[3])


def twice_rule_flops(grad: Tensor, *args: Any) -> int:
    return 2 * rule_flops(*args)


CALLER = "a layer's recurrence"
REMEDY = "Leave out create_graph=True, or call ld.recurrent_attention itself, in float64 or on a CPU."
ROWS = "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? beta, Tensor? lengths, Tensor? cu_seqlens"
GRADIENTS = "(Tensor, Tensor, Tensor, Tensor, Tensor)"

_OP = Op(
    "recurrence",
    schemas=(f"({ROWS}, str spec) -> Tensor", f"(Tensor grad, {ROWS}, str spec) -> {GRADIENTS}"),
    caller=CALLER,
    remedy=REMEDY,
    run=(run_forward, run_backward),
    fake=(fake_forward, fake_backward),
    saves=lambda args, out: (args[:-1], args[-1]),
    arguments=lambda grad, saved, spec: (grad, *saved, spec),
    flops=(rule_flops, twice_rule_flops),
)
RECURRENCE, RECURRENCE_BACKWARD = _OP.forward, _OP.backward
KEPT.append(RECURRENCE)
