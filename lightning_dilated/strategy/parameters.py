"""Parameters sharded over all ranks with torch's fully_shard, and the names of their precisions."""

from __future__ import annotations

from typing import Literal

import lightning.pytorch as pl
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

Exchange = Literal["auto", "gather", "ring", "butterfly", "switch", "hierarchical_gather", "hierarchical_butterfly"]
Layout = Literal["contiguous", "zigzag", "strided"]


STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def shard_parameters(module: pl.LightningModule, mesh: DeviceMesh, offload: CPUOffloadPolicy | None = None) -> None:
    """Shard the layers of every ModuleList, then what is left, over all ranks; once, and not what is sharded already.

    Args:
        offload: keeps the parts on the host.

    Raises:
        ValueError: if the module sharded some of its parameters itself and not all: the others would drift apart silently.
    """
    if isinstance(module, FSDPModule):
        module.reshard()  # evaluation leaves the root's parameters whole
        return
    dealt = [isinstance(p, DTensor) for p in module.parameters()]
    if any(dealt):
        if not all(dealt):
            names = [name for name, p in module.named_parameters() if not isinstance(p, DTensor)]
            raise ValueError(
                f"configure_model sharded some parameters, but not {names[:5]}: every rank would train these on its own. "
                "Call fully_shard(self, mesh=...) last, for the root, too; or leave all of it to the strategy."
            )
        return
    how = {"mesh": mesh._flatten("fsdp"), "offload_policy": offload or OffloadPolicy()}
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    for layer in (layer for found in lists for layer in found):
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **how)
    fully_shard(module, **how)
    for name in STEPS:  # Lightning calls these and not forward
        register_fsdp_forward_method(module, name)
