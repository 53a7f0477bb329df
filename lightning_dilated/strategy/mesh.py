"""Ranks of a job: sizes of the mesh (region, data, ring, head), how processes find each other under torchrun, seeds of each
step.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import random
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_dilated._compat.torch import flatten_mesh
from lightning_dilated._validation import integer
from lightning_dilated.sequence.shard import check_head_size

AXES = ("data", "ring", "head")
#: ranks that share a sequence, as users give them
SequenceSize: TypeAlias = int | Literal["auto"] | list[int]
#: of these, ranks that exchange tokens for heads
HeadSize: TypeAlias = int | Literal["auto"]


@dataclass(frozen=True)
class MeshSizes:
    """Ranks along each axis: world = regions x data x ring x head; a region and a sequence lie on neighbouring ranks.

    Args:
        world: ranks in all.
        sequence_size: ranks that share one sequence; "auto": all of a region; of several numbers the largest that divides
            these.
        head_size: of these, ranks that exchange tokens for heads. "auto": each call has its own, so the mesh has 1.
        regions: parts of the job that train apart between outer steps.

    Raises:
        TypeError, ValueError: naming the option, with what is allowed.
    """

    world: int
    sequence_size: SequenceSize = "auto"
    head_size: HeadSize = 1
    regions: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_size", 1 if check_head_size(self.head_size) == "auto" else self.head_size)
        if self.world % integer(self.regions, "regions", 1):
            raise ValueError(
                f"regions={self.regions} must divide the {self.world} ranks (devices x nodes); "
                f"allowed: {divisors(self.world)}."
            )
        if self.sequence_size == "auto":
            object.__setattr__(self, "sequence_size", self.region_size)
        elif isinstance(self.sequence_size, (list, tuple)):
            object.__setattr__(self, "sequence_size", self._largest(self.sequence_size))
        if isinstance(self.sequence_size, str):
            raise ValueError(
                f'sequence_size must be "auto", a number of ranks or a list of numbers, got {self.sequence_size!r}.'
            )
        integer(self.sequence_size, "sequence_size", 1)
        if self.region_size % self.sequence_size:
            raise ValueError(
                f"sequence_size={self.sequence_size} must divide the {self._ranks}; "
                f"allowed: {divisors(self.region_size)}."
            )
        if self.sequence_size % self.head_size:
            raise ValueError(
                f"head_size={self.head_size} must divide sequence_size={self.sequence_size}; "
                f"allowed: {divisors(self.sequence_size)}."
            )

    def _largest(self, sizes: Sequence[int]) -> int:
        """The largest of the sizes that divides the ranks."""
        fitting = [size for size in sizes if self.region_size % integer(size, "sequence_size", 1) == 0]
        if not fitting:
            raise ValueError(
                f"none of sequence_size={list(sizes)} divides the {self._ranks}; "
                f"allowed: {divisors(self.region_size)}. Add 1 to the list to go on with any number of ranks."
            )
        return max(fitting)

    @property
    def _ranks(self) -> str:
        """The ranks that sequences are distributed over, in words."""
        if self.regions == 1:
            return f"{self.world} ranks (devices x nodes)"
        return f"{self.region_size} ranks of each of {self.regions} regions (devices x nodes / regions)"

    @property
    def region_size(self) -> int:
        """Ranks of a region."""
        return self.world // self.regions

    @property
    def data(self) -> int:
        """Sequences at a time, over all regions."""
        return self.world // self.sequence_size

    @property
    def shape(self) -> tuple[int, int, int]:
        """(data, ring, head) of a region."""
        return self.data // self.regions, self.sequence_size // self.head_size, self.head_size

    def make(self, device_type: str, timeout: timedelta | None = None) -> tuple[DeviceMesh, dist.ProcessGroup]:
        """The mesh (data, ring, head) of this rank's region, and the process group of its sequence; every rank has to call.

        A sequence that is the region has a group of its own, too, so that its rows do not queue behind gradients.
        """
        if self.regions == 1:
            mesh = init_device_mesh(device_type, self.shape, mesh_dim_names=AXES)
        else:
            mesh = init_device_mesh(device_type, (self.regions, *self.shape), mesh_dim_names=("region", *AXES))[AXES]
        sequence = flatten_mesh(mesh["ring", "head"], "sequence").get_group()
        return mesh, self.new_group("region", timeout) if self.shape[0] == 1 else sequence

    def new_group(
        self,
        kind: Literal["region", "peers"],
        timeout: timedelta | None = None,
        backend: str | None = None,
        options: Any = None,
    ) -> dist.ProcessGroup:
        """A new process group of this rank's region, or of the ranks at its place in all regions; every rank has to call."""
        regions = [list(range(first, first + self.region_size)) for first in range(0, self.world, self.region_size)]
        ranks = regions if kind == "region" else [list(peers) for peers in zip(*regions, strict=True)]
        return dist.new_subgroups_by_enumeration(ranks, timeout=timeout, backend=backend, pg_options=options)[0]


