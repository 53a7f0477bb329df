"""Run a fit in which torch raises if the host waits for the GPU, except in `torch.cuda.synchronize`, for events and for
pinning: `python -m torch.distributed.run ... -m tests.models.steps_without_waits STRATEGY MODEL [CHUNK]`. MODEL is a
key of `MODELS`. CHUNK is the number of tokens to stream at a time.
"""

from __future__ import annotations

import os
import sys

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

import lightning_dilated as ld

WARM, STEPS = 3, 8
SIZES = {"dim": 64, "depth": 2, "num_heads": 4}
MODELS = {
    "LongNetLM": {"vocab_size": 2048, "compile_blocks": True},  # this also compiles the loss
    "LongNetLM+recurrence": {"vocab_size": 2048, "compile_blocks": True, "recurrence": {"kind": "gated_delta"}},
    "LongNetMLM": {"vocab_size": 60, "mask_span": 3},
    "LongNetClassifier": {"vocab_size": 256, "num_classes": 4},
}


class Text(Dataset):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = torch.randint(0, 256, (2049,), generator=torch.Generator().manual_seed(index))
        named = {
            "LongNetLM": {"labels": text[1:]},
            "LongNetMLM": {"index": index},
            "LongNetClassifier": {"label": index % 4},
        }
        return {"tokens": text[:-1] % MODELS[NAME].get("vocab_size", 256), **named[CLASS]}


class Refuse(pl.Callback):
    """Makes waits raise errors, from the end of the warm-up steps to the end of the last step but one."""

    def on_train_batch_end(self, trainer: pl.Trainer, *unused) -> None:
        if trainer.global_step == WARM:
            torch.cuda.set_sync_debug_mode("error")
        if trainer.global_step == STEPS - 1:
            torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, *unused) -> None:
        torch.cuda.set_sync_debug_mode("default")


CLASS, NAME, CHUNK = sys.argv[2].partition("+")[0], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None


def main() -> None:
    strategy = getattr(ld, sys.argv[1])(exchange="gather", layout="chunked" if CHUNK else "contiguous")
    streams = [ld.callbacks.ActivationRecompute(stream=CHUNK)] if CHUNK else []
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    model = getattr(ld, CLASS)(ld.DilatedPattern.geometric(256, 2048), **SIZES, **MODELS[NAME])
    trainer = pl.Trainer(
        accelerator="gpu", devices=ranks, strategy=strategy, precision="bf16-mixed", max_steps=STEPS, logger=False,
        enable_checkpointing=False, enable_model_summary=False, gradient_clip_val=1.0, callbacks=[Refuse(), *streams],
    )  # fmt: skip
    trainer.fit(model, DataLoader(Text(), pin_memory=True))
    if trainer.is_global_zero:
        print("shown", trainer.progress_bar_metrics["train_loss"], flush=True)


if __name__ == "__main__":
    main()
