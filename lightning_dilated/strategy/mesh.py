"""MeshSizes: how many ranks hold different samples, and how many share one sequence; validated before anything starts.

Random numbers that a run repeats, and that a resumed run continues: seeds of every step from (seed, stage, step, rank).

Ranks of one sequence draw hidden dropout apart, since they hold different tokens, and what is decided once for the sequence
together: outside of steps all generators are in step, and inside of them the CPU's is where the model is on a GPU. Attention
dropout takes one seed a sequence, from its first rank, whatever their number.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_dilated._validation import integer

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


def run_seed(strategy: Any) -> int:
    """The run's seed, equal on all ranks. Where nobody called `seed_everything`, every rank takes rank 0's state."""
    if "PL_GLOBAL_SEED" in os.environ:
        return int(os.environ["PL_GLOBAL_SEED"])
    seed = strategy.broadcast(torch.initial_seed() % 2**32)
    if strategy.world_size > 1:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
    return seed


def key(*words: object) -> int:
    """A 63-bit seed from words."""
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def step_seeds(seed: int, stage: str, step: int, data_rank: int, rank: int, device: torch.device) -> Iterator[None]:
    """Within, generators start from the seeds of a step of one rank of a sequence; after it the CPU's goes on as before.

    On a GPU only its own generator differs between the ranks of a sequence.
    """
    words = (seed, stage, step, data_rank)
    before = torch.get_rng_state()
    if device.type == "cuda":
        torch.default_generator.manual_seed(key(*words))
        torch.cuda.default_generators[device.index or 0].manual_seed(key(*words, rank))
    else:
        torch.default_generator.manual_seed(key(*words, rank))
    try:
        yield
    finally:
        torch.set_rng_state(before)
