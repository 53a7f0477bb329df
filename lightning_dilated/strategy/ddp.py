"""ring_dilated: every sequence on several ranks, all parameters on each rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_dilated._compat.torch import whole_graphs_in_ddp
from lightning_dilated._validation import integer, one_of
from lightning_dilated.checkpoint.folder import checked, read_whole
from lightning_dilated.checkpoint.ranks import RankGroup
from lightning_dilated.checkpoint.state import read_to_host
from lightning_dilated.strategy.fsdp import Exchange, Layout
from lightning_dilated.strategy.options import SequenceOptions
from lightning_dilated.strategy.outer import OuterSteps
from lightning_dilated.strategy.parallelize import parallelize
from lightning_dilated.strategy.sequence_strategy import SequenceStrategy


class RingDilatedStrategy(SequenceStrategy, DDPStrategy):
    """Every sequence on several ranks, all parameters on each (DDP). `Trainer(strategy="ring_dilated")` takes the defaults.

    A rank that averages gradients with no other rank trains the module without DDP.

    Args:
        sequence_size: ranks that share a sequence; "auto": all ranks; [8, 4, 2]: the largest of these that divides the
            number of ranks. Other ranks hold other samples (data parallel).
        head_size: ranks of a sequence, neighbours within a node, that exchange tokens for heads. "auto": each call takes the
            size with the least cost by the planner; `print(strategy.sequence.plan)` lists the costs.
        exchange: how rows travel between ranks; "auto": the cheapest by the planner.
        layout: which positions a rank holds. "auto": "contiguous" or "zigzag", chosen at each start by the planner's prices
            for the patterns of all layers and the longest sequence that the DataModule or the model declares. It is
            "contiguous" for streams, packed rows, named exchanges, a limit `exchange_memory_gib`, and modules that do not
            declare `takes_any_layout`. "chunked": a piece of every chunk of ActivationRecompute(stream=TOKENS), so that
            ranks compute each chunk together.
        ranks_per_node: ranks with fast links between them; None: the ranks of a node.
        timeout: seconds after which a rank that waits for another rank raises an error.
        allow: names of modules that mix tokens or samples but are correct on parts of a sequence.
        process_group_backend: "nccl" or "gloo"; None: by the device.
        start_method: how further processes are started: "popen" runs the script again.
        check_first_batch: compare one rank with all ranks on the head of the first batch.
        find_unused_parameters: for models with parameters that are unused in some steps; one rank does not need it.
        links: a file from `lightning-dilated bench links`, for exchange="auto"; None: this machine's file, else defaults.
        global_batch: sequences of an optimizer step, on any number of ranks: gradients accumulate over
            global_batch / (sequences at a time x the loader's batch size) batches, and an epoch ends with a whole step.
            None: the Trainer's `accumulate_grad_batches`.
        bucket_cap_mb: MiB of gradients that are summed at a time during the backward (DDP's). None: on GPUs of one node, one
            sum after the backward, which costs less than sums that overlap with it; else DDP's default, 25.
        regions: number of parts of the job that train apart between outer steps, each on consecutive ranks with its own mesh
            and samples; "auto": one for each node. Gradients, clipping and the training loss are each region's own.
        outer: the outer steps that keep regions one model; required for several regions, allowed for one.
        cpu_offload: only False: this strategy holds all parameters on every GPU.
        exchange_memory_gib: the most GiB of other ranks' rows, and of fp32 sums of their gradients, that the exchange of an
            attention call may hold on a rank at once; send buffers and the exchange of `head_size` are not counted.
            exchange="auto" takes the cheapest within the limit. If none fits, or a named exchange does not, the first call
            raises an error that lists the memory of each. None: no limit.
        check_replicas: optimizer steps between two comparisons of the parameters' bits on all ranks of a region. Ranks that
            differ end with an error that names them; on a GPU it is raised at the next comparison. None: compare only
            before a checkpoint.

    Raises:
        OSError: in the constructor, if the file `links` does not exist.
        TypeError, ValueError: in the constructor, or (sizes that do not divide the number of ranks) in `Trainer(...)`.
        MisconfigurationException: in `Trainer(...)`, in an interactive session with start_method="popen".
    """

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
        start_method: Literal["popen", "spawn", "fork"] = "popen",
        find_unused_parameters: bool = False,
        check_first_batch: bool = False,
        links: str | None = None,
        global_batch: int | None = None,
        bucket_cap_mb: int | None = None,
        regions: int | Literal["auto"] = 1,
        outer: OuterSteps | None = None,
        cpu_offload: Any = False,
        exchange_memory_gib: float | None = None,
        check_replicas: int | None = 100,
    ) -> None:
        if cpu_offload is not False:
            raise TypeError(
                f"{type(self).__name__} holds all parameters on every GPU and takes no cpu_offload: use "
                f"RingDilatedFSDPStrategy(cpu_offload={cpu_offload!r})."
            )
        options = SequenceOptions(
            sequence_size, head_size, exchange, layout, ranks_per_node, timeout, allow, check_first_batch, links,
            global_batch, exchange_memory_gib, regions, outer, check_replicas,
        )  # fmt: skip
        self._configure_sequence(options)
        if bucket_cap_mb is not None:
            integer(bucket_cap_mb, "bucket_cap_mb", 1)
        # a forkserver would share the parameters' memory between ranks on the CPU, and all would write to it
        one_of(start_method, "start_method", ("popen", "spawn", "fork"))
        buckets: dict[str, Any] = {} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb}
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=self._options.rank_timeout,
            start_method=start_method,
            find_unused_parameters=find_unused_parameters,
            **buckets,
        )

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        interactive = hasattr(sys, "ps1")
        if interactive and self.launcher is not None and not self.launcher.is_interactive_compatible:
            # Lightning would recommend its own strategy, which does not share sequences
            raise MisconfigurationException(
                "an interactive session cannot be run again on every rank: use strategy='ring_dilated_notebook', or "
                "RingDilatedStrategy(start_method='fork', ...), before CUDA is first used; or run a script."
            )

    @override
    def configure_ddp(self) -> None:
        """Wrap the module, see `parallelize`."""
        parallelize(self, "configure_ddp", super().configure_ddp)

    @override
    @contextmanager
    def _within(self, *args: Any) -> Iterator[None]:
        """Keep compiled blocks whole.

        In DDP's forward torch.compile splits graphs wherever a bucket is full, to send gradients in between. A block is
        short enough to wait for, and a split block fuses fewer kernels and reuses fewer buffers.
        """
        with whole_graphs_in_ddp() if self.sizes.region_size > 1 else nullcontext(), super()._within(*args):
            yield

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a file as Lightning does, or a folder of ShardedCheckpoint or ring_dilated_fsdp.

        Folders are read without running code, for any `weights_only`.
        """
        peers = RankGroup(self.global_rank, self.world_size)
        if not peers.any(Path(checkpoint_path).is_dir()):  # a rank that sees no folder has to enter the checks too
            read_to_host(self.checkpoint_io)
            return self._of_this_region(super().load_checkpoint(checkpoint_path, *args, **kwargs))
        return self._of_this_region(read_whole(checked(Path(checkpoint_path), peers), self.sizes.regions, self.region))
