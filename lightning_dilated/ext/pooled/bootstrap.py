"""BootstrapIntervals: the metrics of a test with confidence intervals, as a table and a CSV.

Shape letters: S samples of the test split, G groups of them, C scores of a sample.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_dilated._validation import integer, real
from lightning_dilated.ext.pooled.pooled_model import PooledModule

#: name of the file in the run folder; `lightning-dilated folds` reads it
FILE = "test_metrics.csv"
COLUMNS = ("metric", "value", "low", "high", "level", "samples", "groups", "resamples", "undefined")


class BootstrapIntervals(pl.Callback):
    """Write `test_metrics.csv` into the run folder after `test`, with a row for each metric of the model's head.

    Each metric has a percentile bootstrap interval (Efron 1979, doi 10.1214/aos/1176344552). The rows are also printed.
    Predictions of all ranks are gathered. A resample draws G times from the G groups of samples, with replacement.
    Slides of a patient are not independent, so `group_column` of SlideDataModule defines the groups; without it each
    sample is a group. The interval depends only on the predictions and `seed`, not on the number of ranks. It shows how
    the metric would vary with other patients of this cohort, but not how it varies between trainings.

    Columns: metric, value, low, high, level, samples, groups, resamples, and undefined: the number of resamples that
    are left out because the metric has no value (such as AUROC if only one class is drawn).

    Args:
        resamples: number of resamples; a test with 1,000 takes a few seconds longer.
        level: confidence level of the intervals, such as 0.95.
        seed: seed of the draws.
        path: path of the CSV; None means `test_metrics.csv` in the logger's folder.

    Raises:
        TypeError: when a test begins, if the model is not a `PooledModule` with a task.
    """

    def __init__(self, resamples: int = 1000, level: float = 0.95, seed: int = 0, path: str | None = None) -> None:
        self.resamples = integer(resamples, "resamples", 1)
        self.level = real(level, "level", above=0, below=1)
        self.seed, self.path = integer(seed, "seed", 0), path
        #: {metric: (value, low, high)} of the last test; set only on the first rank
        self.intervals: dict[str, tuple[float, float, float]] = {}

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the model, and set the CSV's path. All ranks call it, because `trainer.log_dir` is collective."""
        if not isinstance(pl_module, PooledModule) or pl_module.task is None:
            raise TypeError(
                f"BootstrapIntervals is for a model with one prediction a sequence, got {type(pl_module).__name__}"
                f"{' without a task' if isinstance(pl_module, PooledModule) else ''}: leave it out."
            )
        self._target = Path(self.path or Path(trainer.log_dir or trainer.default_root_dir) / FILE)

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather the predictions on every rank; compute and write on the first rank."""
        module: Any = pl_module
        scores, labels, index = module.epoch_scores["test"].whole_epoch()
        if not trainer.is_global_zero or not len(scores):
            return
        groups = group_numbers(index.cpu().numpy(), getattr(trainer, "datamodule", None))
        scores, labels = scores.cpu(), labels.cpu()
        metrics = bootstrap(module.head.metrics, scores, labels, groups, self.resamples, self.level, self.seed)
        self.intervals = {name: (x["value"], x["low"], x["high"]) for name, x in metrics.items()}
        rows = [{"metric": name, **x, "level": self.level, "resamples": self.resamples} for name, x in metrics.items()]
        self._target.parent.mkdir(parents=True, exist_ok=True)
        with self._target.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        self._print(rows)

    def _print(self, rows: list[dict[str, Any]]) -> None:
        first = rows[0]
        table = Table(
            title=f"test of {first['samples']:,} samples in {first['groups']:,} groups",
            title_justify="left",
            min_width=48,
        )
        for name in ("metric", "value", f"{self.level:.0%} interval"):
            table.add_column(name, justify="left" if name == "metric" else "right", no_wrap=True)
        for row in rows:
            table.add_row(row["metric"], f"{row['value']:.3f}", f"{row['low']:.3f} to {row['high']:.3f}")
        console = Console()
        console.print(table)
        console.print(f"metrics: {self._target}", highlight=False, soft_wrap=True)
        for row in rows:
            if row["undefined"]:
                rank_zero_warn(
                    f"{row['metric']} is undefined in {row['undefined']:,} of {self.resamples:,} resamples, and its "
                    "interval leaves them out: a class has few groups."
                )


def group_numbers(index: np.ndarray, data: Any) -> np.ndarray:
    """Return the group of each sample, (S,) int64, numbered from 0.

    Args:
        index: (S,) index of each sample in the test split; -1 if batches do not have it.
        data: the DataModule; its `groups("test")`, if it has this method, names the group of each sample.
    """
    names = data.groups("test") if callable(getattr(data, "groups", None)) else None
    if names is None or (index < 0).any():
        return np.arange(len(index))
    return np.unique([names[int(i)] for i in index], return_inverse=True)[1].reshape(-1)


def bootstrap(
    metrics: Callable[[Tensor, Tensor], dict[str, Tensor]],
    scores: Tensor,
    labels: Tensor,
    groups: np.ndarray,
    resamples: int,
    level: float,
    seed: int,
) -> dict[str, dict[str, Any]]:
    """Return {metric: {"value", "low", "high", "samples", "groups", "undefined"}}.

    Args:
        metrics: function of scores (S, C) and labels (S, ...).
        scores, labels: for all samples.
        groups: (S,) the number of each sample's group; every number from 0 to G - 1 occurs.
        resamples, level, seed: as in `BootstrapIntervals`.
    """
    rng, count = np.random.default_rng([seed]), int(groups.max()) + 1
    members = np.split(np.argsort(groups, kind="stable"), np.cumsum(np.bincount(groups))[:-1])
    values = metrics(scores, labels)
    drawn: dict[str, list[float]] = {name: [] for name in values}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # metrics without a value warn, but are counted below
        for _ in range(resamples):
            rows = torch.from_numpy(np.concatenate([members[g] for g in rng.integers(0, count, count)]))
            for name, value in metrics(scores[rows], labels[rows]).items():
                drawn[name].append(float(value))
    out = {}
    for name, value in values.items():
        known = np.array([x for x in drawn[name] if np.isfinite(x)])
        ends = [(1 - level) / 2, (1 + level) / 2]
        low, high = np.quantile(known, ends).tolist() if len(known) else (float("nan"), float("nan"))
        out[name] = {"value": float(value), "low": low, "high": high, "samples": len(scores), "groups": count}
        out[name]["undefined"] = resamples - len(known)
    return out
