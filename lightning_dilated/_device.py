"""Asynchronous copies of small tensors to a GPU, and settings of its memory allocator."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor


def send(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; from the CPU it is copied through pinned memory, so that the host need not wait for the GPU.

    The pinned memory is a copy, since the caller may write to x before it has arrived. (Torch keeps pinned memory for reuse;
    the host may wait where more is under way than ever before.)
    """
    if _copies_directly(x, device):
        return x.to(device)
    return torch.empty_like(x, pin_memory=True).copy_(x).to(device, non_blocking=True)


def _copies_directly(x: Tensor, device: torch.device) -> bool:
    """Where there is nothing to wait for or pinned memory cannot be used: in traced code, for tensor subclasses, and while a
    CUDA graph is captured, whose replay would read pinned memory that was reused."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return True
    if x.device.type != "cpu" or device.type != "cuda" or not x.numel():
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


#: not empty while planning: tensors of the CPU, which have sizes only, stand for a GPU's and go to its kernels
ASSUMED: list[bool] = []
#: the environment variables that torch reads when the first tensor is made on a GPU, newest name first
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

GIB = 2**30
#: bytes of a GPU that `leave_room` leaves; bytes that CUDA, NCCL and libraries may hold by then: more is other processes'
ROOM, LIBRARIES = GIB, 6 * GIB

_limits: dict[torch.device, float] = {}


def expandable_segments(env: MutableMapping[str, str]) -> None:
    """Have torch's allocator use expandable segments, unless the user has settings of their own."""
    if not any(name in env for name in NAMES):
        env[NAMES[0]] = "expandable_segments:True"


def leave_room(device: torch.device) -> None:
    """Keep torch's allocator from the last GiB of a GPU.

    Kernels are loaded when they are first launched, and NCCL connects when it first sends. Both need memory, and cannot get
    what the allocator keeps unused: a step that would fit then ends with "CUDA error: out of memory". An allocator that
    reaches a limit frees unused memory, and goes on. Nothing is limited where other processes hold memory of the GPU, as
    their needs are unknown; a lower limit that the user set stays.
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
