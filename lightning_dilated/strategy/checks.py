"""Checks, before training, that all ranks have the same settings, data and numbers of batches."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
from collections.abc import Callable, Mapping
from pathlib import PurePath
from types import FunctionType
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import callbacks
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from lightning_dilated._compat.lightning import combined_loaders
from lightning_dilated._compat.torch import own_parameters
from lightning_dilated.checkpoint.ranks import RankGroup
from lightning_dilated.models.metrics import batches_in
from lightning_dilated.sequence import SequenceSpec
from lightning_dilated.sequence.consensus import differing
from lightning_dilated.strategy.mesh import MeshSizes


def computed_in(module: torch.nn.Module, device: str) -> torch.dtype:
    """Return the dtype that a step computes in: autocast's dtype if autocast is enabled, else the parameters' dtype."""
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return next((p.dtype for p in module.parameters()), torch.float32)


#: maximum number of elements of a tensor that an error lists; for a larger tensor it shows a digest
SHOWN = 16


def loader_facts(loader: Any) -> dict[str, str]:
    """Return the properties of a loader that must be equal on all ranks of a sequence, without reading samples.

    A dataset may define `fingerprint()`, which returns different strings if the samples of two datasets differ.
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
    """Describe the batch entries that are not sharded: every rank of a sequence must hold the same values."""
    entries = (
        batch if isinstance(batch, Mapping) else dict(enumerate(batch)) if isinstance(batch, (tuple, list)) else {}
    )
    return {str(name): _described(entries[name]) for name in spec.whole if name in entries}


def _described(value: Any) -> str:
    """Return a string that is equal for equal values; for an object of unknown type, return the type's name."""
    if isinstance(value, (enum.Enum, np.generic)):
        return f"{type(value).__qualname__} {value.name if isinstance(value, enum.Enum) else value.item()!r}"
    if value is None or isinstance(value, (str, bytes, bool, int, float, complex)):
        return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # its `repr` may contain memory addresses
        fields = {x.name: getattr(value, x.name, None) for x in dataclasses.fields(value) if x.compare}
        return f"{type(value).__qualname__}({', '.join(f'{name}={_described(x)}' for name, x in fields.items())})"
    if isinstance(value, functools.partial):
        return f"{_described(value.func)}(*{_described(value.args)}, **{_described(value.keywords)})"
    if isinstance(value, (type, torch.dtype, torch.device, FunctionType, PurePath)):
        return getattr(value, "__qualname__", None) or repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_described, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_described(k)}: {_described(v)}' for k, v in value.items()))}}}"
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return type(value).__name__
    if value.numel() <= SHOWN:
        return str(value.tolist())
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tuple(value.shape)} {value.dtype} {hashlib.blake2b(raw, digest_size=8).hexdigest()}"


# -- settings ----------------------------------------------------------------------------------------------------------
#: settings of a Trainer that must be equal on all ranks; ranks that differ would take different steps or hang
TRAINER = (
    "max_steps", "max_epochs", "min_steps", "min_epochs", "accumulate_grad_batches", "gradient_clip_val",
    "gradient_clip_algorithm", "limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches",
    "val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps", "overfit_batches", "log_every_n_steps",
    "reload_dataloaders_every_n_epochs", "fast_dev_run",
)  # fmt: skip
#: settings of saving callbacks that must be equal on all ranks, because ranks save together
SAVING = ("every_n_train_steps", "every_n_minutes", "at_end", "asynchronous")