#: thread blocks of a communicator that works during the backward: while it waits for a slower rank, its kernels keep these
#: multiprocessors from the backward's own
BLOCKS = 4


def nccl_options(overlapped: bool) -> dist.ProcessGroupNCCL.Options:
    """Of a group over NCCL; one that works during the backward gets few thread blocks."""
    options = dist.ProcessGroupNCCL.Options()
    if overlapped:
        options.config.max_ctas = BLOCKS
    return options


def divisors(n: int) -> list[int]:
    return [x for x in range(1, n + 1) if n % x == 0]


# -- random numbers ----------------------------------------------------------------------------------------------------
def run_seed(strategy: Any) -> int:
    """The run's seed, equal on all ranks; without `seed_everything`, that of rank 0."""
    if "PL_GLOBAL_SEED" in os.environ:
        return int(os.environ["PL_GLOBAL_SEED"])
    seed = strategy.broadcast(torch.initial_seed() % 2**32)
    if strategy.world_size > 1:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
    return seed


def seed_of(*values: object) -> int:
    """A 63-bit seed from values."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def step_seeds(seed: int, stage: str, step: int, data_rank: int, rank: int, device: torch.device) -> Iterator[None]:
    """Within, generators start from the seeds of one step and rank of a sequence; afterwards the CPU's goes on as before.

    Hidden dropout has to differ between the ranks of a sequence, which hold different tokens; what is decided once for the
    sequence has to be equal. So outside of steps all generators are equal, and within steps on a GPU the CPU's is.
    Attention dropout takes one seed a sequence, from its first rank.
    """
    values = (seed, stage, step, data_rank)
    before = torch.get_rng_state()
    if device.type == "cuda":
        torch.default_generator.manual_seed(seed_of(*values))
        torch.cuda.default_generators[device.index or 0].manual_seed(seed_of(*values, rank))
    else:
        torch.default_generator.manual_seed(seed_of(*values, rank))
    try:
        yield
    finally:
        torch.set_rng_state(before)


# -- processes find each other -----------------------------------------------------------------------------------------
#: seconds between two looks of rank 0 for ranks that arrived
PAUSE = 0.05
#: torch's agents remember the address of a store that died with its node
SHARED = (
    "If the first node was lost: the others go on only if TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set for every agent."
)
#: how much longer the other ranks wait than rank 0, which reports the missing ranks
MARGIN = timedelta(seconds=10)


def join_under_torchrun(backend: str, timeout: timedelta, device: torch.device) -> None:
    """Make the world's process group under torchrun; without effect under other launchers, or where there is a group.

    torchrun's store may outlive its workers, with the addresses of the dead: under torch's usual keys, ranks of a later
    attempt read those. No environment variable tells attempts apart: each node's agent counts its own restarts, and a node
    that joins later counts from 0. So the ranks of an attempt agree on a token, and use keys that begin with it.

    Raises:
        RuntimeError: where ranks do not arrive within `timeout`, naming them.
    """
    if dist.is_initialized() or not dist.is_torchelastic_launched():
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _store(rank, timeout)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(agree_on_token(store, rank, world, timeout), store),
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    if device.type == "cuda":
        atexit.register(_leave)  # NCCL warns of groups that exist at the end of the process


def _store(rank: int, timeout: timedelta) -> dist.Store:
    """The store of the job: the agent's, else rank 0's own. `dist.rendezvous` would wait for ranks without naming them."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    served = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return dist.TCPStore(host, port, is_master=served, timeout=timeout, wait_for_workers=False, multi_tenant=served)
    except dist.DistError as error:
        raise RuntimeError(
            f"rank {rank} of the job found no store at {host}:{port} within {timeout.total_seconds():g} seconds. "
            "torchrun's agent of the first node, or rank 0, serves it: look at its output for an earlier error, and check "
            f"that this host can reach that port. {SHARED}"
        ) from error


