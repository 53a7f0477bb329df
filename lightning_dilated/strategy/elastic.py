"""Support for jobs whose number of ranks changes: count launched nodes, and fix the number of sequences in a step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader

from lightning_dilated._compat.lightning import epoch_batches_finished
from lightning_dilated.strategy.checks import number_of_batches


def launched_nodes() -> int:
    """Return the number of nodes that torchrun or SLURM started for this job; 1 under other launchers.

    Pass it to `Trainer(num_nodes=...)` if the number of nodes changes. On the command line: `--trainer.num_nodes auto`.
    """
    if dist.is_torchelastic_launched():
        return int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    return int(os.environ.get("SLURM_NNODES", 1)) if SLURMEnvironment.detect() else 1


def check_launched(devices: int, nodes: int) -> None:
    """Compare the Trainer's ranks with the ranks that torchrun started.

    Raises:
        ValueError: if the numbers differ, or if nodes have different numbers of ranks.
    """
    if not dist.is_torchelastic_launched():
        return
    world, per_node = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    agents = int(os.environ.get("GROUP_WORLD_SIZE", world // per_node))
    if agents * per_node != world:
        raise ValueError(
            f"torchrun started {world} ranks on {agents} nodes, {per_node} of them on this one: nodes have different "
            "numbers of ranks, which a Trainer does not support. Pass the same --nproc-per-node on every node."
        )
    if devices * nodes != world:
        raise ValueError(
            f"torchrun started {world} ranks, {per_node} on each of {world // per_node} nodes, but the Trainer has "
            f"devices={devices} and num_nodes={nodes}. Take devices={per_node} and "
            "num_nodes=lightning_dilated.strategy.launched_nodes() (on the command line --trainer.num_nodes auto), or start "
            "as many ranks as the Trainer has."
        )


class GlobalBatch:
    """Accumulates gradients so that every optimizer step has the same number of sequences.

    Epochs end with a whole step: sequences that do not fill a step are left out. Otherwise the number of steps would depend
    on the number of ranks, and the last gradient would be divided by more batches than were added to it.
    """

    def __init__(self, sequences: int) -> None:
        self.sequences = sequences
        self._set = 1  # the value of `accumulate_grad_batches` that this object has set
        self._limited: tuple[Any, Any] | None = None  # the Trainer and its original `limit_train_batches`

    def set_accumulation(self, trainer: Any, loader: Any, data_ranks: int) -> None:
        """Set the Trainer's `accumulate_grad_batches` for a training loader that is split over `data_ranks` data ranks.

        If the loader's length is known and constant, also round `limit_train_batches` down to whole steps.

        Raises:
            ValueError: if the loader has no batch size, or too few batches for a step; if batch size x data_ranks does
                not divide `sequences`; if other settings accumulate gradients; if the module itself steps optimizers.
        """
        self.restore()
        self._refuse_others(trainer)
        size = batch_size_of(loader)
        if size is None:
            raise ValueError(
                f"global_batch={self.sequences} needs a DataLoader with a batch size, got {type(loader).__name__}: leave "
                "global_batch out, or set the loader's batch_size."
            )
        if self.sequences % (size * data_ranks):
            allowed = [x for x in range(1, self.sequences + 1) if self.sequences % (x * data_ranks) == 0]
            remedy = f"batch_size one of {allowed}" if allowed else f"global_batch a multiple of {data_ranks}"
            raise ValueError(
                f"global_batch={self.sequences} sequences a step cannot be split into {data_ranks} sequence(s) at a "
                f"time in batches of {size}: make {remedy}, or sequence_size larger."
            )
        trainer.accumulate_grad_batches = self._set = self.sequences // (size * data_ranks)
        self._end_epochs_with_a_step(trainer, loader)

    def _refuse_others(self, trainer: Any) -> None:
        """Raise ValueError for other settings that decide how many batches a step takes."""
        other = None
        if trainer.accumulate_grad_batches not in (1, self._set):
            other = f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}): leave that at 1"
        elif any(isinstance(x, GradientAccumulationScheduler) for x in trainer.callbacks):
            other = "the callback GradientAccumulationScheduler: leave one of them out"
        if other is not None:
            raise ValueError(f"global_batch={self.sequences} sets the sequences in a step, and so does {other}.")
        if not trainer.lightning_module.automatic_optimization:
            raise ValueError(
                f"global_batch={self.sequences} has no effect on {type(trainer.lightning_module).__name__}, which steps its "
                "optimizers itself (automatic_optimization = False): leave global_batch out."
            )

    def _end_epochs_with_a_step(self, trainer: Any, loader: Any) -> None:
        batches = number_of_batches(loader, trainer, "train")
        if not batches or trainer.fast_dev_run or getattr(loader.sampler, "epochs_differ", False):
            return
        self._check_enough(batches)
        self._limited = trainer, trainer.limit_train_batches
        trainer.limit_train_batches = batches // self._set * self._set

    def _check_enough(self, batches: int | float) -> None:
        if batches < self._set:
            raise ValueError(
                f"global_batch={self.sequences}: a step takes {self._set} batches of each rank, and an epoch has {batches}. "
                "Lower global_batch, pass more data, or raise limit_train_batches if it is set."
            )

    def check_first_step(self, trainer: Any) -> None:
        """Check a fit before its first step; warn if a resumed fit begins in the middle of an optimizer step.

        Raises:
            ValueError: for several training loaders, and for epochs with fewer batches than a step takes.
        """
        if not trainer.fast_dev_run:
            self._check_enough(trainer.num_training_batches)
        if (count := len(loaders_of(trainer.train_dataloader))) > 1:
            raise ValueError(
                f"global_batch={self.sequences} counts the sequences of one training loader, but there are "
                f"{count}: leave global_batch out, and set Trainer(accumulate_grad_batches=...)."
            )
        if before := epoch_batches_finished(trainer) % self._set:
            rank_zero_warn(
                f"the checkpoint was saved after {before} of the {self._set} batches of a step with global_batch="
                f"{self.sequences}, so the first step's gradient comes from the other batches only. Either "
                "global_batch has changed, or the loader does not save its position: see ld.data.ResumableLoader."
            )

    def restore(self) -> None:
        """Restore the Trainer's `limit_train_batches` after `set_accumulation`."""
        if self._limited is not None:
            trainer, trainer_limit = self._limited
            trainer.limit_train_batches, self._limited = trainer_limit, None


def loaders_of(loaders: Any) -> list[Any]:
    """Return the loaders of a nested collection as a flat list."""
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    return [x for part in loaders for x in loaders_of(part)] if isinstance(loaders, (list, tuple)) else [loaders]


def batch_size_of(loader: Any) -> int | None:
    """Return the number of sequences of a DataLoader's batch; None if unknown."""
    if not isinstance(loader, DataLoader):
        return None
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None
