"""Learning by pattern (slow): copies over varying distances and far recall, with and without a global head.

The limits come from a study with a different implementation. Copies, after 600 of 1,000 scheduled steps:
one dense head below 1 bit, dense attention below 0.2, a dilated pattern above 4.5 of 5 bits. Recall, after 1,000 steps:
one dense head below 0.3, a dilated pattern above 1 of 3 bits.
"""

import argparse
import importlib.util
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lightning_dilated import DilatedPattern, LongNetLM
from lightning_dilated.data import FarRecallDataModule
from lightning_dilated.models import WarmupCosine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "copy_task.py"


@pytest.mark.parametrize("arm, low, high", [("dense", 0, 0.2), ("hybrid", 0, 1), ("paper", 4.5, 5.2)])
def test_copies_over_distances_that_vary(arm: str, low: float, high: float) -> None:
    spec = importlib.util.spec_from_file_location("copy_task", SCRIPT)
    assert spec is not None and spec.loader is not None
    copy_task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy_task)
    options = {"distance": None, "batch_size": 32, "lr": 2e-3, "rotary_base": 1e4, "seed": 0, "device": "cpu"}
    row = copy_task.run(argparse.Namespace(arm=arm, steps=600, schedule=1000, **options))
    print(row)
    assert low <= row["bits"] < high


RECALL = {
    "one dense head": ({"hybrid": {"local": 16, "global_every": 2}}, 0, 0.3),
    "three branches": (DilatedPattern.longnet([16, 64, 128], [1, 4, 8]), 1, 3.2),
}


@pytest.mark.parametrize("name", RECALL)
def test_recalls_from_the_first_half(tmp_path: Path, name: str) -> None:
    """Train the task, model and optimizer of recipes/far_recall.yaml for 1,000 steps."""
    pattern, low, high = RECALL[name]
    pl.seed_everything(0)
    model = LongNetLM(
        pattern, 17, dim=64, depth=3, num_heads=8, max_seq_len=128,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.002, betas=(0.9, 0.98), weight_decay=0.01),
        lr_scheduler=lambda optimizer: WarmupCosine(optimizer, warmup_steps=100, total_steps=1000),
    )  # fmt: skip
    data = FarRecallDataModule(128, num_pairs=4, vocabulary=8, num_queries=32, batch_size=32, train_size=32_000)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=1000, gradient_clip_val=1.0, default_root_dir=tmp_path,
        check_val_every_n_epoch=None, val_check_interval=1000, num_sanity_val_steps=0, **quiet,
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    bits = float(trainer.callback_metrics["val_bits_per_byte"])
    print(f"{name}: {bits:.3f} bits")
    assert low <= bits < high
