"""Training runs for workers, and their results: losses, gradient norms, validation loss, parameters.

A `Run` describes a run completely, so two equal `Run`s must give the same results on any number of ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from lightning_dilated import DilatedPattern, LongNetLM, RingDilatedFSDPStrategy, RingDilatedStrategy
from lightning_dilated.callbacks import ActivationRecompute
from lightning_dilated.data.sampler import ResumableSampler

PATTERN = DilatedPattern.longnet([8, 16, 40], [1, 2, 4])
VOCAB = 11


@dataclass(frozen=True)
class Run:
    """A small LongNet on random tokens. `batch_size` is the sum over all data ranks."""

    seq_len: int = 40
    batch_size: int = 1
    steps: int = 4
    accumulate: int = 1
    clip: float | None = None
    masked: float = 0.0
    kind: str = "whole"  # "whole", "documents", "lengths" or "unshifted"
    strategy: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    cls: type = LongNetLM
    precision: str = "64-true"
    workers: int = 0
    fsdp: bool = False
    memory: dict[str, Any] | None = None  # arguments of ActivationRecompute
    double: bool = False  # cast to float64 without Lightning's plugin, which does not allow sharded parameters

    def but(self, **changes: Any) -> Run:
        """Return a copy with changed fields."""
        return replace(self, **changes)


class Tokens(Dataset):
    """Twelve random samples without `read_ranges`, so batches are split among ranks after collation."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng, n = torch.Generator().manual_seed(index), self.run.seq_len
        values = torch.randint(0, VOCAB, (n + 1,), generator=rng)
        if self.run.kind == "unshifted":
            return {"tokens": values[:-1], "labels": values[:-1].clone(), "index": index}
        labels = values[1:].clone()
        labels[torch.rand(n, generator=rng) < self.run.masked * (index % 3)] = -100
        return {"tokens": values[:-1], "labels": labels, "index": index}


def collate(run: Run, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Stack samples, and add documents or lengths as the run requires."""
    batch = torch.utils.data.default_collate(samples)
    n = run.seq_len
    if run.kind == "documents":
        batch["cu_seqlens"] = torch.tensor([0, 3, n // 2 + 1, n], dtype=torch.int32)
        batch["labels"][:, [2, n // 2]] = -100
    if run.kind == "lengths":
        batch["lengths"] = torch.tensor([n - 7 * (s["index"] % 3) for s in samples])
        batch["labels"][torch.arange(n) >= batch["lengths"][:, None]] = -100
    return batch


class Collate:
    """`collate` for a run, as a class because worker processes must be able to unpickle it."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        return collate(self.run, samples)


class Data(pl.LightningDataModule):
    """Loaders with samplers that get the data ranks from the strategy."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def _loader(self, shuffle: bool) -> DataLoader:
        who = self.trainer.distributed_sampler_kwargs
        data = Tokens(self.run)
        sampler = ResumableSampler(data, shuffle=shuffle, drop_last=shuffle, **who)
        size = self.run.batch_size // who["num_replicas"]
        options = {"collate_fn": Collate(self.run), "drop_last": shuffle, "num_workers": self.run.workers}
        return DataLoader(data, batch_size=size, sampler=sampler, **options)

    def train_dataloader(self) -> DataLoader:
        return self._loader(True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(False)


def write_bytes(folder: Path, count: int) -> str:
    """Write a folder with one file of random bytes. Return the folder."""
    folder.mkdir()
    values = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(0))
    (folder / "a").write_bytes(bytes(values.tolist()))
    return str(folder)


def full(x: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor into a whole tensor."""
    return x.full_tensor() if isinstance(x, DTensor) else x


class Losses(pl.Callback):
    """Records the loss of each batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))


class Record(Losses):
    """Records losses, and the norm of the gradients of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        grads = [full(p.grad).flatten() for p in pl_module.parameters() if p.grad is not None]  # None if frozen
        self.norms.append(float(torch.cat(grads).norm()))


def launched(rank: int) -> int:
    """Set a launcher's variables, so that Trainers use this worker's process group. Return the number of ranks."""
    world = dist.get_world_size()
    names = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    names |= {"TORCHELASTIC_RUN_ID": "tests", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    os.environ.update({name: str(value) for name, value in names.items()})
    warnings.filterwarnings("ignore")
    multiprocessing.current_process()._config["daemon"] = False  # otherwise loaders could not start worker processes
    return world


def trainer(strategy: Any, world: int, **options: Any) -> pl.Trainer:
    """Return a quiet Trainer, on the CPU by default."""
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
    return pl.Trainer(**{"accelerator": "cpu", "devices": world, "strategy": strategy, **quiet, **options})


def make(run: Run, world: int, **options: Any) -> tuple[pl.Trainer, LongNetLM, Data, Record]:
    """Set seeds. Return (trainer, model, data, record) for a run."""
    pl.seed_everything(4, verbose=False)
    record = Record()
    recompute = [] if run.memory is None else [ActivationRecompute(**run.memory)]
    built = trainer(
        (RingDilatedFSDPStrategy if run.fsdp else RingDilatedStrategy)(**run.strategy),
        world,
        max_steps=run.steps,
        accumulate_grad_batches=run.accumulate,
        gradient_clip_val=run.clip,
        precision="32-true" if run.double else run.precision,
        num_sanity_val_steps=0,
        callbacks=[record, *recompute, *options.pop("callbacks", [])],
        **options,
    )
    model = run.cls(**{"pattern": PATTERN, "vocab_size": VOCAB, "dim": 16, "depth": 2, **run.model})
    data = Data(run)
    return built, model.double() if run.double else model, data, record


def fit(rank: int, group: dist.ProcessGroup, run: Run) -> dict[str, Any]:
    """Return this rank's results of a run. The validation has three batches, with all kinds of samples."""
    built, model, data, record = make(run, launched(rank), limit_val_batches=3)
    built.fit(model, data)
    built.validate(model, data, verbose=False)
    return {
        "losses": record.losses,
        "norms": record.norms,
        "val_loss": float(built.callback_metrics["val_loss"]),
        "parameters": {name: full(p).detach().clone() for name, p in model.named_parameters()},
    }