def agree_on_token(store: dist.Store, rank: int, world: int, timeout: timedelta) -> str:
    """A new string that is the same on all ranks that call this together.

    Rank 0 sends it to every other rank under a key that this rank made up, so nobody reads an answer of an earlier attempt.

    Args:
        store: shared by the ranks; it may hold keys of earlier attempts.
        rank: of this process, of `world` ranks.
        timeout: for which rank 0 waits for the others, and the others for rank 0.

    Raises:
        RuntimeError: on every rank that arrived, naming those that did not.
    """
    store = dist.PrefixStore(f"lightning-dilated/token/{world}", store)
    return _send_token(store, world, timeout) if rank == 0 else _receive_token(store, rank, timeout)


def _send_token(store: dist.Store, world: int, timeout: timedelta) -> str:
    """Rank 0's part: answers every hello until all ranks have the token, then reports which are missing."""
    token, end = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    missing = list(range(1, world))
    while missing:
        missing = [rank for rank in missing if not store.check([f"taken/{token}/{rank}"])]
        for rank in missing:
            if store.check([f"hello/{rank}"]):  # it may be of an earlier attempt, until this one's replaces it
                store.set(f"answer/{store.get(f'hello/{rank}').decode()}", token)
        if missing and time.monotonic() > end:
            break
        time.sleep(PAUSE if missing else 0)
    store.set(f"missing/{token}", json.dumps(missing))
    if missing:
        raise RuntimeError(_never_came(0, missing, timeout))
    return token


def _receive_token(store: dist.Store, rank: int, timeout: timedelta) -> str:
    """The other ranks' part."""
    answer_key = uuid.uuid4().hex
    store.set(f"hello/{rank}", answer_key)
    token = _receive(store, f"answer/{answer_key}", rank, timeout).decode()
    store.set(f"taken/{token}/{rank}", "")
    missing = json.loads(_receive(store, f"missing/{token}", rank, timeout, MARGIN))
    if missing:
        raise RuntimeError(_never_came(rank, missing, timeout))
    return token


def _receive(store: dist.Store, key: str, rank: int, timeout: timedelta, margin: timedelta = timedelta(0)) -> bytes:
    """A value that rank 0 sets."""
    try:
        store.wait([key], timeout + margin)
        return store.get(key)
    except dist.DistError as error:
        raise RuntimeError(_never_came(rank, [0], timeout)) from error


def _never_came(rank: int, missing: list[int], timeout: timedelta) -> str:
    return (
        f"rank {rank} of the job waited {timeout.total_seconds():g} seconds in vain for ranks {missing} of the job to say "
        "hello. They did not start, died, or are slower than the strategy's timeout: look at the output of their nodes for "
        f"an earlier error, or give the strategy a longer timeout. {SHARED}"
    )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
