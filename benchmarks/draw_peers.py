"""Draw docs/peers.png: three measurements next to other packages and patterns.

    python benchmarks/draw_peers.py docs/peers.png

The numbers are rows of `benchmarks/results/`. Each panel contains the name of its file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

#: (title, unit, whether the axis is logarithmic, bars, file of the rows)
PANELS = [
    (
        "Attention over 1,048,576 tokens, one H200, same pattern",
        "ms forward and backward", False,
        {"lightning-dilated": 114.94, "torchscale": 311.0},
        "2026-11-21_h200_speed.md",
    ),
    (
        "Causal attention over 1,048,576 tokens, four H200",
        "ms forward and backward, logarithmic", True,
        {"dilated pattern,\nlightning-dilated": 22.05, "all keys, torch's\nring attention": 3427.01},
        "2026-11-22_h200_scaling.md",
    ),
    (
        "A new version of a file, the old one 32 KiB back",
        "bits a byte, same training time", False,
        {"hybrid": 0.098, "LongNet's pattern": 0.897, "dense": 2.503},
        "2026-11-24_h100_version_pairs.md",
    ),
]  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("picture", type=Path)
    draw(p.parse_args().picture)


def draw(picture: Path) -> None:
    """Write a PNG with a bar chart per panel, one below the other, so that words are readable on a phone."""
    heights = [sum(1 + 0.3 * label.count("\n") for label in panel[3]) for panel in PANELS]
    figure, axes = plt.subplots(
        len(PANELS), 1, figsize=(7, 3.9), layout="constrained", gridspec_kw={"height_ratios": heights}
    )
    figure.get_layout_engine().set(hspace=0.06)
    for axis, (title, unit, logarithmic, bars, rows) in zip(axes, PANELS, strict=True):
        drawn = axis.barh(list(bars), list(bars.values()), color=["C0", *["0.65"] * (len(bars) - 1)], height=0.7)
        numbers = [f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in bars.values()]
        axis.bar_label(drawn, numbers, padding=4, fontsize=12)
        axis.invert_yaxis()
        if logarithmic:
            axis.set_xscale("log")
        axis.set_xlim(1 if logarithmic else 0, max(bars.values()) * (3 if logarithmic else 1.15))
        axis.set_title(title, fontsize=12, loc="left", x=-0.26, weight="bold")
        axis.set_xlabel(f"{unit} (shorter is better); {rows}", fontsize=10, ha="left", x=-0.26)
        axis.tick_params("y", labelsize=11, length=0)
        axis.set_xticks([])
        axis.minorticks_off()
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(picture, dpi=200)


if __name__ == "__main__":
    main()
