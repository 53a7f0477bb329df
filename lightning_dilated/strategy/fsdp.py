"""Parameters sharded over all ranks with torch's fully_shard, and the names of their precisions.

Parameters, gradients and optimizer states in memory of the host: what torch's CPU offload asks of a strategy.

ring_dilated_fsdp: every sequence on several ranks, and the parameters dealt to all of them.
"""

from __future__ import annotations

import atexit
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_dilated.checkpoint.folder import checked, load_sharded
from lightning_dilated.checkpoint.ranks import Peers
from lightning_dilated.checkpoint.reader import read_metadata
from lightning_dilated.checkpoint.state import refuse_one_file, refuse_whole
from lightning_dilated.strategy.sequence_strategy import SequenceStrategy

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


class RingDilatedFSDPStrategy(SequenceStrategy, ModelParallelStrategy):
    """Every sequence on several ranks, and the parameters, gradients and optimizer states dealt to all of them (FSDP2).

    The layers in each `nn.ModuleList` of the module are sharded one by one, then the rest; a module that shards itself in
    `configure_model` (with `self.device_mesh`) is left alone. Checkpoints are folders that any number of ranks can load.

    Args:
        sequence_size, head_size, exchange, layout, ranks_per_node, timeout, allow, process_group_backend, check_first_batch,
            links: as in `RingDilatedStrategy`.
        save_distributed_checkpoint: False assembles one file on rank 0; not with torchao's optimizers of 4 or 8 bits.
        cpu_offload: True keeps each rank's part of parameters, gradients and optimizer states in page-locked memory of the
            host, where the optimizer runs too (the fast one there is `AdamW(fused=True)`); a GPU holds the layer at work.
            Before they are dealt out, each rank makes the whole model there.
            Accumulated gradients are dealt out after every micro-batch, or they would wait whole on the GPU. A
            `CPUOffloadPolicy(pin_memory=False)` does without page-locked memory.

    Raises:
        OSError, TypeError, ValueError: as `RingDilatedStrategy`; also for precision 16-mixed, whose scaler knows no shards;
            with cpu_offload, as training begins, for optimizers that need a GPU, process groups without a backend for the
            host, and modules that were sharded otherwise.
    """

    deals_parameters = True
    _holds = False  # whether gradients wait for further micro-batches

    def __init__(
        self,
        sequence_size: int | Literal["auto"] = "auto",
        head_size: int = 1,
        exchange: Exchange = "auto",
        layout: Layout = "contiguous",
        ranks_per_node: int | None = None,
        timeout: int = 1800,
        allow: list[str] | None = None,
        process_group_backend: str | None = None,
        save_distributed_checkpoint: bool = True,
        check_first_batch: bool = False,
        links: str | None = None,
        cpu_offload: bool | CPUOffloadPolicy = False,
    ) -> None:
        self._configure_sequence(
            sequence_size, head_size, exchange, layout, ranks_per_node, timeout, allow or [], check_first_batch, links
        )
        self._offload = check_offload(cpu_offload)
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=self._seconds,
        )

    @override
    def _configure_launcher(self) -> None:
        if hasattr(sys, "ps1"):
            raise MisconfigurationException(
                "ring_dilated_fsdp cannot start processes from an interactive session: run a script, or take "
                "strategy='ring_dilated_notebook'."
            )
        if getattr(self.precision_plugin, "precision", None) == "16-mixed":
            raise ValueError(
                "ring_dilated_fsdp takes no precision='16-mixed': use 'bf16-mixed', or strategy='ring_dilated'."
            )
        super()._configure_launcher()

    @override
    def _find_processes(self) -> None:
        found = dist.is_initialized()
        self._setup_distributed()  # Lightning's setup_environment would make a mesh of its own, (data, tensor)
        if self._offload is not None:
            join_host(self.root_device, found)

    @override
    def _get_process_group_backend(self) -> str:
        backend = super()._get_process_group_backend()
        return backend if self._offload is None else with_host(backend, self.root_device)

    @override
    def setup(self, trainer: Any) -> None:
        """Shards the parameters before Lightning takes the module over."""
        module = cast(LightningModule, self.lightning_module)
        shard_parameters(module, self.device_mesh, fitting(self._offload, self.root_device))
        place(module, self.root_device, self._offload is not None)
        own = is_overridden("configure_model", module)
        if not own:  # Lightning asks for one, to shard the parameters in, which was done
            module.configure_model = _nothing_left  # type: ignore[method-assign]
        try:
            super().setup(trainer)
        finally:
            if not own:
                del module.configure_model
        if not self._save_distributed_checkpoint:
            refuse_one_file(self.optimizers, "save_distributed_checkpoint=False writes one file")
        if self._offload is not None:
            keep_optimizers(self.optimizers)

    @override
    def model_to_device(self) -> None:
        """Lightning's; with `cpu_offload` parameters stay where they are."""
        if self._offload is None:
            super().model_to_device()
        else:
            rest_to_device(cast(LightningModule, self.lightning_module), self.root_device)

    @override
    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Lightning's; what an optimizer compiles, as torchao's do, is not shared between ranks through files.

        torch's cache of such graphs knows a dealt parameter by its whole shape: where its rows do not divide evenly, a rank
        was given another's graph, of another number of rows, and raised while the others waited.
        """
        usual = functorch_config.enable_autograd_cache

        def closed() -> Any:  # forward and backward, whose parameters are whole
            with functorch_config.patch(enable_autograd_cache=usual):
                return closure()

        with functorch_config.patch(enable_autograd_cache=False):
            return super().optimizer_step(optimizer, closed, *args, **kwargs)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As the mixin's; what is logged of parameters on the host is added up on the GPU."""
        given = tensor if self._offload is None else on_gpu(tensor, self.root_device)
        return super().reduce(given, group, reduce_op)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Of a folder, without running code that it names, whatever `weights_only` says; of one file, Lightning's.

        Lightning does not pass `Trainer.fit(weights_only=...)` on to strategies like this one.
        """
        peers = Peers(self.global_rank, self.world_size)
        if peers.any(Path(checkpoint_path).is_dir()):  # a rank that does not see it would not come to the checks
            return self._load_folder(checked(Path(checkpoint_path), peers))
        if peers.any(Path(checkpoint_path).is_file()):
            refuse_one_file(self.optimizers, f"{checkpoint_path} is one file")
        try:
            # Lightning 2.5 has no such argument
            known = "weights_only" in inspect.signature(super().load_checkpoint).parameters
            with functorch_config.patch(enable_autograd_cache=False):  # see `_load_folder`
                return super().load_checkpoint(checkpoint_path, **({"weights_only": weights_only} if known else {}))
        except UnpicklingError as error:
            raise UnpicklingError(
                f"{checkpoint_path} holds objects that are not loaded from files of unknown origin: {error}\nIf you trust "
                "it, name their classes in torch.serialization.add_safe_globals([...]), or set "
                "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1; weights_only=False of Trainer.fit does not reach this strategy."
            ) from error

    def _load_folder(self, folder: Path) -> dict[str, Any]:
        module = self.lightning_module
        assert self.model is not None and module is not None  # Lightning loads after the set-up
        if self.optimizers:  # to validate, test and predict weights suffice
            refuse_whole(read_metadata(folder).state_dict_metadata, folder)
        with functorch_config.patch(enable_autograd_cache=False):  # to have states, torch makes a step
            return load_sharded(folder, self.model, self.optimizers, module.strict_loading)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients stay where they are while micro-batches accumulate; Lightning knows this of DDP only.

        With `cpu_offload` they go to the host at once.
        """
        if self._offload is not None:
            yield
            return
        self._holds = True
        self._reduces(False)
        try:
            yield
        finally:
            self._holds = False
            self._reduces(True)

    @override
    def _check_first_batch(self, batch: Any) -> None:
        """As the mixin's; its gradients are reduced at once, also where those of the step wait for further micro-batches."""
        if self._unchecked:
            self._reduces(True)
            super()._check_first_batch(batch)
            self._reduces(not self._holds)

    def _reduces(self, at_once: bool) -> None:
        """Whether gradients are reduced as a backward ends, or wait for further micro-batches."""
        cast(FSDPModule, self.model).set_requires_gradient_sync(at_once)


def _nothing_left() -> None:
    """Stands in for `configure_model`."""
