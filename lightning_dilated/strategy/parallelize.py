"""The order in which a run is set up, for both strategies: `parallelize` names every step, and what follows defines them."""

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

from lightning_dilated._compat.lightning import (
    ddp_options,
    destroy_process_group_at_exit,
    materialize,
    optimizers_to_device,
    process_group_backend,
    set_device_mesh,
    set_module_device,
    writes_one_file,
)
from lightning_dilated._compat.torch import map_tensors
from lightning_dilated._device import leave_room
from lightning_dilated.checkpoint.state import refuse_one_file
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.sequence.group import SequenceGroup
from lightning_dilated.sequence.shard import check_exchange_memory
from lightning_dilated.strategy.checks import (
    compare_loader,
    compare_settings,
    compare_training,
    optimizers_of,
    parameters_of,
    settings_of,
)
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
    """Set up a run: the steps of each of Lightning's hooks, in the order in which a fit calls the hooks.

    Sizes were checked in `Trainer(...)`, before further processes started (`SequenceStrategy._configure_launcher`).

    Args:
        strategy: RingDilatedStrategy (DDP) or RingDilatedFSDPStrategy.
        hook: the hook of the strategy that calls this.
        lightning: the same hook of the class that the strategy inherits from.
        args: what Lightning passes to the hook.

    Returns:
        What the hook returns.
    """
    module, fsdp = strategy.lightning_module, strategy.shards_parameters
    trainer = module.trainer
    match hook, args:
        case "setup_environment", ():  # in every fit, validate, test and predict; the module has no layers yet
            refuse_callbacks(trainer, type(strategy).__name__, strategy.sizes, fsdp)
            lightning()  # processes find each other; with cpu_offload, also over gloo (`join_host`)
            compare_settings(settings_of, module, {"class": type(strategy), **strategy._options.compared})
            strategy._seed = run_seed(strategy)
            make_groups(strategy)  # the mesh (data, ring, head), the sequence group, and groups over regions
            strategy._preemption = Preemption(trainer, strategy._options.rank_timeout, strategy._region_group)
            keep_order(trainer)
            strategy._loaders = Loaders(strategy.sequence.place, strategy.data_rank)
            strategy._why_unshared = {}

        # Lightning calls `configure_model` here: the module builds its layers, and `compile_blocks` compiles each when it
        # is first run. Recomputation and offload of activations are set after "setup" (`ActivationRecompute.on_fit_start`):
        # they act within a layer's forward, and so inside of what FSDP gathers and DDP sees.

        case "setup", (_,):
            if strategy.sequence.ranks > 1:
                refuse_mixing(module, tuple(strategy._options.allow or ()))
            compare_settings(parameters_of, module)
            if not fsdp:
                lightning(trainer)  # moves the module, wraps it (the next case), makes the optimizers
                compare_settings(optimizers_of, strategy)
                if strategy._regions is not None:
                    strategy._regions.start()
                strategy._replicas = make_replicas(strategy)
                return None
            with strategy.run_groups.making():
                shard_parameters(module, strategy.device_mesh, policy_for(strategy._offload, strategy.root_device))
            place_parameters(module, strategy.root_device, strategy._offload is not None)
            with counts_as_configured(module):
                lightning(trainer)  # moves what is not sharded, makes the optimizers
            compare_settings(optimizers_of, strategy)
            check_optimizers(strategy)

        case "configure_ddp", ():  # in a fit
            if strategy._regions is not None:
                strategy._regions.copy_first_region(module)
            # without another rank to average with, no wrapper, and no second copy of the gradients
            if strategy.sizes.region_size == 1:
                return None
            with strategy.run_groups.making():
                set_gradient_options(strategy)
            lightning()  # wraps the module in DDP
            # else DDP would send all that it is called with to the GPU, also a stream's tokens, which wait on the host
            strategy.model.device_ids = None

        # Lightning loads a checkpoint: of DDP before `setup`, of FSDP here

        case "process_dataloader", (dataloader,):  # the sampler has the numbers of `distributed_sampler_kwargs`
            return shard_loader(strategy, lightning(dataloader))

        case "training_step", (batch,):  # before the first step of a fit
            if strategy._global_batch is not None:
                strategy._global_batch.check_first_step(trainer)
            strategy._check_first_batch(batch)
            compare_training(trainer, strategy.sizes, fsdp)
            leave_room(strategy.root_device)  # of what NCCL's communicators have left
    return None


