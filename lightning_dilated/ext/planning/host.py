"""Read the host memory of this process: resident bytes, their peak, and bytes pinned for copies to a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from lightning_dilated.memory.offload import pinned_bytes

STATUS = Path("/proc/self/status")


def host_memory(status: Path = STATUS) -> dict[str, int | None]:
    """Return bytes: `host` (resident now), `host_peak` (peak resident), and `pinned` (for copies to a GPU).

    Without Linux's status file, `host_peak` is read by getrusage, and `host` is None. `pinned` counts torch's
    allocator, with its caches, and offloaded block inputs; it is None if no GPU is in use.
    """
    try:
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        now, peak = (int(fields[x].split()[0]) * 1024 for x in ("VmRSS", "VmHWM"))
    except (OSError, KeyError, ValueError):
        import resource  # missing on some systems

        unit = 1 if sys.platform == "darwin" else 1024
        now, peak = None, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"host": now, "host_peak": peak, "pinned": _pinned()}


def _pinned() -> int | None:
    if not torch.cuda.is_initialized():
        return None
    allocator = torch.cuda.host_memory_stats().get("allocated_bytes.current")
    return None if allocator is None else allocator + pinned_bytes()
