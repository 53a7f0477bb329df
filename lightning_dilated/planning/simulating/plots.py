"""Pictures of simulated steps: tokens/s a GPU over the number of GPUs, and one rank's streams over time."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_dilated.planning.simulating.clock import COMPUTE, EXCHANGE, GRADIENTS
from lightning_dilated.planning.simulating.simulation import Step

#: a colour and a marker for every exchange; flat forms are drawn with broken lines, so that equal ones stay visible
STYLES = {
    "gather": ("tab:blue", "o", "--"),
    "butterfly": ("tab:orange", "s", "--"),
    "hierarchical_gather": ("tab:green", "^", "-"),
    "hierarchical_butterfly": ("tab:red", "v", "-"),
    "switch": ("tab:purple", "D", "--"),
    "ring": ("tab:brown", "x", "--"),
}
#: colours of kinds of work and of passes
KINDS = {
    **{"attention": "tab:blue", "rest": "tab:gray", "edge": "tab:olive", "optimizer": "tab:purple"},
    **{"arrivals": "tab:cyan", "packing": "tab:pink", "few rows": "navy", "overhead": "lightgray"},
    **{"forward": "tab:orange", "again": "gold", "backward": "tab:red", "gradients": "tab:green"},
}


def scale_plot(steps: Sequence[Step], path: str | Path, caption: str) -> None:
    """Write a PNG: above, tokens/s a GPU over GPUs; below, the share of a step that is exposed; a column for each L.

    Args:
        steps: as from `scale.sweep`; those of one rank begin every line.
        caption: what the numbers rest on, printed below.
    """
    sizes = sorted({s.tokens // s.ranks for s in steps})
    figure = Figure(figsize=(1.0 + 5.0 * len(sizes), 7.6))
    axes = figure.subplots(2, len(sizes), squeeze=False, sharex=True, sharey="row")
    top = max(s.tokens_per_second for s in steps) / 1e3
    for column, size in enumerate(sizes):
        found = [s for s in steps if s.tokens // s.ranks == size]
        longest = max(s.tokens for s in found)
        axes[0][column].set_title(f"{size:,} tokens a GPU, up to N = {longest:,}", fontsize=10)
        _lines(axes[0][column], found, lambda s: s.tokens_per_second / 1e3)
        _lines(axes[1][column], found, lambda s: 100 * s.exposed / s.seconds)
        axes[0][column].set_ylim(0, 1.1 * top)
        axes[1][column].set_ylim(bottom=0)
        axes[1][column].set_xlabel("GPUs")
    axes[0][0].set_ylabel("thousand tokens/s a GPU")
    axes[1][0].set_ylabel("exposed communication, % of the step")
    handles, names = max((row.get_legend_handles_labels() for row in axes[0]), key=lambda x: len(x[1]))
    figure.legend(handles, names, loc="upper center", ncols=max(1, len(names)), fontsize=9, frameon=False)
    text = textwrap.fill(caption, 80 * len(sizes))
    below = 0.03 + 0.021 * (text.count("\n") + 1)
    figure.text(0.02, 0.01, text, fontsize=8, va="bottom")
    figure.subplots_adjust(
        left=0.16 / len(sizes) ** 0.8, right=0.98, top=0.9, bottom=below + 0.06, hspace=0.08, wspace=0.06
    )
    figure.savefig(path, dpi=150)


def _lines(axes: Axes, steps: Sequence[Step], value: Callable[[Step], float]) -> None:
    """A line for each exchange, from the one rank that exchanges nothing."""
    ranks = sorted({s.ranks for s in steps})
    for name, (colour, marker, dashes) in STYLES.items():
        mine = [s for s in steps if s.exchange == name]
        if mine:
            first = [s for s in steps if s.exchange is None and name in ("gather", "butterfly", "switch", "ring")]
            points = sorted((s.ranks, value(s)) for s in (*first, *mine))
            axes.plot(*zip(*points, strict=True), label=name, color=colour, marker=marker, ls=dashes, ms=5, lw=1.4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [f"{r:,}" for r in ranks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def timeline(step: Step, path: str | Path, caption: str) -> None:
    """Write a PNG of the events of the rank that was watched, a row for each stream.

    Raises:
        ValueError: for a step simulated without `watched`.
    """
    if not step.events:
        raise ValueError("this step has no events: simulate it with watched=RANK.")
    figure = Figure(figsize=(14, 3.4))
    axes = figure.add_subplot()
    streams = [x for x in (COMPUTE, EXCHANGE, GRADIENTS) if any(e.stream == x for e in step.events)]
    for i, stream in enumerate(streams):
        for kind in dict.fromkeys(e.kind for e in step.events if e.stream == stream):
            bars = [
                (e.start * 1e3, (e.stop - e.start) * 1e3) for e in step.events if (e.stream, e.kind) == (stream, kind)
            ]
            axes.broken_barh(bars, (i - 0.4, 0.8), color=KINDS.get(kind, "black"), label=f"{stream}: {kind}")
    axes.set_yticks(range(len(streams)), streams)
    axes.invert_yaxis()
    axes.set_xlim(0, step.seconds * 1e3)
    axes.set_xlabel("ms")
    axes.set_title(f"{step.ranks:,} ranks, {step.tokens:,} tokens, {step.exchange or 'no exchange'}", fontsize=10)
    figure.legend(*axes.get_legend_handles_labels(), loc="upper right", fontsize=7)
    text = textwrap.fill(caption, 200)
    figure.text(0.02, 0.01, text, fontsize=7, va="bottom")
    figure.subplots_adjust(left=0.07, right=0.87, top=0.9, bottom=0.2 + 0.04 * (text.count("\n") + 1))
    figure.savefig(path, dpi=150)
