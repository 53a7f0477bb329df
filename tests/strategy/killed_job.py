"""A training script with ranks that are killed at planned moments: killed_job.py.

It reads `kills.json` in its folder: a list of {"moment", "step", "rank", "node", "delay"}. Each kill happens once:
`delay` seconds after the moment in this step, the rank sends itself SIGKILL. With "node" it also kills its agent.
Moments: step (a batch begins), checkpoint (files are written, the manifest is not), validation (a batch begins). Each
rank records its progress in `log/`.
"""

import json
import os
import signal
import threading
import time
import uuid
from pathlib import Path

import lightning.pytorch as pl

import lightning_dilated as ld
from lightning_dilated.callbacks import ShardedCheckpoint
from lightning_dilated.checkpoint import folder as checkpoint_folder

STEPS, GLOBAL_BATCH, BATCHES = 44, 6, 24  # number of optimizer steps, sequences per step, sequences per epoch
SEQ_LEN = 128


def end(number: int, node: bool) -> None:
    """Kill this process, and with `node` also its agent."""
    note = Path(f"killed_{number}")
    note.with_suffix(".part").write_text(json.dumps({"time": time.time(), "agent": os.getppid()}))
    note.with_suffix(".part").rename(note)
    if node:
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class Log(pl.Callback):
    """Records the progress, and carries out the kills of `kills.json`."""

    def on_fit_start(self, trainer, pl_module):
        Path("log").mkdir(exist_ok=True)
        self.kills = json.loads(Path("kills.json").read_text())
        self.file = Path("log", f"{uuid.uuid4()}.jsonl")
        self.attempt = trainer.strategy.broadcast(str(uuid.uuid4()))
        self.note(trainer, "begin", ranks=trainer.world_size)
        write = checkpoint_folder._write_files

        def write_and_die(*args, **options):
            files = write(*args, **options)
            self.die(trainer, "checkpoint", now=True)
            return files

        checkpoint_folder._write_files = write_and_die

    def note(self, trainer, what, **details):
        place = {"attempt": self.attempt, "rank": trainer.global_rank, "step": trainer.global_step}
        with self.file.open("a") as file:
            file.write(json.dumps({"what": what, "time": time.time(), **place, **details}) + "\n")

    def die(self, trainer, moment, now=False):
        """Carry out the kill planned for this moment, if any."""
        for number, kill in enumerate(self.kills):
            here = kill["rank"] % trainer.world_size == trainer.global_rank
            due = (kill["moment"], kill["step"]) == (moment, trainer.global_step)
            if here and due and not Path(f"killed_{number}").exists():
                if now:
                    end(number, kill["node"])
                threading.Timer(kill["delay"], end, (number, kill["node"])).start()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.before = trainer.global_step
        if any(Path(f"killed_{number}").exists() for number, kill in enumerate(self.kills) if kill["node"]):
            time.sleep(0.15)  # slows down the run, so that the node has rejoined before the last step
        self.die(trainer, "step")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step > self.before:
            self.note(trainer, "done")

    def on_validation_batch_start(self, trainer, *args):
        self.die(trainer, "validation")


class Model(ld.LongNetLM):
    """Records the loss and the samples of each batch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        details = {"share": float(loss), "index": batch["index"].tolist(), "data_rank": self.trainer.strategy.data_rank}
        log = next(x for x in self.trainer.callbacks if isinstance(x, Log))
        log.note(self.trainer, "batch", batch=batch_idx, epoch=self.trainer.current_epoch, **details)
        return loss


def main():
    pl.seed_everything(0)
    model = Model(ld.DilatedPattern.longnet([16, 64], [1, 2]), dim=16, depth=1)
    trainer = pl.Trainer(
        strategy=ld.RingDilatedStrategy(sequence_size=[2, 1], global_batch=GLOBAL_BATCH, timeout=20),
        accelerator="cpu",
        devices=1,
        num_nodes=ld.strategy.launched_nodes(),
        precision="64-true",
        max_steps=STEPS,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Log(), ShardedCheckpoint("ckpt", every_n_train_steps=2, resume="auto")],
    )
    data = ld.data.ByteDataModule("data.bin", seq_len=SEQ_LEN, val_fraction=0.2, test_fraction=0.0)
    trainer.fit(model, data)


if __name__ == "__main__":
    main()
