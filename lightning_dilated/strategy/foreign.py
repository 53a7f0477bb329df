"""Lightning's own callbacks that go wrong where a sequence or the parameters are shared, refused before anything runs."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import callbacks


def refuse_callbacks(found: list[Any], strategy: str, world: int, sequence_size: int, dealt: bool) -> None:
    """Raise for a callback that would wait for other ranks, copy parts of parameters, or count a sequence once a rank.

    Args:
        found: the Trainer's callbacks.
        strategy: its name, for the message.
        world: ranks of the job.
        sequence_size: of these, ranks that share a sequence.
        dealt: whether each rank holds a part of the parameters only.

    Raises:
        ValueError: naming the callback, and what to take instead.
    """
    for callback in found:
        reason = _reason(callback, world, sequence_size, dealt)
        if reason:
            raise ValueError(f"the callback {type(callback).__name__} does not go with {strategy} here: {reason}")


def _reason(callback: Any, world: int, sequence_size: int, dealt: bool) -> str | None:
    if isinstance(callback, getattr(callbacks, "OnExceptionCheckpoint", ())) and world > 1:
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
