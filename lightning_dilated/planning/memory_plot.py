"""A picture of a plan: what a rank holds by kind, a bar for each setting, and the longest sequences beside."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_dilated.planning.counting.memory_tracker import KINDS

GIB = 2**30
COLOURS = dict(
    zip(
        KINDS,
        ("tab:purple", "tab:green", "tab:olive", "tab:brown", "tab:blue", "tab:orange", "tab:gray"),
        strict=True,
    )
)


@dataclass(frozen=True)
class Bar:
    """A setting.

    Attributes:
        name: of the setting.
        kinds: bytes of a rank by kind; None where they were not asked for.
        longest: the most tokens that fit.
    """

    name: str
    kinds: Mapping[str, int] | None
    longest: int


def memory_plot(bars: Sequence[Bar], limit: int, path: str | Path, title: str, caption: str) -> None:
    """Write a PNG.

    Args:
        bars: from the top down.
        limit: bytes that a rank may take.
        title: of the left half.
        caption: what the numbers rest on, printed below.
    """
    text = textwrap.fill(caption, 165)
    inches = 1.6 + 0.42 * len(bars) + 0.16 * (text.count("\n") + 1)
    figure = Figure(figsize=(13, inches))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    _memory(left, bars, limit)
    left.set_title(title, fontsize=10)
    lengths = [bar.longest for bar in bars]
    right.barh(range(len(bars)), lengths, color="tab:cyan", height=0.7)
    top = max(lengths, default=0) or 1
    for i, n in enumerate(lengths):
        right.text(n + 0.01 * top, i, f"{n:,}" if n else "nothing fits", va="center", fontsize=8)
    right.set_xlim(0, 1.3 * top)
    right.set_xlabel("tokens")
    right.set_title("longest sequence", fontsize=10)
    step = 2 ** max(0, math.ceil(math.log2(1.3 * top / 6)))
    right.set_xticks(range(0, int(1.3 * top) + 1, step))
    right.xaxis.set_major_formatter(lambda x, _: short(x))
    left.set_yticks(range(len(bars)), [bar.name for bar in bars], fontsize=8)
    left.invert_yaxis()
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="upper center", ncols=max(1, len(names)), fontsize=8, frameon=False)
    figure.text(0.01, 0.1 / inches, text, fontsize=7.5, va="bottom")
    below = (0.75 + 0.16 * (text.count("\n") + 1)) / inches
    names_wide = 0.35 + 0.068 * max((len(bar.name) for bar in bars), default=0)
    figure.subplots_adjust(left=names_wide / 13, right=0.98, top=1 - 0.72 / inches, bottom=below, wspace=0.05)
    figure.savefig(path, dpi=150)


def short(tokens: float) -> str:
    """4M for 4 * 2**20, and so on."""
    for unit, name in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if tokens >= unit:
            return f"{tokens / unit:g}{name}"
    return f"{tokens:g}"


def _memory(axes: Axes, bars: Sequence[Bar], limit: int) -> None:
    """Stacked bars; those far beyond the limit are cut, and say so."""
    totals = [sum((bar.kinds or {}).values()) / GIB for bar in bars]
    end = max(1.6 * limit / GIB, 1.05 * min((t for t in totals if t), default=0))
    end = min(end, 1.15 * max([limit / GIB, *totals]))
    for kind in KINDS:
        sizes = [(bar.kinds or {}).get(kind, 0) / GIB for bar in bars]
        if any(sizes):
            starts = [sum((bar.kinds or {}).get(k, 0) for k in KINDS[: KINDS.index(kind)]) / GIB for bar in bars]
            axes.barh(range(len(bars)), sizes, left=starts, color=COLOURS[kind], label=kind, height=0.7)
    for i, total in enumerate(totals):
        if total:
            beyond = total > 0.93 * end
            where = 0.99 * end if beyond else total + 0.01 * end
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85} if beyond else None
            axes.text(where, i, f"{total:,.1f}", va="center", ha="right" if beyond else "left", fontsize=8, bbox=box)
    axes.axvline(limit / GIB, color="tab:red", lw=1.2, label="fits")
    axes.set_xlim(0, end)
    axes.set_xlabel("GiB of a rank")
