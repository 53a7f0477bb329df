"""Sending small tensors from the CPU to a GPU beside the host's work."""

from __future__ import annotations

import torch
from torch import Tensor


def send(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; one of the CPU goes by pinned memory, so that the host need not wait for what a GPU is doing.

    By memory of its own, since the caller may write to x before it is there. (Torch keeps what was pinned; to pin more than
    ever was under way may wait.)
    """
    if _plainly(x, device):
        return x.to(device)
    return torch.empty_like(x, pin_memory=True).copy_(x).to(device, non_blocking=True)


def _plainly(x: Tensor, device: torch.device) -> bool:
    """Where there is nothing to wait for, or no pinned memory to be had: in traced code, of tensors that stand for others,
    and while a CUDA graph is recorded, whose replay would read memory that is another's by then."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return True
    if x.device.type != "cpu" or device.type != "cuda" or not x.numel():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
