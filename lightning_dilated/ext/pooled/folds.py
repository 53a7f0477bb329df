"""`lightning-dilated folds`: mean and standard deviation of test metrics over several folds."""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_dilated._validation import refuse_special
from lightning_dilated.ext.pooled.bootstrap import FILE

COLUMNS = ("metric", "mean", "std", "min", "max", "folds")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "lightning-dilated folds",
        description=f"Read the {FILE} that `test` wrote for each fold, and print the mean and the standard deviation (with "
        "n - 1) of each metric over the folds.",
    )
    p.add_argument(
        "folds",
        nargs="+",
        type=Path,
        help=f"for each fold, a {FILE}, or a folder, from which the newest {FILE} is taken",
    )
    p.add_argument("--out", type=Path, help="write the summary as a CSV")
    return p


def metrics_file(path: Path) -> Path:
    """Return the metrics file of a fold. Raises FileNotFoundError if there is none."""
    if path.is_file():
        return path
    files = sorted(path.rglob(FILE), key=lambda x: x.stat().st_mtime) if path.is_dir() else []
    if not files:
        raise FileNotFoundError(
            f"{path}: no {FILE} there. `lightning-dilated test --config CONFIG --ckpt_path X.ckpt` of a classifier, "
            "regression or survival model writes it into its run folder."
        )
    return files[-1]


def read_metrics(path: Path) -> dict[str, float]:
    """Return {metric: value}; raise ValueError for a file that `test` did not write."""
    refuse_special(path)
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    try:
        values = {row["metric"]: float(row["value"]) for row in rows}
    except (KeyError, TypeError, ValueError):
        values = {}
    if not values:
        raise ValueError(f"{path} has no columns metric and value with numbers: give files that `test` wrote.")
    return values


def summary(folds: dict[Path, dict[str, float]]) -> list[dict[str, float | str | int]]:
    """Return a row of `COLUMNS` for each metric. If a metric is NaN in one fold, its statistics are NaN.

    Args:
        folds: {file: {metric: value}}, two or more.

    Raises:
        ValueError: for fewer folds, or folds with different metrics.
    """
    if len(folds) < 2:
        raise ValueError(f"a summary needs two folds or more, got {', '.join(map(str, folds))}.")
    first = next(iter(folds))
    other = next((path for path, x in folds.items() if list(x) != list(folds[first])), None)
    if other is not None:
        raise ValueError(
            f"{first} has the metrics {', '.join(folds[first])}, but {other} has {', '.join(folds[other])}: give folds of "
            "one task."
        )
    out: list[dict[str, float | str | int]] = []
    for name in folds[first]:
        values = [x[name] for x in folds.values()]
        known = all(map(math.isfinite, values))
        numbers = [f(values) if known else math.nan for f in (statistics.fmean, statistics.stdev, min, max)]
        out.append({"metric": name, **dict(zip(COLUMNS[1:5], numbers, strict=True)), "folds": len(values)})
    return out


def run(argv: list[str]) -> None:
    """Print the summary of the folds, and write it to `--out`."""
    args = parser().parse_args(argv)
    files = [metrics_file(path) for path in args.folds]
    twice = next((path for path in files if files.count(path) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice: give each fold once.")
    folds = {path: read_metrics(path) for path in files}
    rows, console = summary(folds), Console(soft_wrap=True)
    for path in files:
        console.print(f"fold: {path}", highlight=False)
    table = Table(title=f"{len(files)} folds", title_justify="left")
    for name in COLUMNS[:5]:
        table.add_column(name, justify="left" if name == "metric" else "right", no_wrap=True)
    for row in rows:
        table.add_row(str(row["metric"]), *(f"{row[name]:.4f}" for name in COLUMNS[1:5]))
    console.print(table)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        console.print(f"summary: {args.out}", highlight=False)
