"""Triton kernels. They know nothing of ranks or models; `available` says where they run."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

__all__ = ["available"]


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on tensors of the CPU, too; decided when they are first imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def available(device: torch.device) -> bool:
    """Whether the kernels can run on tensors of a device."""
    return (device.type == "cuda" or (device.type == "cpu" and interpreted())) and _installed()
