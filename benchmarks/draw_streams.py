"""Draw docs/streams.png: memory and speed of exact streamed steps against the length of the sequence.

    python benchmarks/draw_streams.py benchmarks/results/*_streams.jsonl docs/streams.png

The files contain one JSON object per line, from a row of `stream_step.py`: `model` and `gpu`, which label it, `tokens`,
`planned_gib`, `gib` and `seconds`. The first panel has the measured and the planned peak memory, the second has tokens
per second. Each model and GPU is a line.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

#: ticks of the axis of tokens
TICKS = [1e6, 4e6, 16e6, 64e6, 256e6, 1e9]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("files", type=Path, nargs="+")
    p.add_argument("picture", type=Path)
    a = p.parse_args()
    lines = [line for file in a.files for line in file.read_text().splitlines()]
    draw([json.loads(line) for line in lines], a.picture)


def draw(rows: list[dict], picture: Path) -> None:
    figure, (memory, speed) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    series = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["tokens"]):
        series[f"{row['model']}, one {row['gpu']}"].append(row)
    for number, (label, points) in enumerate(sorted(series.items())):
        tokens, colour = [x["tokens"] for x in points], f"C{number}"
        memory.plot(tokens, [x["gib"] for x in points], "o-", c=colour, label=f"{label}: measured")
        planned = [x["planned_gib"] for x in points]
        memory.plot(tokens, planned, "kx", ms=10, mew=1, label="planned" if number == len(series) - 1 else None)
        speed.plot(tokens, [x["tokens"] / x["seconds"] / 1000 for x in points], "o-", c=colour, label=label)
    memory.set(ylabel="GiB", title="Peak memory")
    speed.set(ylabel="thousand tokens a second", title="Speed")
    for axes in (memory, speed):
        axes.set(xlabel="tokens of one training step", xscale="log", xlim=(0.9e6, 1.25e9))
        axes.set_xticks(TICKS, [f"{x / 1e6:,.0f}M" for x in TICKS])
        axes.minorticks_off()
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9, title="layers x width", title_fontsize=9, loc="center left")
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
