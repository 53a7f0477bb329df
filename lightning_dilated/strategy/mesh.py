"""MeshSizes: how many ranks hold different samples, and how many share one sequence; validated before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_dilated.pattern.branch import integer

AXES = ("data", "ring", "head")


@dataclass(frozen=True)
class MeshSizes:
    """Ranks along each axis: world = data x ring x head; a sequence lies on ring x head neighbouring ranks.

    Args:
        world: ranks in all.
        sequence_size: ranks that share one sequence; "auto": all of them.
        head_size: of these, ranks that trade tokens for heads.

    Raises:
        TypeError, ValueError: naming the option, with what is allowed.
    """

    world: int
    sequence_size: int | str = "auto"
    head_size: int = 1

    def __post_init__(self) -> None:
        integer(self.head_size, "head_size", 1)
        if self.sequence_size == "auto":
            object.__setattr__(self, "sequence_size", self.world)
        if isinstance(self.sequence_size, str):
            raise ValueError(f'sequence_size must be "auto" or a number of ranks, got {self.sequence_size!r}.')
        integer(self.sequence_size, "sequence_size", 1)
        if self.world % self.sequence_size:
            raise ValueError(
                f"sequence_size={self.sequence_size} must divide the {self.world} ranks (devices x nodes); "
                f"allowed: {divisors(self.world)}."
            )
        if self.sequence_size % self.head_size:
            raise ValueError(
                f"head_size={self.head_size} must divide sequence_size={self.sequence_size}; "
                f"allowed: {divisors(self.sequence_size)}."
            )

    @property
    def data(self) -> int:
        """Sequences at a time."""
        return self.world // self.sequence_size

    @property
    def shape(self) -> tuple[int, int, int]:
        """(data, ring, head)."""
        return self.data, self.sequence_size // self.head_size, self.head_size

    def make(self, device_type: str, timeout: timedelta | None = None) -> tuple[DeviceMesh, dist.ProcessGroup]:
        """The mesh (data, ring, head), and the process group of this rank's sequence; every rank has to call.

        A sequence that is the world has a group of its own, too, so that its rows do not queue behind gradients.
        """
        mesh = init_device_mesh(device_type, self.shape, mesh_dim_names=AXES)
        sequence = mesh["ring", "head"]._flatten("sequence").get_group()
        return mesh, dist.new_group(timeout=timeout) if self.data == 1 else sequence


#: thread blocks of a communicator that sums gradients beside the backward: while it waits for a slower rank, its kernels
#: keep these multiprocessors from the backward's own
GRADIENT_BLOCKS = 4


def gradient_group(timeout: timedelta, beside: bool) -> dist.ProcessGroup:
    """All ranks, over NCCL, with few thread blocks where it works `beside` the backward; every rank has to call."""
    options = dist.ProcessGroupNCCL.Options()
    if beside:
        options.config.max_ctas = GRADIENT_BLOCKS
    return dist.new_group(backend="nccl", pg_options=options, timeout=timeout)


def divisors(n: int) -> list[int]:
    """All divisors, rising."""
    return [x for x in range(1, n + 1) if n % x == 0]
