"""loss_share and loss_sum: a mean loss over everything that all ranks count, as parts that sum to it.

Why not the mean of local means: ranks that hold unequally many valid tokens would weigh them unequally, and the gradient
would differ from one rank's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dilated.sequence.group import SequenceGroup, active_sequence


def loss_share(total: Tensor, count: Tensor | int, sequence: SequenceGroup | None = None) -> Tensor:
    """This rank's share of the mean loss: `total` over the counts of all ranks. The shares sum to the loss.

    For a loss of tokens give the sum over this rank's tokens and their number; for one of samples that every rank of a
    sequence computes alike (a pooled classifier's) the sum over the samples and their number.

    Args:
        total: scalar, the sum of this rank's losses.
        count: how many there are; scalar.
        sequence: the ranks; None: the active group, or one rank where none is.

    Returns:
        scalar; 0 where nothing was counted anywhere.

    Raises:
        RuntimeError: in an evaluation whose ranks have unlike numbers of batches; some would wait for the others.
    """
    group = _group(sequence)
    count = scalar(count, total.device).detach().to(torch.float64, copy=True)
    if group is not None:
        group.shares += 1
        dist.all_reduce(count, group=group.loss_group)
    return total / count.clamp(min=1).to(total.dtype)


def scalar(x: Tensor | float, device: torch.device) -> Tensor:
    """A number on a device; one of the host's is written there, since to copy it would wait for a GPU."""
    if type(x) in (bool, int, float):
        return torch.full((), x, device=device)  # type: ignore[arg-type]  # mypy does not narrow by `type(x) in`
    return torch.as_tensor(x, device=device)


def loss_sum(share: Tensor, sequence: SequenceGroup | None = None) -> Tensor:
    """The loss that the ranks' shares sum to, on every rank, without a gradient: to log, and to compare.

    Raises:
        RuntimeError: as `loss_share`.
    """
    group = _group(sequence)
    loss = share.detach().to(torch.promote_types(share.dtype, torch.float32), copy=True)
    if group is not None:
        dist.all_reduce(loss, group=group.loss_group)
    return loss


def _group(sequence: SequenceGroup | None) -> SequenceGroup | None:
    group = active_sequence() if sequence is None else sequence
    if group is not None and group.unshared:
        raise RuntimeError(group.unshared)
    return group
