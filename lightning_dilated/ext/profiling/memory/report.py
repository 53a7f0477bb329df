"""Format the results of MemoryProfiler: metrics for loggers, the table at the end of fit, and a timeline as PNG.

Shape letters: R ranks, n numbers that a rank reports of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_dilated.ext.planning.counting.memory_tracker import (
    ACTIVATIONS,
    BATCH,
    EXCHANGE,
    GRADIENTS,
    KINDS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARY,
)
from lightning_dilated.ext.profiling.memory.phases import BACKWARD, FORWARD, OPTIMIZING, REST, Phase, phases
from lightning_dilated.ext.profiling.memory.probe import Measured, Point, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


HOST = ("host", "host_peak", "pinned")
STAGES = (FORWARD, BACKWARD, OPTIMIZING, REST)
COLUMNS = ("phase", "peak {}", "rank", "least {}", "reserved {}", "least {}")
UNKNOWN = -1
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


def unit_of(most: float) -> tuple[float, str]:
    """Return the unit for sizes up to `most` bytes, as (bytes, name)."""
    return next((x for x in UNITS if most >= x[0]), UNITS[-1])


@dataclass(frozen=True)
class Row:
    """Bytes of a phase as maxima over measured steps, on the ranks with the most and the fewest bytes."""

    phase: Phase
    allocated: int
    rank: int
    least: int
    reserved: int | None
    least_reserved: int | None


@dataclass(frozen=True)
class Top:
    """The highest peak: its bytes, rank, step and phase, and the bytes by kind."""

    allocated: int
    rank: int
    step: int
    phase: Phase
    kinds: Mapping[str, int]


def numbers(measured: Measured, blocks: int, host: Mapping[str, int | None]) -> Tensor:
    """Return int64 bytes (n,): allocated by phase, reserved by phase, by kind at the peak, on the host; -1: unknown."""
    allocated, reserved = ([UNKNOWN] * len(phases(blocks)) for _ in range(2))
    places = {phase: i for i, phase in enumerate(phases(blocks))}
    for x in measured.spans:
        i = places[x.phase]
        allocated[i] = max(allocated[i], x.allocated)
        reserved[i] = max(reserved[i], UNKNOWN if x.reserved is None else x.reserved)
    kinds = [measured.top.kinds.get(kind, 0) for kind in KINDS]
    host_sizes = [UNKNOWN if host[name] is None else host[name] for name in HOST]
    return torch.tensor([*allocated, *reserved, *kinds, *host_sizes], dtype=torch.int64)


def _parted(sizes: Tensor, blocks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split (R, n) into allocated bytes (R, phases), reserved bytes (R, phases), kinds (R, kinds) and host (R, 3)."""
    n = len(phases(blocks))
    return sizes[:, :n], sizes[:, n : 2 * n], sizes[:, 2 * n : 2 * n + len(KINDS)], sizes[:, 2 * n + len(KINDS) :]


def top_of(sizes: Tensor, blocks: int, step: int) -> Top:
    """Find the highest peak of a step; `sizes`: (R, n)."""
    allocated, _, kinds, _ = _parted(sizes, blocks)
    rank = int(allocated.amax(1).argmax())
    where = int(allocated[rank].argmax())
    kinds_there = dict(zip(KINDS, kinds[rank].tolist(), strict=True))
    return Top(int(allocated[rank, where]), rank, step, phases(blocks)[where], kinds_there)


def metrics(sizes: Tensor, blocks: int) -> dict[str, float]:
    """Return a step's metrics for loggers, in MB of 1e6 bytes; `sizes`: (R, n)."""
    allocated, reserved, kinds, host = _parted(sizes, blocks)
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
    at_peak = {
        f"at_peak/{kind.replace(' ', '_')}_mb": n / 1e6 for kind, n in zip(KINDS, kinds[rank].tolist(), strict=True)
    }
    return {f"memory/{name}": x for name, x in {**values, **at_peak}.items()}