# -- process groups ----------------------------------------------------------------------------------------------------
def make_groups(strategy: SequenceStrategy) -> None:
    """The mesh and the sequence group of a run; the module gets the mesh.

    The mesh is an earlier run's where parameters are still sharded over it.
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
    set_device_mesh(strategy.lightning_module, strategy._mesh)


def chosen_layout(strategy: SequenceStrategy, per_node: int | None) -> str:
    """Return the strategy's layout; where it is "auto", all ranks take the first rank's choice, and the log says it."""
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
    """Return the tokens of a chunk of each callback that streams."""
    settings = (getattr(callback, "settings", None) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    return [x.stream for x in settings if isinstance(x, MemorySettings) and x.stream is not None]


def chunk_of(trainer: pl.Trainer, layout: str) -> int | None:
    """The tokens of a chunk that ranks share in the chunked layout; None in others.

    Raises:
        ValueError: where no callback says how long chunks are.
    """
    if layout != "chunked":
        return None
    sizes = chunks_of(trainer)
    if not sizes:
        raise ValueError(
            "layout='chunked' has ranks share every chunk of a stream, and no callback streams: add "
            "ActivationRecompute(stream=TOKENS), or set layout='auto' (the default)."
        )
    return sizes[0]


def with_host(backend: str, device: torch.device) -> str:
    """The backend, and gloo for tensors on the host, such as the norms of gradients that clipping adds up over ranks."""
    return f"cpu:gloo,{device.type}:{backend}" if backend == "nccl" else backend


def join_host(device: torch.device, existed: bool) -> None:
    """Check the process group and the threads of a run with cpu_offload.

    Args:
        device: of this rank.
        existed: whether the process group was there before the strategy's set-up.

    Raises:
        ValueError: for one that cannot add up tensors on the host.
    """
    backend = dist.get_backend_config()
    if "cpu:" not in backend:
        raise ValueError(
            f"cpu_offload adds up gradients' norms on the host, but the process group's backend is {backend!r}. Leave "
            f"process_group_backend out, or make the group with init_process_group('cpu:gloo,{device.type}:nccl')."
        )
    if not existed and "nccl" in backend:
        destroy_process_group_at_exit()
    cores = os.cpu_count() or 1
    if device.type != "cpu" and torch.get_num_threads() == 1 < cores:
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        rank_zero_warn(
            f"cpu_offload: the optimizer runs on the host, in 1 thread of {cores} (torchrun sets OMP_NUM_THREADS=1 where it "
            f"is not set). Set OMP_NUM_THREADS={max(1, cores // local_ranks)}."
        )


# -- DDP ---------------------------------------------------------------------------------------------------------------
#: MiB of a bucket that takes all gradients
ONE_BUCKET = 2**20


def lasting_groups(module: nn.Module) -> set[str]:
    """Names of the process groups that parameters stay sharded over."""
    meshes = {p.device_mesh for p in module.parameters() if isinstance(p, DTensor)}
    return {group.group_name for mesh in meshes for group in mesh.get_all_groups()}


def set_gradient_options(strategy: Any) -> None:
    """Have DDP sum gradients within a region; on GPUs, give it a communicator of its own, and on one node a single bucket.

    Sums that overlap with the backward wait for the slowest rank again and again, in kernels that take multiprocessors from
    the backward (benchmarks/results/2026-11-22_h200_scaling.md).
    """
    options = ddp_options(strategy)
    if process_group_backend(strategy) != "nccl":
        if strategy._region_group is not None:
            options["process_group"] = strategy._region_group
        return
    overlapped = "bucket_cap_mb" in options or strategy.num_nodes > 1
    if not overlapped:
        options["bucket_cap_mb"] = ONE_BUCKET
    options["process_group"] = gradient_group(strategy, overlapped)


def forget_gradient_options(strategy: Any) -> None:
    """Leave the group of a run's gradients to that run."""
    if not strategy.shards_parameters:
        ddp_options(strategy).pop("process_group", None)


def gradient_group(strategy: Any, overlapped: bool) -> dist.ProcessGroup:
    """All ranks of this one's region, over NCCL; every rank has to call."""
    return strategy.sizes.new_group("region", strategy._options.rank_timeout, "nccl", nccl_options(overlapped))


def make_replicas(strategy: SequenceStrategy) -> Replicas | None:
    """Make the comparison of the parameters of a region's ranks in a fit; None if no other rank holds them."""
    if not strategy._fitting or strategy.sizes.region_size == 1:
        return None
    return Replicas(
        strategy.lightning_module, strategy._options.check_replicas, strategy._region_group or dist.group.WORLD
    )


# -- FSDP --------------------------------------------------------------------------------------------------------------
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def shard_parameters(module: pl.LightningModule, mesh: DeviceMesh, offload: CPUOffloadPolicy | None = None) -> None:
    """Shard the layers of every ModuleList, then the rest, over all ranks; a module that is sharded already is left alone.

    Args:
        offload: keeps the shards on the host.

    Raises:
        ValueError: if the module sharded some of its parameters and not all: the others would drift apart silently.
    """
    if isinstance(module, FSDPModule):
        module.reshard()  # evaluation leaves the root's parameters whole
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
    # not a part of `mesh`, which the module would hold, and with it the groups of a run
    ranks = init_device_mesh(mesh.device_type, (mesh.size(),), mesh_dim_names=("fsdp",))
    options = {"mesh": ranks, "offload_policy": offload or OffloadPolicy()}
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    for layer in (layer for layers in lists for layer in layers):
        if any(True for _ in layer.parameters()):
            for decay in _wider(layer):
                fully_shard(decay, **options)
            fully_shard(layer, **options)
    fully_shard(module, **options)
    for name in STEPS:  # Lightning calls these and not forward
        register_fsdp_forward_method(module, name)


