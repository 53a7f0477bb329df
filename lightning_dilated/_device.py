"""Memory of a GPU: small tensors sent to it beside the host's work, and how its allocator takes it."""

from __future__ import annotations

from collections.abc import MutableMapping

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


#: what torch reads when the first tensor is made on a GPU, by its names so far
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

GIB = 2**30
#: bytes of a GPU that `leave_room` leaves; and what CUDA, NCCL and libraries may hold by then, more being other processes'
ROOM, LIBRARIES = GIB, 6 * GIB

_limits: dict[torch.device, float] = {}


def expandable_segments(env: MutableMapping[str, str]) -> None:
    """Ask torch's allocator for expandable segments, unless the user has settings of their own."""
    if not any(name in env for name in NAMES):
        env[NAMES[0]] = "expandable_segments:True"


def leave_room(device: torch.device) -> None:
    """Keep torch's allocator from the last GiB of a GPU.

    Kernels are loaded when they are first launched, and NCCL connects when it first sends. Both need memory, and cannot ask
    the allocator for what it keeps without use: a step that would fit then ends with "CUDA error: out of memory". An
    allocator that meets a limit gives back by itself, and goes on. Where other processes hold memory of the GPU nothing is
    known of theirs, and nothing is limited; a lower limit of the user's stays.
    """
    if device.type != "cuda":
        return
    (free, total), held = torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device)
    if total - free - held > LIBRARIES:
        return
    limit, present = (free + held - ROOM) / total, torch.cuda.get_per_process_memory_fraction(device)
    ours = abs(present - _limits.get(device, 1.0)) < 1e-6
    if limit > 0 and (ours or limit < present):
        torch.cuda.set_per_process_memory_fraction(limit, device)
        _limits[device] = limit
