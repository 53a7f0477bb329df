"""Draw docs/learning.png: what each pattern learned of what stands far back.

    python benchmarks/draw_learning.py benchmarks/results/2026-11-24_h100_learning.jsonl docs/learning.png

FILE holds the lines that `recall_distance.py` and `pairs_distance.py` print. Left: the share of right answers by octave of
the distance, at 65,536 tokens. Right: bits by eighth of the position, where the second half is a new version of the first,
or another strain. A line for each seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

#: (arm, segment length of its local heads) to its label and colour; other arms are left out
LABELS = {
    ("dense", None): ("dense attention", "0.3"),
    ("dense", 2048): ("dense attention", "0.3"),
    ("hybrid-first", 2048): ("hybrid, dense head in the first layer", "C0"),
    ("hybrid-lite", None): ("hybrid, dense head in the last layer, the paper's far branches", "C2"),
    ("hybrid", None): ("hybrid, dense head in the last layer", "C4"),
    ("hybrid", 2048): ("hybrid: a dense head in layers 3 and 7", "C0"),
    ("paper", None): ("the paper's pattern", "C3"),
    ("paper", 2048): ("the paper's pattern", "C3"),
    ("window", None): ("local segments of 2,048", "C1"),
    ("window", 2048): ("local segments of 2,048", "C1"),
}


def main() -> None:
    """Draw it."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("file", type=Path)
    p.add_argument("picture", type=Path)
    a = p.parse_args()
    rows = [json.loads(line) for line in a.file.read_text().splitlines()]
    draw(rows, a.picture)


def draw(rows: list[dict], picture: Path) -> None:
    """All panels."""
    figure, (recall, versions, strains) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for row in rows:
        key = row["arm"], row.get("local")
        if key not in LABELS or (row.get("kind") == "versions" and row["arm"] == "hybrid-first"):
            continue
        label, colour = LABELS[key]
        if "by_octave" in row:
            octaves = {int(o): share for o, (share, count) in row["by_octave"].items() if count >= 20}
            dashed = (0, (4, 3)) if row["arm"] in ("dense", "hybrid") else "-"  # they lie on others
            recall.plot(
                list(octaves), [100 * x for x in octaves.values()], ls=dashed, marker="o", ms=4, label=label, c=colour
            )
            continue
        unit, axes = (1024, versions) if row["kind"] == "versions" else (1000, strains)
        edges = [i / 8 * max(row["lengths"]) / unit for i in range(9)]
        if row["arm"] == "hybrid-first":
            label, colour = "hybrid: a dense head in layers 0 and 4", "C9"
        axes.stairs(row["eighths"], edges, label=label, color=colour, lw=2, baseline=None)
    recall.set_xscale("log", base=2)
    recall.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    recall.set(xlabel="tokens between query and pair", ylabel="answered right, %", ylim=(-3, 103))
    recall.set_title("Recall at 65,536 tokens, kv_conv=4, same steps")
    versions.set(xlabel="position in the sample, KiB", ylabel="bits a byte", ylim=(0, 2.7), xlim=(0, 64))
    versions.set_title("Linux 6.12 after the same files of 6.1, same time")
    versions.axvline(32, c="0.6", ls=":", lw=1)
    strains.set(xlabel="position in the sample, thousands of bases", ylabel="bits a base", ylim=(0, 2), xlim=(0, 65.6))
    strains.set_title("A strain after another of its species, same steps")
    for axes in (recall, versions, strains):
        labels = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        axes.legend(labels.values(), labels, fontsize=8, loc="lower left" if axes is strains else "center left")
        axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
