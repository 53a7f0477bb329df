"""Errors for callbacks and modules that would compute wrong results or hang on shards."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from torch import nn

from lightning_dilated._compat.lightning import saves_by_time
from lightning_dilated._compat.torch import ADAPTIVE_POOLS, CONVOLUTION, POOLS, TOKEN_NORMS
from lightning_dilated.strategy.mesh import MeshSizes


def refuse_callbacks(trainer: pl.Trainer, strategy: str, sizes: MeshSizes, shards_parameters: bool) -> None:
    """Raise ValueError for a callback that would hang, copy shards of parameters, or count a sequence on every rank.

    Args:
        strategy: the strategy's name, for the message.
        shards_parameters: whether each rank holds only a shard of the parameters.

    Raises:
        ValueError: naming the callback and an alternative.
    """
    for callback in list(trainer.callbacks):  # type: ignore[attr-defined]
        reason = _callback_reason(callback, sizes.world, sizes.sequence_size, shards_parameters)
        reason = reason or (_region_reason(callback) if sizes.regions > 1 else None)
        if reason:
            trainer.callbacks.remove(callback)  # type: ignore[attr-defined]  # otherwise it would handle this error
            raise ValueError(f"the callback {type(callback).__name__} does not go with {strategy} here: {reason}")


def _callback_reason(callback: Any, world: int, sequence_size: int, shards_parameters: bool) -> str | None:
    saves = isinstance(callback, callbacks.OnExceptionCheckpoint)
    if world > 1 and (saves or getattr(callback, "save_on_exception", False)):
        return (
            "a rank that raised would wait for all others to save with it, until the timeout. Take "
            "ModelCheckpoint(every_n_train_steps=..., save_last=True), and torchrun --max-restarts to go on from it."
        )
    if isinstance(callback, callbacks.WeightAveraging) and shards_parameters:
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


def _region_reason(callback: Any) -> str | None:
    if isinstance(callback, callbacks.WeightAveraging):
        return (
            "it averages the parameters of one region, and would validate and save these. Leave it out: validations and "
            "checkpoints take the mean of the regions."
        )
    if isinstance(callback, callbacks.Timer) or saves_by_time(callback):
        return (
            "after each batch all regions would wait for rank 0 to tell the time. Count steps (max_steps, "
            "every_n_train_steps), or take ShardedCheckpoint(every_n_minutes=...), which asks at outer steps."
        )
    return None


HALO = (
    "use lightning_dilated.sequence.SequenceConv1d, or sequence_halo and allow=[...], or gather the sequence first "
    "(lightning_dilated.sequence.sequence_gather)"
)

GATHER = "gather the sequence first (lightning_dilated.sequence.sequence_gather)"

MEAN = "use lightning_dilated.sequence.sequence_mean"

ATTENTION = "use lightning_dilated.MultiheadDilatedAttention (DilatedPattern.dense() is full attention)"

NORM = "use LayerNorm or RMSNorm, which look at one token"

#: (kinds of modules, why they are refused, the remedy)
MIXING: tuple[tuple[tuple[type, ...], str, str], ...] = (
    (TOKEN_NORMS, "takes statistics over tokens", NORM),
    ((nn.MultiheadAttention, nn.Transformer), "attends to this rank's tokens only", ATTENTION),
    ((nn.RNNBase,), "runs along the sequence", GATHER),
    (POOLS, "pools neighbouring tokens", GATHER),
    (ADAPTIVE_POOLS, "pools over this rank's tokens only", MEAN),
)


def _mixing_reason(module: nn.Module) -> tuple[str, str] | None:
    wide = isinstance(module, CONVOLUTION) and any(size > 1 for size in module.kernel_size)
    if wide and not getattr(module, "reads_neighbours", False):
        return "reaches over the edge of a shard", HALO
    for kinds, why, remedy in MIXING:
        if isinstance(module, kinds):
            return why, remedy
    return None


def refuse_mixing(root: nn.Module, allow: tuple[str, ...]) -> None:
    """Raise ValueError for modules below `root` that would silently compute wrong values on a part of a sequence.

    Args:
        allow: names of modules to accept, together with their submodules.

    Raises:
        ValueError: naming every such module.
    """
    refused = []
    for name, module in root.named_modules():
        reason = _mixing_reason(module)
        allowed = any(name == a or name.startswith(a + ".") for a in allow)
        if reason and not allowed:
            refused.append(f"{name or 'the module'} ({type(module).__name__}) {reason[0]}: {reason[1]}")
    if refused:
        raise ValueError(
            "modules that mix tokens or samples cannot run on parts of a sequence. "
            + "; ".join(refused)
            + ". If a module never gets a part of a sequence, name it in the strategy's allow=[...]."
        )
