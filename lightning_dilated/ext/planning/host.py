"""Host memory of this process: resident, at its peak, and held for copies to a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from lightning_dilated.memory.offload import pinned_bytes

STATUS = Path("/proc/self/status")


def host_memory(status: Path = STATUS) -> dict[str, int | None]:
    """Bytes: `host` resident now, `host_peak` the most so far, `pinned` held for copies to a GPU.

    Where Linux does not tell, the peak is getrusage's and the present unknown (None); pinned memory is that of torch's own
    allocator (its caches with it) and of offloaded block inputs; unknown without a GPU in use.
    """
    try:
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        now, peak = (int(fields[x].split()[0]) * 1024 for x in ("VmRSS", "VmHWM"))
    except (OSError, KeyError, ValueError):
        import resource  # not everywhere

        unit = 1 if sys.platform == "darwin" else 1024
        now, peak = None, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"host": now, "host_peak": peak, "pinned": _pinned()}


def _pinned() -> int | None:
    if not torch.cuda.is_initialized():
        return None
    allocator = torch.cuda.host_memory_stats().get("allocated_bytes.current")
    return None if allocator is None else allocator + pinned_bytes()
