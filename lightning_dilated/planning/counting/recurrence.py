"""Bytes that the op of a recurrence holds beside its inputs and results: its own code is run at two lengths, and metered.

Shape letters: B batch, L tokens of a rank, H query heads, K kv heads, D head dim, m tokens of a memory segment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_dilated._compat.torch import real_tensors
from lightning_dilated.recurrence import op
from lightning_dilated.recurrence.runs import CHUNK


class Sized(Protocol):
    """What a workspace depends on."""

    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    whole: int | None
    batch: int
    dtype: torch.dtype


#: of a piece of a step, see `memory_tracker.Piece`
NAMES = {op.RECURRENCE: "recurrence", op.RECURRENCE_BACKWARD: "recurrence backward"}


def recurrence_workspace(forward: bool, call: Sized, spec: str, meter: Callable[[], Any]) -> int:
    """Of a call of L tokens in each of B samples; `meter` makes a `Meter`."""
    described = op.RecurrenceSpec.decode(spec)
    sizes = call.heads, call.kv_heads, call.head_dim
    (short, low), (long, high) = _metered(forward, sizes, call.dtype, spec, meter)
    shared = call.whole is not None and call.whole > call.tokens  # by ranks, which compute all of their tokens at once
    tokens = min(call.tokens, op.WINDOW) if described.causal and not shared else call.tokens
    rows = call.heads * (1 if forward else 2) + (0 if forward else 2 * call.kv_heads)  # a window's results are copied
    copied = 0 if tokens == call.tokens else call.batch * tokens * rows * call.head_dim * call.dtype.itemsize
    return max(0, round(low + (high - low) * (call.batch * tokens - short) / (long - short))) + copied


@functools.lru_cache(maxsize=64)
def _metered(
    forward: bool, sizes: tuple[int, int, int], dtype: torch.dtype, spec: str, meter: Callable[[], Any]
) -> tuple[tuple[int, int], ...]:
    """(tokens, bytes) of two calls on the CPU."""
    segment = op.RecurrenceSpec.decode(spec).segment or CHUNK
    with real_tensors():
        lengths = (4 * segment, 8 * segment)
        return tuple((n, _held(forward, n, sizes, dtype, spec, meter())) for n in lengths)


def _held(forward: bool, tokens: int, sizes: tuple[int, int, int], dtype: torch.dtype, spec: str, meter: Any) -> int:
    heads, kv_heads, dim = sizes
    kind = op.RecurrenceSpec.decode(spec).kind
    with torch.device("cpu"), meter:
        q, k, v = (torch.zeros(1, tokens, n, dim, dtype=dtype) for n in (heads, kv_heads, kv_heads))
        gates = [torch.zeros(1, tokens, kv_heads, dtype=torch.float32) for _ in range(2)]
        tensors = [q, k, v, *(gates if kind == "gated_delta" else (None, None))]
        grad = [] if forward else [torch.zeros_like(q)]
        known = meter.live
        meter.reset_peak()
        results = (op.run_forward if forward else op.run_backward)(*grad, *tensors, None, None, spec)
        results = (results,) if isinstance(results, Tensor) else results
        return meter.peak - known - sum(x.nbytes for x in results)
