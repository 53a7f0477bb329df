"""Parameters, gradients and optimizer states in memory of the host: what torch's CPU offload asks of a strategy."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

#: packages whose optimizers are kernels for GPUs only
ON_GPUS = ("apex", "bitsandbytes", "transformer_engine")


def check_offload(asked: bool | CPUOffloadPolicy) -> CPUOffloadPolicy | None:
    """torch's policy for a strategy's `cpu_offload`; None for False.

    Raises:
        TypeError: for anything but True, False and a policy.
    """
    if isinstance(asked, CPUOffloadPolicy):
        return asked
    if not isinstance(asked, bool):
        raise TypeError(
            f"cpu_offload must be True, False or torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=...), got {asked!r}."
        )
    return CPUOffloadPolicy() if asked else None


def fitting(policy: CPUOffloadPolicy | None, device: torch.device) -> CPUOffloadPolicy | None:
    """The policy for ranks on a device: only copies to a GPU gain from page-locked memory, and a CPU alone has none."""
    return policy if policy is None or device.type != "cpu" else replace(policy, pin_memory=False)


# -- process groups ----------------------------------------------------------------------------------------------------
def with_host(backend: str, device: torch.device) -> str:
    """The backend, and gloo for tensors on the host, such as the norms of gradients that clipping adds up over ranks."""
    return f"cpu:gloo,{device.type}:{backend}" if backend == "nccl" else backend


def join_host(device: torch.device, found: bool) -> None:
    """To be called when the ranks have found each other.

    Args:
        device: of this rank.
        found: whether somebody else had made the process group.

    Raises:
        ValueError: for one that cannot add up tensors on the host.
    """
    told = dist.get_backend_config()
    if "cpu:" not in told:
        raise ValueError(
            f"cpu_offload adds up gradients' norms on the host, but the process group's backend is {told!r}. Leave "
            f"process_group_backend out, or make the group with init_process_group('cpu:gloo,{device.type}:nccl')."
        )
    if not found and "nccl" in told:  # Lightning does so where NCCL is all there is
        atexit.register(_destroy_dist_connection)
    cores = os.cpu_count() or 1
    if device.type != "cpu" and torch.get_num_threads() == 1 < cores:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        rank_zero_warn(
            f"cpu_offload: the optimizer runs on the host, in 1 thread of {cores} (torchrun sets OMP_NUM_THREADS=1 where it "
            f"is not set). Set OMP_NUM_THREADS={max(1, cores // here)}."
        )


# -- modules and optimizers --------------------------------------------------------------------------------------------
def place(module: nn.Module, device: torch.device, offload: bool) -> None:
    """Give dealt parameters without memory some of the host's, where `cpu_offload` has them there (Lightning would take the
    GPU's); and see that all of them are where they belong.

    Raises:
        ValueError: naming some that somebody else sharded otherwise.
    """
    if offload:
        _materialize_distributed_module(module, torch.device("cpu"))
    if device.type == "cpu":
        return
    wrong = [name for name, p in module.named_parameters() if (p.device.type == "cpu") is not offload]
    if not wrong:
        return
    others = f"{', '.join(wrong[:3])}{' and others' if len(wrong) > 3 else ''}"
    if offload:
        raise ValueError(
            f"cpu_offload keeps parameters on the host, but {others} were sharded without it, by configure_model or by an "
            "earlier Trainer. Call fully_shard(..., offload_policy=CPUOffloadPolicy()) in configure_model, leave all "
            "sharding to the strategy, or make the module anew."
        )
    raise ValueError(
        f"{others} were sharded with a CPUOffloadPolicy, by configure_model or by an earlier Trainer: set the strategy's "
        "cpu_offload=True, or make the module anew."
    )


def rest_to_device(module: nn.Module, device: torch.device) -> None:
    """Move all to a device but dealt parameters: buffers and metrics; and let the module say that it is there."""
    _update_properties(module, device=device)
    module._apply(lambda x: x if isinstance(x, DTensor) else x.to(device))


def keep_optimizers(optimizers: Sequence[Any]) -> None:
    """Bring back to the host what states Lightning moved; refuse optimizers that cannot step there.

    Raises:
        ValueError: naming the optimizer, and what to take instead.
    """
    for optimizer in optimizers:
        name, package = type(optimizer).__name__, type(optimizer).__module__.split(".")[0]
        if any(group.get("capturable") for group in optimizer.param_groups):
            why = f"{name}(capturable=True) steps on tensors of a GPU only: leave capturable out"
        elif package in ON_GPUS:
            why = f"{package}'s {name} steps on tensors of a GPU only: take torch.optim.AdamW(fused=True)"
        else:
            continue
        raise ValueError(f"cpu_offload runs the optimizer on the host, and {why}, or set cpu_offload=False.")
    _optimizers_to_device(optimizers, torch.device("cpu"))


def on_gpu(tensor: Any, device: torch.device) -> Any:
    """A tensor on the ranks' device, copied there if need be; anything else as it is.

    On GPUs NCCL then reduces what lies on the host, as it does without `cpu_offload`, and not gloo. On CPUs nothing moves.
    """
    return tensor.to(device) if isinstance(tensor, Tensor) else tensor
