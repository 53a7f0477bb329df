"""Private interfaces of Lightning and torchmetrics, which only the functions of this file use.

All are known to exist in lightning 2.6.6, unless a docstring names other versions. `tests/test_compat.py` tests each.
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


# -- strategies, checkpoints and the Trainer's connectors --------------------------------------------------------------
def set_device_mesh(module: Any, mesh: Any) -> None:
    """Set a LightningModule's `device_mesh`, as ModelParallelStrategy does, via `module._device_mesh`."""
    module._device_mesh = mesh


def ddp_options(strategy: DDPStrategy) -> dict[str, Any]:
    """Return the keywords for DistributedDataParallel, which DDPStrategy stores in `_ddp_kwargs`."""
    return strategy._ddp_kwargs


def process_group_backend(strategy: DDPStrategy | ModelParallelStrategy) -> str:
    """Return the backend of the strategy's future process group (`_get_process_group_backend`)."""
    return strategy._get_process_group_backend()


def writes_one_file(strategy: Any) -> bool:
    """Return True if a ModelParallelStrategy gathers checkpoints into one file (not `_save_distributed_checkpoint`)."""
    return not getattr(strategy, "_save_distributed_checkpoint", True)


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate meta parameters on a device, as ModelParallelStrategy does, via `_materialize_distributed_module`."""
    _materialize_distributed_module(module, device)


def set_module_device(module: nn.Module, device: torch.device) -> None:
    """Set the device that LightningModules report, without moving tensors, via `_update_properties`."""
    _update_properties(module, device=device)


def optimizers_to_device(optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> None:
    """Move optimizer states, as ModelParallelStrategy does, via `_optimizers_to_device`."""
    _optimizers_to_device(optimizers, device)


def destroy_process_group_at_exit() -> None:
    """Destroy the process group when Python exits, via `_destroy_dist_connection`; Lightning does this only for NCCL."""
    atexit.register(_destroy_dist_connection)


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """Return the checkpoint that `Trainer.save_checkpoint` would write (`_checkpoint_connector.dump_checkpoint`)."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def resume_from(trainer: Any, path: Path) -> None:
    """Load a checkpoint later than `ckpt_path` does, after a fit has begun, via `_checkpoint_connector.resume_start`."""
    trainer._checkpoint_connector.resume_start(path)


