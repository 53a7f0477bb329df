"""Host memory of this process: resident, peak, and pinned for copies to a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from lightning_dilated.memory.offload import pinned_bytes

STATUS = Path("/proc/self/status")


def host_memory(status: Path = STATUS) -> dict[str, int | None]:
    """Return bytes: `host` resident now, `host_peak` at the peak, and `pinned` for copies to a GPU.

    If Linux does not report them, the peak is getrusage's and the present is None. Pinned memory counts torch's
    allocator with its caches and offloaded block inputs; it is None if no GPU is in use.
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
