"""Private interfaces of Lightning and torchmetrics, each behind a function that says why it is used and where it holds.

`tests/test_compat.py` has a test for each, which names what breaks where one changes.
"""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse import ArgumentParser
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _load
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters
from lightning.pytorch.core.saving import _default_map_location, _load_state
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import RunningStage, TrainerStatus
from lightning.pytorch.utilities.exceptions import _TunerExitException
from lightning.pytorch.utilities.migration import pl_legacy_patch
from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod
from torch import nn
from torch.utils.data import BatchSampler

# -- strategies, checkpoints and the Trainer's connectors; all of it holds for lightning 2.6.6 ---------------------------


def set_device_mesh(module: Any, mesh: Any) -> None:
    """Give a LightningModule its `device_mesh`, which ModelParallelStrategy sets by `module._device_mesh`."""
    module._device_mesh = mesh


def ddp_options(strategy: DDPStrategy) -> dict[str, Any]:
    """The keywords of DistributedDataParallel, which DDPStrategy keeps in `_ddp_kwargs` until it wraps the module."""
    return strategy._ddp_kwargs


def process_group_backend(strategy: DDPStrategy | ModelParallelStrategy) -> str:
    """The backend of the strategy's process group, before there is one: `_get_process_group_backend`."""
    return strategy._get_process_group_backend()


def writes_one_file(strategy: Any) -> bool:
    """Whether a strategy assembles checkpoints on rank 0: `_save_distributed_checkpoint` of ModelParallelStrategy."""
    return not getattr(strategy, "_save_distributed_checkpoint", True)


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give meta parameters memory on a device, as ModelParallelStrategy does, by `_materialize_distributed_module`."""
    _materialize_distributed_module(module, device)


def set_module_device(module: nn.Module, device: torch.device) -> None:
    """Have LightningModules report a device without moving tensors there, by `_update_properties`."""
    _update_properties(module, device=device)


def optimizers_to_device(optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> None:
    """Move optimizer states, as ModelParallelStrategy does, by `_optimizers_to_device`."""
    _optimizers_to_device(optimizers, device)


def destroy_process_group_at_exit() -> None:
    """As Lightning does for process groups with NCCL alone, by `_destroy_dist_connection`."""
    atexit.register(_destroy_dist_connection)


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """What `Trainer.save_checkpoint` would write, without writing it: `_checkpoint_connector.dump_checkpoint`."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def resume_from(trainer: Any, path: Path) -> None:
    """Have a fit that has begun load a checkpoint, by `_checkpoint_connector.resume_start`: `ckpt_path` comes too early."""
    trainer._checkpoint_connector.resume_start(path)


