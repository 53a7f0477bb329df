"""A small model that records its batches, and the Trainer runs that the data tests stop and resume."""

from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint

from lightning_dilated.data import ByteDataModule

from ..models import trainer

SEQ_LEN = 4
SAMPLES = 11
BATCHES = 5  # batches of 2 samples; each epoch omits one sample


class Recorder(pl.LightningModule):
    """Records its inputs as tuples (batch_idx, sample indices), and the global steps of its validations."""

    def __init__(self, crash_at: int | None = None, ask_for_steps: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.crash_at = crash_at
        self.ask_for_steps = ask_for_steps
        self.seen: list[tuple[int, tuple[int, ...]]] = []
        self.validated_after: list[int] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.global_step == self.crash_at:
            raise KeyError("crash")
        self.seen.append((batch_idx, tuple(batch["index"].tolist())))
        return self.weight.sum() * batch["tokens"].float().mean()

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated_after.append(self.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.ask_for_steps:  # this property makes Lightning build the train loader before it restores the loops
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def samples(self) -> list[int]:
        return [index for _, batch in self.seen for index in batch]


def data(file: str, **options: object) -> ByteDataModule:
    settings = {"seq_len": SEQ_LEN, "batch_size": 2, "val_fraction": 0.125, "test_fraction": 0, "seed": 3}
    module = ByteDataModule(file, **{**settings, **options})
    assert len(module.dataset("train")) == SAMPLES
    return module


def run(
    module: ByteDataModule,
    ckpt: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    crash_at: int | None = None,
    ask_for_steps: bool = False,
    **options: object,
) -> tuple[Recorder, pl.Trainer]:
    model = Recorder(crash_at, ask_for_steps)
    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
    built = trainer(callbacks=list(callbacks), enable_checkpointing=saves, **options)
    built.fit(model, module, ckpt_path=None if ckpt is None else str(ckpt), weights_only=True if ckpt else None)
    return model, built


def every_step(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
