"""MetricsProgressBar: Rich's progress bar with room for the names of metrics."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar
from rich import get_console
from rich.progress import BarColumn

#: number of a terminal's columns beside the bar: 47 for epoch, batches, times and speed, and 23 for metrics
BESIDE = 70
#: smallest and largest width of the bar in columns
LEAST, MOST = 8, 40


class MetricsProgressBar(RichProgressBar):
    """Lightning's `RichProgressBar` with a shorter bar in narrow terminals, and without "-2" as the number of epochs.

    Rich gives the bar and the metrics equal widths, and truncates `val_bits_per_byte` in a terminal of 80 columns. Here
    metrics have 23 columns, and the bar has the remaining 8 to 40 columns.

    Args: as in `RichProgressBar`.
    """

    def configure_columns(self, trainer: pl.Trainer) -> list[Any]:
        """Return Lightning's columns, with a bar that is as wide as the terminal allows."""
        columns = super().configure_columns(trainer)
        for column in columns:
            if isinstance(column, BarColumn):
                column.bar_width = min(MOST, max(LEAST, get_console().width - BESIDE))
        return columns

    def _get_train_description(self, current_epoch: int) -> str:
        """Return Lightning's "Epoch 1/9", or with `max_epochs=-1` "Epoch 1" instead of "Epoch 1/-2"."""
        text = super()._get_train_description(current_epoch)
        return text.replace("/-2", "  ") if self.trainer.max_epochs == -1 else text
