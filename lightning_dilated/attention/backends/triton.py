"""The triton engine: this package's own flash attention kernels, for what cuDNN does not take.

Head dims to 256, float32, dropout with the mask that every engine has, and the same bits in every run.
Shape letters: G samples and segments, J heads, n query rows, m key rows, D head dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_dilated import kernels
from lightning_dilated.attention.backends.base import Engine


def _drop(dropout: Any, device: Any) -> Any:
    """The kernels' form of a block's dropout."""
    if dropout is None:
        return None
    from lightning_dilated.kernels.tiles import Drop

    mask = dropout.dropout
    return Drop(mask.state(dropout.number), mask.threshold, 1 / (1 - mask.p), *dropout.positions(device))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, dropout: Any, tile_order: str | None = None
) -> tuple[Tensor, Tensor]:
    from lightning_dilated.kernels import pipelined
    from lightning_dilated.kernels.dense import forward

    with kernels.on(q.device):
        if tile_order is None and dropout is None and pipelined.serves(q, k, v, scale):
            return pipelined.forward(q, k, v, causal, scale)
        return forward(q, k, v, causal, scale, _drop(dropout, q.device), tile_order or "linear")


def _forward_into(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, dropout: Any, into: Any) -> None:
    from lightning_dilated.kernels.dense import Into, forward

    with kernels.on(q.device):
        forward(q, k, v, causal, scale, _drop(dropout, q.device), into=Into(*into))


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float, dropout: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from lightning_dilated.kernels.dense import backward

    with kernels.on(q.device):
        return backward(grad, q, k, v, out, lse.contiguous(), causal, scale, _drop(dropout, q.device))


TRITON = Engine(
    name="triton",
    forward=_forward,
    backward=_backward,
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    max_head_dim=256,
    dropout=True,
    forward_into=_forward_into,
    available=kernels.why_not,
)

#: the same with another order of the forward's tiles, for benchmarks: see `kernels.forward.forward`
TILE_ORDERS = tuple(
    replace(TRITON, name=f"triton:{order}", forward=partial(_forward, tile_order=order))
    for order in ("linear", "hilbert", "sawtooth")
)
