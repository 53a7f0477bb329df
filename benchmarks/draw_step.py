"""Draw docs/step.png: the way of one training step over ranks that share a sequence.

python benchmarks/draw_step.py docs/step.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RANKS = 3
#: (what happens, what a rank holds then, whether ranks exchange data)
STAGES = [
    ("read", "its slice\nof the file", False),
    ("embed", "hidden states\nof its tokens", False),
    ("project", "q, k, v\nof its tokens", False),
    ("exchange rows", "rows of others\nthat its queries\nread, too", True),
    ("attend", "output\nof its tokens", False),
    ("feed-forward,\nnext layers", "logits\nof its tokens", False),
    ("count labels", "its share of the\nloss over all tokens", True),
    ("backward,\nsum gradients", "equal\ngradients", True),
    ("optimizer", "equal\nparameters", False),
]


def draw(picture: Path) -> None:
    """Write a PNG: a column for each stage, a row for each rank, bars where ranks exchange data."""
    figure, axis = plt.subplots(figsize=(13, 4.2), layout="constrained")
    for column, (name, holds, exchanges) in enumerate(STAGES):
        x = 1.5 * column
        axis.text(x, RANKS - 0.35, name, ha="center", va="bottom", fontsize=9, weight="bold")
        if exchanges:
            axis.add_patch(plt.Rectangle((x - 0.7, -0.45), 1.4, RANKS - 0.1, color="#ffd9a0", zorder=0))
        for rank in range(RANKS):
            y = RANKS - 1 - rank
            axis.text(
                x, y, holds, ha="center", va="center", fontsize=8,
                bbox={"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": f"C{rank}", "linewidth": 1.6},
            )  # fmt: skip
            if column + 1 < len(STAGES):
                axis.annotate("", (x + 0.86, y), (x + 0.64, y), arrowprops={"arrowstyle": "->", "color": f"C{rank}"})
    for rank in range(RANKS):
        axis.text(-1.0, RANKS - 1 - rank, f"rank {rank}", ha="right", va="center", fontsize=10, color=f"C{rank}")
    axis.text(1.5 * 4, -0.75, "shaded: ranks exchange data", ha="center", fontsize=9)
    axis.set(xlim=(-1.8, 1.5 * len(STAGES) - 0.7), ylim=(-0.9, RANKS + 0.2))
    axis.axis("off")
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Draw it."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("picture", type=Path)
    draw(p.parse_args().picture)


if __name__ == "__main__":
    main()
