"""A training script in which rank 1 may stop, with NCCL's way to exit: stopped_job.py stop|catch|nothing SECONDS [fsdp].

Lightning destroys NCCL's groups at exit. This blocks if a rank stopped. SECONDS is the strategy's timeout.
"""

import atexit
import ctypes
import os
import signal
import sys
import traceback

import lightning.pytorch as pl
import torch.distributed as dist

import lightning_dilated as ld
from lightning_dilated._compat.lightning import destroy_process_group_at_exit

HOW, SECONDS = sys.argv[1], float(sys.argv[2])
STRATEGY = ld.RingDilatedFSDPStrategy if "fsdp" in sys.argv else ld.RingDilatedStrategy
destroy = dist.destroy_process_group


def destroy_as_nccl(group=None):
    """Destroy a group, or block as `ncclCommDestroy` does if a rank stopped."""
    sys.stderr.write("destroying\n")
    if HOW != "nothing":
        ctypes.PyDLL(None).sleep(10**6)  # PyDLL keeps the GIL
    destroy(group)


class Stop(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if HOW != "nothing" and trainer.global_rank == 1 and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGSTOP)


def main():
    dist.destroy_process_group = destroy_as_nccl
    destroy_process_group_at_exit()  # before the run, as Lightning does for NCCL
    model = ld.LongNetLM(ld.DilatedPattern.longnet([16, 64], [1, 2]), dim=16, depth=1)
    trainer = pl.Trainer(
        strategy=STRATEGY(timeout=SECONDS),
        accelerator="cpu",
        devices=2,
        num_nodes=ld.strategy.launched_nodes(),
        max_steps=3,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Stop()],
    )
    try:
        trainer.fit(model, ld.data.ByteDataModule(seq_len=128))
    except Exception as error:
        if HOW == "stop":
            raise
        del model, error  # parameters of FSDP may then destroy their groups
    print("the script continued")  # stays in the buffer until the exit


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
    if dist.is_torchelastic_launched():  # a fork of the tests does not call these functions
        atexit._run_exitfuncs()
