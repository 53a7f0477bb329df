"""The sdpa engines: torch's fused attention kernels that return the log-sum-exp (cuDNN, flash, and flash on the CPU).

Each is called through its aten op, because the public function hides the log-sum-exp that the merge of branches needs.
Shape letters: G samples and segments, J heads, n query rows, m key rows, D head dim.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dilated import kernels
from lightning_dilated.attention.backends.base import Engine, unsupported
from lightning_dilated.attention.dropout import BlockDropout

_aten = torch.ops.aten
_log = logging.getLogger(__name__)


def _no_dropout(dropout: BlockDropout | None) -> None:
    if dropout is not None:
        raise ValueError("the sdpa engines have no exact attention dropout; use engine='math'.")


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, dropout: BlockDropout | None
) -> tuple[Tensor, Tensor]:
    _no_dropout(dropout)
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    dropout: BlockDropout | None,
) -> tuple[Tensor, Tensor, Tensor]:
    _no_dropout(dropout)
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal, scale=scale)


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, dropout: BlockDropout | None
) -> tuple[Tensor, Tensor]:
    _no_dropout(dropout)
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    return out, lse.view(q.shape[:-1])  # some versions return (G, J, n, 1)


def _cudnn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    dropout: BlockDropout | None,
) -> tuple[Tensor, Tensor, Tensor]:
    _no_dropout(dropout)
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    n, m = q.shape[2], k.shape[2]
    laid = _as_first_read((q, k, v), grad, out)
    if laid is None:
        return _flash_backward(grad, q, k, v, out, lse, causal, scale, dropout)
    (grad, out), lse = laid, lse.contiguous()[..., None]
    return _aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, none, none, None, None, None, n, m, _OURS, causal, scale=scale
    )


#: A dropout of none, in other bits than everybody's 0.0: torch keeps cuDNN's graphs by the bits, too, so that none is shared
#: with calls of torch's own attention, whose strides are not known here.
_OURS = -0.0
#: times as much memory as q or a gradient lies in, over which no copy of it is strewn
STREWN = 4
#: shapes and strides of q, k, v to the strides of grad and out in the first backward of such
_READ: dict[tuple, tuple[tuple[int, ...], ...]] = {}


def _as_first_read(of: tuple[Tensor, Tensor, Tensor], *read: Tensor) -> list[Tensor] | None:
    """grad and out with the strides they had in the first backward of such q, k, v: copies, where they have others; None
    where such copies would take far more memory, as in a short call after a long one, and flash attention serves instead.

    torch (seen: 2.11) keeps a backward's graph by the shapes and strides of q, k, v alone, and it reads grad and out where
    those of the call that it was made for lay: seen as gradients wrong by their own size, without an error.
    """
    key = tuple((x.shape, x.stride()) for x in of)
    if (first := _READ.get(key)) is None:  # no copy can be laid out as an expanded gradient is
        first = _READ.setdefault(
            key, tuple((x.contiguous() if _extent(x.shape, x.stride()) is None else x).stride() for x in read)
        )
    laid = []
    for x, strides in zip(read, first, strict=True):
        if not _lies(x, strides):
            room = max(_extent(y.shape, y.stride()) or y.numel() for y in (x, of[0]))
            if _extent(x.shape, strides) > STREWN * room and _flash_available(x.device) is None:
                return None
            x = _laid(x, strides)
        laid.append(x)
    return laid


def _lies(x: Tensor, strides: tuple[int, ...]) -> bool:
    return x.stride() == strides or all(n < 2 or a == b for n, a, b in zip(x.shape, x.stride(), strides, strict=True))


def _laid(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    _say_copies()
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


@functools.cache
def _say_copies() -> None:
    _log.info(
        "gradients of attention lie otherwise than in an earlier call, and are copied for cuDNN, which costs some time"
    )


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Elements from the first to the last of a tensor, or None where some may share memory."""
    extent = 1
    for stride, n in sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1):
        if stride < extent:
            return None
        extent += stride * (n - 1)
    return extent


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, dropout: BlockDropout | None
) -> tuple[Tensor, Tensor]:
    _no_dropout(dropout)
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    dropout: BlockDropout | None,
) -> tuple[Tensor, Tensor, Tensor]:
    _no_dropout(dropout)
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    n, m = q.shape[2], k.shape[2]
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, n, m, 0.0, causal, none, none, scale=scale
    )


def _cudnn_available(device: torch.device) -> str | None:
    if (found := kernels.capability(device)) is None:
        return "needs a CUDA device, and this machine has none"
    if not torch.backends.cudnn.is_available():
        return "this torch has no cuDNN"
    if found < (8, 0):
        return "cuDNN attention needs compute capability 8.0"
    return unsupported("_scaled_dot_product_cudnn_attention")(device)


def _flash_available(device: torch.device) -> str | None:
    if (found := kernels.capability(device)) is None:
        return "needs a CUDA device, and this machine has none"
    if found < (8, 0):
        return "flash attention needs compute capability 8.0"
    return unsupported("_scaled_dot_product_flash_attention")(device)


# Seen: cuDNN given fp32 returned NaN without an error, given no rows None, and it refuses a single row; the CPU op given no
# rows kills the process; all three mask before they scale, so causal scores with scale <= 0 are wrong without an error.
CPU_FLASH = Engine(
    name="cpu_flash",
    forward=_cpu_forward,
    backward=_cpu_backward,
    devices=("cpu",),
    dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    any_scale=False,
    rows_in_place=True,
    available=unsupported("_scaled_dot_product_flash_attention_for_cpu"),
)
CUDNN = Engine(
    name="cudnn",
    forward=_cudnn_forward,
    backward=_cudnn_backward,
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
    forward=_flash_forward,
    backward=_flash_backward,
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    max_head_dim=256,
    head_dim_multiple=8,
    alignment=16,
    deterministic=False,
    any_scale=False,
    available=_flash_available,
)
