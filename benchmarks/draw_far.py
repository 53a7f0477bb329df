"""Draw docs/far.png: recall by length, and bits by position where the second half is a new version of the first.

    python benchmarks/draw_far.py benchmarks/results/2026-11-28_h200_far_package.jsonl docs/far.png

The file has the lines that `far/package.py` printed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

#: name of a run: (label, colour)
RECALL = {
    "hashed_s1": ("hashed head, seed 1", "C9"),
    "hashed_s0": ("hashed head, seed 0", "C0"),
    "dense": ("dense head without positions", "C2"),
    "rotary": ("dense head, rotary positions", "C3"),
    "window": ("windows only", "C1"),
}
VERSIONS = {"e5_hashed": ("hashed heads", "C0"), "e5_window": ("windows only", "C1")}


def words(tokens: float) -> str:
    """Return a number of tokens in short form: 64K, 1M, 1G."""
    for unit, size in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if tokens >= size:
            return f"{tokens / size:g}{unit}"
    return f"{tokens:g}"


def training(rows: list[dict], name: str) -> str:
    """Return the steps of a run and the length of its longest training sequences."""
    last = [x for x in rows if x.get("name") == name and "step" in x][-1]
    return f"{last['step']:,} steps of up to {words(last['length'])}"


def draw(rows: list[dict], picture: Path) -> None:
    figure, (recall, versions) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, (label, colour) in RECALL.items():
        tests = sorted((x["test"], x["right"]) for x in rows if x.get("name") == name and "right" in x)
        recall.plot(*zip(*tests, strict=True), "o-", c=colour, ms=4, label=f"{label}\n({training(rows, name)})")
    recall.set(xlabel="tokens", ylabel="answered right, %", ylim=(-3, 103), title="Recall of planted keys")
    recall.set_xscale("log", base=2)
    recall.set_xticks([2**i for i in (12, 16, 20, 24, 27, 30)])
    for name, (label, colour) in VERSIONS.items():
        (test,) = (x for x in rows if x.get("name") == name and "eighths" in x)
        parts = len(test["eighths"])
        places = [test["test"] * (i + 0.5) / parts for i in range(parts)]
        versions.plot(places, test["eighths"], "o-", c=colour, ms=4, label=f"{label} ({training(rows, name)})")
        versions.set_xticks([test["test"] * i // 4 for i in range(5)])
    versions.set(
        xlabel="position in the sample; the newer versions begin at 1M",
        ylabel="bits per byte",
        ylim=(0, 1.1),
        title="Newer versions of files, 1M bytes behind the older ones",
    )
    for axes, size in ((recall, 7.5), (versions, 8)):
        axes.xaxis.set_major_formatter(lambda x, _: words(x))
        axes.legend(fontsize=size, loc="center right" if axes is recall else "lower left")
    figure.savefig(picture, dpi=150)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("file", type=Path)
    p.add_argument("picture", type=Path)
    a = p.parse_args()
    draw([json.loads(line) for line in a.file.read_text().splitlines()], a.picture)


if __name__ == "__main__":
    main()
