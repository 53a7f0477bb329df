"""Draw docs/step.png: the stages of a training step on ranks that share a sequence.

python benchmarks/draw_step.py docs/step.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RANKS = 3
#: (what happens, what a rank has afterwards, whether ranks exchange data)
STAGES = [
    ("read", "its slice\nof the file", False),
    ("embed", "hidden states\nof its tokens", False),
    ("project", "q, k, v\nof its tokens", False),
    ("exchange\nrows", "rows of others\nthat it reads, too", True),
    ("attend", "output\nof its tokens", False),
    ("feed-forward,\nnext layers", "logits\nof its tokens", False),
    ("count labels", "its share of the\nloss of all tokens", True),
    ("backward, sum\ngradients", "equal\ngradients", True),
    ("optimizer", "equal\nparameters", False),
]


def draw(picture: Path) -> None:
    """Write a PNG with a row per stage, a column per rank, and bars where ranks exchange data.

    The picture is taller than wide, so that words are readable on a phone.
    """
    figure, axis = plt.subplots(figsize=(7, 7), layout="constrained")
    for row, (name, holds, exchanges) in enumerate(STAGES):
        y = -row
        axis.text(-0.62, y, name, ha="right", va="center", fontsize=12, weight="bold")
        if exchanges:
            axis.add_patch(plt.Rectangle((-0.55, y - 0.4), RANKS + 0.1, 0.8, color="#ffd9a0", zorder=0))
        for rank in range(RANKS):
            axis.text(
                rank, y, holds, ha="center", va="center", fontsize=11, linespacing=1,
                bbox={"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": f"C{rank}", "linewidth": 1.6},
            )  # fmt: skip
            if row + 1 < len(STAGES):
                arrow = {"arrowstyle": "->", "color": f"C{rank}", "shrinkA": 0, "shrinkB": 0}
                axis.annotate("", (rank, y - 0.68), (rank, y - 0.33), arrowprops=arrow)
    for rank in range(RANKS):
        axis.text(rank, 0.5, f"rank {rank}", ha="center", va="bottom", fontsize=12, color=f"C{rank}", weight="bold")
    axis.text(RANKS / 2 - 0.5, -len(STAGES) + 0.45, "shaded: ranks exchange data", ha="center", va="top", fontsize=11)
    axis.set(xlim=(-1.6, RANKS - 0.4), ylim=(-len(STAGES) + 0.15, 0.8))
    axis.axis("off")
    figure.savefig(picture, dpi=150)


def main() -> None:
    """Draw the picture."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("picture", type=Path)
    draw(p.parse_args().picture)


if __name__ == "__main__":
    main()