def _wider(layer: nn.Module) -> list[nn.Module]:
    """Modules that keep fp32 where the layer is in 16 bits: `fully_shard` takes parameters of one dtype."""
    dtypes = {p.dtype for p in layer.parameters()}
    return [m for m in layer.modules() if getattr(m, "keeps_fp32", False)] if len(dtypes) > 1 else []


@contextmanager
def counts_as_configured(module: pl.LightningModule) -> Iterator[None]:
    """Within, a module without `configure_model` has one: ModelParallelStrategy asks for it, to shard parameters in."""
    own = is_overridden("configure_model", module)
    if not own:
        module.configure_model = lambda: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        if not own:
            del module.configure_model


def check_optimizers(strategy: Any) -> None:
    """Refuse optimizers whose states do not go with the strategy's options; with cpu_offload, states stay on the host."""
    if writes_one_file(strategy):
        refuse_one_file(strategy.optimizers, "save_distributed_checkpoint=False writes one file")
    if strategy._offload is not None:
        keep_optimizers(strategy.optimizers)


# -- cpu_offload -------------------------------------------------------------------------------------------------------
#: packages whose optimizers are kernels for GPUs only
ON_GPUS = ("apex", "bitsandbytes", "transformer_engine")


def check_offload(value: bool | CPUOffloadPolicy) -> CPUOffloadPolicy | None:
    """torch's policy for a strategy's `cpu_offload`; None for False.

    Raises:
        TypeError: for anything but True, False and a policy.
    """
    if isinstance(value, CPUOffloadPolicy):
        return value
    if not isinstance(value, bool):
        raise TypeError(
            f"cpu_offload must be True, False or torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=...), got {value!r}."
        )
    return CPUOffloadPolicy() if value else None


def policy_for(policy: CPUOffloadPolicy | None, device: torch.device) -> CPUOffloadPolicy | None:
    """The policy for ranks on a device: on CPUs without page-locked memory, which only copies to a GPU gain from."""
    return policy if policy is None or device.type != "cpu" else replace(policy, pin_memory=False)


def place_parameters(module: nn.Module, device: torch.device, offload: bool) -> None:
    """Allocate sharded meta parameters on the host with `cpu_offload` (Lightning would take the GPU), and check that all
    parameters are where they belong.

    Raises:
        ValueError: naming parameters that were sharded with other settings.
    """
    if offload:
        materialize(module, torch.device("cpu"))
    if device.type == "cpu":
        return
    wrong = [name for name, p in module.named_parameters() if (p.device.type == "cpu") is not offload]
    if not wrong:
        return
    names = f"{', '.join(wrong[:3])}{' and others' if len(wrong) > 3 else ''}"
    if offload:
        raise ValueError(
            f"cpu_offload keeps parameters on the host, but {names} were sharded without it, by configure_model or by an "
            "earlier Trainer. Call fully_shard(..., offload_policy=CPUOffloadPolicy()) in configure_model, leave all "
            "sharding to the strategy, or make the module anew."
        )
    raise ValueError(
        f"{names} were sharded with a CPUOffloadPolicy, by configure_model or by an earlier Trainer: set the strategy's "
        "cpu_offload=True, or make the module anew."
    )


def rest_to_device(module: nn.Module, device: torch.device) -> None:
    """Move everything but sharded parameters to a device, such as buffers and metrics; the module reports that device."""
    set_module_device(module, device)
    map_tensors(module, lambda x: x if isinstance(x, DTensor) else x.to(device))


def keep_optimizers(optimizers: Sequence[Any]) -> None:
    """Move states back to the host; refuse optimizers that cannot step there.

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
    optimizers_to_device(optimizers, torch.device("cpu"))


# -- loaders -----------------------------------------------------------------------------------------------------------
def shard_loader(strategy: SequenceStrategy, loader: Any) -> Any:
    """The loader with this rank's tokens only, after all ranks compared what they read.

    Raises:
        ValueError: on every rank, if the ranks of a sequence read different data, or ranks have different numbers of batches
            where each step takes all of them.
        RuntimeError: outside of a run.
    """
    stage, trainer = strategy._stage(), strategy.lightning_module.trainer

    def shard() -> Any:
        if stage == "train" and strategy._global_batch is not None:
            strategy._global_batch.set_accumulation(trainer, loader, strategy.sizes.data)
        return strategy._loaders.shard(loader, strategy._spec())

    sharded, unequal = compare_loader(loader, shard, trainer, stage, strategy.sizes, strategy.shards_parameters)
    if unequal:
        strategy._why_unshared[stage] = unequal
    return sharded
