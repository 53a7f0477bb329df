"""Asynchronous copies of small tensors to a GPU, and settings of torch's memory allocator."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor


def send(x: Tensor, device: torch.device) -> Tensor:
    """Return x on a device; copy it from the CPU through pinned memory, so that the host need not wait for the GPU.

    The transfer reads a copy of x in pinned memory, so the caller may change x at once. Torch reuses pinned memory; the
    host waits only to allocate more of it.
    """
    if _copies_directly(x, device):
        return x.to(device)
    return torch.empty_like(x, pin_memory=True).copy_(x).to(device, non_blocking=True)


def _copies_directly(x: Tensor, device: torch.device) -> bool:
    """Return True if `x.to` never makes the host wait, or if pinned memory cannot be used: in traced code, for tensor
    subclasses, and while a CUDA graph is captured (a replay would read pinned memory that then has other data)."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return True
    if x.device.type != "cpu" or device.type != "cuda" or not x.numel():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


#: not empty while planning: CPU tensors without values then represent GPU tensors, so code chooses a GPU's kernels
ASSUMED: list[bool] = []
#: environment variables that torch reads when it creates the first tensor on a GPU, newest name first
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

GIB = 2**30
#: GPU bytes that `leave_room` keeps free; bytes outside torch above which it assumes that other processes use the GPU
ROOM, LIBRARIES = GIB, 6 * GIB

_limits: dict[torch.device, float] = {}


def expandable_segments(env: MutableMapping[str, str]) -> None:
    """Let torch's allocator use expandable segments, unless the user has configured the allocator."""
    if not any(name in env for name in NAMES):
        env[NAMES[0]] = "expandable_segments:True"


def leave_room(device: torch.device) -> None:
    """Limit torch's allocator so that 1 GiB of a GPU stays free.

    Kernels are loaded at their first launch, and NCCL connects at its first call. Both need memory, and cannot use
    memory that the allocator caches, so a step that would fit can fail with "CUDA error: out of memory". An allocator
    that reaches its limit frees its cache and continues. A lower limit that the user has set is kept. No limit is set
    if other processes use the GPU, because their needs are unknown.
    """
    if device.type != "cuda":
        return
    (free, total), reserved = torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device)
    if total - free - reserved > LIBRARIES:
        return
    limit, current = (free + reserved - ROOM) / total, torch.cuda.get_per_process_memory_fraction(device)
    is_ours = abs(current - _limits.get(device, 1.0)) < 1e-6
    if limit > 0 and (is_ours or limit < current):
        torch.cuda.set_per_process_memory_fraction(limit, device)
        _limits[device] = limit
