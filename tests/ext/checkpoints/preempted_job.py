"""A script with a ShardedCheckpoint that is interrupted: preempted_job.py STRATEGY DEVICES STEPS WORKERS [SIGNAL RANK].

The script sends SIGNAL to rank RANK in the third batch. If RANK is "validation", rank 0 gets the signal in the
validation before. Without SIGNAL, each rank trains slowly and writes its process number to a file (rank 0: `ready0`).
"""

import os
import signal
import sys
import time
from pathlib import Path

import lightning.pytorch as pl

import lightning_dilated as ld
from lightning_dilated.callbacks import ShardedCheckpoint


class Sends(pl.Callback):
    """Sends the signal once."""

    def __init__(self, name, who):
        self.name, self.who, self.once = name, who, Path("once")

    def _send(self):
        self.once.touch()
        os.kill(os.getpid(), getattr(signal, self.name))

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 2 and str(trainer.global_rank) == self.who and not self.once.exists():
            self._send()

    def on_validation_batch_start(self, trainer, *args):
        here = trainer.global_step == 2 and trainer.global_rank == 0 and self.who == "validation"
        if here and not self.once.exists():
            self._send()


class Slow(pl.Callback):
    """Slows training down, so that a test has time to send signals."""

    def on_train_batch_end(self, trainer, *args):
        Path(f"ready{trainer.global_rank}").write_text(str(os.getpid()))
        time.sleep(0.05)


def main():
    strategy, devices, steps, workers, *signals = sys.argv[1:]
    pl.seed_everything(0)
    model = ld.LongNetLM(ld.DilatedPattern.longnet([16, 128], [1, 2]), dim=16, depth=1)
    saver = ShardedCheckpoint("ckpt", every_n_train_steps=1000, resume="auto")
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(devices),
        max_steps=int(steps),
        val_check_interval=2,
        limit_val_batches=2 if "validation" in signals else 0,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saver, Sends(*signals) if signals else Slow()],
    )
    trainer.fit(model, ld.data.ByteDataModule(seq_len=256, num_workers=int(workers)))
    print("loss", float(trainer.callback_metrics["train_loss"]), flush=True)


if __name__ == "__main__":
    main()
