"""Whether a model learns to read one strain off the other (slow): a dense head in two of four layers does, walls cannot."""

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lightning_dilated import DilatedPattern, LongNetLM
from lightning_dilated.callbacks import LossByPosition
from lightning_dilated.data import StrainPairsDataModule
from lightning_dilated.models import WarmupCosine

from .strains import made, mutated, write_strain

N, STEPS, LOCAL = 512, 450, 32
PATTERNS = {
    "hybrid": DilatedPattern.hybrid(4, 4, local=LOCAL, global_every=2),
    "walls": [DilatedPattern.dense(LOCAL), DilatedPattern.dense(LOCAL).shifted()] * 2,
}


def halves(pattern: list[DilatedPattern], data: StrainPairsDataModule, folder: str) -> tuple[float, float]:
    """Validation bits a base in parts of the first strain, and in parts of the second; LossByPosition tells them apart."""
    pl.seed_everything(0)
    model = LongNetLM(
        pattern, data.vocab_size, dim=64, depth=4, num_heads=4, max_seq_len=N,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.002, betas=(0.9, 0.98), weight_decay=0.01),
        lr_scheduler=lambda optimizer: WarmupCosine(optimizer, warmup_steps=100, total_steps=STEPS),
    )  # fmt: skip
    losses = LossByPosition(table=False, picture=False)
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=STEPS, gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[losses], default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    eighths = {row["first"]: row["bits"] for row in losses.rows if row["part"] == "eighth"}
    return float(np.mean([eighths[i] for i in (0, 1, 2, 3)])), float(np.mean([eighths[i] for i in (5, 6, 7)]))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PATTERNS)
def test_the_second_strain_is_read_off_the_first(tmp_path, name: str) -> None:
    """Three species to train on and one to validate; 1 to 3 % of the bases differ, with insertions and deletions.

    The boundary is the same in all samples: at distances that vary these steps are too few for either.
    """
    species = {}
    for number, kind in enumerate(("one", "two", "three", "other")):
        genome = made(200_000, number)
        strains = [genome, mutated(genome, 0.01, 10 * number + 1), mutated(genome, 0.03, 10 * number + 2)]
        species[kind] = [write_strain(tmp_path, f"{kind}{i}.fa", x) for i, x in enumerate(strains)]
    data = StrainPairsDataModule(
        species,
        val="other",
        seq_len=N,
        batch_size=8,
        boundary_range=0,
        max_dropped=0,
        train_size=8 * STEPS,
        val_size=128,
    )
    first, second = halves(PATTERNS[name], data, str(tmp_path))
    print(f"{name}: {first:.3f} bits a base in the first strain, {second:.3f} in the second")
    assert first > 1.95, "nothing tells the bases of the first strain"
    if name == "hybrid":
        assert second < 1.0
    else:
        assert second > 1.9
