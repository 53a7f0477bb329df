"""Bytes that the op of a recurrence holds beside its inputs and results: its own code is run at two lengths, and metered.

Shape letters: B batch, L tokens of a rank, H query heads, K kv heads, D head dim, m tokens of a memory segment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_dilated._compat.torch import real_tensors
from lightning_dilated.recurrence import op
from lightning_dilated.recurrence.runs import CHUNK

RECURRENCES = (op.RECURRENCE, op.RECURRENCE_BACKWARD)


def recurrence_workspace(func: Any, args: Sequence[Any], meter: Callable[[], Any]) -> int:
    """Of a call of one of `RECURRENCES`; `meter` makes a `Meter`."""
    forward = func is op.RECURRENCE
    q, k = args[:2] if forward else args[1:3]
    (short, low), (long, high) = _metered(forward, q.shape[2], k.shape[2], q.shape[3], q.dtype, args[-1], meter)
    return max(0, round(low + (high - low) * (q.shape[0] * q.shape[1] - short) / (long - short)))


@functools.lru_cache(maxsize=64)
def _metered(
    forward: bool, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, spec: str, meter: Callable[[], Any]
) -> tuple[tuple[int, int], ...]:
    """(tokens, bytes) of two calls on the CPU."""
    segment = op.RecurrenceSpec.decode(spec).segment or CHUNK
    with real_tensors():
        return tuple(
            (n, _held(forward, n, (heads, kv_heads, dim), dtype, spec, meter())) for n in (4 * segment, 8 * segment)
        )


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
