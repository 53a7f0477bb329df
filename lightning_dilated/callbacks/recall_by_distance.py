"""RecallByDistance: the share of right answers by the distance over which they are recalled.

Shape letters: B batch, N tokens, L tokens of this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_dilated.attention.rotary import token_positions
from lightning_dilated.models.longnet.lm import LongNetLM

#: octaves of distances up to 2^48 tokens
OCTAVES = 48


class RecallByDistance(pl.Callback):
    """Share of right answers in validation and test, in all and by octave of the distance, summed over all ranks.

    For a LongNetLM on `FarRecallDataModule`, or on another DataModule whose batches have `index` (B,) and which has
    `distances(split, index)`: (N,) integers of a sample of "val" or "test", at each label how many tokens back its answer
    stands, or 0 to leave the label out. An answer is right if its token is the likeliest; logits at labels suffice for it.

    Logged: `val_accuracy`, and `val_accuracy_D` for each octave that has labels: those with distances D to 2 D - 1, where D
    is a power of two. In test `test_accuracy` and so on.

    Attributes:
        rows: of the last validation or test: mappings of first and last (distances), labels, accuracy.

    Raises:
        TypeError: as a run starts, for a model that is no LongNetLM, or data without `distances`.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._counts: Tensor | None = None
        self._distances: Callable[[int], Tensor] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that the model gives answers and the data their distances."""
        if not isinstance(pl_module, LongNetLM):
            raise TypeError(
                f"RecallByDistance needs a LongNetLM, whose labels each have an answer; got {type(pl_module).__name__}. "
                "Remove the callback."
            )
        data = _datamodule(trainer)
        if not callable(getattr(data, "distances", None)):
            kind = "loaders alone" if data is None else type(data).__name__
            raise TypeError(
                "RecallByDistance needs a DataModule that knows the distances, such as FarRecallDataModule, or one with a "
                f"method distances(split, index); got {kind}. Give the Trainer such a DataModule, or remove the callback."
            )

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer, pl_module, "val")

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer, pl_module, "test")

    def add(self, batch: Mapping[str, Any], predictions: Tensor) -> None:
        """Add a batch's predictions (B, L) at this rank's positions; only labels that have a distance count."""
        if self._counts is None or self._distances is None:
            return
        positions = token_positions(0, predictions.shape[1])  # collective: also on ranks without labels
        labels = batch["labels"]
        distances = torch.stack([self._distances(index)[positions] for index in batch["index"].tolist()])
        octave = torch.frexp(distances.double()).exponent.long() - 1  # floor(log2), exactly; -1 of 0
        octave = octave.clamp(max=OCTAVES - 1).to(labels.device)
        counted = (labels != -100) & (octave >= 0)
        octaves = octave[counted]
        right = (predictions == labels)[counted]
        self._counts[0].index_add_(0, octaves, right.long())
        self._counts[1].index_add_(0, octaves, torch.ones_like(octaves))

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._report(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._report(trainer, pl_module, "test")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Detach from the model."""
        self._end(pl_module)

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule, split: str) -> None:
        self._counts = torch.zeros(2, OCTAVES, dtype=torch.int64, device=pl_module.device)
        self._distances = functools.partial(_datamodule(trainer).distances, split)
        pl_module.watch_predictions = self.add  # type: ignore[assignment]  # a LongNetLM, by `setup`

    def _end(self, pl_module: pl.LightningModule) -> Tensor | None:
        """Detach from the model and return the counts."""
        pl_module.watch_predictions = None  # type: ignore[assignment]
        counts, self._counts, self._distances = self._counts, None, None
        return counts

    def _report(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        counts = self._end(pl_module)
        if counts is None:
            return
        right, labels = torch.as_tensor(trainer.strategy.reduce(counts, reduce_op="sum")).tolist()
        if trainer.sanity_checking or not sum(labels):
            return
        self.rows = [_row(i, right[i], labels[i]) for i in range(OCTAVES) if labels[i]]
        shares = {"": sum(right) / sum(labels), **{f"_{row['first']}": row["accuracy"] for row in self.rows}}
        for name, share in shares.items():
            shown = stage == "val" and not name
            pl_module._log_of_all(f"{stage}_accuracy{name}", share, prog_bar=shown)  # type: ignore[operator]


def _datamodule(trainer: pl.Trainer) -> Any:
    return getattr(trainer, "datamodule", None)


def _row(i: int, right: int, labels: int) -> dict[str, Any]:
    return {"first": 2**i, "last": 2 ** (i + 1) - 1, "labels": labels, "accuracy": right / labels}
