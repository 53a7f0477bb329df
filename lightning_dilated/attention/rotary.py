"""Rotary position embedding from global positions, optionally with xPos's decay: in torch, and as one op over q and k.

Angles are computed in float64: at position 1,000,000 a float32 angle has an error of up to 0.06.
Shape letters: B batch, N tokens, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dilated import kernels
from lightning_dilated._device import ASSUMED, send
from lightning_dilated.sequence.group import active_sequence


def rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | None, unrotated: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Rotate q (B, N, H, D) and k (B, N, K, D) by a table (N, D/2) or (B, N, D/2), and keep their dtype.

    xPos's `scale` multiplies q and divides k. The kv heads `unrotated` and their query heads stay as they are.
    """
    tables = ((cos, sin), (cos, sin)) if scale is None else ((cos * scale, sin * scale), (cos / scale, sin / scale))
    queries = [head for head in range(q.shape[2]) if head * k.shape[2] // q.shape[2] in unrotated]
    return _rotate(q, *tables[0], queries), _rotate(k, *tables[1], unrotated)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, unrotated: Sequence[int]) -> Tensor:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    wide = torch.promote_types(x.dtype, torch.float32)
    a, b = x.to(wide).chunk(2, -1)
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
    if not unrotated:
        return rotated
    same = torch.stack([torch.arange(x.shape[2], device=x.device) == head for head in unrotated]).any(0)
    return torch.where(same[:, None], x, rotated)


