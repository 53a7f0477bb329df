"""The turn of rotary positions: as plain torch, and as one op over the projection that holds q and k.

Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """q (B, N, H, D) and k (B, N, K, D), turned by a table (N, D/2) or (B, N, D/2), in their own dtype.

    xPos's `scale` multiplies q and divides k.
    """
    if scale is None:
        return _rotate(q, cos, sin), _rotate(k, cos, sin)
    return _rotate(q, cos * scale, sin * scale), _rotate(k, cos / scale, sin / scale)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    wide = torch.promote_types(x.dtype, torch.float32)
    a, b = x.to(wide).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


@torch.library.custom_op("lightning_dilated::turn", mutates_args=())
def turn(joint: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    """q (B, N, heads, D) and k (B, N, K, D), turned, of joint (B, N, heads + K, D)."""
    if not _serves(joint, cos):
        return rotate(joint[:, :, :heads], joint[:, :, heads:], cos, sin, scale)
    from lightning_dilated.kernels.rotary import rotary

    q, k = _halves(joint, heads)
    joint = joint if joint.stride(-1) == 1 else joint.contiguous()
    rotary(joint, q, k, *_tables(joint, cos, sin, scale), back=False)
    return q, k


@torch.library.custom_op("lightning_dilated::turn_backward", mutates_args=())
def turn_backward(dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | None) -> Tensor:
    """The gradient of joint (B, N, H + K, D) from those of q and k."""
    if not _serves(dq, cos):
        return torch.cat(rotate(dq, dk, cos, -sin, scale), 2)
    from lightning_dilated.kernels.rotary import rotary

    joint = dq.new_empty(*dq.shape[:2], dq.shape[2] + dk.shape[2], dq.shape[3])
    dq, dk = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk))
    rotary(joint, dq, dk, *_tables(joint, cos, sin, scale), back=True)
    return joint


def _serves(x: Tensor, table: Tensor) -> bool:
    """Whether this device has the kernel; it is imported only there."""
    from lightning_dilated import kernels

    if not kernels.available(x.device):
        return False
    from lightning_dilated.kernels.rotary import serves

    return serves(x, table)


def _tables(joint: Tensor, *table: Tensor | None) -> list[Tensor | None]:
    """The tables at their full shape, as torch broadcasts them; the kernel trusts it."""
    batch, tokens, _, dim = joint.shape
    whole = (tokens, dim // 2)
    return [None if x is None else x.expand(whole if x.ndim == 2 else (batch, *whole)).contiguous() for x in table]


def _halves(joint: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Empty q and k."""
    batch, tokens, both, dim = joint.shape
    return joint.new_empty(batch, tokens, heads, dim), joint.new_empty(batch, tokens, both - heads, dim)


@turn.register_fake
def _(joint, cos, sin, scale, heads):
    return _halves(joint, heads)


@turn_backward.register_fake
def _(dq, dk, cos, sin, scale):
    return dq.new_empty(*dq.shape[:2], dq.shape[2] + dk.shape[2], dq.shape[3])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, cos, sin, scale, _ = inputs
    ctx.save_for_backward(cos, sin, scale)


def _backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Any, ...]:
    return turn_backward(dq, dk, *ctx.saved_tensors), None, None, None, None


turn.register_autograd(_backward, setup_context=_setup_context)
