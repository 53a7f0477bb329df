"""The sdpa engines: torch's fused attention kernels that return the log-sum-exp (cuDNN, flash, and flash on the CPU).

Shape letters: G samples and segments, J heads, n query rows, m key rows, D head dim.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_dilated import kernels
from lightning_dilated._compat import torch as compat
from lightning_dilated.attention.backends.base import Engine, Terms

_log = logging.getLogger(__name__)


def _without_dropout(function: Callable) -> Callable:
    """Make `Engine.forward` or `Engine.backward` from a function without dropout."""

    @functools.wraps(function)
    def call(*arguments: Tensor | Terms) -> tuple[Tensor, ...]:
        *tensors, terms = arguments
        if terms.dropout is not None:
            raise ValueError("the sdpa engines have no exact attention dropout; use engine='math'.")
        return function(*tensors, terms.causal, terms.scale)

    return call


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Call cuDNN's backward with the strides of its cached graph, or flash's if copies would be too large."""
    restrided = _with_first_strides((q, k, v), grad, out)
    if restrided is None:
        return compat.flash_attention_backward(grad, q, k, v, out, lse, causal, scale)
    return compat.cudnn_attention_backward(restrided[0], q, k, v, restrided[1], lse, causal, scale)


#: largest storage of a copy, as a multiple of the storage of q or of the original, whichever is larger
MOST_SPREAD = 4
#: {shapes and strides of q, k, v: strides of grad and out in their first backward}. Entries are never removed, because
#: torch never removes its graphs: without an entry, a later call could read its gradient with wrong strides
_READ: dict[tuple, tuple[tuple[int, ...], ...]] = {}


def _with_first_strides(inputs: tuple[Tensor, Tensor, Tensor], *read: Tensor) -> list[Tensor] | None:
    """Return grad and out, copied unless they have the strides of the first backward with these shapes of q, k, v.

    torch (seen in 2.11) caches the graph of cuDNN's backward only by the shapes and strides of q, k and v. The graph
    reads grad and out with the strides of its first call. With other strides, gradients are wrong, without an error.

    Return None if flash attention is available and a copy would take far more memory than its original, as in a short
    call after a long call.
    """
    key = tuple((x.shape, x.stride()) for x in inputs)
    if (first := _READ.get(key)) is None:  # elements of an expanded tensor share memory, so no copy has its strides
        first = _READ.setdefault(
            key, tuple((x.contiguous() if _extent(x.shape, x.stride()) is None else x).stride() for x in read)
        )
    restrided = []
    for x, strides in zip(read, first, strict=True):
        if not _has_strides(x, strides):
            allowed = MOST_SPREAD * max(_extent(y.shape, y.stride()) or y.numel() for y in (x, inputs[0]))
            if _extent(x.shape, strides) > allowed and _flash_available(x.device) is None:
                return None
            x = _copy(x, strides)
        restrided.append(x)
    return restrided


def _has_strides(x: Tensor, strides: tuple[int, ...]) -> bool:
    return x.stride() == strides or all(n < 2 or a == b for n, a, b in zip(x.shape, x.stride(), strides, strict=True))


def _copy(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    _log_copies()
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


@functools.cache
def _log_copies() -> None:
    _log.info(
        "gradients of attention have other strides than in an earlier call and are copied for cuDNN (takes some time)"
    )


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Return the number of elements in the memory that a tensor spans; None if two of its elements may overlap."""
    extent = 1
    for stride, n in sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1):
        if stride < extent:
            return None
        extent += stride * (n - 1)
    return extent


def _cudnn_available(device: torch.device) -> str | None:
    if kernels.capability(device) is not None and not torch.backends.cudnn.is_available():
        return "this torch has no cuDNN"
    return _cuda_available(device, "cuDNN attention", compat.CUDNN_ATTENTION)


def _flash_available(device: torch.device) -> str | None:
    return _cuda_available(device, "flash attention", compat.FLASH_ATTENTION)


def _cuda_available(device: torch.device, name: str, op: str) -> str | None:
    if (version := kernels.capability(device)) is None:
        return "needs a CUDA device, and this machine has none"
    return f"{name} needs compute capability 8.0" if version < (8, 0) else compat.missing_op(op)


# Observed: cuDNN refuses a single row. It raises no error for fp32, but returns NaN; for no rows, it returns None. The
# CPU op kills the process for no rows. All ops mask before they scale: causal results with scale <= 0 are wrong.
CPU_FLASH = Engine(
    name="cpu_flash",
    forward=_without_dropout(compat.cpu_flash_attention_forward),
    backward=_without_dropout(compat.cpu_flash_attention_backward),
    devices=("cpu",),
    dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    any_scale=False,
    rows_in_place=True,
    available=lambda device: compat.missing_op(compat.CPU_FLASH_ATTENTION),
)
CUDNN = Engine(
    name="cudnn",
    forward=_without_dropout(compat.cudnn_attention_forward),
    backward=_without_dropout(_cudnn_backward),
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    max_head_dim=128,
    head_dim_multiple=8,
    alignment=16,
    deterministic=False,
    any_scale=False,
    rows_in_place=True,
    min_rows=2,
    available=_cudnn_available,
)
FLASH = Engine(
    name="flash",
    forward=_without_dropout(compat.flash_attention_forward),
    backward=_without_dropout(compat.flash_attention_backward),
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    max_head_dim=256,
    head_dim_multiple=8,
    alignment=16,
    deterministic=False,
    any_scale=False,
    available=_flash_available,
)
