"""Triton kernels, independent of ranks and models; `available` returns whether they run on a device."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil

import torch

__all__ = ["available", "capability", "on", "why_not"]


@functools.cache
def _missing() -> str | None:
    """Return a message about a requirement of Triton that this machine lacks; None if it has all of them."""
    if importlib.util.find_spec("triton") is None:
        return "needs Triton, which is not installed"
    if not any(map(shutil.which, (os.environ.get("CC") or "gcc", "gcc", "clang"))):
        return "needs gcc or clang, with which Triton builds its launchers"
    return None


def interpreted() -> bool:
    """Return whether TRITON_INTERPRET=1 (set before import) makes kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability (major, minor) of a device, None without CUDA; cached for the calls of the op."""
    if device.type != "cuda" or not (torch.cuda.is_initialized() or torch.cuda.is_available()):
        return None
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def why_not(device: torch.device) -> str | None:
    """Return the reason why the kernels cannot run on tensors of a device; None if they can."""
    if device.type != "cuda":
        if device.type == "cpu" and interpreted():
            return _missing()
        return f"needs a CUDA device (or TRITON_INTERPRET=1 on a CPU, for tests), not {device.type}"
    if (version := capability(device)) is None:
        return "needs a CUDA device, and this machine has none"
    if version < (8, 0):
        return "needs compute capability 8.0"
    return _missing()


def available(device: torch.device) -> bool:
    """Return whether the kernels can run on tensors of a device."""
    return why_not(device) is None


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context that makes `device` the current device: Triton launches there, even for tensors of another."""
    current = device.type != "cuda" or torch.cuda.current_device() == device.index
    return contextlib.nullcontext() if current else torch.cuda.device(device)
