"""Private APIs of torch, each behind a name that says what it uses, why, and for which versions it is known to hold."""

from __future__ import annotations

import torch
from torch import Tensor

# -- dense attention with its log-sum-exp ------------------------------------------------------------------------------
# The public scaled_dot_product_attention returns no log-sum-exp, without which branches cannot be merged. The aten ops below
# do, and their backward takes a merged output and log-sum-exp. All known to hold for torch 2.11 to 2.13.
# q, grad and out are (G, J, n, D), k and v (G, J, m, D), with any strides, but 1 along D; lse is (G, J, n), natural logs.

CUDNN_ATTENTION = "_scaled_dot_product_cudnn_attention"
FLASH_ATTENTION = "_scaled_dot_product_flash_attention"
CPU_FLASH_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def missing_op(name: str) -> str | None:
    """Why an aten op of this name cannot be called, None where torch has it."""
    return None if hasattr(torch.ops.aten, name) else f"this torch ({torch.__version__}) has no aten::{name}"


def cudnn_attention_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) by `aten::_scaled_dot_product_cudnn_attention`."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.view(q.shape[:-1])  # some versions return (G, J, n, 1)


def cudnn_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) by `aten::_scaled_dot_product_cudnn_attention_backward`.

    torch caches one cuDNN graph for each set of parameters: shapes and strides of q, k and v, and the bits of the dropout
    rate, but not the strides of grad and out, which the graph reads as they were in its first call. The rate -0.0 gives
    these calls graphs of their own, apart from those of torch's attention, whose strides are not known here; the caller
    keeps the strides of its own calls equal (`attention.backends.sdpa`).
    """
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    lse = lse.contiguous()[..., None]
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, none, none, None, None, None, q.shape[2], k.shape[2], -0.0, causal, scale=scale
    )


def flash_attention_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) by `aten::_scaled_dot_product_flash_attention`."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) by `aten::_scaled_dot_product_flash_attention_backward`."""
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, none, none, scale=scale
    )


def cpu_flash_attention_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) by `aten::_scaled_dot_product_flash_attention_for_cpu`."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def cpu_flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) by `aten::_scaled_dot_product_flash_attention_for_cpu_backward`."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, scale=scale
    )