def _most(name: str, sizes: Tensor) -> dict[str, float]:
    """Return the maximum and minimum over ranks in MB, by metric name; {} if a rank's number is unknown."""
    least, most = int(sizes.min()), int(sizes.max())
    return {} if least < 0 else {f"{name}_mb": most / 1e6, f"{name}_min_mb": least / 1e6}


def _name(phase: Phase, blocks: int) -> str:
    if phase.stage not in (FORWARD, BACKWARD):
        return phase.stage
    if phase.block is None:
        return f"{phase.stage}_other"
    return f"{phase.stage}_block_{phase.block + 1:0{len(str(blocks))}d}"


def rows_of(most: Tensor, blocks: int) -> list[Row]:
    """Return the table's rows, without phases that no rank ran; `most`: (R, n) maxima over measured steps."""
    allocated, reserved, *_ = _parted(most, blocks)
    rows = []
    for i, phase in enumerate(phases(blocks)):
        peaks, reserves = allocated[:, i], reserved[:, i]
        if int(peaks.max()) < 0:
            continue
        known = int(reserves.min()) >= 0
        sizes = (int(reserves.max()), int(reserves.min())) if known else (None, None)
        rows.append(Row(phase, int(peaks.max()), int(peaks.argmax()), max(0, int(peaks.min())), *sizes))
    return rows


def table(rows: Sequence[Row], blocks: int, title: str) -> Table:
    """Build the console's table, without reserved bytes if they are unknown."""
    unit, name = unit_of(max(x.allocated for x in rows))
    shown = Table(title=title, title_justify="left")
    known = rows[0].reserved is not None
    for i, column in enumerate(COLUMNS if known else COLUMNS[:4]):
        shown.add_column(column.format(name), justify="right" if i else "left", no_wrap=True)
    for x in rows:
        sizes = [f"{n / unit:.3f}" for n in (x.least, x.reserved, x.least_reserved) if n is not None]
        shown.add_row(x.phase.in_words(blocks), f"{x.allocated / unit:.3f}", str(x.rank), *sizes)
    return shown


def show(rows: Sequence[Row], top: Top | None, blocks: int, steps: int, most: Tensor | None) -> None:
    """Print the table of the measured steps, the kinds of the highest peak, and the hosts' memory.

    Args:
        steps: number of measured steps.
        most: (R, n) maxima over these steps.
    """
    if top is None:
        Console().print("No training step was measured: the fit ended before the first step to be measured.")
        return
    unit, name = unit_of(top.allocated)
    where = f"on rank {top.rank} in step {top.step}, {top.phase.in_words(blocks)}"
    parts = ", ".join(f"{kind} {n / unit:.3f} {name}" for kind, n in top.kinds.items() if n)
    title = f"peak memory by phase, most of {steps} steps"
    hosts = {name: n for name, n in zip(HOST, _parted(most, blocks)[3].amax(0).tolist(), strict=True) if n >= 0}
    words = {"host": "resident", "host_peak": "resident at most", "pinned": "pinned"}
    resident = ", ".join(f"{n / 1e6:.0f} MB {words[name]}" for name, n in hosts.items())
    lines = [f"The highest peak: {top.allocated / unit:.3f} {name} {where}. It is made of {parts}."]
    Console().print(
        table(rows, blocks, title), *lines, f"A process on its host: {resident}.", sep="\n", highlight=False
    )


COLOURS = {
    **{PARAMETERS: "#4e79a7", GRADIENTS: "#59a14f", OPTIMIZER: "#b07aa1", BATCH: "#9c755f"},
    **{ACTIVATIONS: "#f28e2b", EXCHANGE: "#76b7b2", TEMPORARY: "#bab0ac"},
}
#: maximum number of points in a picture; each is the highest of several consecutive points
POINTS = 1500


