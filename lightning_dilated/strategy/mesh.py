"""Ranks of a job: sizes of the mesh (region, data, ring, head), rendezvous under torchrun, seeds of each step."""

from __future__ import annotations

import atexit
import faulthandler
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

from lightning_dilated._compat.lightning import destroy_process_group_at_exit
from lightning_dilated._compat.torch import collectives_begun, default_store, flatten_mesh, process_groups
from lightning_dilated._validation import integer
from lightning_dilated.sequence.consensus import connections, forget_connections
from lightning_dilated.sequence.shard import check_head_size

AXES = ("data", "ring", "head")
#: values of the option `sequence_size`, the number of ranks that share a sequence
SequenceSize: TypeAlias = int | Literal["auto"] | list[int]
#: values of the option `head_size`, the number of ranks of a sequence that exchange tokens for heads
HeadSize: TypeAlias = int | Literal["auto"]


@dataclass(frozen=True)
class MeshSizes:
    """Numbers of ranks: world = regions x data x ring x head. The ranks of a region or of a sequence are consecutive.

    Args:
        world: number of all ranks.
        sequence_size: number of ranks that share a sequence; "auto": all ranks of a region; a list: the largest number
            in it that divides the number of ranks of a region.
        head_size: number of ranks that exchange tokens for heads; "auto" becomes 1 here: each call chooses its size.
        regions: number of parts of the job that train apart between outer steps.

    Raises:
        TypeError, ValueError: naming the option and its allowed values.
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
                f"allowed: {divisors(self.region_size)}. Add 1 to the list to allow any number of ranks."
            )
        return max(fitting)

    @property
    def _ranks(self) -> str:
        """Describe, for errors, the ranks that sequences are distributed over."""
        if self.regions == 1:
            return f"{self.world} ranks (devices x nodes)"
        return f"{self.region_size} ranks of each of {self.regions} regions (devices x nodes / regions)"

    @property
    def region_size(self) -> int:
        """Number of ranks of a region."""
        return self.world // self.regions

    @property
    def data(self) -> int:
        """Number of data parallel ranks in all regions: the number of sequences that are computed at a time."""
        return self.world // self.sequence_size

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes (data, ring, head) of a region."""
        return self.data // self.regions, self.sequence_size // self.head_size, self.head_size

    def make(self, device_type: str) -> DeviceMesh:
        """Make the mesh (data, ring, head) of this rank's region; every rank must call this."""
        if self.regions == 1:
            return init_device_mesh(device_type, self.shape, mesh_dim_names=AXES)
        return init_device_mesh(device_type, (self.regions, *self.shape), mesh_dim_names=("region", *AXES))[AXES]

    def sequence_group(self, mesh: DeviceMesh, timeout: timedelta | None = None) -> dist.ProcessGroup:
        """Return the process group of this rank's sequence; every rank must call this.

        If the sequence spans a whole region, the group is a new one, so that its rows do not queue behind gradients.
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
        """Make a group of this rank's region, or of one rank in each region ("peers"); every rank must call this."""
        regions = [list(range(first, first + self.region_size)) for first in range(0, self.world, self.region_size)]
        ranks = regions if kind == "region" else [list(peers) for peers in zip(*regions, strict=True)]
        return dist.new_subgroups_by_enumeration(ranks, timeout=timeout, backend=backend, pg_options=options)[0]


