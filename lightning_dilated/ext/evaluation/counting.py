"""CountsAnswers, the base of AccuracyByDepth and RecallByDistance, and a function that appends rows to a CSV.

Shape letters: B batch, L tokens of this rank, C counters.
"""

from __future__ import annotations

import csv
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

#: rows of a table, and {suffix: share} to log as "val_accuracy" or "test_accuracy" plus the suffix
Report = tuple[list[dict[str, Any]], dict[str, float]]


class CountsAnswers(pl.Callback):
    """Counts right answers and labels in validation and test, and logs shares of right answers.

    A subclass defines `counters` (returns C), `add` (counts a batch's predictions (B, L)) and `evaluate` (reports).
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._counts: Tensor | None = None

    @abstractmethod
    def counters(self, trainer: pl.Trainer, split: str) -> int: ...

    @abstractmethod
    def add(self, batch: Mapping[str, Any], predictions: Tensor) -> None: ...

    @abstractmethod
    def evaluate(self, trainer: pl.Trainer, split: str, right: list[int], labels: list[int]) -> Report: ...

    def write(self) -> None:
        """Write the rows to the CSV; called on the first rank only."""

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer, pl_module, "val")

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer, pl_module, "test")

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._report(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._report(trainer, pl_module, "test")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Detach from the model."""
        self._end(pl_module)

    def _begin(self, trainer: pl.Trainer, pl_module: Any, split: str) -> None:
        self._counts = torch.zeros(2, self.counters(trainer, split), dtype=torch.int64, device=pl_module.device)
        pl_module.watch_predictions = self.add

    def _end(self, pl_module: Any) -> Tensor | None:
        pl_module.watch_predictions = None
        counts, self._counts = self._counts, None
        return counts

    def _report(self, trainer: pl.Trainer, pl_module: Any, split: str) -> None:
        counts = self._end(pl_module)
        if counts is None:
            return
        right, labels = torch.as_tensor(trainer.strategy.reduce(counts, reduce_op="sum")).tolist()
        if trainer.sanity_checking or not any(labels):
            return
        self.rows, shares = self.evaluate(trainer, split, right, labels)
        for name, share in shares.items():
            pl_module._log_of_all(f"{split}_accuracy{name}", share, prog_bar=split == "val" and not name)
        if trainer.is_global_zero:
            self.write()


def datamodule(trainer: pl.Trainer) -> Any:
    return getattr(trainer, "datamodule", None)


def check_model(callback: pl.Callback, model: object, hook: str, suffix: str = "") -> None:
    """Raise TypeError for a model without the attribute `hook`, which passes losses or predictions to the callback."""
    if not hasattr(model, hook):
        raise TypeError(
            f"{type(callback).__name__} needs a causal language model, a LongNetLM or HFCausalLM{suffix}; got "
            f"{type(model).__name__}. Remove the callback."
        )


def append_rows(path: Path, fields: Sequence[str], rows: list[dict[str, Any]]) -> None:
    """Append rows to a CSV; a new file begins with the names of its columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fields)
        if fresh:
            writer.writeheader()
        writer.writerows(rows)
