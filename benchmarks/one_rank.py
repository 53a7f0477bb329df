"""Run `weak_scaling.py` as one rank of N on one GPU, without the other ranks: memory, and time without a network.

    python benchmarks/one_rank.py --ranks 4 --tokens 65536 --steps 40 --warm 16
    python benchmarks/one_rank.py --ranks 2 --rank 1 --tokens 65536 --decoder 1.3B --recompute block \\
        --strategy ring_dilated_fsdp --layout zigzag --warm 1 --steps 1 --memory FOLDER

torch's fake process group moves no bytes. The rank allocates, packs and computes as one of N ranks. Received rows are
random numbers, so the loss means nothing. The columns of received bytes have what the rank asked for. Nothing waits, so
exposed time is near 0, and a step takes as long as the rank's own work. NCCL's memory is not counted. All options except
--ranks and --rank go to `weak_scaling.py`.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import weak_scaling
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import lightning_dilated as ld
from lightning_dilated.sequence import consensus
from lightning_dilated.strategy import mesh


def options(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ranks", type=int, required=True)
    p.add_argument("--rank", type=int, default=0, help="the rank that runs")
    a, others = p.parse_known_args(argv)
    if a.ranks < 1:
        p.error(f"--ranks must be at least 1, got {a.ranks}.")
    if not 0 <= a.rank < a.ranks:
        p.error(
            f"--rank must be in 0..{a.ranks - 1} for --ranks {a.ranks}, got {a.rank}: lower --rank or raise --ranks."
        )
    return a, others


class Done:
    """The work of a collective that moved nothing."""

    def wait(self) -> bool:
        return True


def receive(rows: torch.Tensor, *unused: Any, **options: Any) -> Done:
    """Fill `rows`, bytes, with small random numbers of bf16 or fp32, in place of `dist.all_to_all_single`.

    With uninitialized memory, ranks that computed with NaN were up to 11 % faster than one GPU.
    """
    flat = rows.flatten()
    flat[: len(flat) // 2 * 2].view(torch.bfloat16).normal_(std=0.01)
    return Done()


def with_own_gradients(init: Callable[..., None]) -> Callable[..., None]:
    """Return DDP's `__init__`, after which the mean of all ranks' gradients is this rank's gradient.

    DDP's own hook refuses the result of a fake all-reduce.
    """

    def made(self: DistributedDataParallel, *values: Any, **options: Any) -> None:
        init(self, *values, **options)
        self.register_comm_hook(None, own)

    def own(unused, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    return made


def alone(ranks: int, rank: int) -> None:
    """Let this process be one rank of `ranks`: its groups are fake, and control messages come back as they were sent."""
    os.environ |= {
        "WORLD_SIZE": str(ranks), "RANK": str(rank), "GROUP_RANK": str(rank), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0",
        "TORCHELASTIC_RUN_ID": "alone", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }  # fmt: skip
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    new_group = dist.new_group
    # torch's own functions call the second name; DDP's sums of gradients ask for NCCL
    dist.new_group = c10d.new_group = lambda members=None, *unused, **options: new_group(members, backend="fake")
    dist.all_to_all_single = receive  # the fake one refuses a rank that only receives
    dist.broadcast_object_list = lambda *unused, **options: None
    DistributedDataParallel.__init__ = with_own_gradients(DistributedDataParallel.__init__)
    mesh.collectives_begun = lambda group: 0  # a fake group does not count

    def connect(self: consensus.ControlGroup, group: dist.ProcessGroup, *unused: Any) -> None:
        self.group, self.ranks, self.backend = group, dist.get_world_size(group), None

    consensus.ControlGroup.__init__ = connect
    consensus.ControlGroup.start_gather = lambda self, own: consensus.PendingGather(
        [own.clone() for _ in range(self.ranks)]
    )
    # each rank is a node of its own for Lightning, and all are one node for the exchange
    pl.Trainer = functools.partial(pl.Trainer, num_nodes=ranks)
    for name in ("RingDilatedStrategy", "RingDilatedFSDPStrategy"):
        setattr(ld, name, functools.partial(getattr(ld, name), ranks_per_node=ranks))


def main() -> None:
    a, others = options()
    sys.argv[1:] = others
    weak_scaling.options()  # its errors come before anything starts
    alone(a.ranks, a.rank)
    weak_scaling.PRINTS = a.rank
    weak_scaling.main()


if __name__ == "__main__":
    main()