class RunGroups:
    """The process groups and the connections between hosts of a run, which are closed at the end of the run.

    A group is destroyed after all its ranks have reached the end of the run, because a rank that left earlier could
    break another rank's reads. After an exception ranks may have stopped in different calls. Destroying a group would
    then wait for its timeout, so such a group is left until the process ends, see `end_in_time`.
    """

    def __init__(self) -> None:
        self.groups: list[dist.ProcessGroup] = []
        self._before = connections()

    @contextmanager
    def making(self) -> Iterator[None]:
        """Add the process groups that this process makes while the context is open."""
        before = process_groups()
        try:
            yield
        finally:
            self.groups += [group for group in process_groups() if group not in before]

    def add(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Add groups to destroy at the end of the run."""
        self.groups += groups

    def hold(self, names: set[str], run: int, patience: timedelta, failed: bool) -> bool:
        """If the run has a group with one of these names, keep all groups, forget connections, and return True.

        The other arguments are as in `end`. If a rank does not arrive after an exception, `end_now` does nothing.
        """
        if not any(group.group_name in names for group in self.groups):
            return False
        _left.append(forget_connections(self._before, ()))
        if failed and not _all_arrived(run, patience, failed, {}):
            self.groups.clear()
        return True

    def end_now(self) -> None:
        """Destroy the groups that `hold` kept."""
        for group in set(self.groups) & set(process_groups()):
            dist.destroy_process_group(group)
        self.groups.clear()

    def end(self, run: int, patience: timedelta, failed: bool) -> None:
        """Destroy groups and close connections; every rank must call this.

        Args:
            run: the run's number, equal on all ranks.
            patience: maximum time to wait for the other ranks.
            failed: True if an exception ended the run on this rank.
        """
        known = process_groups()  # the user may have destroyed some groups
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


#: maximum time to wait for the other ranks at the end of a run; shorter after an exception, because they may hang
AFTER_RUN, AFTER_FAILURE = timedelta(seconds=60), timedelta(seconds=2)
#: groups and connections that are kept until the process ends, because a call may still wait in them
_left: list[Any] = []
#: seconds that Python may take to exit after a run in which a rank did not arrive at the end
AT_EXIT = 10.0


def end_in_time() -> None:
    """After `AT_EXIT` seconds print where this process waits and end the process with status 1; called at exit.

    Lightning destroys NCCL's groups at exit, which waits without a limit for a rank that hangs. Python first calls the
    function that was registered last, so this one runs before Lightning's. The thread of faulthandler needs no GIL.
    """
    faulthandler.dump_traceback_later(AT_EXIT, exit=True, file=2)
    print(end="", flush=True)  # the end itself writes no buffered output


def _all_arrived(run: int, patience: timedelta, failed: bool, begun: dict[str, int]) -> bool:
    """Return True if all ranks arrive within `patience` and, after an exception, have equal counts of collectives.

    If a rank does not arrive, the time that this process may take to exit is limited.
    """
    if dist.get_world_size() == 1:
        return True
    try:
        store = dist.PrefixStore(f"lightning-dilated/ends/{run}", default_store())
        store.set(str(dist.get_rank()), json.dumps([failed, begun]))
        ranks = [str(rank) for rank in range(dist.get_world_size())]
        store.wait(ranks, patience)
        ends = [json.loads(store.get(rank)) for rank in ranks]
    except RuntimeError:  # a rank did not arrive, or the store is gone
        atexit.register(end_in_time)
        return False
    if not any(has_failed for has_failed, _ in ends):
        return True
    return all(len({counts[name] for _, counts in ends if name in counts}) == 1 for name in begun)


#: limit of thread blocks for a communicator that overlaps with the backward: kernels that wait for a slower rank occupy
#: multiprocessors that the backward needs
BLOCKS = 4


def nccl_options(overlapped: bool) -> dist.ProcessGroupNCCL.Options:
    """Return NCCL's options for a group; a group that is `overlapped` with the backward gets few thread blocks."""
    options = dist.ProcessGroupNCCL.Options()
    if overlapped:
        options.config.max_ctas = BLOCKS
    return options


def divisors(n: int) -> list[int]:
    return [x for x in range(1, n + 1) if n % x == 0]


# -- random numbers ----------------------------------------------------------------------------------------------------
def run_seed(strategy: Any) -> int:
    """Return the run's seed, equal on all ranks: from `seed_everything`, else the initial seed of rank 0."""
    if "PL_GLOBAL_SEED" in os.environ:
        return int(os.environ["PL_GLOBAL_SEED"])
    seed = strategy.broadcast(torch.initial_seed() % 2**32)
    if strategy.world_size > 1:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
    return seed


def seed_of(*values: object) -> int:
    """Hash values to a 63-bit seed."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def step_seeds(seed: int, stage: str, step: int, data_rank: int, rank: int, device: torch.device) -> Iterator[None]:
    """Seed the generators for one step and rank of a sequence; restore the CPU generator afterwards.

    Hidden dropout must differ between the ranks of a sequence, because they hold different tokens. Random decisions for
    the whole sequence must be equal. So all generators are equal on these ranks outside of steps, and within a step on
    a GPU the CPU generators are equal. Attention dropout uses one seed for each sequence, drawn on its first rank.
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


# -- rendezvous under torchrun -----------------------------------------------------------------------------------------
#: seconds between two checks of rank 0 for new ranks
PAUSE = 0.05
#: advice in errors, because torchrun's agents keep using the store's address after its node was lost
SHARED = (
    "If the first node was lost, the others continue only with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for every agent."
)
#: extra time that the other ranks wait for rank 0's report of the missing ranks
MARGIN = timedelta(seconds=10)


def join_under_torchrun(backend: str, timeout: timedelta, device: torch.device) -> None:
    """Make the world's process group under torchrun; do nothing under other launchers or if the group exists.

    torchrun's store may outlive its workers, and under torch's usual keys a restarted job would read the addresses of
    dead workers. No environment variable identifies an attempt: each node's agent counts its own restarts, from 0 for
    a node that joins later. So the ranks of an attempt agree on a token, and all their keys begin with this token.

    Raises:
        RuntimeError: naming the ranks that do not arrive within `timeout`.
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
        destroy_process_group_at_exit()  # NCCL warns about groups that still exist then


def _store(rank: int, timeout: timedelta) -> dist.Store:
    """Connect to the store of torchrun's agent or rank 0; `dist.rendezvous` would not report the missing ranks."""
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
    """Return a new string that is the same on all ranks that call this together.

    Each other rank draws a random key, and rank 0 answers under this key. So no rank reads an earlier attempt's answer.

    Args:
        store: the ranks' common store, which may still contain keys of earlier attempts.
        rank: this process among `world` ranks.
        timeout: maximum time that rank 0 and the other ranks wait for each other.

    Raises:
        RuntimeError: on every rank that arrived, naming the missing ranks.
    """
    store = dist.PrefixStore(f"lightning-dilated/token/{world}", store)
    return _send_token(store, world, timeout) if rank == 0 else _receive_token(store, rank, timeout)


def _send_token(store: dist.Store, world: int, timeout: timedelta) -> str:
    """Answer the other ranks' requests until all have the token or the timeout ends; then publish the missing ranks."""
    token, end = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    missing = list(range(1, world))
    while missing:
        missing = [rank for rank in missing if not store.check([f"taken/{token}/{rank}"])]
        for rank in missing:
            if store.check([f"hello/{rank}"]):  # it may be a request of an earlier attempt
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
    try:
        store.wait([key], timeout + margin)
        return store.get(key)
    except dist.DistError as error:
        raise RuntimeError(_never_came(rank, [0], timeout)) from error


def _never_came(rank: int, missing: list[int], timeout: timedelta) -> str:
    return (
        f"rank {rank} of the job waited {timeout.total_seconds():g} seconds in vain for ranks {missing} of the job to join. "
        "They did not start, died, or are slower than the strategy's timeout: look at the output of their nodes for "
        f"an earlier error, or give the strategy a longer timeout. {SHARED}"
    )
