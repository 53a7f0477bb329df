"""One sequence on two ranks under the strategy: the losses of one rank, and half of the bytes on each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest

from lightning_dilated import DilatedPattern, LongNetLM, RingDilatedStrategy
from lightning_dilated.data import FarRecallDataModule, GenomeDataModule, TokenDataModule

from ..distributed.pool import Pool
from ..strategy.runs import Record, launched, trainer

N, STEPS = 60, 5
DATA = {
    "tokens": lambda folder: TokenDataModule(f"{folder}/a.npy", N, 20),
    "documents": lambda folder: TokenDataModule(f"{folder}/a.npy", N, 20, eos_token=0),
    "genome": lambda folder: GenomeDataModule(f"{folder}/lambda_virus.fa", N),
    "far recall": lambda folder: FarRecallDataModule(N, batch_size=2),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(2)
    yield made
    made.close()


def fit(rank: int | None, group: Any, name: str, folder: str) -> tuple[list[float], int]:
    """Losses of a run, and the bytes that this rank read for it; without a rank, those of a run in this process."""
    world, record, data = 1 if rank is None else launched(rank), Record(), DATA[name](folder)
    pl.seed_everything(1, verbose=False)
    model = LongNetLM(DilatedPattern.longnet([8, 60], [1, 2]), vocab_size=20, dim=8, depth=2, num_heads=2)
    built = trainer(RingDilatedStrategy(), world, max_steps=STEPS, limit_val_batches=0, callbacks=[record])
    built.fit(model, data)
    if name == "far recall":
        return record.losses, 0
    return record.losses, (data.genome if name == "genome" else data.dataset("train").stream).bytes_read


@pytest.mark.parametrize("name", DATA)
def test_two_ranks_do_as_one(pool: Pool, lambda_virus: str, name: str) -> None:
    folder = Path(lambda_virus).parent
    np.save(folder / "a.npy", np.random.default_rng(0).integers(0, 20, 2000).astype(np.uint16))
    alone, whole = fit(None, None, name, str(folder))
    both = pool.run(2, fit, name, str(folder))
    assert len(alone) == STEPS and len(set(alone)) == STEPS
    for losses, _ in both:
        np.testing.assert_allclose(losses, alone, rtol=1e-5)
    if name == "far recall":
        return
    width = 1 if name == "genome" else 2  # bytes of a token
    for read, tokens in ((whole, N), *((read, N // 2) for _, read in both)):
        # one token more for the last label; line ends of the genome; Lightning may ask for a batch more than it uses
        assert STEPS * tokens * width <= read <= (STEPS + 1) * ((tokens + 1) * width + 2 * (name == "genome"))
