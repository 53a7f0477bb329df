"""The set-up of a run for both strategies. `parallelize` lists the steps in order; other functions implement them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from lightning_dilated._compat import lightning as compat
from lightning_dilated._compat.torch import map_tensors
from lightning_dilated._device import leave_room
from lightning_dilated.checkpoint.state import refuse_one_file
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.sequence.group import SequenceGroup
from lightning_dilated.sequence.shard import check_exchange_memory
from lightning_dilated.strategy import checks
from lightning_dilated.strategy.layout import declared_length, layout_for
from lightning_dilated.strategy.loader import Loaders, keep_order
from lightning_dilated.strategy.mesh import nccl_options, run_seed
from lightning_dilated.strategy.preemption import Preemption
from lightning_dilated.strategy.refusals import refuse_callbacks, refuse_mixing
from lightning_dilated.strategy.replicas import Replicas

if TYPE_CHECKING:
    from lightning_dilated.strategy.sequence_strategy import SequenceStrategy

Hook = Literal["setup_environment", "setup", "configure_ddp", "process_dataloader", "training_step"]


def parallelize(strategy: SequenceStrategy, hook: Hook, lightning: Callable[..., Any], *args: Any) -> Any:
    """Run the set-up steps that belong to one of Lightning's hooks; a fit calls the hooks in the order of the cases.

    `Trainer(...)` has already checked sizes, before further processes started (`SequenceStrategy._configure_launcher`).

    Args:
        strategy: RingDilatedStrategy (DDP) or RingDilatedFSDPStrategy.
        hook: the name of the strategy's hook that calls this function.
        lightning: the same hook of Lightning's base class.
        args: the arguments that Lightning passed to the hook.

    Returns:
        The result of the hook.
    """
    module, fsdp = strategy.lightning_module, strategy.shards_parameters
    trainer = module.trainer
    match hook, args:
        case "setup_environment", ():  # in every fit, validate, test and predict; the module has no layers yet
            refuse_callbacks(trainer, type(strategy).__name__, strategy.sizes, fsdp)
            lightning()  # processes join the group; with cpu_offload they also connect over gloo (`join_host`)
            checks.compare_settings(checks.settings_of, module, {"class": type(strategy), **strategy._options.compared})
            strategy._seed = run_seed(strategy)
            make_groups(strategy)  # the mesh (data, ring, head), the sequence group, and groups over regions
            strategy._preemption = Preemption(trainer, strategy._options.rank_timeout, strategy._region_group)
            keep_order(trainer)
            strategy._loaders = Loaders(strategy.sequence.place, strategy.data_rank)
            strategy._why_unshared = {}

        # Lightning calls `configure_model` here: the module builds its layers, and `compile_blocks` compiles each on its
        # first run. Recomputation and offload of activations are set after "setup" (`ActivationRecompute.on_fit_start`):
        # they act in a layer's forward, inside FSDP's gathering and DDP's hooks.

        case "setup", (_,):
            if strategy.sequence.ranks > 1:
                refuse_mixing(module, tuple(strategy._options.allow or ()))
            checks.compare_settings(checks.parameters_of, module)
            if not fsdp:
                lightning(trainer)  # moves the module, wraps it (next case), makes the optimizers
                checks.compare_settings(checks.optimizers_of, strategy)
                if strategy._regions is not None:
                    strategy._regions.start()
                strategy._replicas = make_replicas(strategy)
                return None
            with strategy.run_groups.making():
                shard_parameters(module, strategy.device_mesh, policy_for(strategy._offload, strategy.root_device))
            place_parameters(module, strategy.root_device, strategy._offload is not None)
            with counts_as_configured(module):
                lightning(trainer)  # moves unsharded tensors, makes the optimizers
            checks.compare_settings(checks.optimizers_of, strategy)
            check_optimizers(strategy)

        case "configure_ddp", ():  # in a fit
            if strategy._regions is not None:
                strategy._regions.copy_first_region(module)
            # a single rank needs neither the wrapper nor DDP's second copy of the gradients
            if strategy.sizes.region_size == 1:
                return None
            with strategy.run_groups.making():
                set_gradient_options(strategy)
            lightning()  # wraps the module in DDP
            # otherwise DDP would move all inputs to the GPU, including the tokens that a stream keeps on the host
            strategy.model.device_ids = None

        # here Lightning loads a checkpoint for FSDP; for DDP it does so before "setup"

        case "process_dataloader", (dataloader,):  # Lightning passed `distributed_sampler_kwargs` to the sampler
            return shard_loader(strategy, lightning(dataloader))

        case "training_step", (batch,):  # before the first step of a fit
            if strategy._global_batch is not None:
                strategy._global_batch.check_first_step(trainer)
            strategy._check_first_batch(batch)
            checks.compare_training(trainer, strategy.sizes, fsdp)
            leave_room(strategy.root_device)  # called after NCCL's communicators have allocated their memory
    return None


# -- process groups ----------------------------------------------------------------------------------------------------
def make_groups(strategy: SequenceStrategy) -> None:
    """Make the mesh and the sequence group of a run, and pass the mesh to the module.

    If parameters are still sharded over an earlier run's mesh, use that mesh.
    """
    sizes, timeout = strategy.sizes, strategy._options.rank_timeout
    per_node = strategy._options.ranks_per_node or (strategy.num_processes if strategy.num_nodes > 1 else None)
    per_node = per_node if per_node is None else min(per_node, sizes.sequence_size)
    layout = chosen_layout(strategy, per_node)
    stream = chunk_of(strategy.lightning_module.trainer, layout)
    with strategy.run_groups.making():
        strategy._make_regions()
        if strategy._mesh is None:
            strategy._mesh = sizes.make(strategy.root_device.type)
        ranks = sizes.sequence_group(strategy._mesh, timeout)
    strategy._sequence = SequenceGroup(
        ranks,
        stream=stream,
        ranks_per_node=per_node,
        loss_group=strategy._region_group or dist.group.WORLD,
        timeout=timeout,
        links=strategy._options.speeds,
        **{**strategy._options.exchange_settings, "layout": layout},
    )
    compat.set_device_mesh(strategy.lightning_module, strategy._mesh)


def chosen_layout(strategy: SequenceStrategy, per_node: int | None) -> str:
    """Return the strategy's layout; if it is "auto", all ranks take the first rank's choice, which is logged."""
    options, module, ranks = strategy._options, strategy.lightning_module, strategy.sizes.sequence_size
    if options.layout != "auto":
        return options.layout
    tokens = declared_length(module, getattr(module.trainer, "datamodule", None))
    prices = {
        "head_size": strategy.sizes.head_size,
        "ranks_per_node": per_node,
        "links": options.speeds,
        "exchange_memory": check_exchange_memory(options.exchange_memory_gib),
    }
    chunk = next(iter(chunks_of(module.trainer)), None)
    layout = strategy.broadcast(layout_for(module, tokens, ranks, options.exchange, chunk, prices))
    if layout != "contiguous":
        rank_zero_info(f"layout='auto' is {layout!r}: it costs less for {tokens:,} tokens on {ranks} ranks.")
    return layout


def chunks_of(trainer: pl.Trainer) -> list[int]:
    """Return the chunk length, in tokens, of each callback that streams."""
    settings = (getattr(callback, "settings", None) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    return [x.stream for x in settings if isinstance(x, MemorySettings) and x.stream is not None]


def chunk_of(trainer: pl.Trainer, layout: str) -> int | None:
    """Return the length, in tokens, of the chunks that ranks share in the chunked layout; None for other layouts.

    Raises:
        ValueError: if no callback sets the length of chunks.
    """
    if layout != "chunked":
        return None
    sizes = chunks_of(trainer)
    if not sizes:
        raise ValueError(
            "layout='chunked' shares every chunk of a stream among ranks, but no callback streams: add "
            "ActivationRecompute(stream=TOKENS), or set layout='auto' (the default)."
        )
    return sizes[0]


def with_host(backend: str, device: torch.device) -> str:
    """Add gloo to the backend nccl, for sums of host tensors over ranks, such as the gradient norms for clipping."""
    return f"cpu:gloo,{device.type}:{backend}" if backend == "nccl" else backend


def join_host(device: torch.device, existed: bool) -> None:
    """Check that a run with cpu_offload can sum tensors on the host; warn if the optimizer would use one thread.

    Args:
        device: this rank's device.
        existed: True if the process group existed before the strategy's set-up.

    Raises:
        ValueError: for a group that cannot sum tensors on the host.
    """
    backend = dist.get_backend_config()
    if "cpu:" not in backend:
        raise ValueError(
            f"cpu_offload adds up gradients' norms on the host, but the process group's backend is {backend!r}. Leave "
            f"process_group_backend out, or make the group with init_process_group('cpu:gloo,{device.type}:nccl')."
        )
    if not existed and "nccl" in backend:
        compat.destroy_process_group_at_exit()
    cores = os.cpu_count() or 1
    if device.type != "cpu" and torch.get_num_threads() == 1 < cores:
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        rank_zero_warn(
            f"cpu_offload: the optimizer runs on the host, in 1 thread of {cores} (torchrun sets OMP_NUM_THREADS=1 "
            f"unless you set it). Set OMP_NUM_THREADS={max(1, cores // local_ranks)}."
        )


# -- DDP ---------------------------------------------------------------------------------------------------------------
#: a bucket size, in MiB, that is large enough for all gradients together
ONE_BUCKET = 2**20


def lasting_groups(module: nn.Module) -> set[str]:
    """Return the names of the process groups that parameters stay sharded over."""
    meshes = {p.device_mesh for p in module.parameters() if isinstance(p, DTensor)}
    return {group.group_name for mesh in meshes for group in mesh.get_all_groups()}


def set_gradient_options(strategy: Any) -> None:
    """Let DDP sum gradients within a region. On GPUs use a separate communicator, and on one node a single bucket.

    A single bucket is faster: each sum that overlaps with the backward waits for the slowest rank, and its kernels take
    multiprocessors from the backward (benchmarks/results/2026-11-22_h200_scaling.md).
    """
    options = compat.ddp_options(strategy)
    if compat.process_group_backend(strategy) != "nccl":
        if strategy._region_group is not None:
            options["process_group"] = strategy._region_group
        return
    overlapped = "bucket_cap_mb" in options or strategy.num_nodes > 1
    if not overlapped:
        options["bucket_cap_mb"] = ONE_BUCKET
    options["process_group"] = gradient_group(strategy, overlapped)


def forget_gradient_options(strategy: Any) -> None:
    """Remove the process group of gradients, which belongs to the run that ends."""
    if not strategy.shards_parameters:
        compat.ddp_options(strategy).pop("process_group", None)


def gradient_group(strategy: Any, overlapped: bool) -> dist.ProcessGroup:
    """Make an NCCL group of all ranks of this rank's region; every rank must call this."""
    return strategy.sizes.new_group("region", strategy._options.rank_timeout, "nccl", nccl_options(overlapped))


