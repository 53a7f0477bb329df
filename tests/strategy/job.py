"""A user's training script that fails in its third step: job.py HOW RANK[+RANK...] DEVICES [STRATEGY].

HOW: kill, node (kill the rank and its agent), term, raise, config, nothing, or notebook (run as in a notebook).
STRATEGY: a name, "regions" (each node is a region) or "two regions".
"""

import os
import signal
import sys
from pathlib import Path

if sys.argv[1] == "notebook":
    sys.ps1 = ">>> "

import lightning.pytorch as pl

import lightning_dilated as ld

HOW, WHO = sys.argv[1], [int(rank) for rank in sys.argv[2].split("+")]
REGIONS = {"regions": "auto", "two regions": 2}


def strategy(name=None):
    """Return the strategy that the command line names."""
    if name in REGIONS:
        return ld.RingDilatedStrategy(timeout=20, regions=REGIONS[name], outer=ld.OuterSteps(every=2))
    return name or ld.RingDilatedStrategy(timeout=20)


class Trouble(pl.Callback):
    """Causes the failure, once on each rank."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        once = Path("once" if trainer.global_rank == WHO[0] else f"once.{trainer.global_rank}")
        if trainer.global_step == 2 and trainer.global_rank in WHO and not once.exists():
            once.touch()
            if HOW == "node":
                os.kill(os.getppid(), signal.SIGKILL)
            if HOW in ("kill", "node"):
                os.kill(os.getpid(), signal.SIGKILL)
            if HOW == "term":
                os.kill(os.getpid(), signal.SIGTERM)
            if HOW == "raise":
                raise ValueError("trouble of its own")


def main():
    pl.seed_everything(0)
    other = HOW == "config" and int(os.environ.get("LOCAL_RANK", 0)) in WHO
    pattern = ld.DilatedPattern.longnet([16, 64 if other else 128], [1, 2])
    model = ld.LongNetLM(pattern, dim=16, depth=1)
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath="ckpt", every_n_train_steps=1, save_last=True)
    trainer = pl.Trainer(
        strategy=strategy(*sys.argv[4:]),
        accelerator=os.environ.get("JOB_ACCELERATOR", "cpu"),
        devices=int(sys.argv[3]),
        num_nodes=ld.strategy.launched_nodes(),
        max_steps=5,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Trouble(), checkpoint],
    )
    last = "ckpt/last.ckpt" if Path("ckpt/last.ckpt").exists() else None
    trainer.fit(model, ld.data.ByteDataModule(seq_len=256), ckpt_path=last)
    ranks, restarts = trainer.world_size, os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    # a single write, because the ranks share a pipe
    sys.stdout.write(f"ranks {ranks} restarts {restarts}\nloss {float(trainer.callback_metrics['train_loss'])}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
