"""How CUDA's memory is taken: in segments that grow, so that long sequences' large tensors leave no holes between them, and
not to the last byte."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch

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
