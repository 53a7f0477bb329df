"""A training script on two ranks of ring_dilated_fsdp that reports where tensors are: offload_job.py SETTINGS, as JSON.

SETTINGS: accelerator, precision, strategy and model (options), fused (AdamW), steps, memory (options of
ActivationRecompute), resume and save (paths).
"""

import functools
import json
import sys

import lightning.pytorch as pl
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

import lightning_dilated as ld
from lightning_dilated.callbacks import ActivationRecompute


def local(x):
    """Return this rank's part of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def places(tensors):
    """Return device types of the tensors, and "pinned" if all memory on the host is pinned."""
    parts = [local(t) for t in tensors]
    kinds = sorted({t.device.type for t in parts})
    return [
        *kinds,
        *(["pinned"] if torch.cuda.is_available() and all(t.is_pinned() for t in parts if t.numel()) else []),
    ]


class Look(pl.Callback):
    """Records losses, gradient norms before clipping, and the devices of parameters, gradients and optimizer states."""

    def __init__(self):
        self.told = {"losses": [], "norms": []}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        grads = [p.grad for p in pl_module.parameters()]
        self.told["gradients"] = places(grads)
        self.told["norms"].append(float(torch.nn.utils.get_total_norm(grads).full_tensor()))
        weight = local(next(pl_module.parameters()).detach())
        pl_module.log("size", weight.norm(), sync_dist=True)  # logs the mean over ranks of a tensor on the host

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.told["losses"].append(float(trainer.callback_metrics["train_loss"]))
        self.told["parameters"] = places(pl_module.parameters())
        states = [t for s in trainer.optimizers[0].state.values() for name, t in s.items() if name != "step"]
        self.told["states"], self.told["module"] = places(states), pl_module.device.type


def main(settings):
    pl.seed_everything(0)
    pattern = ld.DilatedPattern.longnet([256, 1024, 4096], [1, 2, 4])
    adamw = functools.partial(torch.optim.AdamW, lr=3e-4, fused=settings["fused"])
    model = ld.LongNetLM(pattern, optimizer=adamw, **{"dim": 64, "depth": 3, "num_heads": 4, **settings["model"]})
    look, memory = Look(), settings["memory"]
    strategy_options = settings["strategy"]
    if isinstance(strategy_options.get("cpu_offload"), dict):
        strategy_options["cpu_offload"] = CPUOffloadPolicy(**strategy_options["cpu_offload"])
    trainer = pl.Trainer(
        strategy=ld.RingDilatedFSDPStrategy(timeout=60, **strategy_options),
        accelerator=settings["accelerator"],
        devices=2,
        precision=settings["precision"],
        max_steps=settings["steps"],
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[look, *([] if memory is None else [ActivationRecompute(**memory)])],
    )
    data = ld.data.ByteDataModule(seq_len=4096, batch_size=2)
    trainer.fit(model, data, ckpt_path=settings["resume"])
    if settings["save"]:
        trainer.save_checkpoint(settings["save"])
    trainer.validate(model, data, verbose=False)
    if trainer.is_global_zero:
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        report = {**look.told, "val_loss": float(trainer.callback_metrics["val_loss"]), "peak": peak}
        print("told", json.dumps(report), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