@torch.library.custom_op("lightning_dilated::turn", mutates_args=())
def turn(
    joint: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | None, heads: int, unrotated: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return q (B, N, heads, D) and k (B, N, K, D), rotated, from joint (B, N, heads + K, D)."""
    if not _serves(joint, cos):
        return rotate(joint[:, :, :heads], joint[:, :, heads:], cos, sin, scale, unrotated)
    from lightning_dilated.kernels.rows import rotary

    q, k = _halves(joint, heads)
    joint = joint if joint.stride(-1) == 1 else joint.contiguous()
    rotary(joint, q, k, *_tables(joint, cos, sin, scale), back=False, copied=unrotated)
    return q, k


@torch.library.custom_op("lightning_dilated::turn_backward", mutates_args=())
def turn_backward(
    dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, scale: Tensor | None, unrotated: Sequence[int]
) -> Tensor:
    """Return the gradient of joint (B, N, H + K, D) from the gradients of the rotated q and k."""
    if not _serves(dq, cos):
        return torch.cat(rotate(dq, dk, cos, -sin, scale, unrotated), 2)
    from lightning_dilated.kernels.rows import rotary

    joint = dq.new_empty(*dq.shape[:2], dq.shape[2] + dk.shape[2], dq.shape[3])
    dq, dk = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk))
    rotary(joint, dq, dk, *_tables(joint, cos, sin, scale), back=True, copied=unrotated)
    return joint


def _serves(x: Tensor, table: Tensor) -> bool:
    """Return whether the kernel supports x. The kernel is imported only on devices that can run it."""
    if not kernels.available(x.device):
        return False
    from lightning_dilated.kernels.rows import rotary_serves

    return rotary_serves(x, table)


def _tables(joint: Tensor, *table: Tensor | None) -> list[Tensor | None]:
    """Broadcast the tables to the kernel's shape."""
    batch, tokens, _, dim = joint.shape
    shape = (tokens, dim // 2)
    return [None if x is None else x.expand(shape if x.ndim == 2 else (batch, *shape)).contiguous() for x in table]


def _halves(joint: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    batch, tokens, all_heads, dim = joint.shape
    return joint.new_empty(batch, tokens, heads, dim), joint.new_empty(batch, tokens, all_heads - heads, dim)


@turn.register_fake
def _(joint, cos, sin, scale, heads, unrotated):
    return _halves(joint, heads)


@turn_backward.register_fake
def _(dq, dk, cos, sin, scale, unrotated):
    return dq.new_empty(*dq.shape[:2], dq.shape[2] + dk.shape[2], dq.shape[3])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, cos, sin, scale, _, ctx.unrotated = inputs
    ctx.save_for_backward(cos, sin, scale)


def _backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Any, ...]:
    return turn_backward(dq, dk, *ctx.saved_tensors, ctx.unrotated), None, None, None, None, None


turn.register_autograd(_backward, setup_context=_setup_context)


#: xPos: channel pair i decays by ((2i/D + GAMMA) / (1 + GAMMA)) ^ (distance / scale_base)
GAMMA = 0.4


@dataclass(frozen=True)
class RotaryTable:
    """Table of a rotary embedding; all layers with the same embedding share it.

    Attributes:
        cos, sin: (N, D/2), or (B, N, D/2) for positions that differ between samples; fp32 (fp64 for float64 inputs).
        scale: xPos's scale, with the same shape and dtype; None without xPos.
        unrotated: kv heads without positions; their query heads have none either.
    """

    cos: Tensor
    sin: Tensor
    scale: Tensor | None = None
    unrotated: tuple[int, ...] = ()

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q (B, N, H, D) and k (B, N, K, D), and keep their dtype."""
        return rotate(q, k, *self.on(q.device), self.unrotated)

    def on(self, device: torch.device) -> list[Tensor | None]:
        """Return [cos, sin, scale] on a device."""
        return [None if x is None else x.to(device) for x in (self.cos, self.sin, self.scale)]

    def rows(self) -> tuple[Tensor, ...]:
        """Return the tensors as (1, N, D/2) or (B, N, D/2), which can be cut along the tokens; see `of_rows`."""
        tensors = (x for x in (self.cos, self.sin, self.scale) if x is not None)
        return tuple(x if x.ndim == 3 else x[None] for x in tensors)

    @classmethod
    def of_rows(cls, rows: Sequence[Tensor], unrotated: tuple[int, ...] = ()) -> RotaryTable:
        """Make a table from the tensors of `rows`, or from a part of their tokens."""
        return cls(*((x[0] if len(x) == 1 else x).contiguous() for x in rows), unrotated=unrotated)

    def split(self, joint: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        """Return q (B, N, heads, D) and k (B, N, K, D), rotated, from one projection (B, N, heads + K, D)."""
        if joint.device.type == "cuda" or ASSUMED:
            return turn(joint, *self.on(joint.device), heads, self.unrotated)
        return self.rotate(joint[:, :, :heads], joint[:, :, heads:])

    def split_backward(self, dq: Tensor, dk: Tensor) -> Tensor:
        """Return the gradient of `split`'s projection (B, N, H + K, D) from the gradients of q and k."""
        return turn_backward(dq, dk, *self.on(dq.device), self.unrotated)


class Rotary(nn.Module):
    """Tables of rotary position embedding (arXiv 2104.09864), with xPos (arXiv 2212.10554) if `xpos_scale_base` is set.

    Args:
        head_dim: D, even.
        base: base of the wavelengths 2 pi base^(2i/D) tokens; above 1.
        xpos_scale_base: unit of distance of xPos's decay, in tokens; None means no decay.

    Raises:
        ValueError: for an odd head dim, a base of 1 or less, or an xpos_scale_base of 0 or less.
    """

    def __init__(self, head_dim: int, base: float = 10000.0, xpos_scale_base: float | None = None) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"rotary positions turn channel pairs, so head_dim must be even; got {head_dim}.")
        if not base > 1:
            raise ValueError(f"rotary base must be above 1, got {base!r}; 10000 is usual.")
        if xpos_scale_base is not None and not xpos_scale_base > 0:
            raise ValueError(
                f"xpos_scale_base must be a positive number of tokens, got {xpos_scale_base!r}; 512 is usual."
            )
        self.head_dim, self.base, self.xpos_scale_base = head_dim, base, xpos_scale_base

    def table(
        self,
        x: Tensor,
        dtype: torch.dtype,
        positions: Tensor | None = None,
        start: int = 0,
        furthest: int | None = None,
    ) -> RotaryTable:
        """Return the table for x (B, N, ...) at global `positions` (N,) or (B, N), or at start, start + 1, ... if None.

        Args:
            x: a tensor with the shape and device of the tokens.
            dtype: dtype of the q and k that will be rotated.
            furthest: the largest of `positions`, if the caller knows it. If None, xPos reads it from `positions`.

        Raises:
            ValueError: if `positions` has a different shape, or if xPos's scales would overflow.
        """
        if positions is None:
            numbers, end = _positions(start, x.shape[1], x.device)
            return self._table(numbers, dtype, end - 1)
        if positions.shape not in (x.shape[1:2], x.shape[:2]):
            raise ValueError(
                f"positions must be {tuple(x.shape[1:2])} or {tuple(x.shape[:2])}, got {tuple(positions.shape)}."
            )
        on_cpu = positions.device.type == "cpu" and self.xpos_scale_base is not None
        if on_cpu and furthest is None:  # read on the CPU, because the host would wait for a GPU
            furthest = _furthest(positions)
        return self._table(send(positions, x.device), dtype, furthest)

    def _table(self, positions: Tensor, dtype: torch.dtype, furthest: int | None) -> RotaryTable:
        return self(positions, dtype) if self.xpos_scale_base is None else self(positions, dtype, furthest)

    def forward(
        self, positions: Tensor, dtype: torch.dtype = torch.float32, furthest: int | None = None
    ) -> RotaryTable:
        """Return the table of global positions (N,) or (B, N), integers, for q and k of `dtype`.

        Args:
            furthest: the largest absolute position of the whole sequence. If None, xPos reads it from `positions`; the
                host then waits if they are on a GPU.

        Raises:
            ValueError: if xPos's scales would overflow.
        """
        channel = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=positions.device) / self.head_dim
        angle = positions.to(torch.float64)[..., None] * self.base**-channel
        wide = torch.promote_types(dtype, torch.float32)
        cos, sin = torch.cos(angle).to(wide), torch.sin(angle).to(wide)
        if self.xpos_scale_base is None:
            return RotaryTable(cos, sin)
        group, furthest = active_sequence(), _furthest(positions) if furthest is None else furthest
        # ranks with low positions are in range, but must raise together with the other ranks
        check = self._check_range if group is None else functools.partial(group.guard, self._check_range)
        check(furthest, dtype)
        zeta = (channel + GAMMA) / (1 + GAMMA)
        return RotaryTable(cos, sin, (zeta ** (positions.to(torch.float64)[..., None] / self.xpos_scale_base)).to(wide))

    def _check_range(self, furthest: int, dtype: torch.dtype) -> None:
        """Raise ValueError if xPos's factor of k, which grows with the position, would overflow."""
        powers = 0.8 * math.log(torch.finfo(dtype).max) / math.log((1 + GAMMA) / GAMMA)
        limit = int(powers * self.xpos_scale_base)
        if furthest > limit:
            raise ValueError(
                f"xPos with xpos_scale_base={self.xpos_scale_base:g} overflows {dtype} beyond position {limit}, and this "
                f"sequence reaches {furthest}. Set xpos_scale_base to at least {math.ceil(furthest / powers)}, or use "
                "plain rotary positions."
            )


def _furthest(positions: Tensor) -> int:
    return int(positions.abs().max()) if positions.numel() else 0


def token_positions(start: int, length: int, device: torch.device | None = None) -> Tensor:
    """Return the int64 global positions start, ..., start + length - 1, on the CPU by default.

    In an active `SequenceGroup`, return the positions of this rank's shard instead.
    """
    return _positions(start, length, device)[0]


def _positions(start: int, length: int, device: torch.device | None) -> tuple[Tensor, int]:
    """Return `token_positions`, and the position after the last token of the whole sequence."""
    group = active_sequence()
    if group is None:
        return torch.arange(start, start + length, device=device), start + length
    return group.positions(length, device), group.agreed.seq_len