def thinned(points: Sequence[Point], limit: int = POINTS) -> list[Point]:
    """Cut the points into at most `limit` runs; return each run's highest point at its start, and the last point."""
    size = max(1, -(-len(points) // limit))
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    points_kept = [(run[0][0], max((kinds for _, kinds in run), key=lambda x: sum(x.values()))) for run in runs]
    return [*points_kept, points[-1]]


def stages(spans: Sequence[Span]) -> list[tuple[str, float, float]]:
    """Merge consecutive phases of the same stage into (stage, start, stop)."""
    merged: list[tuple[str, float, float]] = []
    for x in spans:
        if merged and merged[-1][0] == x.phase.stage and merged[-1][2] == x.start:
            merged[-1] = (x.phase.stage, merged[-1][1], x.stop)
        else:
            merged.append((x.phase.stage, x.start, x.stop))
    return merged


def draw(measured: Measured, folder: Path, who: str, blocks: int) -> None:
    """Write the timeline of a step into a folder; `who` names the rank and its device."""
    folder.mkdir(parents=True, exist_ok=True)
    top, (unit, name) = measured.top, unit_of(measured.top.allocated)
    peak = f"peak of {top.allocated / unit:.3f} {name} in {top.phase.in_words(blocks)}"
    figure = _timeline(measured, unit, name)
    figure.suptitle(f"step {measured.step}, {who}: {peak}", fontsize=10, x=0.07, ha="left")
    figure.savefig(folder / "memory_timeline.png")


def _timeline(measured: Measured, unit: float, name: str) -> Figure:
    """Draw memory by kind over the host's time. Lines separate stages; thin lines separate the numbered blocks."""
    from matplotlib.figure import Figure

    points, top = thinned(measured.points), measured.top
    begin = points[0][0]
    ms = [(seconds - begin) * 1e3 for seconds, _ in points]
    shown = [kind for kind in KINDS if any(kinds.get(kind) for _, kinds in points)]
    figure = Figure(figsize=(11, 4.4), dpi=130)
    axes = figure.add_subplot()
    below = [0.0] * len(points)
    for kind in shown:
        above = [b + kinds.get(kind, 0) / unit for b, (_, kinds) in zip(below, points, strict=True)]
        label = f"{kind}, {top.kinds.get(kind, 0) / unit:.3g} {name} at the peak"
        axes.fill_between(ms, below, above, step="post", color=COLOURS[kind], lw=0.4, label=label)
        below = above
    _part(axes, measured.spans, begin, (ms[-1] - ms[0]) or 1.0)
    axes.axhline(top.allocated / unit, color="black", ls=":", lw=0.8)
    axes.set_xlim(ms[0], ms[-1] if ms[-1] > ms[0] else ms[0] + 1)
    axes.set_ylim(0, 1.12 * top.allocated / unit or 1)
    axes.set_xlabel("ms on the host")
    axes.set_ylabel(name)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(0.735, 0.5), fontsize=8, frameon=False)
    figure.subplots_adjust(left=0.07, right=0.73, top=0.86, bottom=0.12)
    return figure


def _part(axes: Axes, spans: Sequence[Span], begin: float, width: float) -> None:
    """Draw lines between stages and blocks, with their names if there is room; `width`: width of the plot in ms."""
    where = axes.get_xaxis_transform()
    for x in spans:
        start, stop = (x.start - begin) * 1e3, (x.stop - begin) * 1e3
        axes.axvline(start, color="black", lw=0.4, alpha=0.25)
        if x.phase.block is not None and stop - start > 0.02 * width:
            options = {"ha": "center", "va": "top", "fontsize": 7, "alpha": 0.7, "transform": where}
            axes.text((start + stop) / 2, 0.985, str(x.phase.block + 1), **options)
    for stage, first, last in stages(spans):
        start, stop = (first - begin) * 1e3, (last - begin) * 1e3
        axes.axvline(start, color="black", lw=0.9, alpha=0.7)
        if stop - start > 0.06 * width:
            axes.text((start + stop) / 2, 1.015, stage, ha="center", va="bottom", fontsize=9, transform=where)
