"""The data-parallel ranks of a real Trainer share one order, and a different number of ranks can continue it."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback

from .runs import data, every_step, run


class Ranks(Callback):
    """Writes the batches of each rank to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        lines = [" ".join(map(str, batch)) for _, batch in pl_module.seen]
        (self.folder / f"rank{trainer.global_rank}.txt").write_text("\n".join(lines))


def rank_batches(folder: Path, rank: int) -> list[list[int]]:
    return [[int(word) for word in line.split()] for line in (folder / f"rank{rank}.txt").read_text().splitlines()]


@pytest.mark.full
def test_two_ranks_share_the_order_of_one(file: str, tmp_path: Path) -> None:
    whole, _ = run(data(file), max_steps=10)
    callbacks = [Ranks(tmp_path), every_step(tmp_path)]
    run(data(file, batch_size=1), callbacks=callbacks, max_steps=8, strategy="ddp_fork", devices=2)
    joined = [left + right for left, right in zip(rank_batches(tmp_path, 0), rank_batches(tmp_path, 1), strict=True)]
    assert joined == [list(batch) for _, batch in whole.seen[:8]]
    # two ranks were stopped; one rank with the same global batch size continues
    resumed, _ = run(data(file), tmp_path / "step=7.ckpt", max_steps=10)
    assert resumed.seen == whole.seen[7:]
    # one rank with batches of 1 needs twice the number of batches for the rest of the epoch
    finer, _ = run(data(file, batch_size=1), tmp_path / "step=7.ckpt", max_epochs=2)
    assert [number for number, _ in finer.seen] == list(range(4, 11))
    assert finer.samples()[:6] == whole.samples()[14:]
