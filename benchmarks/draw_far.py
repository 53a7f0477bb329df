"""Draw docs/far.png: recall by length, and the time of a hashed head beside a dense head.

    python benchmarks/draw_far.py benchmarks/results/2026-11-28_h200_far_package.jsonl docs/far.png

The file has the lines that `far/package.py` printed, and lines with `head`, `tokens` and `ms`: the forward and backward of
one head's attention, from `hashed_time.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

#: name of a run, or kind of a head: (label, colour)
LABELS = {
    "hashed_s0": ("hashed head, seed 0", "C0"),
    "hashed_s1": ("hashed head, seed 1", "C9"),
    "dense": ("dense head without positions", "C2"),
    "rotary": ("dense head, rotary positions", "C3"),
    "window": ("windows only", "C1"),
    "hashed": ("hashed head", "C0"),
}
#: length of the longest training sequences
TRAINED = 4096


def words(tokens: float) -> str:
    """Return a number of tokens in short form: 64K, 1M, 1G."""
    for unit, size in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if tokens >= size:
            return f"{tokens / size:g}{unit}"
    return f"{tokens:g}"


def draw(rows: list[dict], picture: Path) -> None:
    figure, (recall, time) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, (label, colour) in LABELS.items():
        tests = sorted((x["test"], x["right"]) for x in rows if x.get("name") == name and "right" in x)
        if tests:
            recall.plot(*zip(*tests, strict=True), "o-", c=colour, ms=4, label=label)
        times = sorted((x["tokens"], x["ms"]) for x in rows if x.get("head") == name)
        if times:
            time.plot(*zip(*times, strict=True), "o-", c=colour, ms=4, label=label)
    recall.axvline(TRAINED, c="0.6", ls=":", lw=1)
    recall.text(TRAINED * 1.2, 3, "trained up to 4K", color="0.4", fontsize=8)
    recall.set(xlabel="tokens", ylabel="answered right, %", ylim=(-3, 103), title="Recall of planted keys, one H200")
    recall.legend(fontsize=8)
    time.set(
        xlabel="tokens", ylabel="ms, forward and backward", yscale="log", title="Attention of one head of 64, one H200"
    )
    time.legend(fontsize=8)
    recall.set_xticks([2**i for i in (12, 16, 20, 24, 27, 30)])
    for axes in (recall, time):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: words(x))
    figure.savefig(picture, dpi=150)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("file", type=Path)
    p.add_argument("picture", type=Path)
    a = p.parse_args()
    draw([json.loads(line) for line in a.file.read_text().splitlines()], a.picture)


if __name__ == "__main__":
    main()
