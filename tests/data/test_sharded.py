"""One sequence on two ranks under the strategy: each rank reads half of the bytes, and losses equal one rank's."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lightning_dilated import DilatedPattern, LongNetLM, RingDilatedStrategy
from lightning_dilated.data import ByteDataModule, FarRecallDataModule, GenomeDataModule, TokenDataModule
from lightning_dilated.sequence import SequenceSpec, loss_share

from ..distributed.pool import Pool
from ..strategy.runs import Record, launched, trainer

pytestmark = pytest.mark.full

N, STEPS = 60, 5
DATA = {
    "tokens": lambda folder: TokenDataModule(f"{folder}/a.npy", N, 20),
    "documents": lambda folder: TokenDataModule(f"{folder}/a.npy", N, 20, eos_token=0),
    "genome": lambda folder: GenomeDataModule(f"{folder}/lambda_virus.fa", N),
    "far recall": lambda folder: FarRecallDataModule(N, batch_size=2),
}


def fit(rank: int | None, group: Any, name: str, folder: str) -> tuple[list[float], int]:
    """Return (losses of a run, bytes read by this rank). If `rank` is None, it is a run of one process."""
    world, record, data = 1 if rank is None else launched(rank), Record(), DATA[name](folder)
    pl.seed_everything(1, verbose=False)
    model = LongNetLM(DilatedPattern.longnet([8, 60], [1, 2]), vocab_size=20, dim=8, depth=2, num_heads=2)
    built = trainer(RingDilatedStrategy(), world, max_steps=STEPS, limit_val_batches=0, callbacks=[record])
    built.fit(model, data)
    if name == "far recall":  # generated samples, no files
        return record.losses, 0
    return record.losses, (data.genome if name == "genome" else data.dataset("train").stream).bytes_read


@pytest.mark.parametrize("name", DATA)
def test_two_ranks_do_as_one(pool: Pool, lambda_virus: str, name: str) -> None:
    folder = Path(lambda_virus).parent
    np.save(folder / "a.npy", np.random.default_rng(0).integers(0, 20, 2000).astype(np.uint16))
    alone, whole = fit(None, None, name, str(folder))
    results = pool.run(2, fit, name, str(folder))
    assert len(alone) == STEPS and len(set(alone)) == STEPS
    for losses, _ in results:
        np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if name == "far recall":  # generated samples, no files
        return
    width = 1 if name == "genome" else 2  # bytes per token
    for read, tokens in ((whole, N), *((read, N // 2) for _, read in results)):
        # limits: a token more for the last label; line ends in the genome; Lightning may prefetch a batch
        assert STEPS * tokens * width <= read <= (STEPS + 1) * ((tokens + 1) * width + 2 * (name == "genome"))


# -- one sample of millions of tokens ----------------------------------------------------------------------------------
class Weighed(pl.LightningModule):
    """Computes a loss from every token, and records the number of tokens on this rank."""

    sequence_spec = SequenceSpec({"tokens": 1, "labels": 1}, whole=["index"])

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.ones((), dtype=torch.float64)), []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append((batch["tokens"].shape[1], int(batch["tokens"].sum()), int(batch["labels"][0, -1])))
        return loss_share((batch["tokens"].double() * self.weight).sum(), batch["tokens"].numel())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def enormous(rank: int, group: Any, path: str, tokens: int) -> tuple[list, int]:
    """Return (the batches that this rank got, bytes that its process read from the file)."""
    world = launched(rank)
    data = ByteDataModule(path, seq_len=tokens, val_fraction=0.0, test_fraction=0.0, num_workers=1, seed=3)
    model, built = Weighed(), trainer(RingDilatedStrategy(), world, max_steps=2, limit_val_batches=0)
    built.fit(model, data)
    return model.seen, data.dataset("train").stream.bytes_read


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2_000_000, 24_000_000])
def test_millions_of_tokens(pool: Pool, tmp_path: Path, tokens: int) -> None:
    """Each of two ranks gets half of a sample, which its worker process reads through a memory map."""
    text = np.random.default_rng(0).integers(0, 256, tokens + 1).astype(np.uint8)
    (tmp_path / "text.bin").write_bytes(text.tobytes())
    results = pool.run(2, enormous, str(tmp_path / "text.bin"), tokens)
    half, total = tokens // 2, text.astype(np.int64)
    for rank, (batches, read) in enumerate(results):
        shard = slice(rank * half, (rank + 1) * half)
        assert batches[0] == (half, total[shard].sum(), total[(rank + 1) * half])
        assert read == 0
