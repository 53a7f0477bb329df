"""The quickstart's loss if two regions train separately between outer steps, next to data-parallel training.

    python benchmarks/outer_steps.py --out runs/outer_steps
    python benchmarks/outer_steps.py --accelerator gpu --rows "data parallel" "every=20, warmup=150"

Two ranks, on a CPU by default, have their own sequences. All rows have the same order of samples, seeds and inner
optimizer. The threshold was set before the first run: with an outer step after every 20 inner steps, and defaults
otherwise, the validation loss after 300 steps must be at most 1 % higher than in data-parallel training.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
ROWS: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "every=20": {"regions": 2, "outer": {"every": 20}},
    "every=20, fragments=2, delay=5, mix=0.5": {
        "regions": 2,
        "outer": {"every": 20, "fragments": 2, "delay": 5, "mix": 0.5},
    },
    "every=20, momentum=0, lr=1": {"regions": 2, "outer": {"every": 20, "momentum": 0.0, "lr": 1.0}},
    "every=5, momentum=0, lr=1": {"regions": 2, "outer": {"every": 5, "momentum": 0.0, "lr": 1.0}},
    "every=20, momentum=0, lr=1.414": {"regions": 2, "outer": {"every": 20, "momentum": 0.0, "lr": 2**0.5}},
    "every=1, momentum=0, lr=1": {"regions": 2, "outer": {"every": 1, "momentum": 0.0, "lr": 1.0}},
    "every=20, momentum=0, lr=1, warmup=100": {
        "regions": 2,
        "outer": {"every": 20, "momentum": 0.0, "lr": 1.0, "warmup": 100},
    },
    "every=20, momentum=0, lr=1, warmup=150": {
        "regions": 2,
        "outer": {"every": 20, "momentum": 0.0, "lr": 1.0, "warmup": 150},
    },
    "every=20, warmup=150": {"regions": 2, "outer": {"every": 20, "warmup": 150}},
    "every=20, momentum=0.5, lr=1": {"regions": 2, "outer": {"every": 20, "momentum": 0.5, "lr": 1.0}},
}
THRESHOLD = 1.01


def validated(strategy: dict[str, Any], out: Path, steps: int, accelerator: str) -> tuple[list[float], float]:
    """Return (bits per byte in each validation, seconds) of a run."""
    options = {"class_path": "lightning_dilated.RingDilatedStrategy", "init_args": {"sequence_size": 1, **strategy}}
    command = [sys.executable, "-m", "lightning_dilated", "fit", "--config", str(RECIPE), "--trainer.devices", "2"]
    command += ["--trainer.strategy", json.dumps(options), "--trainer.max_steps", str(steps)]
    command += ["--trainer.accelerator", accelerator]
    command += ["--trainer.logger.init_args.save_dir", str(out)]
    begin = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - begin
    newest = max(out.rglob("metrics.csv"), key=lambda path: path.stat().st_mtime)
    with newest.open() as file:
        return [float(x) for row in csv.DictReader(file) if (x := row.get("val_bits_per_byte"))], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/outer_steps"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    a = parser.parse_args()
    print("| two ranks | bits per byte after each validation | of data parallel | time |\n| --- | --- | --- | --- |")
    first = None
    for name in a.rows:
        bits, seconds = validated(ROWS[name], a.out / name.replace(", ", "_"), a.steps, a.accelerator)
        first = first or bits[-1]
        listed = ", ".join(f"{x:.3f}" for x in bits)
        print(f"| {name} | {listed} | {bits[-1] / first:.4f} | {seconds / 60:.1f} min |", flush=True)
        if name == "every=20":
            print(f"threshold {THRESHOLD}: {'met' if bits[-1] <= THRESHOLD * first else 'missed'}", file=sys.stderr)


if __name__ == "__main__":
    main()