def make_replicas(strategy: SequenceStrategy) -> Replicas | None:
    """Make the `Replicas` that compare the ranks of a region in a fit; None in other runs or for a single rank."""
    if not strategy._fitting or strategy.sizes.region_size == 1:
        return None
    return Replicas(
        strategy.lightning_module, strategy._options.check_replicas, strategy._region_group or dist.group.WORLD
    )


# -- FSDP --------------------------------------------------------------------------------------------------------------
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def shard_parameters(module: pl.LightningModule, mesh: DeviceMesh, offload: CPUOffloadPolicy | None = None) -> None:
    """Shard the layers of every ModuleList, then the remaining parameters, over all ranks, unless already sharded.

    Args:
        offload: policy that keeps the shards on the host.

    Raises:
        ValueError: if only some parameters are already sharded, because the others would silently differ between ranks.
    """
    if isinstance(module, FSDPModule):
        module.reshard()  # evaluation leaves the root's parameters gathered
        return
    plain = [name for name, p in module.named_parameters() if not isinstance(p, DTensor)]
    sharded = any(isinstance(p, DTensor) for p in module.parameters())
    if sharded and plain:
        raise ValueError(
            f"configure_model sharded some parameters, but not {plain[:5]}: every rank would train these on its own. "
            "Call fully_shard(self, mesh=...) last, for the root, too; or leave all of it to the strategy."
        )
    if sharded:
        return
    # the module keeps its mesh: a part of `mesh` would keep the groups of this run alive, so make a new one
    ranks = init_device_mesh(mesh.device_type, (mesh.size(),), mesh_dim_names=("fsdp",))
    options = {"mesh": ranks, "offload_policy": offload or OffloadPolicy()}
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    for layer in (layer for layers in lists for layer in layers):
        if any(True for _ in layer.parameters()):
            for decay in _wider(layer):
                fully_shard(decay, **options)
            fully_shard(layer, **options)
    fully_shard(module, **options)
    for name in STEPS:  # Lightning calls these methods instead of forward
        register_fsdp_forward_method(module, name)


