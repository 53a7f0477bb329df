"""Private interfaces of Lightning and torchmetrics, each behind a function that says why it is used and where it holds.

`tests/test_compat.py` has a test for each, which names what breaks where one changes.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _load
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.callbacks import ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities.model_helpers import _restricted_classmethod
from torch import nn

# -- strategies, checkpoints and the Trainer's connectors; all of it holds for lightning 2.6.6 ---------------------------

#: private methods and attributes of Lightning's classes that ours override or use on `self`: there is no public hook to
#: refuse sizes before processes start, to take DDP's process group and buckets, to set up without Lightning's own mesh, or
#: to time batches without waiting for the GPU
OVERRIDDEN: dict[type, tuple[str, ...]] = {
    DDPStrategy: ("_configure_launcher", "_get_process_group_backend", "_ddp_kwargs"),
    ModelParallelStrategy: (
        *("_configure_launcher", "_get_process_group_backend", "_setup_distributed", "_device_mesh"),
        "_save_distributed_checkpoint",
    ),
    ThroughputMonitor: ("_start", "_update", "_throughputs", "_t0s", "_lengths", "_samples", "_batches"),
}


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


def batches_begun(trainer: pl.Trainer) -> int:
    """Training batches of this epoch that were begun: `epoch_loop.batch_progress.current.ready`; 2.6.6."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


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


def read_remote(address: Any) -> Any:
    """A checkpoint at an address that fsspec can open, on the CPU and with `weights_only=True`.

    Uses `lightning.fabric.utilities.cloud_io._load`. Known to hold for lightning 2.6.6.
    """
    return _load(address, map_location="cpu", weights_only=True)


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


# -- the memory profiler -----------------------------------------------------------------------------------------------
