"""The profiler's numbers: a step as a vector that ranks compare, what loggers get of it, and the table at the end.

Shape letters: R ranks, n numbers of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_dilated.callbacks.memory.phases import BACKWARD, FORWARD, OPTIMIZER, REST, Phase, phases
from lightning_dilated.callbacks.memory.probe import Measured
from lightning_dilated.planning.counting.memory_tracker import KINDS

HOST = ("host", "host_peak", "pinned")
STAGES = (FORWARD, BACKWARD, OPTIMIZER, REST)
COLUMNS = ("phase", "peak {}", "rank", "least {}", "reserved {}", "least {}")
UNKNOWN = -1
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


def unit_of(most: float) -> tuple[float, str]:
    """(bytes, name) of the unit to show up to `most` bytes in."""
    return next((x for x in UNITS if most >= x[0]), UNITS[-1])


@dataclass(frozen=True)
class Row:
    """Bytes of a phase: the most of all measured steps, on the rank where that is most and where it is least."""

    phase: Phase
    allocated: int
    rank: int
    least: int
    reserved: int | None
    least_reserved: int | None


@dataclass(frozen=True)
class Top:
    """The highest peak: in bytes, where it was, and its kinds."""

    allocated: int
    rank: int
    step: int
    phase: Phase
    kinds: Mapping[str, int]


def numbers(measured: Measured, blocks: int, host: Mapping[str, int | None]) -> Tensor:
    """(n,) int64: allocated, then reserved bytes of all phases, kinds at the peak, and the host's; -1 where unknown."""
    allocated, reserved = ([UNKNOWN] * len(phases(blocks)) for _ in range(2))
    places = {phase: i for i, phase in enumerate(phases(blocks))}
    for x in measured.spans:
        i = places[x.phase]
        allocated[i] = max(allocated[i], x.allocated)
        reserved[i] = max(reserved[i], UNKNOWN if x.reserved is None else x.reserved)
    kinds = [measured.top.kinds.get(kind, 0) for kind in KINDS]
    others = [UNKNOWN if host[name] is None else host[name] for name in HOST]
    return torch.tensor([*allocated, *reserved, *kinds, *others], dtype=torch.int64)


def _parted(found: Tensor, blocks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(R, phases) allocated, the same reserved, (R, kinds), (R, host)."""
    n = len(phases(blocks))
    return found[:, :n], found[:, n : 2 * n], found[:, 2 * n : 2 * n + len(KINDS)], found[:, 2 * n + len(KINDS) :]


def top_of(found: Tensor, blocks: int, step: int) -> Top:
    """Where the highest peak of a step is, from (R, n)."""
    allocated, _, kinds, _ = _parted(found, blocks)
    rank = int(allocated.amax(1).argmax())
    where = int(allocated[rank].argmax())
    held = dict(zip(KINDS, kinds[rank].tolist(), strict=True))
    return Top(int(allocated[rank, where]), rank, step, phases(blocks)[where], held)


def metrics(found: Tensor, blocks: int) -> dict[str, float]:
    """What loggers get of a step, in MB of 1e6 bytes, from (R, n)."""
    allocated, reserved, kinds, host = _parted(found, blocks)
    every = phases(blocks)
    slots = {"peak": range(len(every))}
    slots |= {stage: [i for i, x in enumerate(every) if x.stage == stage] for stage in STAGES}
    slots |= {_name(x, blocks): [i] for i, x in enumerate(every)} if blocks else {}
    values: dict[str, float] = {}
    for name, at in slots.items():
        for what, peaks in (("", allocated), ("_reserved", reserved)):
            values |= _most(f"{name}{what}", peaks[:, list(at)].amax(1))
    for i, name in enumerate(HOST):
        values |= _most(name, host[:, i])
    rank = int(allocated.amax(1).argmax())
    held = {
        f"at_peak/{kind.replace(' ', '_')}_mb": n / 1e6 for kind, n in zip(KINDS, kinds[rank].tolist(), strict=True)
    }
    return {f"memory/{name}": x for name, x in {**values, **held}.items()}


def _most(name: str, sizes: Tensor) -> dict[str, float]:
    """The most and the least of any rank; nothing where a rank does not know."""
    least, most = int(sizes.min()), int(sizes.max())
    return {} if least < 0 else {f"{name}_mb": most / 1e6, f"{name}_min_mb": least / 1e6}


def _name(phase: Phase, blocks: int) -> str:
    if phase.stage not in (FORWARD, BACKWARD):
        return phase.stage
    if phase.block is None:
        return f"{phase.stage}_other"
    return f"{phase.stage}_block_{phase.block + 1:0{len(str(blocks))}d}"


def rows_of(most: Tensor, blocks: int) -> list[Row]:
    """The table, from (R, n) maxima of all measured steps; phases that no rank passed are left out."""
    allocated, reserved, *_ = _parted(most, blocks)
    found = []
    for i, phase in enumerate(phases(blocks)):
        mine, theirs = allocated[:, i], reserved[:, i]
        if int(mine.max()) < 0:
            continue
        known = int(theirs.min()) >= 0
        sizes = (int(theirs.max()), int(theirs.min())) if known else (None, None)
        found.append(Row(phase, int(mine.max()), int(mine.argmax()), max(0, int(mine.min())), *sizes))
    return found


def table(rows: Sequence[Row], blocks: int, title: str) -> Table:
    """For the console; without reserved bytes where they are not known."""
    unit, name = unit_of(max(x.allocated for x in rows))
    shown = Table(title=title, title_justify="left")
    known = rows[0].reserved is not None
    for i, column in enumerate(COLUMNS if known else COLUMNS[:4]):
        shown.add_column(column.format(name), justify="right" if i else "left", no_wrap=True)
    for x in rows:
        sizes = [f"{n / unit:.3f}" for n in (x.least, x.reserved, x.least_reserved) if n is not None]
        shown.add_row(x.phase.told(blocks), f"{x.allocated / unit:.3f}", str(x.rank), *sizes)
    return shown


def show(rows: Sequence[Row], top: Top | None, blocks: int, steps: int, most: Tensor | None) -> None:
    """Print the table of so many measured steps, what the highest peak is made of, and what the hosts held.

    Args:
        most: (R, n) maxima of these steps.
    """
    if top is None:
        Console().print("No training step was measured: the fit ended before every_n_steps let one be.")
        return
    unit, name = unit_of(top.allocated)
    where = f"on rank {top.rank} in step {top.step}, {top.phase.told(blocks)}"
    made = ", ".join(f"{kind} {n / unit:.3f} {name}" for kind, n in top.kinds.items() if n)
    title = f"peak memory by phase, most of {steps} steps"
    hosts = {name: n for name, n in zip(HOST, _parted(most, blocks)[3].amax(0).tolist(), strict=True) if n >= 0}
    words = {"host": "resident", "host_peak": "resident at most", "pinned": "pinned"}
    told = ", ".join(f"{n / 1e6:.0f} MB {words[name]}" for name, n in hosts.items())
    lines = [f"The highest peak: {top.allocated / unit:.3f} {name} {where}. It is made of {made}."]
    Console().print(table(rows, blocks, title), *lines, f"A process on its host: {told}.", sep="\n", highlight=False)
