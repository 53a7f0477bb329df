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
    """Shard every sequence over several ranks, with all parameters on each rank (DDP).

    `Trainer(strategy="ring_dilated")` uses the default options. A region of one rank trains the module without DDP.

    Args:
        sequence_size: number of ranks that share a sequence; "auto": all ranks; a list such as [8, 4, 2]: the largest
            number in it that divides the number of ranks. Other ranks hold other samples (data parallel).
        head_size: number of neighbouring ranks of a node that exchange tokens for heads. "auto": each attention call
            uses the size with the lowest planned cost; `print(strategy.sequence.plan)` lists the costs.
        exchange: the algorithm that moves rows between ranks; "auto": the one with the lowest planned cost.
        layout: which positions a rank holds. "auto": "contiguous" or "zigzag", whichever the planner expects to cost
            less for the patterns of all layers and the longest sequence that the DataModule or the model declares.
            "auto" is always "contiguous" for streams, packed rows, an `exchange` other than "auto", a limit
            `exchange_memory_gib`, and modules that do not declare `takes_any_layout`. "chunked": each rank holds a part
            of every chunk of ActivationRecompute(stream=TOKENS), and the ranks compute each chunk together.
        ranks_per_node: number of ranks that are connected by fast links; None: the ranks of a node.
        timeout: seconds after which a rank that waits for another rank raises an error.
        allow: names of modules that may run although they mix tokens or samples, because they are correct on shards.
        process_group_backend: "nccl" or "gloo"; None: the device decides.
        start_method: how to start further processes; "popen" runs the script again.
        check_first_batch: check, on the first tokens of the first batch, that all ranks give the same results as one rank.
        find_unused_parameters: DDP's option for models with parameters that are unused in some steps.
        links: a file from `lightning-dilated bench links`, for exchange="auto"; None: this machine's file, else defaults.
        global_batch: number of sequences in an optimizer step, on any number of ranks: gradients accumulate over
            global_batch / (sequences at a time x the loader's batch size) batches, and an epoch ends with a whole step.
            None: the Trainer's `accumulate_grad_batches`.
        bucket_cap_mb: MiB of gradients that DDP sums at a time during the backward. None: DDP's default, 25; but GPUs
            of one node compute a single sum after the backward, which costs less than sums that overlap with it.
        regions: number of parts of the job that train separately between outer steps, on consecutive ranks, with their own
            mesh and samples; "auto": one for each node. Each region has its own gradients, clipping and training loss.
        outer: the outer steps that synchronize the regions' parameters; required for several regions, allowed for one.
        cpu_offload: must be False, because this strategy holds all parameters on every GPU.
        exchange_memory_gib: limit in GiB for the rows of other ranks and the fp32 sums of their gradients that a rank
            stores at a time for an attention call; send buffers and the exchange of `head_size` are not counted.
            exchange="auto" uses the cheapest exchange within the limit. If no exchange fits, or the named exchange
            does not fit, the first call raises an error that lists the memory of every exchange. None: no limit.
        check_replicas: number of optimizer steps between two checks that all ranks of a region have parameters with the
            same bits. If ranks differ, an error names them; on a GPU it is raised at the next check. None: check only
            before a checkpoint.

    Raises:
        OSError: in the constructor, if the file `links` does not exist.
        TypeError, ValueError: in the constructor, but in `Trainer(...)` if a size does not divide the number of ranks.
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
        # "forkserver" is refused: on the CPU all ranks would share the parameters' memory and write to it
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
            # Lightning would recommend its own strategy, which does not shard sequences
            raise MisconfigurationException(
                "an interactive session cannot be run again on every rank: use strategy='ring_dilated_notebook' or "
                "RingDilatedStrategy(start_method='fork', ...) before the first use of CUDA, or run a script."
            )

    @override
    def configure_ddp(self) -> None:
        """Wrap the module, see `parallelize`."""
        parallelize(self, "configure_ddp", super().configure_ddp)

    @override
    @contextmanager
    def _within(self, *args: Any) -> Iterator[None]:
        """Activate the sequence for a step, and keep the graphs of compiled blocks whole in DDP's forward.

        By default torch.compile splits a graph where a bucket is full, so that DDP can send gradients earlier. A block
        is too short to gain from this, and a split block fuses fewer kernels and reuses fewer buffers.
        """
        with whole_graphs_in_ddp() if self.sizes.region_size > 1 else nullcontext(), super()._within(*args):
            yield

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a file as Lightning does, or a folder of ShardedCheckpoint or ring_dilated_fsdp.

        Reading a folder runs no code from it, even with `weights_only=False`.
        """
        peers = RankGroup(self.global_rank, self.world_size)
        if not peers.any(Path(checkpoint_path).is_dir()):  # true on all ranks if one rank sees the folder
            read_to_host(self.checkpoint_io)
            return self._of_this_region(super().load_checkpoint(checkpoint_path, *args, **kwargs))
        return self._of_this_region(read_whole(checked(Path(checkpoint_path), peers), self.sizes.regions, self.region))
