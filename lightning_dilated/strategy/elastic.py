"""Jobs whose number of ranks changes: nodes that the launcher started, and sequences of a step on any number of ranks."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader


def launched_nodes() -> int:
    """Nodes of this job, as torchrun or SLURM started it; 1 without them.

    For `Trainer(num_nodes=...)` of a job whose number of nodes changes; on the command line `--trainer.num_nodes auto`.
    """
    if dist.is_torchelastic_launched():
        return int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    return int(os.environ.get("SLURM_NNODES", 1)) if SLURMEnvironment.detect() else 1


def check_launched(devices: int, nodes: int) -> None:
    """Compare the Trainer's ranks with those that torchrun started.

    Raises:
        ValueError: where they differ.
    """
    if not dist.is_torchelastic_launched():
        return
    world, each = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if devices * nodes != world:
        raise ValueError(
            f"torchrun started {world} ranks, {each} on each of {world // each} nodes, but the Trainer has "
            f"devices={devices} and num_nodes={nodes}. Take devices={each} and "
            "num_nodes=lightning_dilated.strategy.launched_nodes() (on the command line --trainer.num_nodes auto), or start "
            "as many ranks as the Trainer has."
        )


class GlobalBatch:
    """So many sequences a step of the optimizer: gradients accumulate over as many batches as that takes."""

    def __init__(self, sequences: int) -> None:
        self.sequences = sequences
        self._set = 1  # what `accumulate_grad_batches` was set to here

    def set_accumulation(self, trainer: Any, loader: Any, data_ranks: int) -> None:
        """Set the Trainer's `accumulate_grad_batches` for a training loader, of which `data_ranks` take batches at a time.

        Raises:
            ValueError: for a loader without a batch size, another accumulation, or sizes that do not divide the sequences.
        """
        if trainer.accumulate_grad_batches not in (1, self._set):
            raise ValueError(
                f"global_batch={self.sequences} says how many sequences a step takes, and so does "
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}): leave that at 1."
            )
        size = batch_size_of(loader)
        if size is None:
            raise ValueError(
                f"global_batch={self.sequences} needs a DataLoader with a batch size, got {type(loader).__name__}: leave "
                "global_batch out, or set the loader's batch_size."
            )
        if self.sequences % (size * data_ranks):
            allowed = [x for x in range(1, self.sequences + 1) if self.sequences % (x * data_ranks) == 0]
            each = f"batch_size one of {allowed}" if allowed else f"global_batch a multiple of {data_ranks}"
            raise ValueError(
                f"global_batch={self.sequences} sequences a step cannot be dealt to {data_ranks} sequence(s) at a time in "
                f"batches of {size}: make {each}, or sequence_size larger."
            )
        trainer.accumulate_grad_batches = self._set = self.sequences // (size * data_ranks)


def batch_size_of(loader: Any) -> int | None:
    """Sequences of a batch of a DataLoader; None where it does not say."""
    if not isinstance(loader, DataLoader):
        return None
    size = loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None