def replace_sampler_choice(trainer: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap `_data_connector._resolve_sampler(dataloader, shuffle, mode)`, which shuffles every training loader.

    Do nothing in a second call for the same Trainer.
    """
    connector = trainer._data_connector
    if "_resolve_sampler" not in vars(connector):
        connector._resolve_sampler = wrap(connector._resolve_sampler)
        connector._prepare_dataloader = functools.partial(_keep_batches, connector._prepare_dataloader)


def _keep_batches(prepare: Callable[..., Any], dataloader: Any, shuffle: bool, mode: Any) -> Any:
    """Run `_data_connector._prepare_dataloader`, but keep the batch size of a loader that has torch's BatchSampler.

    Lightning would read `dataloader.sampler`, which is not the sampler of the BatchSampler, and lose the batch size.
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
    """Return the loaders of a combined batch, nested as the batch is; None if batches come from one loader."""
    if trainer.training:
        loaders = trainer.train_dataloader
    elif trainer.predicting or trainer.state.stage is None:
        loaders = None
    else:
        loop = trainer._evaluation_loop
        loaders = None if loop._combined_loader is None or loop._is_sequential else loop._combined_loader.iterables
    return loaders if isinstance(loaders, (Mapping, list, tuple)) else None


def evaluated_loaders(trainer: Any) -> int:
    """Return the number of loaders that an evaluation reads one after another (`_evaluation_loop.num_dataloaders`)."""
    loop = trainer._evaluation_loop
    return loop.num_dataloaders if loop._is_sequential else 1


def logs_this_step(trainer: Any) -> bool:
    """Return True if this batch's values are sent to the loggers (`_logger_connector.should_update_logs`)."""
    return trainer._logger_connector.should_update_logs


def logged_step(trainer: Any) -> int:
    """Return the step under which Lightning logs a training batch (`fit_loop.epoch_loop._batches_that_stepped`)."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def is_accumulating(trainer: Any) -> bool:
    """Return True if the optimizer does not step after this batch (`fit_loop.epoch_loop._should_accumulate`)."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def checkpoint_after_optimizer_steps(trainer: pl.Trainer) -> None:
    """Let ModelCheckpoint callbacks save at the end of a batch only after an optimizer step.

    Lightning may save after any batch, and a resumed run would then lack the accumulated gradients. This replaces
    `on_train_batch_end` of these objects, only once.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and "on_train_batch_end" not in vars(callback):
            hook = functools.partial(_unless_accumulating, callback.on_train_batch_end)
            callback.on_train_batch_end = hook  # type: ignore[method-assign]


def saves_by_time(callback: Any) -> bool:
    """Return True if a callback is a ModelCheckpoint that saves by time (`_train_time_interval`)."""
    return isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None


def _unless_accumulating(hook: Callable[..., None], trainer: Any, *args: Any) -> None:
    if not is_accumulating(trainer):
        hook(trainer, *args)


def set_received_sigterm(trainer: Any) -> None:
    """Make a Trainer end as after SIGTERM, via `_signal_connector.received_sigterm`: the Trainer's property is read-only."""
    trainer._signal_connector.received_sigterm = True


class SignalHooks:
    """Replaces a Trainer's handling of signals, and restores it later.

    Lightning's own handling reads a number from the GPU before each batch, and calls collectives or saves within a step.

    Attributes:
        advance, register, requeue: Lightning's original methods, bound to this Trainer.
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
        """Make the Trainer call these functions instead of Lightning's, and remove the broadcast before each batch."""
        self._set(self._loop, "advance", advance)
        self._set(self._loop, "_broadcast_sigterm_tensor", _nothing)
        self._set(self._connector, "register_signal_handlers", register)
        self._set(self._connector, "_sigterm_notifier_fn", on_sigterm)
        self._set(self._connector, "_slurm_sigusr_handler_fn", on_requeue)

    def _set(self, owner: Any, name: str, function: Callable[..., None]) -> None:
        setattr(owner, name, function)
        self._replaced.append((owner, name))

    def restore(self) -> None:
        """Restore the Trainer's methods."""
        for owner, name in self._replaced:
            vars(owner).pop(name, None)
        self._replaced.clear()


def _nothing(*args: Any) -> None:
    """Do nothing, in place of the broadcast before a batch. Unlike a lambda, this function can be pickled."""


class EndsRuns(_SubprocessScriptLauncher):
    """A launcher that calls `strategy.end_run()` after the last hook of a run.

    `Strategy.teardown` is too early, because `on_fit_end` and the teardown hooks run later and may call collectives.
    `teardown` runs last only after an exception or Lightning's Tuner, see `is_over`.
    """

    starts_processes = True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Launch as Lightning does, then end the run."""
        if self.starts_processes:
            result = super().launch(function, *args, trainer=trainer, **kwargs)
        else:
            result = function(*args, **kwargs)
        if trainer is not None:
            trainer.strategy.end_run()
        return result


def end_runs(strategy: Any) -> None:
    """Replace a strategy's `_launcher` with `EndsRuns`, except for launchers that end their processes with the run.

    ModelParallelStrategy has no launcher if another program, such as torchrun, starts the processes.
    """
    if strategy._launcher is None or type(strategy._launcher) is _SubprocessScriptLauncher:
        launcher = EndsRuns(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        launcher.starts_processes, strategy._launcher = strategy._launcher is not None, launcher


def is_over(trainer: Any) -> bool:
    """Return True if an exception or Lightning's Tuner ended the run; then `Strategy.teardown` runs after all hooks."""
    tuned = isinstance(sys.exc_info()[1], _TunerExitException)
    return tuned or trainer.state.status == TrainerStatus.INTERRUPTED


def forget_launched_processes(launcher: Any) -> None:
    """Stop the observer thread of `_SubprocessScriptLauncher` from watching the processes that the launcher started.

    The thread watches the original list `procs`, and kills this process if a process in the list ends with an error.
    """
    if isinstance(launcher, _SubprocessScriptLauncher):
        started = list(launcher.procs)
        launcher.procs.clear()
        launcher.procs = started


def set_update_count(metric: Any, count: int) -> None:
    """Set a torchmetrics metric's number of updates and clear its cached value. Works in torchmetrics 1.8 and 1.9."""
    metric._update_count, metric._computed = count, None


# -- the position in the training data ---------------------------------------------------------------------------------
def batches_finished(trainer: pl.Trainer) -> int:
    """Return the number of training batches finished in all epochs (`epoch_loop.batch_progress.total.processed`)."""
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total  # its declared class has no `processed`
    return total.processed


def set_batches_finished(trainer: pl.Trainer, count: int) -> None:
    """Set the number of this epoch's finished batches, by shifting all counts of `epoch_loop.batch_progress.current`.

    Lightning counts batches, and has no public API to translate the count to a different batch size.
    """
    current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    shift = count - current.processed
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, getattr(current, name) + shift)


def epoch_batches_finished(trainer: pl.Trainer) -> int:
    """Return the number of this epoch's finished training batches (`epoch_loop.batch_progress.current.processed`)."""
    current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return current.processed


