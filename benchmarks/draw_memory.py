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
#: memory of an H100 in GiB
MEMORY = 79.1
#: part of a setting's name: (legend, color)
KINDS = {
    "stream": ("stream: one chunk at a time", "C0"),
    "offload": ("offload: block inputs on the host", "C1"),
    "": ("one pass on the GPU", "0.35"),
}
#: settings by the letter next to their dots
LETTERS = "abcdef"
SETTINGS = [
    "all kept",
    "attention-kept",
    "block",
    "block, tile=16384",
    "block, tile=16384, head_chunks=6",
    "block, every=2, tile=16384, head_chunks=6",
]
#: text for these letters in the picture
WORDS = ["all kept", "attention-kept", "block", "block, tile=16384", "as d, head_chunks=6", "as e, every=2"]


def rows() -> list[tuple[str, float, float]]:
    """Return (setting, GiB, seconds per step) for each row of the first table."""
    first = ROWS.read_text().split("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in first.splitlines() if line.startswith("| ")]
    return [(row[0], float(row[2].split(",")[0]), float(row[4])) for row in cells[2:]]


def draw(picture: Path) -> None:
    """Write a PNG with a dot and a letter per setting."""
    figure, axis = plt.subplots(figsize=(7, 5), layout="constrained")
    for kind, (legend, color) in KINDS.items():
        dots = [row for row in rows() if kind in row[0] and (kind or not any(x and x in row[0] for x in KINDS))]
        axis.plot([row[1] for row in dots], [row[2] for row in dots], "o", color=color, label=legend, markersize=8)
        for setting, memory, seconds in dots:
            letter = LETTERS[SETTINGS.index(setting.replace(", stream=131072", "").replace(", offload=128 GiB", ""))]
            axis.annotate(letter, (memory, seconds), (7, -4), textcoords="offset points", fontsize=12)
    axis.axvline(MEMORY, color="0.6", linestyle="--", linewidth=1)
    axis.text(MEMORY * 0.96, 5.1, "memory of\nan H100", fontsize=11, color="0.4", va="top", ha="right")
    words = "\n".join(f"{letter}: {text}" for letter, text in zip(LETTERS, WORDS, strict=True))
    axis.text(MEMORY * 1.1, 5.1, words, fontsize=12, va="top")
    axis.set(xscale="log", ylim=(2, 5.2), xlim=(5, 500))
    axis.set_xlabel("GiB of the GPU", fontsize=12)
    axis.set_ylabel("seconds a step", fontsize=12)
    axis.set_xticks([5, 10, 20, 40, 80, 160, 320], ["5", "10", "20", "40", "80", "160", "320"])
    axis.minorticks_off()
    axis.tick_params(labelsize=11)
    figure.suptitle("12 blocks of 768, 1,048,576 tokens, one H100, as planned", fontsize=12)
    axis.legend(fontsize=11, loc="lower left", borderaxespad=0.3)
    figure.savefig(picture, dpi=150)


def main() -> None:
    """Draw the picture."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("picture", type=Path)
    draw(p.parse_args().picture)


if __name__ == "__main__":
    main()
