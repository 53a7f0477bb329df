"""The strategies by name: ring_dilated (DDP), ring_dilated_fsdp and ring_dilated_notebook."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_dilated.pattern.branch import integer
from lightning_dilated.strategy import host_parameters
from lightning_dilated.strategy.mesh import gradient_group
from lightning_dilated.strategy.parameters import shard_parameters
from lightning_dilated.strategy.peers import Peers
from lightning_dilated.strategy.saved_folder import checked, read_whole
from lightning_dilated.strategy.sequence_strategy import SequenceStrategy

Exchange = Literal["auto", "gather", "ring", "butterfly", "switch", "hierarchical_gather", "hierarchical_butterfly"]
Layout = Literal["contiguous", "zigzag", "strided"]


class _Whole:
    """Every rank holds all parameters: who asks for `cpu_offload` is told where it is."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Whole:
        if "cpu_offload" in kwargs:
            raise TypeError(
                f"{cls.__name__} holds all parameters on every GPU and takes no cpu_offload: use RingDilatedFSDPStrategy("
                f"cpu_offload={kwargs['cpu_offload']!r})."
            )
        return super().__new__(cls)


class RingDilatedStrategy(_Whole, SequenceStrategy, DDPStrategy):
    """Every sequence on several ranks, the parameters on each (DDP). `Trainer(strategy="ring_dilated")` takes the defaults.

    Args:
        sequence_size: ranks that share a sequence; "auto": all of them. The others hold other samples (data parallel).
        head_size: of these, neighbours that trade tokens for heads.
        exchange: how rows travel between ranks; "auto" is the planner's cheapest.
        layout: which positions a rank holds.
        ranks_per_node: ranks with fast links; None: those of a node.
        timeout: seconds after which a rank that waits in vain for another gives up.
        allow: names of modules that mix tokens or samples and are right nevertheless.
        process_group_backend: "nccl" or "gloo"; None fits the device.
        start_method: how further processes are started: "popen" runs the script again.
        check_first_batch: compare one rank with all on the head of the first batch (see `strategy.first_batch`).
        find_unused_parameters: for models some of whose parameters take no part in a step.
        links: a file that `lightning-dilated bench links` wrote, for exchange="auto"; None: this machine's, else defaults.
        bucket_cap_mb: MiB of gradients that are summed at a time, while the backward goes on (DDP's). None: on GPUs of one
            node all at once when it is done, which costs less than sums beside it; else DDP's own, 25.

    Raises:
        OSError: when made, where the file of links is not there.
        TypeError, ValueError: when made, or (sizes that do not divide the number of ranks) in `Trainer(...)`.
        MisconfigurationException: in `Trainer(...)`, in an interactive session with start_method="popen".
    """

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
        start_method: Literal["popen", "spawn", "fork"] = "popen",
        find_unused_parameters: bool = False,
        check_first_batch: bool = False,
        links: str | None = None,
        bucket_cap_mb: int | None = None,
    ) -> None:
        self._configure_sequence(
            sequence_size, head_size, exchange, layout, ranks_per_node, timeout, allow or [], check_first_batch, links
        )
        if bucket_cap_mb is not None:
            integer(bucket_cap_mb, "bucket_cap_mb", 1)
        if start_method not in ("popen", "spawn", "fork"):
            # a forkserver would share the parameters' memory between ranks on the CPU, and train something else
            raise ValueError(f"start_method must be one of popen, spawn, fork; got {start_method!r}.")
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=self._seconds,
            start_method=start_method,
            find_unused_parameters=find_unused_parameters,
            **({} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb}),
        )

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        interactive = hasattr(sys, "ps1")
        if interactive and self.launcher is not None and not self.launcher.is_interactive_compatible:
            # Lightning would send users to a strategy of its own, which shares no sequence
            raise MisconfigurationException(
                "an interactive session cannot be run again on every rank: use strategy='ring_dilated_notebook', or "
                "RingDilatedStrategy(start_method='fork', ...), before CUDA is first used; or run a script."
            )

    @override
    def _setup_model(self, model: Module) -> DistributedDataParallel:
        """Lightning's; on GPUs with a communicator of its own for the gradients, and those of one node's in one bucket.

        Why one: sums beside the backward wait for the slowest rank again and again, in kernels that take multiprocessors
        from the backward (benchmarks/results/2026-11-22_h200_scaling.md).
        """
        if self._get_process_group_backend() == "nccl" and "process_group" not in self._ddp_kwargs:
            beside = "bucket_cap_mb" in self._ddp_kwargs or self.num_nodes > 1
            if not beside:
                self._ddp_kwargs["bucket_cap_mb"] = 1 + sum(p.nbytes for p in model.parameters()) // 2**20
            self._ddp_kwargs["process_group"] = gradient_group(self._seconds, beside)
        return super()._setup_model(model)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Lightning's; also of folders, which ShardedCheckpoint and ring_dilated_fsdp write."""
        if not Path(checkpoint_path).is_dir():
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)
        found = checked(Path(checkpoint_path), Peers(self.global_rank, self.world_size))
        return read_whole(found, kwargs.get("weights_only"))


