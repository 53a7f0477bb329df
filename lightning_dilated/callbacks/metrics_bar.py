"""MetricsProgressBar: Rich's progress bar with room for the names of metrics."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar
from rich import get_console
from rich.progress import BarColumn

#: columns of the terminal that stand beside the bar: 47 of the epoch, batches, times and speed, 23 of the metrics
BESIDE = 70
#: the least and the most columns of the bar
LEAST, MOST = 8, 40


class MetricsProgressBar(RichProgressBar):
    """Lightning's `RichProgressBar`, with a shorter bar in a narrow terminal, and no number of a last epoch without one.

    Rich gives the bar and the metrics equal room, and cuts `val_bits_per_byte` in a terminal of 80 columns. Here metrics
    have 23 of these, and the bar what is left, from 8 to 40.

    Args: those of `RichProgressBar`.
    """

    def configure_columns(self, trainer: pl.Trainer) -> list[Any]:
        """Lightning's columns; the bar's width follows from the terminal's."""
        columns = super().configure_columns(trainer)
        for column in columns:
            if isinstance(column, BarColumn):
                column.bar_width = min(MOST, max(LEAST, get_console().width - BESIDE))
        return columns

    def _get_train_description(self, current_epoch: int) -> str:
        """Lightning's "Epoch 1/9"; of a run that steps end, whose `max_epochs` is -1, "Epoch 1" in place of "Epoch 1/-2"."""
        text = super()._get_train_description(current_epoch)
        return text.replace("/-2", "  ") if self.trainer.max_epochs == -1 else text
