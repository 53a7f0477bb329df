"""Draw docs/memory_settings.png: memory and time of a step for each memory setting, as planned.

    python benchmarks/draw_memory.py docs/memory_settings.png

The numbers are the rows of `benchmarks/results/2026-11-28_plan_settings.md`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROWS = Path(__file__).parent / "results" / "2026-11-28_plan_settings.md"
#: GiB of an H100
MEMORY = 79.1
#: what a setting has in its name: (legend, color)
KINDS = {
    "stream": ("stream: one chunk at a time", "C0"),
    "offload": ("offload: block inputs on the host", "C1"),
    "": ("one pass on the GPU", "0.35"),
}


def rows() -> list[tuple[str, float, float]]:
    """(setting, GiB, seconds a step) of each row of the table."""
    cells = [line.strip("| ").split(" | ") for line in ROWS.read_text().splitlines() if line.startswith("| ")]
    return [(row[0], float(row[2].split(",")[0]), float(row[4])) for row in cells[2:]]


def draw(picture: Path) -> None:
    """Write a PNG with a dot for each setting."""
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    for kind, (legend, color) in KINDS.items():
        dots = [row for row in rows() if kind in row[0] and (kind or not any(x and x in row[0] for x in KINDS))]
        axis.plot([row[1] for row in dots], [row[2] for row in dots], "o", color=color, label=legend)
        for setting, memory, seconds in dots:
            text = setting.replace(", stream=131072", "").replace(", offload=128 GiB", "").replace("16384", "16K")
            axis.annotate(
                text, (memory, seconds), (5, -11 if kind == "offload" else 4), textcoords="offset points", fontsize=7
            )
    axis.axvline(MEMORY, color="0.6", linestyle="--", linewidth=1)
    axis.text(MEMORY * 1.02, 5.0, "memory of\nan H100", fontsize=8, color="0.4", va="top")
    axis.set(xscale="log", xlabel="GiB of the GPU", ylabel="seconds a step", ylim=(2, 5.2), xlim=(5, 500))
    axis.set_xticks([5, 10, 20, 40, 80, 160, 320], ["5", "10", "20", "40", "80", "160", "320"])
    axis.minorticks_off()
    axis.set_title("12 blocks of 768, 1,048,576 tokens, one H100, as planned", fontsize=10)
    axis.legend(fontsize=8, loc="upper right")
    figure.savefig(picture, dpi=120)


def main() -> None:
    """Draw it."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("picture", type=Path)
    draw(p.parse_args().picture)


if __name__ == "__main__":
    main()
