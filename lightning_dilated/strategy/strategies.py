"""The strategies by name: ring_dilated (DDP), ring_dilated_fsdp and ring_dilated_notebook."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry
from typing_extensions import override

from lightning_dilated.strategy.first_batch import check_first_batch
from lightning_dilated.strategy.parameters import check_lengths, shard_parameters
from lightning_dilated.strategy.sequence_strategy import SequenceStrategy

Exchange = Literal["auto", "gather", "ring", "butterfly", "switch", "hierarchical_gather", "hierarchical_butterfly"]
Layout = Literal["contiguous", "zigzag", "strided"]


class RingDilatedStrategy(SequenceStrategy, DDPStrategy):
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

    Raises:
        TypeError, ValueError: when made, or (sizes that do not divide the number of ranks) in `Trainer(...)`.
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
    ) -> None:
        self._configure_sequence(sequence_size, head_size, exchange, layout, ranks_per_node, timeout, allow or [])
        self._unchecked = check_first_batch
        if start_method not in ("popen", "spawn", "fork"):
            # a forkserver would share the parameters' memory between ranks on the CPU, and train something else
            raise ValueError(f"start_method must be one of popen, spawn, fork; got {start_method!r}.")
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=self._seconds,
            start_method=start_method,
            find_unused_parameters=find_unused_parameters,
        )

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the mixin's; before the first, the check of its batch that was asked for."""
        if self._unchecked:
            self._unchecked = False
            batch = kwargs.get("batch", args[0] if args else None)
            with self.precision_plugin.train_step_context():
                dtype = _computed_in(self.lightning_module, self.root_device.type)
                check_first_batch(self.lightning_module, batch, self._spec(), self.sequence, dtype)
        return super().training_step(*args, **kwargs)


def _computed_in(module: torch.nn.Module, device: str) -> torch.dtype:
    """The dtype of a step: autocast's, else that of the parameters."""
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return next((p.dtype for p in module.parameters()), torch.float32)


class RingDilatedFSDPStrategy(SequenceStrategy, ModelParallelStrategy):
    """Every sequence on several ranks, and the parameters, gradients and optimizer states dealt to all of them (FSDP2).

    The layers in each `nn.ModuleList` of the module are sharded one by one, then the rest; a module that shards itself in
    `configure_model` (with `self.device_mesh`) is left alone. Checkpoints are folders that any number of ranks can load.

    Args:
        sequence_size, head_size, exchange, layout, ranks_per_node, timeout, allow, process_group_backend: as in
            `RingDilatedStrategy`.
        save_distributed_checkpoint: False assembles one file on rank 0.

    Raises:
        TypeError, ValueError: as `RingDilatedStrategy`; also for precision 16-mixed, whose loss scaler knows no shards.
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
        save_distributed_checkpoint: bool = True,
    ) -> None:
        self._configure_sequence(sequence_size, head_size, exchange, layout, ranks_per_node, timeout, allow or [])
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=self._seconds,
        )

    @override
    def _configure_launcher(self) -> None:
        if getattr(self.precision_plugin, "precision", None) == "16-mixed":
            raise ValueError(
                "ring_dilated_fsdp takes no precision='16-mixed': use 'bf16-mixed', or strategy='ring_dilated'."
            )
        super()._configure_launcher()

    @override
    def _find_processes(self) -> None:
        self._setup_distributed()  # Lightning's setup_environment would make a mesh of its own, (data, tensor)

    @override
    def setup(self, trainer: Any) -> None:
        """Shards the parameters before Lightning takes the module over."""
        shard_parameters(self.lightning_module, self.device_mesh)
        super().setup(trainer)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """As the mixin's; refuses loaders of unlike lengths, since all ranks gather parameters in every step."""
        sharded = super().process_dataloader(dataloader)
        check_lengths(sharded, self.sizes)
        return sharded

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Gradients stay where they are while micro-batches accumulate; Lightning knows this of DDP only."""
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)


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
