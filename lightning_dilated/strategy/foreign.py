"""Lightning's own callbacks that go wrong where a sequence or the parameters are shared, refused before anything runs."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks

from lightning_dilated.strategy.mesh import MeshSizes


def refuse_callbacks(trainer: pl.Trainer, strategy: str, sizes: MeshSizes, dealt: bool) -> None:
    """Raise for a callback that would wait for other ranks, copy parts of parameters, or count a sequence once a rank.

    Args:
        trainer: with its callbacks.
        strategy: its name, for the message.
        sizes: the ranks.
        dealt: whether each rank holds a part of the parameters only.

    Raises:
        ValueError: naming the callback, and what to take instead.
    """
    for callback in list(trainer.callbacks):  # type: ignore[attr-defined]
        reason = _reason(callback, sizes.world, sizes.sequence_size, dealt)
        if reason:
            trainer.callbacks.remove(callback)  # type: ignore[attr-defined]  # or the error would set it off
            raise ValueError(f"the callback {type(callback).__name__} does not go with {strategy} here: {reason}")


def _reason(callback: Any, world: int, sequence_size: int, dealt: bool) -> str | None:
    saves = isinstance(callback, getattr(callbacks, "OnExceptionCheckpoint", ()))
    if world > 1 and (saves or getattr(callback, "save_on_exception", False)):
        return (
            "a rank that raised would wait for all others to save with it, until the timeout. Take "
            "ModelCheckpoint(every_n_train_steps=..., save_last=True), and torchrun --max-restarts to go on from it."
        )
    if isinstance(callback, getattr(callbacks, "WeightAveraging", ())) and dealt:
        return (
            "it averages a copy of the whole model, while every rank trains a part of the parameters. Take "
            "strategy='ring_dilated', or average over module.parameters() in on_train_batch_end."
        )
    if type(callback) is callbacks.ThroughputMonitor and sequence_size > 1:
        return (
            f"it multiplies by all ranks, and would report {sequence_size} times as many sequences as there are. Take "
            "lightning_dilated.callbacks.ThroughputMonitor."
        )
    return None
