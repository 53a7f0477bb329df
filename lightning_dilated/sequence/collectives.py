"""Collectives of a sequence and of its loss: sums, means and gathers over all ranks, with their gradients.

A rank's share of the loss is its local sum, divided by the global count. (A mean of local means would depend on the
distribution of valid tokens over ranks.) The loss is the sum of the shares, so the gradient of a result that every rank
has is the sum of the ranks' gradients, and a loss that every rank computes must be divided by the number of ranks.

Shape letters: B batch, L tokens of this rank, N tokens of the sequence, R ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dilated._device import send
from lightning_dilated.sequence.exchange.transport import Wire
from lightning_dilated.sequence.group import SequenceGroup, active_sequence


def loss_share(total: Tensor, count: Tensor | int, sequence: SequenceGroup | None = None) -> Tensor:
    """Return this rank's share of the mean loss: `total` / (sum of all ranks' counts). The shares sum to the loss.

    For a loss over tokens, sum and count this rank's tokens. For a loss over samples that every rank of a sequence
    computes identically (as in a pooled classifier), sum and count the samples on every rank.

    Args:
        total: scalar, the sum of this rank's losses.
        count: scalar, the number of losses in this sum.
        sequence: the ranks; None means the active group, or this rank alone.

    Returns:
        scalar; 0 if the sum of the counts is 0.

    Raises:
        RuntimeError: in an evaluation with different numbers of batches on its ranks, because ranks would wait forever.
    """
    group = _group(sequence)
    count = scalar(count, total.device).detach().to(torch.float64, copy=True)
    if group is not None:
        group.shares += 1
        _add(count, group.loss_group)
    return total / count.clamp(min=1).to(total.dtype)


def scalar(x: Tensor | float, device: torch.device) -> Tensor:
    """Return a number as a tensor on a device, without making the host wait for the device."""
    if type(x) in (bool, int, float):
        return torch.full((), x, device=device)  # type: ignore[arg-type]  # mypy does not narrow by `type(x) in`
    return send(x, device) if isinstance(x, Tensor) else torch.as_tensor(x, device=device)


def loss_sum(share: Tensor, sequence: SequenceGroup | None = None) -> Tensor:
    """Return the sum of the ranks' shares on every rank, without a gradient, for logging and comparisons.

    Args:
        share: scalar, this rank's share.
        sequence: the ranks; None means the active group, or this rank alone.

    Raises:
        RuntimeError: as `loss_share`.
    """
    group = _group(sequence)
    loss = share.detach().to(torch.promote_types(share.dtype, torch.float32), copy=True)
    if group is not None:
        _add(loss, group.loss_group)
    return loss


def _group(sequence: SequenceGroup | None) -> SequenceGroup | None:
    group = active_sequence() if sequence is None else sequence
    if group is not None and group.unshared:
        raise RuntimeError(group.unshared)
    return group


def _add(x: Tensor, ranks: dist.ProcessGroup) -> None:
    """Sum x over the ranks of a process group, in place; do nothing on a single rank."""
    if dist.get_world_size(ranks) > 1:
        dist.all_reduce(x, group=ranks)


def _all_reduce(x: Tensor, group: SequenceGroup) -> Tensor:
    """Return the sum over ranks, computed in fp32 (fp64 for float64, int64 for integers)."""
    wide = torch.promote_types(x.dtype, torch.float32 if x.is_floating_point() or x.is_complex() else torch.int64)
    total = x.to(wide, copy=True, memory_format=torch.contiguous_format)
    _add(total, group.group)
    return total.to(x.dtype)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup, number: int) -> Tensor:
        ctx.group, ctx.number = group, number
        return _all_reduce(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.group.agree({"call": f"backward of sequence_sum, call {ctx.number}"})
        return _all_reduce(grad, ctx.group), None, None


class _Gather(torch.autograd.Function):
    """Gathers the (L, ...) rows of every rank, rank after rank; the backward sums the ranks' gradients of a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup, lengths: tuple[int, ...], number: int) -> Tensor:
        ctx.group, ctx.lengths, ctx.number = group, lengths, number
        ctx.wire = wire = Wire(group.group, tuple(range(group.ranks)), group.rank)
        rows = torch.cat([x.reshape(len(x), math.prod(x.shape[1:]))] * len(lengths))
        sends = dict.fromkeys(range(len(lengths)), len(x))
        return wire.post(rows, sends, dict(enumerate(lengths))).wait().view(sum(lengths), *x.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.group.agree({"call": f"backward of sequence_gather, call {ctx.number}"})
        length, ranks = ctx.lengths[ctx.wire.rank], len(ctx.lengths)
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        received = ctx.wire.post(
            wide.reshape(len(grad), math.prod(grad.shape[1:])),
            dict(enumerate(ctx.lengths)),
            dict.fromkeys(range(ranks), length),
        ).wait()
        return received.view(ranks, length, *grad.shape[1:]).sum(0).to(grad.dtype), None, None, None


def sequence_sum(x: Tensor, sequence: SequenceGroup | None = None) -> Tensor:
    """Return the sum of x over the ranks of the sequence, on every rank.

    Args:
        x: any shape, the same on all ranks.
        sequence: the ranks; None means the active group. If no group is active, x itself is returned.

    Raises:
        ValueError: on every rank, if shapes or dtypes differ.
    """
    group = active_sequence() if sequence is None else sequence
    if group is None:
        return x
    if group.ranks == 1:
        return x.clone()  # a new tensor, as on several ranks, because the caller may change it
    agreed = group.agree({"call": "sequence_sum", "shape": tuple(x.shape), "dtype": x.dtype, "requires grad": _grad(x)})
    return _Sum.apply(x, group, agreed.number)


def _grad(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def sequence_mean(x: Tensor, dim: int = 1, mask: Tensor | None = None, sequence: SequenceGroup | None = None) -> Tensor:
    """Return the mean of x over the tokens of the whole sequence. Each token counts once, even if shards are unequal.

    Args:
        x: (B, L, ...) or any shape with this rank's tokens along `dim`.
        mask: True, or a weight, for each token that counts, with x's shape up to and including `dim`: (B, L) for dim=1.
            The mean of a sample without such tokens is 0.
        sequence: the ranks; None means the active group, or this rank alone.

    Returns:
        x's shape without `dim`, the same values on all ranks.

    Raises:
        ValueError: if the mask's shape does not fit, or, on every rank, if shapes or dtypes differ.
    """
    group = active_sequence() if sequence is None else sequence
    dim, mask = _guarded(group, _mean_arguments, x, dim, mask)
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = mask.to(wide).view(*mask.shape, *[1] * (x.ndim - dim - 1))
    # x * weight alone would keep the NaN of a token that does not count
    counted = torch.where(weight == 0, torch.zeros((), dtype=wide, device=x.device), x * weight)
    total, count = sequence_sum(counted.sum(dim), sequence), sequence_sum(weight.sum(dim), sequence)
    return (total / torch.where(count == 0, 1.0, count)).to(x.dtype)


def _guarded(group: SequenceGroup | None, check: Any, *arguments: Any) -> Any:
    """Return check(*arguments); if `check` raises on one rank of a group, all ranks raise."""
    return check(*arguments) if group is None else group.guard(check, *arguments)


def axis(x: Tensor, dim: int) -> int:
    """Return `dim`, which may be negative, as a number counted from 0."""
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim={dim} lies outside the {x.ndim} dimensions of x, {tuple(x.shape)}.")
    return dim % x.ndim


def _mean_arguments(x: Tensor, dim: int, mask: Tensor | None) -> tuple[int, Tensor]:
    """Return (`dim` counted from 0, mask)."""
    dim = axis(x, dim)
    if not x.is_floating_point():
        raise TypeError(f"sequence_mean takes floating tensors, got {x.dtype}; convert it first: x.float().")
    if mask is None:
        mask = x.new_ones(()).expand(x.shape[: dim + 1])
    if mask.shape != x.shape[: dim + 1]:
        raise ValueError(
            f"mask must have shape {tuple(x.shape[: dim + 1])}, as x up to dim {dim}; got {tuple(mask.shape)}."
        )
    return dim, mask


def sequence_gather(x: Tensor, dim: int = 1, sequence: SequenceGroup | None = None) -> Tensor:
    """Return all tokens of the sequence in their order, on every rank.

    Args:
        x: (B, L, ...) or any shape with this rank's tokens along `dim`.
        sequence: the ranks; None means the active group. If no group is active, x itself is returned.

    Returns:
        x's shape with N along `dim`.

    Raises:
        ValueError: on every rank, if shapes or dtypes differ or a rank does not have the tokens of its shard.
    """
    group = active_sequence() if sequence is None else sequence
    if group is None:
        return x
    dim = group.guard(axis, x, dim)
    facts = {"shape": (*x.shape[:dim], *x.shape[dim + 1 :]), "dtype": x.dtype, "dim": dim, "requires grad": _grad(x)}
    agreed = group.agree({"call": "sequence_gather", **facts}, x.shape[dim])
    rows = _Gather.apply(x.movedim(dim, 0).contiguous(), group, agreed.lengths, agreed.number)
    if group.layout != "contiguous":
        shard = group.shard(agreed.seq_len)
        positions = [torch.arange(p.start, p.stop, p.step) for rank in range(group.ranks) for p in shard.ranges(rank)]
        rows = rows[torch.argsort(torch.cat(positions)).to(x.device)] if positions else rows
    return rows.movedim(0, dim)
