"""Private APIs of Lightning, each behind a name that says what it uses and for which versions that is known to hold."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl


# -- the position in the training data ---------------------------------------------------------------------------------
def batches_finished(trainer: pl.Trainer) -> int:
    """Training batches finished in all: `epoch_loop.batch_progress.total.processed`; 2.6.6."""
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total  # declared as a class that counts less
    return total.processed


def batches_begun(trainer: pl.Trainer) -> int:
    """Training batches of this epoch that were begun: `epoch_loop.batch_progress.current.ready`; 2.6.6."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def set_batches_finished(trainer: pl.Trainer, count: int) -> None:
    """Let this epoch have `count` finished batches: moves all of `epoch_loop.batch_progress.current` alike; 2.6.6.

    Lightning counts batches and has no other way to be told that their size changed.
    """
    current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    shift = count - current.processed
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, getattr(current, name) + shift)


def epoch_batches_finished(trainer: pl.Trainer) -> int:
    """Training batches of this epoch that are finished: `epoch_loop.batch_progress.current.processed`; 2.6.6."""
    current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return current.processed
