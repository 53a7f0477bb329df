"""Print which calls allocated the memory that was allocated at the peak of a snapshot of CUDA's allocator.

    torchrun --nproc-per-node 2 benchmarks/weak_scaling.py --tokens 65536 --decoder 1.3B --layout zigzag \\
        --strategy ring_dilated_fsdp --recompute block --warm 1 --steps 1 --memory FOLDER
    python benchmarks/peak_of.py FOLDER/65536-2-2/memory_steps_1_to_1_rank_0.pickle

A row has the MiB and the number of allocations of one call, and the innermost frames of its stack. Frames of torch are
omitted if the stack has others. Memory that was allocated before the snapshot began is not in the table. A snapshot has
the last events of a step, 200,000 if the profiler wrote it. A snapshot is a pickle, and a pickle can run code: read only
your own.
"""

from __future__ import annotations

import argparse
import pickle
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FREED = "free_requested"


def at_peak(events: Sequence[Mapping[str, Any]]) -> tuple[int, list[Mapping[str, Any]]]:
    """Return the `alloc` events that are not freed at the peak, and the sum of their bytes."""
    total = most = last = 0
    for i, event in enumerate(events, 1):
        if event["action"] == "alloc":
            total += event["size"]
        elif event["action"] == FREED:
            total -= event["size"]
        if total > most:
            most, last = total, i
    live: dict[int, Mapping[str, Any]] = {}
    for event in events[:last]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == FREED:
            live.pop(event["addr"], None)
    return sum(event["size"] for event in live.values()), list(live.values())


def place(frames: Iterable[Mapping[str, Any]], depth: int) -> str:
    """Return the innermost `depth` frames of Python files, without torch's if there are others."""
    python = [x for x in frames if x["filename"].endswith(".py")]
    own = [x for x in python if "/torch/" not in x["filename"]] or python
    return " < ".join(f"{'/'.join(Path(x['filename']).parts[-2:])}:{x['line']} {x['name']}" for x in own[:depth])


def table(events: Sequence[Mapping[str, Any]], depth: int = 3, rows: int = 30) -> str:
    """Return the rows with the most bytes, and the sum."""
    most, held = at_peak(events)
    sizes, counts = Counter[str](), Counter[str]()
    for event in held:
        name = place(event.get("frames", ()), depth) or "no Python frame"
        sizes[name] += event["size"]
        counts[name] += 1
    lines = [f"| {size / 2**20:,.1f} | {counts[name]} | {name} |" for name, size in sizes.most_common(rows)]
    return "\n".join(["| MiB | allocations | by |", "| --- | --- | --- |", *lines, f"| {most / 2**20:,.1f} | | all |"])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("file", type=Path)
    p.add_argument("--depth", type=int, default=3, help="frames of a row")
    p.add_argument("--rows", type=int, default=30)
    a = p.parse_args()
    for number, events in enumerate(pickle.loads(a.file.read_bytes())["device_traces"]):
        if events:
            print(f"GPU {number}\n{table(events, a.depth, a.rows)}", flush=True)


if __name__ == "__main__":
    main()