def settings_of(module: pl.LightningModule, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that must be equal on all ranks before set-up: precision, Trainer, hyperparameters.

    Args:
        options: the strategy's options.
    """
    trainer = module.trainer
    plugin = trainer.precision_plugin
    facts: dict[str, Any] = {
        "run": str(trainer.state.fn),
        "precision": f"{plugin.precision} ({type(plugin).__name__})",
        **{name: getattr(trainer, name, None) for name in TRAINER},
        **{f"strategy {name}": value for name, value in options.items()},
    }
    for number, saver in enumerate(x for x in trainer.callbacks if isinstance(x, callbacks.Checkpoint)):  # type: ignore[attr-defined]
        settings = {name: getattr(saver, name) for name in SAVING if hasattr(saver, name)}
        facts[f"saving callback {number}"] = [saver.state_key, settings]
    facts |= {"model": type(module), "automatic_optimization": module.automatic_optimization}
    facts |= {f"hyperparameter {name}": value for name, value in dict(module.hparams).items()}
    facts["linear_dtype"] = getattr(module, "linear_dtype", None)
    return {name: _described(value) for name, value in facts.items()}


def parameters_of(module: nn.Module) -> dict[str, str]:
    """Describe each parameter that all ranks share: its shape, its dtype, and whether it is frozen."""
    ignored = own_parameters(module)
    named = [(name, p) for name, p in module.named_parameters() if name not in ignored and not is_lazy(p)]
    return {f"parameter {n}": f"{tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ', frozen'}" for n, p in named}


def optimizers_of(strategy: Any) -> dict[str, str]:
    """Describe a strategy's optimizers: classes, groups and schedules."""
    facts: dict[str, Any] = {"optimizers": len(strategy.optimizers)}
    for i, optimizer in enumerate(strategy.optimizers):
        facts[f"optimizer {i}"] = type(optimizer)
        for j, group in enumerate(optimizer.param_groups):
            values = {**group, "params": len(group["params"])}
            facts |= {f"{name} of group {j} of optimizer {i}": x for name, x in values.items()}
    for i, config in enumerate(strategy.lr_scheduler_configs):
        settings = {name: getattr(config, name) for name in ("interval", "frequency", "monitor", "strict")}
        facts[f"scheduler {i}"] = [type(config.scheduler), settings]
        states = getattr(config.scheduler, "state_dict", dict)()
        facts |= {f"{name} of scheduler {i}": x for name, x in states.items()}
    return {name: _described(value) for name, value in facts.items()}


def compare_settings(read: Callable[..., dict[str, str]], *args: Any) -> None:
    """Compare the results of `read(*args)` on all ranks of the job; every rank must call this.

    Raises:
        ValueError: on every rank if results differ, naming the ranks and their values.
        Exception: the error of `read`, if `read` raised the same error on all ranks.
    """
    facts, error = {}, None
    try:
        facts = read(*args)
    except Exception as raised:  # report it to the other ranks, which wait to compare
        facts, error = {"error": f"{type(raised).__name__}: {raised}"}, raised
    peers = RankGroup(dist.get_rank(), dist.get_world_size())
    digest = hashlib.blake2b(repr(sorted(facts.items())).encode(), digest_size=16).hexdigest()
    if len(set(peers.gather(digest))) == 1:  # compare digests first, because they are small
        if error is not None:
            raise error
        return
    lines = list(differing(peers.gather(facts)).values())
    raise ValueError(
        f"the ranks of the job were set up differently, so nothing was trained. {'. '.join(lines[:SHOWN])}. Start every "
        "rank with the same script, configuration and versions; exclude a hyperparameter that differs by rank with "
        "save_hyperparameters(ignore=[...])."
    ) from error


def compare_loader(
    loader: Any, shard: Callable[[], Any], trainer: Any, stage: str, sizes: MeshSizes, shards_parameters: bool
) -> tuple[Any, str | None]:
    """Shard a loader and compare it over all ranks of the job, even if `shard` fails on this rank.

    Returns:
        The sharded loader; None if a step of the stage can add losses over ranks, else the reason why it cannot.

    Raises:
        ValueError: on every rank; see `compare_loaders` and `check_equal_batches`. If `shard` failed, its own error.
    """
    sharded, facts, error = loader, {}, None
    try:
        facts, sharded = loader_facts(loader), shard()
    except Exception as raised:  # report it to the other ranks, which wait to compare
        facts, error = {"error": f"{type(raised).__name__}: {raised}"}, raised
    try:
        batches = compare_loaders(facts, number_of_batches(sharded, trainer, stage), sizes)
    except ValueError as differs:
        raise (error or differs) from None
    # the batches of several training loaders are counted later, by `compare_training` at the first step
    compared = stage != "train" or 0 in batches
    return sharded, check_equal_batches(batches, stage, sizes, shards_parameters) if compared else None


def compare_loaders(facts: dict[str, str], batches: int | None, sizes: MeshSizes) -> list[int | None]:
    """Compare all ranks' loaders, and return each rank's number of batches; `facts` of a failed rank has an "error".

    Raises:
        ValueError: on every rank, naming a rank that failed, or the ranks of a sequence that read different data.
    """
    gathered: list[Any] = [None] * sizes.world
    dist.all_gather_object(gathered, (facts, batches))
    errors = [f"rank {rank}: {other['error']}" for rank, (other, _) in enumerate(gathered) if "error" in other]
    if errors:
        raise ValueError(f"a loader could not be shared. {'; '.join(errors)}")
    for first in range(0, sizes.world, sizes.sequence_size):
        ranks = range(first, first + sizes.sequence_size)
        for name in facts:
            values = [gathered[rank][0].get(name) for rank in ranks]
            if len(set(values)) > 1:
                listed = ", ".join(f"rank {rank} has {value}" for rank, value in zip(ranks, values, strict=True))
                raise ValueError(
                    f"the ranks of a sequence read different data, so nothing was computed. {name}: {listed}. Give every "
                    "rank the same dataset; the strategy shards it."
                )
    return [batches for _, batches in gathered]


def number_of_batches(loader: Any, trainer: Any, stage: str) -> int | None:
    """Return the number of batches that a Trainer takes from a loader in a stage; None if the loader has no length."""
    batches, limit = sized_len(loader), getattr(trainer, f"limit_{stage}_batches", None)
    if batches is None or limit is None:
        return batches
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def check_equal_batches(batches: list[Any], stage: str, sizes: MeshSizes, shards_parameters: bool) -> str | None:
    """Return None if ranks have equal numbers of batches, else the reason why a step cannot add losses over ranks.

    Raises:
        ValueError: if the numbers differ in a stage where each step needs all ranks: in training, and in every stage if
            parameters are sharded. Also if only some ranks have evaluation batches; they would wait for the others.
    """
    if len(set(batches)) == 1:
        return None
    text = f"the ranks have {batches} batches of the stage {stage!r}"
    multiple = f"Let the number of samples be a multiple of batch_size x {sizes.data} data ranks"
    if shards_parameters:
        raise ValueError(f"{text}, but sharded parameters need equal numbers. {multiple}, or use 'ring_dilated'.")
    if stage == "train":
        raise ValueError(f"{text}, but each training step needs all ranks. {multiple}, or drop the last batch.")
    if stage != "predict" and 0 in batches:
        raise ValueError(
            f"{text}, and at its end the others would wait for ranks without a batch. Give the stage at least "
            f"batch_size x {sizes.data} samples, or none (limit_{stage}_batches=0)."
        )
    return (
        f"{text}, so losses cannot be added over all ranks in each step. {multiple}; or keep sums and counts of this rank "
        "in a torchmetrics metric, which adds them up at the end of the epoch."
    )


def compare_training(trainer: Any, sizes: MeshSizes, shards_parameters: bool) -> None:
    """At the first step, compare how many batches each rank will train on, over all loaders and up to `max_steps`.

    Raises:
        ValueError: on every rank, if the numbers differ.
    """
    remaining = float("inf")
    if trainer.max_steps >= 0:
        remaining = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
    batches: list[Any] = [None] * sizes.world
    dist.all_gather_object(batches, min(trainer.num_training_batches, remaining))
    check_equal_batches(batches, "train", sizes, shards_parameters)


def batches_of_loaders(trainer: Any, batch: Any) -> list[Any]:
    """Return the batch of each training loader from a combined `batch`."""
    return batches_in(batch, combined_loaders(trainer))