def _wider(layer: nn.Module) -> list[nn.Module]:
    """Return a 16-bit layer's fp32 modules, which need a `fully_shard` call of their own: a call takes one dtype."""
    dtypes = {p.dtype for p in layer.parameters()}
    return [m for m in layer.modules() if getattr(m, "keeps_fp32", False)] if len(dtypes) > 1 else []


@contextmanager
def counts_as_configured(module: pl.LightningModule) -> Iterator[None]:
    """Give a module without `configure_model` an empty one while the context is open, for ModelParallelStrategy."""
    if is_overridden("configure_model", module):
        yield
        return
    module.configure_model = lambda: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.configure_model


def check_optimizers(strategy: Any) -> None:
    """Refuse optimizers that do not support the strategy's options; with cpu_offload, move states to the host."""
    if compat.writes_one_file(strategy):
        refuse_one_file(strategy.optimizers, "save_distributed_checkpoint=False writes one file")
    if strategy._offload is not None:
        keep_optimizers(strategy.optimizers)


# -- cpu_offload -------------------------------------------------------------------------------------------------------
#: packages with optimizers that run only on GPUs
ON_GPUS = ("apex", "bitsandbytes", "transformer_engine")


def check_offload(value: bool | CPUOffloadPolicy) -> CPUOffloadPolicy | None:
    """Return torch's policy for a strategy's `cpu_offload`; None for False.

    Raises:
        TypeError: if the value is not True, False or a policy.
    """
    if isinstance(value, CPUOffloadPolicy):
        return value
    if not isinstance(value, bool):
        raise TypeError(
            f"cpu_offload must be True, False or torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=...), got {value!r}."
        )
    return CPUOffloadPolicy() if value else None


