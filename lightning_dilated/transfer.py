"""Sending small tensors from the CPU to a GPU beside the host's work."""

from __future__ import annotations

import torch
from torch import Tensor


def send(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; one of the CPU goes by pinned memory, so that the host does not wait for what a GPU is doing."""
    if x.device.type != "cpu" or device.type != "cuda" or not x.numel():
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
