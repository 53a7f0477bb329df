"""Snapshots of CUDA's allocator for pytorch.org/memory_viz: of some steps with their history, or where memory ran out."""

from __future__ import annotations

from pathlib import Path

import torch

#: allocations and frees that a history holds, the latest
ENTRIES = 200_000


def check_steps(steps: object) -> tuple[int, int] | None:
    """`snapshot_steps` as (first, stop), or None.

    Raises:
        TypeError, ValueError: for anything but two integers 0 <= start < stop.
    """
    if steps is None:
        return None
    plain = isinstance(steps, (tuple, list)) and len(steps) == 2
    if not plain or not all(isinstance(x, int) and not isinstance(x, bool) for x in steps):
        raise TypeError(f"snapshot_steps must be two integers (start, stop), or None, got {steps!r}.")
    if not 0 <= steps[0] < steps[1]:
        raise ValueError(f"snapshot_steps must be (start, stop) with 0 <= start < stop, got {steps!r}.")
    return steps[0], steps[1]


class Snapshots:
    """The history of steps start, ..., stop - 1 of this rank."""

    def __init__(self, steps: tuple[int, int] | None, device: torch.device) -> None:
        if steps is not None and (device.type != "cuda" or not hasattr(torch.cuda.memory, "_record_memory_history")):
            raise ValueError(
                f"snapshot_steps={steps} needs CUDA's allocator and a torch that records its history; this run is on "
                f"{device} with torch {torch.__version__}. Leave snapshot_steps out: the timeline works on the CPU, too."
            )
        self.steps, self.device, self.recording = steps, device, False

    def begin(self, step: int) -> None:
        """A step begins."""
        if self.steps is not None and not self.recording and self.steps[0] <= step < self.steps[1]:
            torch.cuda.memory._record_memory_history(max_entries=ENTRIES)
            self.recording = True

    def end(self, step: int, folder: Path, rank: int) -> None:
        """A step ended."""
        if self.recording and step >= self.steps[1] - 1:
            first, stop = self.steps
            self.write(folder / f"memory_steps_{first}_to_{stop - 1}_rank_{rank}.pickle")

    def write(self, path: Path) -> bool:
        """Write what is known, and record no more; False where there is no allocator that tells."""
        if self.device.type != "cuda" or not hasattr(torch.cuda.memory, "_dump_snapshot"):
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
        self.stop()
        return True

    def stop(self) -> None:
        """Record no more."""
        if self.recording:
            self.recording = False
            torch.cuda.memory._record_memory_history(enabled=None)
