"""Describe the GPUs, strategy and exchange of a planned run.

Shape letters: R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dilated._validation import integer, one_of
from lightning_dilated.sequence.planner import DEFAULTS, Links

OPTIMIZERS = ("adamw", "adamw8bit")
STRATEGIES = ("single", "ring_dilated", "ring_dilated_fsdp")


@dataclass(frozen=True)
class Setup:
    """The GPUs, strategy and options of a run.

    Attributes:
        strategy: "single" (one GPU, the module is not wrapped), "ring_dilated" (DDP) or "ring_dilated_fsdp".
        ranks: R, the number of GPUs that share each sequence. per_node: number of GPUs on a node.
        links: speeds of links, from which "auto" chooses an exchange.
        cpu_offload: whether ring_dilated_fsdp keeps parameters, gradients and optimizer states on the host.
        bucket_cap_mb: MiB of a bucket of gradients in ring_dilated; None: the strategy's default. Memory does not
            depend on it, because all buckets together are as large as the gradients.
        exchange_memory: maximum number of bytes that a call's exchange may use, as in `planner.plan`.
        data_ranks: number of sequences that train in parallel, each on R GPUs. With several GPUs in total, DDP copies
            all gradients to average them.
    """

    strategy: str = "single"
    ranks: int = 1
    per_node: int = 8
    optimizer: str = "adamw"
    exchange: str = "auto"
    links: Links = DEFAULTS
    cpu_offload: bool = False
    bucket_cap_mb: int | None = None
    exchange_memory: int | None = None
    data_ranks: int = 1
    layout: str = "contiguous"
    head_size: int | str = 1

    def __post_init__(self) -> None:
        for name, allowed in (("strategy", STRATEGIES), ("optimizer", OPTIMIZERS)):
            one_of(getattr(self, name), name, allowed)
        if self.strategy == "single" and self.ranks > 1:
            raise ValueError(f"{self.ranks} GPUs need strategy ring_dilated or ring_dilated_fsdp.")
        if self.cpu_offload and self.strategy != "ring_dilated_fsdp":
            raise ValueError(f"cpu_offload is an option of strategy ring_dilated_fsdp, not of {self.strategy}.")
        if self.bucket_cap_mb is not None:
            integer(self.bucket_cap_mb, "bucket_cap_mb", 1)
            if self.strategy != "ring_dilated":
                raise ValueError(f"bucket_cap_mb is an option of strategy ring_dilated, not of {self.strategy}.")