def replace_sampler_choice(trainer: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace `_data_connector._resolve_sampler(dataloader, shuffle, mode)`, which shuffles every training loader, by `wrap`
    of it; once a Trainer."""
    connector = trainer._data_connector
    if "_resolve_sampler" not in vars(connector):
        connector._resolve_sampler = wrap(connector._resolve_sampler)
        connector._prepare_dataloader = functools.partial(_keep_batches, connector._prepare_dataloader)


def _keep_batches(prepare: Callable[..., Any], dataloader: Any, shuffle: bool, mode: Any) -> Any:
    """`_data_connector._prepare_dataloader`, for a loader that was made with torch's BatchSampler, too.

    Lightning takes `dataloader.sampler`, which is another than the BatchSampler's own, and loses the size of the batches.
    """
    batches = getattr(dataloader, "batch_sampler", None)
    if type(batches) is not BatchSampler or dataloader.batch_size is not None:
        return prepare(dataloader, shuffle=shuffle, mode=mode)
    before = vars(dataloader)["sampler"]
    vars(dataloader)["sampler"] = batches.sampler
    try:
        prepared = prepare(dataloader, shuffle=shuffle, mode=mode)
    finally:
        vars(dataloader)["sampler"] = before
    if prepared is not dataloader and mode != RunningStage.PREDICTING:
        shared = BatchSampler(prepared.sampler, batches.batch_size, batches.drop_last)
        vars(prepared).update(batch_sampler=shared, batch_size=None, drop_last=False, collate_fn=dataloader.collate_fn)
    return prepared


def combined_loaders(trainer: Any) -> Any:
    """Return the loaders that each give a part of a batch, nested as the batch is; None if a batch comes from one loader.

    Uses `_evaluation_loop`, its `_combined_loader` and `_is_sequential`.
    """
    if trainer.training:
        loaders = trainer.train_dataloader
    elif trainer.predicting or trainer.state.stage is None:
        loaders = None
    else:
        loop = trainer._evaluation_loop
        loaders = None if loop._combined_loader is None or loop._is_sequential else loop._combined_loader.iterables
    return loaders if isinstance(loaders, (Mapping, list, tuple)) else None


def evaluated_loaders(trainer: Any) -> int:
    """How many loaders an evaluation goes through one after the other: `_evaluation_loop.num_dataloaders`."""
    loop = trainer._evaluation_loop
    return loop.num_dataloaders if loop._is_sequential else 1


def logs_this_step(trainer: Any) -> bool:
    """Whether this batch's values go to the loggers: `_logger_connector.should_update_logs`."""
    return trainer._logger_connector.should_update_logs


def logged_step(trainer: Any) -> int:
    """The step that Lightning logs a training batch's values with: `fit_loop.epoch_loop._batches_that_stepped`."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def is_accumulating(trainer: Any) -> bool:
    """Whether gradients wait for further batches: `fit_loop.epoch_loop._should_accumulate`."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def checkpoint_after_optimizer_steps(trainer: pl.Trainer) -> None:
    """Have each ModelCheckpoint that is due by time wait for an optimizer's step.

    Lightning saves after any batch; gradients that wait for further batches would be missing from a run that goes on from
    there. Replaces `on_train_batch_end` of these objects, once.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and "on_train_batch_end" not in vars(callback):
            hook = functools.partial(_unless_accumulating, callback.on_train_batch_end)
            callback.on_train_batch_end = hook  # type: ignore[method-assign]


def saves_by_time(callback: Any) -> bool:
    """Whether a callback is a ModelCheckpoint that is due by time: `_train_time_interval`."""
    return isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None


def _unless_accumulating(hook: Callable[..., None], trainer: Any, *args: Any) -> None:
    if not is_accumulating(trainer):
        hook(trainer, *args)


def set_received_sigterm(trainer: Any) -> None:
    """Have a Trainer end as if SIGTERM had come: `_signal_connector.received_sigterm`, read-only on the Trainer."""
    trainer._signal_connector.received_sigterm = True


class SignalHooks:
    """Replaces what a Trainer does about signals, and puts it back.

    Uses `fit_loop.epoch_loop.advance` and `_broadcast_sigterm_tensor`, and `_signal_connector` with
    `register_signal_handlers`, `_sigterm_notifier_fn` and `_slurm_sigusr_handler_fn`: Lightning reads a number from the GPU
    before each batch, and its handlers call collectives or save wherever the rank is.

    Attributes:
        advance, register, requeue: Lightning's own, bound to this Trainer.
    """

    def __init__(self, trainer: Any) -> None:
        loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
        self.advance = type(loop).advance.__get__(loop)
        self.register = type(connector).register_signal_handlers.__get__(connector)
        self.requeue = type(connector)._slurm_sigusr_handler_fn.__get__(connector)
        self._loop, self._connector = loop, connector
        self._replaced: list[tuple[Any, str]] = []

    def replace(
        self,
        advance: Callable[..., None],
        register: Callable[[], None],
        on_sigterm: Callable[..., None],
        on_requeue: Callable[..., None],
    ) -> None:
        """Call these instead of Lightning's; the broadcast before each batch is left out."""
        self._set(self._loop, "advance", advance)
        self._set(self._loop, "_broadcast_sigterm_tensor", _nothing)
        self._set(self._connector, "register_signal_handlers", register)
        self._set(self._connector, "_sigterm_notifier_fn", on_sigterm)
        self._set(self._connector, "_slurm_sigusr_handler_fn", on_requeue)

    def _set(self, owner: Any, name: str, function: Callable[..., None]) -> None:
        setattr(owner, name, function)
        self._replaced.append((owner, name))

    def restore(self) -> None:
        """Give the Trainer its own functions back."""
        for owner, name in self._replaced:
            vars(owner).pop(name, None)
        self._replaced.clear()


def _nothing(*args: Any) -> None:
    """In place of the broadcast before a batch; a lambda could not be pickled with the Trainer."""


class EndsRuns(_SubprocessScriptLauncher):
    """A launcher that calls `strategy.end_run()` after the last hook of a run; 2.6.6.

    `Strategy.teardown` comes before `on_fit_end` and the teardown hooks, which may still call collectives. A run that ended
    with an exception calls `Strategy.teardown` last, see `is_over`.
    """

    starts_processes = True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Lightning's, and the end of the run."""
        if self.starts_processes:
            result = super().launch(function, *args, trainer=trainer, **kwargs)
        else:
            result = function(*args, **kwargs)
        if trainer is not None:
            trainer.strategy.end_run()
        return result


def end_runs(strategy: Any) -> None:
    """Give a strategy a launcher that ends runs, in place of `_launcher`; launchers of other kinds end the process.

    ModelParallelStrategy has none where another program, such as torchrun, starts the processes.
    """
    if strategy._launcher is None or type(strategy._launcher) is _SubprocessScriptLauncher:
        launcher = EndsRuns(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        launcher.starts_processes, strategy._launcher = strategy._launcher is not None, launcher


def is_over(trainer: Any) -> bool:
    """Return whether no hook of a run comes after `Strategy.teardown`: an exception ended it, or Lightning's Tuner did."""
    tuned = isinstance(sys.exc_info()[1], _TunerExitException)
    return tuned or trainer.state.status == TrainerStatus.INTERRUPTED


def forget_launched_processes(launcher: Any) -> None:
    """Let the observer thread of `_SubprocessScriptLauncher` take no process that the launcher started for dead.

    It watches the list object that `procs` was when it began, and kills this process where one ends with a status.
    """
    if isinstance(launcher, _SubprocessScriptLauncher):
        started = list(launcher.procs)
        launcher.procs.clear()
        launcher.procs = started


def set_update_count(metric: Any, count: int) -> None:
    """Take back updates of a torchmetrics metric: `_update_count` and the cached `_computed` (torchmetrics 1.8, 1.9)."""
    metric._update_count, metric._computed = count, None


# -- the position in the training data ---------------------------------------------------------------------------------
def batches_finished(trainer: pl.Trainer) -> int:
    """Training batches finished in all: `epoch_loop.batch_progress.total.processed`; 2.6.6."""
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total  # declared as a class that counts less
    return total.processed


def set_batches_finished(trainer: pl.Trainer, count: int) -> None:
    """Let this epoch have `count` finished batches: moves all of `epoch_loop.batch_progress.current` alike; 2.6.6.

    Lightning counts batches, and offers no public way to say that their size changed.
    """
    current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    shift = count - current.processed
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, getattr(current, name) + shift)


def epoch_batches_finished(trainer: pl.Trainer) -> int:
    """Training batches of this epoch that are finished: `epoch_loop.batch_progress.current.processed`; 2.6.6."""
    current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return current.processed


def set_epoch_batches(trainer: pl.Trainer, loader: Any, length: int, multiple: int = 1) -> None:
    """Let the epoch that begins have the batches of a training loader of this length, cut to a multiple; 2.6.6.

    Lightning reads the length once, before the first epoch, into `fit_loop.max_batches`, `trainer.val_check_batch`, the
    limits of `fit_loop._combined_loader` and the length of `fit_loop._data_fetcher`. Left alone where the Trainer combines
    several loaders.
    """
    loop, limit = trainer.fit_loop, trainer.limit_train_batches
    combined, fetcher = loop._combined_loader, loop._data_fetcher
    if combined is None or fetcher is None or len(combined.flattened) != 1 or combined.flattened[0] is not loader:
        return
    batches = min(length, limit) if isinstance(limit, int) else int(length * (1.0 if limit is None else limit))
    batches -= batches % multiple if batches >= multiple else 0
    loop.max_batches, combined.limits, fetcher.length = batches, [batches], batches
    every = trainer.val_check_interval
    if isinstance(every, float) and trainer.val_check_batch is not None:
        trainer.val_check_batch = max(1, int(batches * every))


# -- models ------------------------------------------------------------------------------------------------------------
#: a class method that raises where it is called on an object, as Lightning's `load_from_checkpoint`; known for 2.6.6
restricted_classmethod = _restricted_classmethod


def attached_trainer(module: pl.LightningModule) -> pl.Trainer | None:
    """The Trainer that runs the module, None outside of one, where `module.trainer` raises.

    Uses `LightningModule._trainer`. Known to hold for lightning 2.6.6.
    """
    return module._trainer


#: a storage's device in a checkpoint where this machine has it, else the CPU: Lightning's own `map_location`; 2.6.6
map_to_known_devices = _default_map_location


def read_remote(address: Any, map_location: Any = "cpu") -> Any:
    """A checkpoint at an address that fsspec can open, with `weights_only=True`.

    Uses `lightning.fabric.utilities.cloud_io._load`. Known to hold for lightning 2.6.6.
    """
    return _load(address, map_location=map_location, weights_only=True)


def read_trusted(source: Any, map_location: Any) -> Any:
    """A checkpoint with `weights_only=False`, which may run any code; by `_load` as above, and `pl_legacy_patch`."""
    with pl_legacy_patch():
        return _load(source, map_location=map_location, weights_only=False)


def migrated(checkpoint: dict[str, Any], source: Any) -> dict[str, Any]:
    """A checkpoint of an older Lightning in today's form, by `_pl_migrate_checkpoint`; 2.6.6."""
    path = source if isinstance(source, (str, Path)) else None
    return _pl_migrate_checkpoint(checkpoint, checkpoint_path=path)


#: (checkpoint that is being loaded, `strict`), with whose tensors layers are compared before they are made
LOADED: ContextVar[tuple[dict[str, Any], bool | None] | None] = ContextVar("loaded", default=None)


def made_from_checkpoint(cls: Any, checkpoint: dict[str, Any], strict: bool | None, changes: dict[str, Any]) -> Any:
    """The module of a checkpoint's hyperparameters, with `changes` over them, and its weights, on their device; in all of
    a checkpoint's forms, by `_load_state`; 2.6.6.

    `hyper_parameters` name no `_instantiator`, so that the constructor takes the values, and no parser reads them.
    """
    older = ("hparams", "module_arguments", "hparams_type")  # the last may be any function
    kept = {name: value for name, value in checkpoint.items() if name not in older}
    kept["hyper_parameters"] = {**checkpoint["hyper_parameters"], **changes}
    token = LOADED.set((kept, strict))
    try:
        model = _load_state(cls, kept, strict=strict, **changes)
    finally:
        LOADED.reset(token)
    device = next((x.device for x in kept["state_dict"].values() if isinstance(x, torch.Tensor)), None)
    return model if device is None else model.to(device)


@functools.cache
def argument_types(cls: Any) -> dict[str, list[Any]]:
    """The annotations that a command line's parser reads each argument of a class by; several for a dataclass.

    Uses `_typehint` of jsonargparse's actions. Known to hold for jsonargparse 4.44 to 4.53.
    """
    parser, types = ArgumentParser(exit_on_error=False), dict[str, list[Any]]()
    parser.add_class_arguments(cls, "of", fail_untyped=False)
    for action in parser._actions:
        section, _, name = action.dest.partition(".")
        if section == "of" and name and not name.endswith(".help"):
            types.setdefault(name.partition(".")[0], []).append(getattr(action, "_typehint", action.type))
    return types


def given_hyperparameters() -> dict[str, Any]:
    """The values of the recipe that the command line makes the module from, and its class; else empty.

    LightningCLI offers them to `save_hyperparameters` only, by `_given_hyperparameters`. Known to hold for lightning 2.6.6.
    """
    return _given_hyperparameters.get() or {}


def load_to_cpu_by_name(strategy: Any, check: Callable[[Any], None]) -> None:
    """Let the strategy's checkpoint reader name the CPU as a string.

    Lightning passes a function as `map_location`, with which torch cannot read torchao's low-bit optimizer states; and it
    waits for a fifo, which `check` refuses. Replaces
    `load_checkpoint` of a plain `TorchCheckpointIO` object; others are left alone. Known to hold for lightning 2.6.6.
    """
    io = getattr(strategy, "checkpoint_io", None)
    if type(io) is TorchCheckpointIO:
        load: Any = TorchCheckpointIO.load_checkpoint  # Lightning declares map_location as a function only

        def load_checkpoint(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
            check(path)
            return load(io, path, map_location="cpu", weights_only=weights_only)

        io.load_checkpoint = load_checkpoint  # type: ignore[method-assign]
