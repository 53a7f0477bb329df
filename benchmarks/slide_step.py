"""Train a GigaPath-sized slide encoder (12 layers of 768, 16 heads, random weights) on one slide with many tiles.

    python benchmarks/slide_step.py --tiles 70000                    # one GPU
    python benchmarks/slide_step.py --tiles 70000 --devices 2        # the slide on two: the same losses
    python benchmarks/slide_step.py --tiles 10000 --accelerator cpu --precision 32-true
    python benchmarks/slide_step.py --tiles 70000 --vary 111 --steps 8 [--engine triton]      # each slide of another size

Features are random, on a grid of tiles. Prints the loss of each step, seconds of the fastest and of the median step
after the first, and the peak memory of each rank.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

import lightning_dilated as ld


class OneSlide(Dataset):
    """A blank row for the class token, then tiles. Each step has the same slide with `vary` fewer tiles than before."""

    def __init__(self, tiles: int, width: int, steps: int, vary: int = 0) -> None:
        self.rows, self.steps, self.vary = tiles + 1, steps, vary
        self.features, self.coords = torch.zeros(self.rows, width), torch.full((self.rows, 2), -1)
        self.features[1:].normal_(generator=torch.Generator().manual_seed(1))
        cells = torch.arange(tiles)
        self.coords[1:] = 256 * torch.stack([cells % 500, cells // 500], 1)

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> dict[str, Any]:
        rows = self.rows - self.vary * index
        return {"features": self.features[:rows], "coords": self.coords[:rows], "lengths": rows, "label": index % 2}


class Watch(pl.Callback):
    """Records the loss and the seconds of each step."""

    def __init__(self) -> None:
        self.rows, self.last = [], 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *unused: Any) -> None:
        """Wait for the device, then read the clock."""
        loss = float(trainer.callback_metrics["train_loss"])
        now, self.last = time.perf_counter() - self.last, time.perf_counter()
        self.rows.append((loss, now))


def peak(device: torch.device) -> float:
    """Return GiB of the GPU's tensors, or on a CPU of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tiles", type=int, default=70000)
    p.add_argument("--devices", type=int, default=1)
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--precision", default="bf16-mixed")
    p.add_argument("--accelerator", default="auto")
    p.add_argument("--recompute", default="none", choices=["none", "attention-kept", "block"])
    p.add_argument("--vary", type=int, default=0, help="tiles that each slide has less than the one before")
    p.add_argument("--engine", default="auto")
    o = p.parse_args()
    pl.seed_everything(0)
    on_gpu = torch.cuda.is_available() and o.accelerator != "cpu"
    optimizer = partial(torch.optim.AdamW, lr=1e-5, fused=on_gpu)
    options = {"dropout": 0.0, "drop_path": 0.0, "optimizer": optimizer, "engine": o.engine}
    model = ld.SlideEncoder(task="classification", num_classes=2, **options)
    watch = Watch()
    callbacks = [watch] if o.recompute == "none" else [watch, ld.callbacks.ActivationRecompute(o.recompute)]
    trainer = pl.Trainer(
        strategy="ring_dilated", devices=o.devices, accelerator=o.accelerator, precision=o.precision, max_steps=o.steps,
        callbacks=callbacks, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(OneSlide(o.tiles, 1536, o.steps, o.vary)))
    losses = ", ".join(f"{loss:.6f}" for loss, _ in watch.rows)
    seconds = sorted(s for _, s in watch.rows[1:]) or [float("nan")]
    print(
        f"| {o.tiles:,} | {o.devices} | {trainer.global_rank} | {o.recompute} | {o.precision} | {losses} | "
        f"{seconds[0]:.3f} | {statistics.median(seconds):.3f} | "
        f"{peak(trainer.strategy.root_device):.1f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
