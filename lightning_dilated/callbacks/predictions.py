"""PredictionWriter: what `predict` returns, as one CSV row a sequence."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor


class PredictionWriter(BasePredictionWriter):
    """Writes `predictions.csv` into the run folder, batch by batch; where several ranks have samples of their own, one file
    each: `predictions.RANK.csv`. Of the ranks that share a sequence the first one writes.

    A prediction must be a mapping of names to tensors with one entry a sample, as `LongNetLM.predict_step` returns it.

    Args:
        path: of the CSV; None means `predictions.csv` in the logger's folder.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__(write_interval="batch")
        self.path = path
        self._started = False

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the file anew, where every rank takes part in finding the folder."""
        self._started = False
        self._target = self._find_target(trainer)

    def _find_target(self, trainer: pl.Trainer) -> Path:
        """Where this rank writes."""
        path = Path(self.path) if self.path else Path(trainer.log_dir or trainer.default_root_dir) / "predictions.csv"
        writers = trainer.distributed_sampler_kwargs or {"num_replicas": 1}
        return path if writers["num_replicas"] == 1 else path.with_suffix(f".{writers['rank']}{path.suffix}")

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Append the rows of one batch."""
        if not getattr(trainer.strategy, "is_first_of_sequence", True):
            return
        if not isinstance(prediction, Mapping) or not all(
            isinstance(x, Tensor) and x.ndim == 1 for x in prediction.values()
        ):
            raise TypeError(
                f"{type(pl_module).__name__}.predict_step must return a mapping of names to tensors (B,) for "
                f"PredictionWriter, got {type(prediction).__name__}. Change it, or leave the callback out."
            )
        self._target.parent.mkdir(parents=True, exist_ok=True)
        with self._target.open("a" if self._started else "w", newline="") as file:
            writer = csv.writer(file)
            if not self._started:
                writer.writerow(prediction)
            writer.writerows(zip(*(x.tolist() for x in prediction.values()), strict=True))
        self._started = True

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say where the rows are."""
        if self._started and trainer.is_global_zero:
            print(f"predictions: {self._target}")
