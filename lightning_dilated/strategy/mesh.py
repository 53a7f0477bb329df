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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_dilated._compat.torch import collectives_begun, default_store, flatten_mesh, process_groups
from lightning_dilated._validation import integer
from lightning_dilated.sequence.consensus import connections, forget_connections
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

    def make(self, device_type: str) -> DeviceMesh:
        """The mesh (data, ring, head) of this rank's region; every rank has to call."""
        if self.regions == 1:
            return init_device_mesh(device_type, self.shape, mesh_dim_names=AXES)
        return init_device_mesh(device_type, (self.regions, *self.shape), mesh_dim_names=("region", *AXES))[AXES]

    def sequence_group(self, mesh: DeviceMesh, timeout: timedelta | None = None) -> dist.ProcessGroup:
        """The process group of this rank's sequence; every rank has to call.

        A sequence that is the region has a group of its own, too, so that its rows do not queue behind gradients.
        """
        if self.shape[0] == 1 and self.region_size > 1:
            return self.new_group("region", timeout)
        return flatten_mesh(mesh["ring", "head"], "sequence").get_group()

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


class RunGroups:
    """Process groups that a strategy made for a run, and connections between hosts, which all end with the run.

    A group ends when all of its ranks have arrived at the end of the run: one that left earlier might break what another
    still reads. After an exception ranks may have stopped in different calls, and a group in which one waits for another
    would end after its timeout only: such a group is left to the end of the process.
    """

    def __init__(self) -> None:
        self.groups: list[dist.ProcessGroup] = []
        self._before = connections()

    @contextmanager
    def making(self) -> Iterator[None]:
        """Let process groups that this process makes within the context end with the run."""
        before = process_groups()
        try:
            yield
        finally:
            self.groups += [group for group in process_groups() if group not in before]

    def add(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Let these end with the run, too."""
        self.groups += groups

    def hold(self, names: set[str]) -> bool:
        """Return whether a group of the run has one of these names; all groups then last, but not the connections."""
        if not any(group.group_name in names for group in self.groups):
            return False
        _left.append(forget_connections(self._before, ()))
        return True

    def end_now(self) -> None:
        """End the groups that lasted."""
        for group in set(self.groups) & set(process_groups()):
            dist.destroy_process_group(group)
        self.groups.clear()

    def end(self, run: int, patience: timedelta, failed: bool) -> None:
        """End all; every rank calls.

        Args:
            run: a number, equal on all ranks and another in each run.
            patience: for which to wait for the other ranks.
            failed: whether an exception ended the run on this rank.
        """
        known = process_groups()  # a user may have ended some
        groups, self.groups = [x for x in self.groups if x in known], []
        closing = forget_connections(self._before, groups)
        if not dist.is_initialized():
            return
        begun = {x.group_name: collectives_begun(x) for x in groups}
        begun |= {x.name: collectives_begun(x.backend) for x in closing if x.backend is not None}
        if not _all_arrived(run, patience, failed, begun):
            _left.append((groups, closing))
            return
        for group in groups:
            dist.destroy_process_group(group)
        for connection in closing:
            connection.close()


#: for which a rank waits for the others as a run ends, also after an exception, where they may hang
AFTER_RUN, AFTER_FAILURE = timedelta(seconds=60), timedelta(seconds=2)
#: groups in which a call may wait for other ranks
_left: list[Any] = []


def _all_arrived(run: int, patience: timedelta, failed: bool, begun: dict[str, int]) -> bool:
    """Whether all ranks ended a run within `patience`, and, after an exception, each group after equally many calls."""
    if dist.get_world_size() == 1:
        return True
    try:
        store = dist.PrefixStore(f"lightning-dilated/ends/{run}", default_store())
        store.set(str(dist.get_rank()), json.dumps([failed, begun]))
        ranks = [str(rank) for rank in range(dist.get_world_size())]
        store.wait(ranks, patience)
        ends = [json.loads(store.get(rank)) for rank in ranks]
    except RuntimeError:  # a rank did not come, or the store is gone
        return False
    if not any(has_failed for has_failed, _ in ends):
        return True
    return all(len({counts[name] for _, counts in ends if name in counts}) == 1 for name in begun)


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
