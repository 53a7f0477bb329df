"""Draw docs/peers.png: three measurements next to other packages and patterns.

    python benchmarks/draw_peers.py docs/peers.png

The numbers are rows of `benchmarks/results/`; each panel names its file.
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
        "Attention over 1,048,576 tokens, one H200\nforward and backward, same pattern",
        "ms", False,
        {"lightning-dilated": 114.94, "torchscale": 311.0},
        "2026-11-21_h200_speed.md",
    ),
    (
        "Causal attention over 1,048,576 tokens, four H200\nforward and backward",
        "ms, logarithmic", True,
        {"dilated pattern,\nlightning-dilated": 22.05, "all keys,\ntorch's ring attention": 3427.01},
        "2026-11-22_h200_scaling.md",
    ),
    (
        "A new version of a file, the old one 32 KiB back\nsame training time",
        "bits a byte", False,
        {"hybrid": 0.098, "LongNet's\npattern": 0.897, "dense": 2.503},
        "2026-11-24_h100_version_pairs.md",
    ),
]  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("picture", type=Path)
    draw(p.parse_args().picture)


def draw(picture: Path) -> None:
    """Write a PNG with a bar chart for each panel; shorter bars are better."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(14, 3.4), layout="constrained")
    for axis, (title, unit, logarithmic, bars, rows) in zip(axes, PANELS, strict=True):
        drawn = axis.barh(list(bars), list(bars.values()), color=["C0", *["0.65"] * (len(bars) - 1)], height=0.6)
        axis.bar_label(
            drawn, [f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in bars.values()], padding=3
        )
        axis.invert_yaxis()
        if logarithmic:
            axis.set_xscale("log")
        axis.set_xlim(1 if logarithmic else 0, max(bars.values()) * (6 if logarithmic else 1.2))
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(f"{unit} (shorter is better)\n{rows}", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=100)


if __name__ == "__main__":
    main()
