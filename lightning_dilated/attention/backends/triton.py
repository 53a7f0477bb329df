"""The triton engine: this package's flash attention kernels, for calls that cuDNN does not serve or serves more slowly.

It supports head dims up to 256, float32, and dropout with the same mask as every other engine. It is deterministic.
Shape letters: G samples and segments, J heads, n query rows, m key rows, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_dilated import kernels
from lightning_dilated.attention.backends.base import Engine, Terms
from lightning_dilated.attention.dropout import PairDropout

if TYPE_CHECKING:
    from lightning_dilated.kernels.dense import Drop


def _drop(dropout: PairDropout | None, device: torch.device) -> Drop | None:
    if dropout is None:
        return None
    from lightning_dilated.kernels.dense import Drop

    mask = dropout.dropout
    return Drop(mask.state(dropout.branch), mask.threshold, 1 / (1 - mask.p), *dropout.positions(device))


def _forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    from lightning_dilated.kernels import dense, pipelined

    causal, scale, dropout, band = terms
    with kernels.on(q.device):
        if dropout is None and band is None and pipelined.serves(q, k, v, scale):
            return pipelined.forward(q, k, v, causal, scale)
        return dense.forward(q, k, v, causal, scale, _drop(dropout, q.device), band=band)


def _forward_into(q: Tensor, k: Tensor, v: Tensor, terms: Terms, into: tuple) -> None:
    from lightning_dilated.kernels.dense import Into, forward

    causal, scale, dropout, band = terms
    with kernels.on(q.device):
        forward(q, k, v, causal, scale, _drop(dropout, q.device), into=Into(*into), band=band)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    from lightning_dilated.kernels.dense import backward

    causal, scale, dropout, band = terms
    with kernels.on(q.device):
        return backward(grad, q, k, v, out, lse.contiguous(), causal, scale, _drop(dropout, q.device), band)


TRITON = Engine(
    name="triton",
    forward=_forward,
    backward=_backward,
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    max_head_dim=256,
    dropout=True,
    bands=True,
    forward_into=_forward_into,
    available=kernels.why_not,
)
