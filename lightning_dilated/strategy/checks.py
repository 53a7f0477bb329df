"""Checks before training: data and batches alike on all ranks, callbacks and modules that go wrong on shards."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import callbacks
from torch import Tensor, nn
from torch.nn.modules import batchnorm, conv, instancenorm, pooling
from torch.utils.data import DataLoader

from lightning_dilated.sequence import SequenceConv1d
from lightning_dilated.sequence.batch_spec import SequenceSpec
from lightning_dilated.strategy.mesh import MeshSizes

#: numbers of a tensor that an error shows; of longer ones, a digest
SHOWN = 16


def loader_facts(loader: Any) -> dict[str, str]:
    """What has to be equal for the ranks of a sequence to hold parts of the same one, as far as it can be known at once.

    A dataset's own `fingerprint()` counts, where it has one: a string that differs where its samples do.
    """
    if not isinstance(loader, DataLoader):
        return {"loader": type(loader).__name__}
    data = loader.dataset
    samples, fingerprint = sized_len(data), getattr(data, "fingerprint", None)
    return {
        "loader": f"{type(loader).__name__} of {type(data).__name__}",
        "samples": "unknown" if samples is None else str(samples),
        "seq_len": str(getattr(data, "seq_len", "unknown")),
        "batch_size": str(loader.batch_size),
        "fingerprint": str(fingerprint()) if callable(fingerprint) else "unknown",
    }


def batch_facts(batch: Any, spec: SequenceSpec) -> dict[str, str]:
    """The entries of a batch that every rank of a sequence has whole."""
    entries = (
        batch if isinstance(batch, Mapping) else dict(enumerate(batch)) if isinstance(batch, (tuple, list)) else {}
    )
    return {str(name): _words(entries[name]) for name in spec.whole if name in entries}


def _words(value: Any) -> str:
    """A value in words that are equal where it is; of an object of unknown kind, the kind."""
    if value is None or isinstance(value, (str, bytes, bool, int, float, complex)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_words, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_words(k)}: {_words(v)}' for k, v in value.items())}}}"
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return type(value).__name__
    if value.numel() <= SHOWN:
        return str(value.tolist())
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tuple(value.shape)} {value.dtype} {hashlib.blake2b(raw, digest_size=8).hexdigest()}"


def compare_loaders(facts: dict[str, str], batches: int | None, sizes: MeshSizes) -> list[int | None]:
    """The numbers of batches of all ranks of the job, after a look at what they read; `facts` may hold an "error".

    Raises:
        ValueError: on every rank of the job, naming the ranks of a sequence that read different data, or the rank in error.
    """
    found: list[Any] = [None] * sizes.world
    dist.all_gather_object(found, (facts, batches))
    errors = [f"rank {rank}: {told['error']}" for rank, (told, _) in enumerate(found) if "error" in told]
    if errors:
        raise ValueError(f"a loader could not be shared. {'; '.join(errors)}")
    for first in range(0, sizes.world, sizes.sequence_size):
        ranks = range(first, first + sizes.sequence_size)
        for name in facts:
            values = [found[rank][0].get(name) for rank in ranks]
            if len(set(values)) > 1:
                told = ", ".join(f"rank {rank} has {value}" for rank, value in zip(ranks, values, strict=True))
                raise ValueError(
                    f"the ranks of a sequence read different data, so nothing was computed. {name}: {told}. Give every rank "
                    "the same dataset; the strategy hands out the parts."
                )
    return [batches for _, batches in found]


def number_of_batches(loader: Any, trainer: Any, stage: str) -> int | None:
    """How many batches of a loader a Trainer takes in a stage; None where nobody knows."""
    batches, limit = sized_len(loader), getattr(trainer, f"limit_{stage}_batches", None)
    if batches is None or limit is None:
        return batches
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def unlike_batches(found: list[Any], stage: str, sizes: MeshSizes, deals_parameters: bool) -> str | None:
    """Why losses cannot be added over all ranks in each step of a stage, as some have fewer batches; None if they can.

    Raises:
        ValueError: where all ranks meet in each step: in training, and with sharded parameters in every stage; and where
            some have no batch of an evaluation at all, for Lightning would leave them out where the others add up metrics.
    """
    if len(set(found)) == 1:
        return None
    text = f"the ranks have {found} batches of the stage {stage!r}"
    multiple = f"Let the number of samples be a multiple of batch_size x {sizes.data} data ranks"
    if deals_parameters:
        raise ValueError(f"{text}, but with sharded parameters all need as many. {multiple}, or use 'ring_dilated'.")
    if stage == "train":
        raise ValueError(f"{text}, but each step takes all ranks. {multiple}, or drop the last batch.")
    if stage != "predict" and 0 in found:
        raise ValueError(
            f"{text}, and ranks without any would be waited for at its end in vain. Give the stage at least batch_size x "
            f"{sizes.data} samples, or none (limit_{stage}_batches=0)."
        )
    return (
        f"{text}, so losses cannot be added over all ranks in each step. {multiple}; or keep sums and counts of this rank "
        "in a torchmetrics metric, which adds them up at the end of the epoch."
    )


def compare_training(trainer: Any, sizes: MeshSizes, deals_parameters: bool) -> None:
    """Unlike numbers of training batches, at the first step: those of all loaders together, up to the last step.

    Raises:
        ValueError: on every rank.
    """
    left = float("inf")
    if trainer.max_steps >= 0:
        left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
    found: list[Any] = [None] * sizes.world
    dist.all_gather_object(found, min(trainer.num_training_batches, left))
    unlike_batches(found, "train", sizes, deals_parameters)


def batches_of_loaders(trainer: Any, batch: Any) -> list[Any]:
    """The batches of several training loaders, each as its own; that of one loader as it is."""
    combined = getattr(trainer.fit_loop, "_combined_loader", None) if trainer.training else None
    several = getattr(combined, "iterables", None)
    if isinstance(several, Mapping):
        return [batch[name] for name in several if batch[name] is not None]
    return [x for x in batch if x is not None] if isinstance(several, (list, tuple)) else [batch]


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
        reason = _callback_reason(callback, sizes.world, sizes.sequence_size, dealt)
        if reason:
            trainer.callbacks.remove(callback)  # type: ignore[attr-defined]  # or the error would set it off
            raise ValueError(f"the callback {type(callback).__name__} does not go with {strategy} here: {reason}")


def _callback_reason(callback: Any, world: int, sequence_size: int, dealt: bool) -> str | None:
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


HALO = (
    "use lightning_dilated.sequence.SequenceConv1d, or sequence_halo and allow=[...], or gather the sequence first "
    "(lightning_dilated.sequence.sequence_gather)"
)
GATHER = "gather the sequence first (lightning_dilated.sequence.sequence_gather)"
MEAN = "use lightning_dilated.sequence.sequence_mean"
ATTENTION = "use lightning_dilated.MultiheadDilatedAttention (DilatedPattern.dense() is full attention)"
NORM = "use LayerNorm or RMSNorm, which look at one token"
#: (kinds of modules, why, what to do)
MIXING: tuple[tuple[tuple[type, ...], str, str], ...] = (
    ((batchnorm._BatchNorm, instancenorm._InstanceNorm, nn.GroupNorm), "takes statistics over tokens", NORM),
    ((nn.MultiheadAttention, nn.Transformer), "attends to this rank's tokens only", ATTENTION),
    ((nn.RNNBase,), "runs along the sequence", GATHER),
    ((pooling._MaxPoolNd, pooling._AvgPoolNd, pooling._LPPoolNd), "pools neighbouring tokens", GATHER),
    ((pooling._AdaptiveAvgPoolNd, pooling._AdaptiveMaxPoolNd), "pools over this rank's tokens only", MEAN),
)


def _mixing_reason(module: nn.Module) -> tuple[str, str] | None:
    wide = isinstance(module, conv._ConvNd) and any(size > 1 for size in module.kernel_size)
    if wide and not isinstance(module, SequenceConv1d):
        return "reaches over the edge of a shard", HALO
    for kinds, why, remedy in MIXING:
        if isinstance(module, kinds):
            return why, remedy
    return None


def refuse_mixing(root: nn.Module, allow: tuple[str, ...]) -> None:
    """Raise for modules below `root` that would silently compute something else on a part of the sequence.

    Args:
        allow: names of modules (with everything below them) that are known not to see tokens of a cut sequence.

    Raises:
        ValueError: naming every such module.
    """
    found = []
    for name, module in root.named_modules():
        reason = _mixing_reason(module)
        allowed = any(name == a or name.startswith(a + ".") for a in allow)
        if reason and not allowed:
            found.append(f"{name or 'the module'} ({type(module).__name__}) {reason[0]}: {reason[1]}")
    if found:
        raise ValueError(
            "modules that mix tokens or samples cannot run on parts of a sequence. "
            + "; ".join(found)
            + ". One that never sees a cut sequence may be named in the strategy's allow=[...]."
        )