class RingDilatedFSDPStrategy(SequenceStrategy, ModelParallelStrategy):
    """Every sequence on several ranks, and the parameters, gradients and optimizer states dealt to all of them (FSDP2).

    The layers in each `nn.ModuleList` of the module are sharded one by one, then the rest; a module that shards itself in
    `configure_model` (with `self.device_mesh`) is left alone. Checkpoints are folders that any number of ranks can load.

    Args:
        sequence_size, head_size, exchange, layout, ranks_per_node, timeout, allow, process_group_backend, check_first_batch,
            links: as in `RingDilatedStrategy`.
        save_distributed_checkpoint: False assembles one file on rank 0.
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
        self._offload = host_parameters.check_offload(cpu_offload)
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
            host_parameters.join_host(self.root_device, found)

    @override
    def _get_process_group_backend(self) -> str:
        backend = super()._get_process_group_backend()
        return backend if self._offload is None else host_parameters.with_host(backend, self.root_device)

    @override
    def setup(self, trainer: Any) -> None:
        """Shards the parameters before Lightning takes the module over."""
        module = self.lightning_module
        shard_parameters(module, self.device_mesh, host_parameters.fitting(self._offload, self.root_device))
        host_parameters.place(module, self.root_device, self._offload is not None)
        own = is_overridden("configure_model", module)
        if not own:  # Lightning asks for one, to shard the parameters in, which was done
            module.configure_model = _nothing_left  # type: ignore[method-assign]
        try:
            super().setup(trainer)
        finally:
            if not own:
                del module.configure_model
        if self._offload is not None:
            host_parameters.keep_optimizers(self.optimizers)

    @override
    def model_to_device(self) -> None:
        """Lightning's; with `cpu_offload` parameters stay where they are."""
        if self._offload is None:
            super().model_to_device()
        else:
            host_parameters.rest_to_device(self.lightning_module, self.root_device)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As the mixin's; what is logged of parameters on the host is added up on the GPU."""
        given = tensor if self._offload is None else host_parameters.on_gpu(tensor, self.root_device)
        return super().reduce(given, group, reduce_op)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Lightning's; it does not hand on `Trainer.fit(weights_only=...)` to strategies like this one."""
        if Path(checkpoint_path).is_dir():
            checkpoint_path = checked(Path(checkpoint_path), Peers(self.global_rank, self.world_size))
        try:
            # Lightning 2.5 has no such argument
            known = "weights_only" in inspect.signature(super().load_checkpoint).parameters
            return super().load_checkpoint(checkpoint_path, **({"weights_only": weights_only} if known else {}))
        except UnpicklingError as error:
            raise UnpicklingError(
                f"{checkpoint_path} holds objects that are not loaded from files of unknown origin: {error}\nIf you trust "
                "it, name their classes in torch.serialization.add_safe_globals([...]), or set "
                "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1; weights_only=False of Trainer.fit does not reach this strategy."
            ) from error

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
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._holds = False
            self.model.set_requires_gradient_sync(True)

    @override
    def _check_first_batch(self, batch: Any) -> None:
        """As the mixin's; its gradients are reduced at once, also where those of the step wait for further micro-batches."""
        if self._unchecked:
            self.model.set_requires_gradient_sync(True)
            super()._check_first_batch(batch)
            self.model.set_requires_gradient_sync(not self._holds)


def _nothing_left() -> None:
    """Stands in for `configure_model`."""


def register() -> None:
    """Make the names known to `lightning.pytorch.Trainer`."""
    about = "one sequence on many ranks, dilated attention"
    StrategyRegistry.register("ring_dilated", RingDilatedStrategy, description=about, override=True)
    StrategyRegistry.register(
        "ring_dilated_fsdp", RingDilatedFSDPStrategy, description=f"{about}, sharded parameters", override=True
    )
    StrategyRegistry.register(
        "ring_dilated_notebook",
        RingDilatedStrategy,
        description=f"{about}, in Jupyter",
        override=True,
        start_method="fork",
    )


register()
