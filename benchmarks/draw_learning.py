"""Draw docs/learning.png: how each pattern learned to use distant tokens.

    python benchmarks/draw_learning.py benchmarks/results/*_learning.jsonl docs/learning.png

The files contain lines printed by `recall_distance.py` and `pairs_distance.py`. The first panel shows the share of right
answers by octave of the distance, at 65,536 tokens. The others show bits by eighth of the position in samples with a
second half like the first: another strain, or a newer version of the same files. The newer version begins at a
fixed position in the third panel, and at a random position in the fourth. Each seed has its own curve.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

#: (arm, segment length of its local heads): (label, colour); other arms are omitted
LABELS = {
    ("dense", None): ("dense attention", "0.3"),
    ("dense", 2048): ("dense attention", "0.3"),
    ("hybrid-first", 2048): ("hybrid, dense head in the first layer", "C0"),
    ("hybrid-ends", 2048): ("hybrid: a dense head in the first and the last layer", "C9"),
    ("hybrid-lite", None): ("hybrid, dense head in the last layer, the paper's far branches", "C2"),
    ("hybrid", None): ("hybrid, dense head in the last layer", "C4"),
    ("hybrid", 2048): ("hybrid: a dense head in layers 3 and 7", "C0"),
    ("paper", None): ("the paper's pattern", "C3"),
    ("paper", 2048): ("the paper's pattern", "C3"),
    ("window", None): ("local segments of 2,048", "C1"),
    ("window", 2048): ("local segments of 2,048", "C1"),
}


#: arms with another label for 8 layers than for recall's 4 layers
OF_PAIRS = {
    "hybrid-first": ("hybrid: a dense head in layers 0 and 4", "C5"),
    "hybrid-ends": ("hybrid: a dense head in layers 0, 3 and 7", "C9"),
}
LENGTH = 65536


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("files", type=Path, nargs="+")
    p.add_argument("picture", type=Path)
    a = p.parse_args()
    lines = [line for file in a.files for line in file.read_text().splitlines()]
    draw([row for row in map(json.loads, lines) if belongs(row)], a.picture)


def belongs(row: dict) -> bool:
    """Return whether a row is drawn: it has an arm with a label, and the rotary base for its longest sequence."""
    if (row["arm"], row.get("local")) not in LABELS or row["base"] != 1e7:
        return False
    # for two versions, hybrid-first has a convolution, and other arms have none
    return row.get("kind") != "versions" or row["arm"] != "hybrid-first"


def draw(rows: list[dict], picture: Path) -> None:
    figure, ((recall, strains), (fixed, drawn)) = plt.subplots(2, 2, figsize=(12, 8.4), layout="constrained")
    for row in rows:
        if "by_octave" in row:
            draw_recall(recall, row)
        elif row["kind"] == "strains":
            draw_eighths(strains, row, 1000)
        else:
            draw_eighths(drawn if "drawn" in row["data"] else fixed, row, 1024)
    recall.set_xscale("log", base=2)
    recall.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    recall.set(xlabel="tokens between query and pair", ylabel="answered right, %", ylim=(-3, 103))
    recall.set_title("Recall at 65,536 tokens, kv_conv=4, same steps")
    strains.set(xlabel="position in the sample, thousands of bases", ylabel="bits a base", ylim=(0, 2), xlim=(0, 65.6))
    strains.set_title("A strain after another of its species, same steps")
    for axes, title in ((fixed, "same distance"), (drawn, "distances that vary")):
        axes.set(xlabel="position in the sample, KiB", ylabel="bits a byte", ylim=(0, 2.7), xlim=(0, 64))
        axes.set_title(f"Linux 6.12 after 6.1, same time, {title}")
    fixed.axvline(32, c="0.6", ls=":", lw=1)
    drawn.axvspan(28, 36, color="0.92", zorder=0, label="the new version begins")
    for axes in (recall, strains, fixed, drawn):
        labels = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        axes.legend(labels.values(), labels, fontsize=8, loc="lower left" if axes is strains else "center left")
        axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=110)


def draw_recall(axes: plt.Axes, row: dict) -> None:
    """Draw shares of right answers by octave, if an octave has 20 queries or more."""
    label, colour = LABELS[row["arm"], row.get("local")]
    octaves = {int(o): share for o, (share, count) in row["by_octave"].items() if count >= 20}
    dashed = (0, (4, 3)) if row["arm"] in ("dense", "hybrid") else "-"  # other octaves overlap other lines
    axes.plot(list(octaves), [100 * x for x in octaves.values()], ls=dashed, marker="o", ms=4, label=label, c=colour)


def draw_eighths(axes: plt.Axes, row: dict, unit: int) -> None:
    """Draw bits by eighth of the position, in units of `unit` tokens."""
    label, colour = OF_PAIRS.get(row["arm"], LABELS[row["arm"], row.get("local")])
    edges = [i / 8 * LENGTH / unit for i in range(9)]
    style = {"ls": (0, (4, 3)), "zorder": 3} if row["arm"] == "hybrid-ends" else {}  # one seed, because lines overlap
    axes.stairs(row["eighths"], edges, label=label, color=colour, lw=2, baseline=None, **style)


if __name__ == "__main__":
    main()