def policy_for(policy: CPUOffloadPolicy | None, device: torch.device) -> CPUOffloadPolicy | None:
    """Return the policy for a device; for a CPU turn page-locked memory off, as it only speeds up copies to GPUs."""
    return policy if policy is None or device.type != "cpu" else replace(policy, pin_memory=False)


def place_parameters(module: nn.Module, device: torch.device, offload: bool) -> None:
    """Check the devices of sharded parameters; with `offload`, first allocate meta parameters on the host.

    Raises:
        ValueError: naming parameters that were sharded with other settings.
    """
    if offload:
        compat.materialize(module, torch.device("cpu"))
    if device.type == "cpu":
        return
    misplaced = [name for name, p in module.named_parameters() if (p.device.type == "cpu") is not offload]
    if not misplaced:
        return
    names = f"{', '.join(misplaced[:3])}{' and others' if len(misplaced) > 3 else ''}"
    if offload:
        raise ValueError(
            f"cpu_offload keeps parameters on the host, but {names} were sharded without it, by configure_model or by an "
            "earlier Trainer. Call fully_shard(..., offload_policy=CPUOffloadPolicy()) in configure_model, leave all "
            "sharding to the strategy, or create a new module."
        )
    raise ValueError(
        f"{names} were sharded with a CPUOffloadPolicy, by configure_model or by an earlier Trainer: set the strategy's "
        "cpu_offload=True, or create a new module."
    )


def unsharded_to_device(module: nn.Module, device: torch.device) -> None:
    """Move all tensors except sharded parameters (buffers, metrics, ...) to the device, and set `module.device`."""
    compat.set_module_device(module, device)
    map_tensors(module, lambda x: x if isinstance(x, DTensor) else x.to(device))


def keep_optimizers(optimizers: Sequence[Any]) -> None:
    """Move optimizer states to the host; refuse optimizers that cannot step there.

    Raises:
        ValueError: naming the optimizer and an alternative.
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
    compat.optimizers_to_device(optimizers, torch.device("cpu"))


# -- loaders -----------------------------------------------------------------------------------------------------------
def shard_loader(strategy: SequenceStrategy, loader: Any) -> Any:
    """Return a loader that yields only this rank's tokens, after all ranks have compared their loaders.

    Raises:
        ValueError: on every rank, if the ranks of a sequence read different data, or if ranks have different numbers of
            batches in a stage where each step needs all ranks.
        RuntimeError: outside of a run.
    """
    stage, trainer = strategy._stage(), strategy.lightning_module.trainer

    def shard() -> Any:
        if stage == "train" and strategy._global_batch is not None:
            strategy._global_batch.set_accumulation(trainer, loader, strategy.sizes.data)
        return strategy._loaders.shard(loader, strategy._spec())

    sharded, unequal = checks.compare_loader(loader, shard, trainer, stage, strategy.sizes, strategy.shards_parameters)
    if unequal:
        strategy._why_unshared[stage] = unequal
    return sharded