def set_epoch_batches(trainer: pl.Trainer, loader: Any, length: int, multiple: int = 1) -> None:
    """Set the number of batches of a new epoch from the loader's new length and `limit_train_batches`.

    A number above `multiple` is rounded down to a multiple of it. Lightning reads the length only once, into
    `fit_loop.max_batches`, `trainer.val_check_batch`, the limits of `fit_loop._combined_loader` and the length of
    `fit_loop._data_fetcher`. Do nothing if the Trainer combines several loaders.
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
#: decorator for a class method that raises an error if it is called on an object, as `load_from_checkpoint` does
restricted_classmethod = _restricted_classmethod


def attached_trainer(module: pl.LightningModule) -> pl.Trainer | None:
    """Return the Trainer that runs the module, or None without a Trainer; `module.trainer` would raise an error."""
    return module._trainer


#: Lightning's `map_location`: a tensor's stored device if this machine has it, else the CPU
map_to_known_devices = _default_map_location


def read_remote(address: Any, map_location: Any = "cpu") -> Any:
    """Read a checkpoint from a URL that fsspec can open, with `weights_only=True`."""
    return _load(address, map_location=map_location, weights_only=True)


def read_trusted(source: Any, map_location: Any) -> Any:
    """Read a checkpoint with `weights_only=False`, which may run any code."""
    with pl_legacy_patch():
        return _load(source, map_location=map_location, weights_only=False)


def migrated(checkpoint: dict[str, Any], source: Any) -> dict[str, Any]:
    """Convert a checkpoint of an older Lightning to the installed version's format, via `_pl_migrate_checkpoint`."""
    path = source if isinstance(source, (str, Path)) else None
    return _pl_migrate_checkpoint(checkpoint, checkpoint_path=path)


#: (the checkpoint that is being loaded, `strict`); models compare its tensors with layers before they allocate layers
LOADED: ContextVar[tuple[dict[str, Any], bool | None] | None] = ContextVar("loaded", default=None)


def module_from_checkpoint(cls: Any, checkpoint: dict[str, Any], strict: bool | None, changes: dict[str, Any]) -> Any:
    """Make a module from a checkpoint's hyperparameters, updated by `changes`, and load the weights to their device.

    Uses `_load_state`. `hyper_parameters` must not contain `_instantiator`, so that the values are passed to the
    constructor and not to a parser.
    """
    older = ("hparams", "module_arguments", "hparams_type")  # hparams_type may be any function
    state = {name: value for name, value in checkpoint.items() if name not in older}
    state["hyper_parameters"] = {**checkpoint["hyper_parameters"], **changes}
    token = LOADED.set((state, strict))
    try:
        model = _load_state(cls, state, strict=strict, **changes)
    finally:
        LOADED.reset(token)
    device = next((x.device for x in state["state_dict"].values() if isinstance(x, torch.Tensor)), None)
    return model if device is None else model.to(device)


@functools.cache
def argument_types(cls: Any) -> dict[str, list[Any]]:
    """Return {argument of a class: the types that jsonargparse reads it as}; an argument with a dataclass has several.

    Uses `_typehint` of jsonargparse's actions. Known to work with jsonargparse 4.44 to 4.53.
    """
    parser, types = ArgumentParser(exit_on_error=False), dict[str, list[Any]]()
    parser.add_class_arguments(cls, "of", fail_untyped=False)
    for action in parser._actions:
        section, _, name = action.dest.partition(".")
        if section == "of" and name and not name.endswith(".help"):
            types.setdefault(name.partition(".")[0], []).append(getattr(action, "_typehint", action.type))
    return types


def given_hyperparameters() -> dict[str, Any]:
    """Return the class and the recipe values that the command line makes a module from; {} in other programs.

    LightningCLI passes these values only to `save_hyperparameters`, via `_given_hyperparameters`.
    """
    return _given_hyperparameters.get() or {}


def load_to_cpu_by_name(strategy: Any, check: Callable[[Any], None]) -> None:
    """Make the strategy's checkpoint reader call `check` with the path, and then load with `map_location="cpu"`.

    Lightning passes a function as `map_location`, with which torch cannot read torchao's low-bit optimizer states.
    Lightning would also block on a fifo, which `check` refuses. Only a plain `TorchCheckpointIO` is changed.
    """
    io = getattr(strategy, "checkpoint_io", None)
    if type(io) is TorchCheckpointIO:
        load: Any = TorchCheckpointIO.load_checkpoint  # its annotation of map_location allows only functions

        def load_checkpoint(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
            check(path)
            return load(io, path, map_location="cpu", weights_only=weights_only)

        io.load_checkpoint = load_checkpoint  # type: ignore[method-assign]
