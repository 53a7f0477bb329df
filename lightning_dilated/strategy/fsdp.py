"""ring_dilated_fsdp: every sequence on several ranks; parameters, gradients and optimizer states sharded over all ranks."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, cast

import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from typing_extensions import override

from lightning_dilated._compat.lightning import writes_one_file
from lightning_dilated._compat.torch import use_autograd_cache, uses_autograd_cache
from lightning_dilated._validation import check_input
from lightning_dilated.checkpoint.folder import META, checked, load_sharded, load_whole_states
from lightning_dilated.checkpoint.ranks import RankGroup
from lightning_dilated.checkpoint.reader import read_metadata
from lightning_dilated.checkpoint.state import refuse_one_file, refuse_replicated_low_bit, to_numbers
from lightning_dilated.strategy.options import SequenceOptions
from lightning_dilated.strategy.parallelize import check_offload, join_host, unsharded_to_device, with_host
from lightning_dilated.strategy.sequence_strategy import SequenceStrategy

Exchange = Literal["auto", "gather", "ring", "butterfly", "switch", "hierarchical_gather", "hierarchical_butterfly"]
Layout = Literal["auto", "contiguous", "zigzag", "strided", "chunked"]


class RingDilatedFSDPStrategy(SequenceStrategy, ModelParallelStrategy):
    """Shard every sequence over several ranks, and parameters, gradients and optimizer states over all ranks (FSDP2).

    Each layer in an `nn.ModuleList` is an FSDP unit; the remaining parameters are another unit. A module that shards
    itself in `configure_model` (over `self.device_mesh`) is not changed. Any number of ranks can load a checkpoint.

    Args:
        sequence_size, head_size, exchange, layout, ranks_per_node, timeout, allow, process_group_backend, check_first_batch,
            links, global_batch, exchange_memory_gib: as in `RingDilatedStrategy`.
        save_distributed_checkpoint: False gathers one file on rank 0; torchao's 4- and 8-bit optimizers need True.
        cpu_offload: True keeps each rank's shard of parameters, gradients and optimizer states in page-locked host
            memory, and the optimizer runs on the host (use `AdamW(fused=True)` for speed); a GPU holds only the current
            layer. Before parameters are sharded, each rank builds the whole model on the host. Gradients are reduced
            after every micro-batch, because unsharded accumulated gradients would stay on the GPU.
            `CPUOffloadPolicy(pin_memory=False)` does not use page-locked memory.
        regions, outer: must be 1 and None: a checkpoint holds one sharded model, and each region would have its own.

    Raises:
        OSError, TypeError, ValueError: as in `RingDilatedStrategy`. ValueError also for precision 16-mixed, because its
            scaler does not support shards. With cpu_offload, ValueError when training starts if an optimizer needs a
            GPU, a process group has no host backend, or a module was sharded without offload.
    """

    shards_parameters = True
    _accumulates = False  # True in the micro-batches before a step's last one, which do not reduce gradients

    def __init__(
        self,
        sequence_size: int | Literal["auto"] | list[int] = "auto",
        head_size: int | Literal["auto"] = 1,
        exchange: Exchange = "auto",
        layout: Layout = "auto",
        ranks_per_node: int | None = None,
        timeout: int = 1800,
        allow: list[str] | None = None,
        process_group_backend: str | None = None,
        save_distributed_checkpoint: bool = True,
        check_first_batch: bool = False,
        links: str | None = None,
        global_batch: int | None = None,
        cpu_offload: bool | CPUOffloadPolicy = False,
        regions: Any = 1,
        outer: Any = None,
        exchange_memory_gib: float | None = None,
    ) -> None:
        if regions != 1 or outer is not None:
            raise ValueError(
                f"{type(self).__name__} has no regions and outer steps: its checkpoints hold one sharded model and "
                "optimizer, but each region trains its own. Take RingDilatedStrategy(regions=..., outer=...): its "
                "ranks hold all parameters."
            )
        options = SequenceOptions(
            sequence_size, head_size, exchange, layout, ranks_per_node, timeout, allow, check_first_batch, links,
            global_batch, exchange_memory_gib,
        )  # fmt: skip
        self._configure_sequence(options)
        self._offload = check_offload(cpu_offload)
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=self._options.rank_timeout,
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
    def _start_process_group(self) -> None:
        existed = dist.is_initialized()
        self._setup_distributed()  # Lightning's setup_environment would make its own mesh (data, tensor)
        if self._offload is not None:
            join_host(self.root_device, existed)

    @override
    def _get_process_group_backend(self) -> str:
        backend = super()._get_process_group_backend()
        return backend if self._offload is None else with_host(backend, self.root_device)

    @override
    def model_to_device(self) -> None:
        """Move the model to the device; with `cpu_offload` parameters stay on the host."""
        if self._offload is None:
            super().model_to_device()
        else:
            unsharded_to_device(cast(LightningModule, self.lightning_module), self.root_device)

    @override
    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Step without torch's file cache of compiled graphs, for optimizers that compile, such as torchao's.

        The cache identifies a graph by the unsharded shape of a parameter. If the rows do not divide evenly over ranks,
        a rank could get a graph for a different number of rows and raise an error while the others wait.
        """
        usual = uses_autograd_cache()

        def closed() -> Any:  # forward and backward may use the cache: their parameters are gathered
            with use_autograd_cache(usual):
                return closure()

        with use_autograd_cache(False):
            return super().optimizer_step(optimizer, closed, *args, **kwargs)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor; with cpu_offload, tensors on the host are reduced on the GPU, by NCCL instead of gloo."""
        if self._offload is not None and isinstance(tensor, Tensor):
            tensor = tensor.to(self.root_device)
        return super().reduce(tensor, group, reduce_op)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a file of any strategy as Lightning does, or a folder; a folder is read without running code from it.

        Lightning does not pass `Trainer.fit(weights_only=...)` to strategies that shard parameters.
        """
        peers = RankGroup(self.global_rank, self.world_size)
        if peers.any(Path(checkpoint_path).is_dir()):  # true on all ranks if one rank sees the folder
            return self._load_folder(checked(Path(checkpoint_path), peers))
        if peers.any(Path(checkpoint_path).is_file()):
            refuse_one_file(self.optimizers, f"{checkpoint_path} is one file")
        try:
            with use_autograd_cache(False):  # see `_load_folder`
                return self._of_this_region(self._load_file(checkpoint_path, weights_only))
        except UnpicklingError as error:
            raise UnpicklingError(
                f"{checkpoint_path} holds objects that are not loaded from files of unknown origin: {error}\nIf you trust "
                "it, name their classes in torch.serialization.add_safe_globals([...]), or set "
                "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1; weights_only=False of Trainer.fit does not reach this strategy."
            ) from error

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save; a new folder may replace a file of the same name, and a new file may replace a folder.

        Only one rank of each node removes the old file or folder. In Lightning every rank does so, and late ranks fail.
        """
        path = Path(self.broadcast(filepath))
        if storage_options is None:  # Lightning raises an error for any other value
            peers = RankGroup(self.global_rank, self.world_size)
            peers.together(f"{path} cannot be replaced", self._remove_other_form, path)
        super().save_checkpoint(checkpoint, path, storage_options)

    def _remove_other_form(self, path: Path) -> None:
        if self.local_rank != 0:
            return
        with suppress(FileNotFoundError):  # another node may have removed it
            if writes_one_file(self):
                if (path / META).is_file():
                    shutil.rmtree(path)
            elif path.is_file():
                path.unlink()

    def _load_file(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        """Let Lightning load weights; load optimizer states here: Lightning would misread the states of other strategies."""
        check_input(path)
        optimizers, self.optimizers = self.optimizers, []
        try:
            checkpoint = super().load_checkpoint(path, weights_only=weights_only)
        finally:
            self.optimizers = optimizers
        if optimizers:  # validate, test and predict need only weights
            assert self.model is not None
            load_whole_states(self.model, optimizers, checkpoint.get("optimizer_states", []))
        return checkpoint

    @override
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state; for a checkpoint of one file, number the parameters as torch's optimizers do."""
        if not writes_one_file(self):
            return super().optimizer_state(optimizer)
        assert self.model is not None
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        unwrapped = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        state = get_optimizer_state_dict(self.model, unwrapped, options=options)
        return to_numbers(state) if self.global_rank == 0 else {}

    def _load_folder(self, folder: Path) -> dict[str, Any]:
        module = self.lightning_module
        assert self.model is not None and module is not None  # Lightning calls this after the set-up
        if self.optimizers:  # validate, test and predict need only weights
            refuse_replicated_low_bit(read_metadata(folder).state_dict_metadata, folder)
        with use_autograd_cache(False):  # torch creates missing states by an optimizer step, which may compile
            return self._of_this_region(load_sharded(folder, self.model, self.optimizers, module.strict_loading))

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Do not reduce gradients while micro-batches accumulate; Lightning implements this for DDP only.

        With `cpu_offload` gradients are reduced and moved to the host after every micro-batch.
        """
        if self._offload is not None:
            yield
            return
        self._accumulates = True
        self._reduces(False)
        try:
            yield
        finally:
            self._accumulates = False
            self._reduces(True)

    @override
    def _check_first_batch(self, batch: Any) -> None:
        """Check the first batch with gradient reduction enabled, even if the step's gradients accumulate."""
        if self._checks_first_batch:
            self._reduces(True)
            super()._check_first_batch(batch)
            self._reduces(not self._accumulates)

    def _reduces(self, at_once: bool) -> None:
        """Set whether each backward reduces gradients or only accumulates them."""
        cast(FSDPModule, self.model).set_requires_gradient_sync(at_once)
