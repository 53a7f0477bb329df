"""Time and bytes of each exchange on this machine's GPUs (or gloo ranks), in the forward and backward of the op.

    python benchmarks/exchange.py --local 262144 --record benchmarks/results/....md     # on a machine with GPUs: all of them
    python benchmarks/exchange.py --device cpu --ranks 2 --local 4096 --heads 2 --head-dim 16 --dtype float32

"alone" is the op on one rank's own tokens, with the branches that fit a shard and need no exchange. "added"
is the additional time of the widest branches and their exchange. "exposed" is the time in which computation waits for
rows, in both passes, measured by the exchange in separate calls. "moving" is the time that calls without transfers save
(--still); they leave buffers unchanged. Each column has the largest number of any rank. Calls are trusted as in
training (`SequenceGroup.trusting`), and "forward" also saves tensors for the backward. Bytes are received bytes,
counted by the exchange itself. "planned" is the plan's bytes of both passes, without the trade of tokens for heads.
Shape letters: L tokens of a rank, N = R L tokens, R ranks, H heads, D head dim.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_dilated import DilatedPattern, dilated_attention
from lightning_dilated.ext.profiling.traffic import summary
from lightning_dilated.sequence import SequenceGroup
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.exchange.transport import Posted, TrafficLog, Wire

COLUMNS = (
    *(
        "tokens a rank",
        "causal",
        "exchange",
        "head_size",
        "forward ms",
        "forward + backward ms",
        "added ms",
        "exposed ms",
    ),
    *("moving ms", "received forward MB", "backward MB", "planned MB"),
)


def options() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda")
    p.add_argument("--ranks", type=int, help="default: all GPUs")
    p.add_argument("--local", type=int, nargs="+", default=[262144], help="tokens a rank")
    p.add_argument(
        "--first", type=int, default=2048, help="shortest segment of the geometric pattern; the longest is N"
    )
    p.add_argument("--heads", type=int, default=12)
    p.add_argument("--head-dim", type=int, default=64)
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--causal", nargs="+", type=int, default=[0, 1])
    p.add_argument("--exchanges", nargs="+", default=["auto", *EXCHANGES])
    p.add_argument("--head-sizes", nargs="+", type=int, default=[1])
    p.add_argument(
        "--ranks-per-node", type=int, help="default: all; smaller makes the hierarchical forms run on one node"
    )
    p.add_argument("--still", action="store_true", help="time calls in which nothing moves, too")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--record", type=Path, help="append the table to this file")
    return p.parse_args()


def seconds(run, device: torch.device, repeats: int, settle=lambda: None) -> float:
    """Return median wall seconds of `run` on the slowest rank, over four consecutive calls after two warm-ups."""
    times = []
    for i in range(repeats + 2):
        meet(device)
        begin = time.perf_counter()
        for _ in range(4):
            run()
        settle()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times += [(time.perf_counter() - begin) / 4] if i > 1 else []
    return most(device, statistics.median(times))[0]


def meet(device: torch.device) -> None:
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()


def most(device: torch.device, *numbers: float) -> list[float]:
    """Return the maximum over ranks of each number."""
    largest = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.tolist()


def step(tensors, pattern, causal: bool, group: SequenceGroup | None):
    """Return functions without arguments: the op's forward, and its forward and backward."""
    q, k, v, grad = tensors
    trusting = contextlib.nullcontext if group is None else group.trusting

    def call(backward: bool) -> None:
        with trusting():
            out = dilated_attention(q, k, v, pattern, causal=causal, sequence=group)
            if backward:
                torch.autograd.grad(out, (q, k, v), grad)

    return lambda: call(False), lambda: call(True)


def watched(run, group: SequenceGroup, device: torch.device, repeats: int) -> tuple[float, float, float]:
    """Return (exposed seconds, planned bytes to receive, whether counts differ) of a call, maximum over ranks."""
    exposed = []
    for _ in range(repeats):
        meet(device)
        clock = TrafficLog()
        group.watch(clock)
        run()
        group.settle()
        group.watch(None)
        if device.type == "cuda":
            torch.cuda.synchronize()
        *rows, total = summary(clock, group.links)
        exposed.append(total.exposed)
    unlike = any(x.as_planned is False for x in rows)
    planned = [sum(x.planned_received for x in rows if x.run == run) for run in ("forward", "backward")]
    exposed, unlike, *planned = most(device, statistics.median(exposed), unlike, *planned)
    return exposed, sum(planned), unlike


def counted(run, group: SequenceGroup) -> tuple[int, int]:
    """Return the (forward, backward) bytes that this rank receives in a call."""
    group.forward_traffic.clear(), group.backward_traffic.clear()
    run()
    group.settle()
    return group.forward_traffic.received, group.backward_traffic.received


def awaited(run, group: SequenceGroup, device: torch.device, repeats: int) -> tuple[str, str]:
    """Return the cells "exposed ms" and "received MB" (both passes, maximum over ranks), from calls without timing."""
    exposed, _, unlike = watched(run, group, device, repeats)
    (received,) = most(device, sum(counted(run, group)))
    return f"{exposed * 1e3:.2f}", f"{received / 1e6:.2f}{' (NOT as planned)' if unlike else ''}"


def still():
    """Make exchanges pack, compute and sum as usual, but send nothing."""

    def post(self, rows, sends, receives, into=None, what="rows"):
        out = rows.new_empty(sum(receives.values()), *rows.shape[1:]) if into is None else into
        return Posted(out, None, rows.contiguous())

    return mock.patch.object(Wire, "post", post)


@dataclass
class Line:
    """Seconds and bytes in a row of the table, which are equal on all ranks."""

    local: int
    causal: bool
    name: str
    size: int
    forward: float
    both: float
    added: float = 0.0
    exposed: float = 0.0
    moving: float | None = None
    received: tuple[float, float] = (0, 0)
    planned: float = 0
    unlike: float = 0

    def __str__(self) -> str:
        moving = [f"{self.moving * 1e3:.2f}" if self.moving is not None else "-"]
        times = [f"{x * 1e3:.2f}" for x in (self.forward, self.both, self.added, self.exposed)]
        sizes = [f"{x / 1e6:.2f}" for x in (*self.received, self.planned)]
        sizes[-1] += " (NOT as counted)" if self.unlike else ""
        return f"| {' | '.join([str(self.local), str(self.causal), self.name, str(self.size), *times, *moving, *sizes])} |\n"


def measure(
    group: SequenceGroup, tensors, pattern, causal: bool, alone: float, args: argparse.Namespace
) -> Line | ValueError:
    """Measure an exchange, or return the reason why it does not support the call."""
    device, local = tensors[0].device, tensors[0].shape[1]
    forward, both_passes = step(tensors, pattern, causal, group)
    try:
        forward()
    except ValueError as error:
        return error
    name = f"auto ({group.plan.exchange or 'nothing'})" if group.exchange == "auto" else group.exchange
    line = Line(
        local,
        causal,
        name,
        group.head_size,
        *(seconds(run, device, args.repeats, group.settle) for run in (forward, both_passes)),
    )
    line.added = line.both - alone
    line.exposed, line.planned, line.unlike = watched(both_passes, group, device, args.repeats)
    line.received = tuple(most(device, *counted(both_passes, group)))
    if args.still:
        with still():
            line.moving = line.both - seconds(both_passes, device, args.repeats, group.settle)
    return line


def lines(rank: int, args: argparse.Namespace, device: torch.device):
    """Yield the lines of the table, which are equal on all ranks."""
    ranks = dist.get_world_size()
    for local in args.local:
        pattern = DilatedPattern.geometric(args.first, local * ranks)
        narrow = DilatedPattern(tuple(b for b in pattern.branches if b.segment_length <= local))
        shape = (1, local, args.heads, args.head_dim)
        make = lambda shape=shape: torch.randn(shape, device=device, dtype=getattr(torch, args.dtype))  # noqa: E731
        tensors = [make().requires_grad_() for _ in "qkv"] + [make()]
        for causal in map(bool, args.causal):
            alone = [seconds(run, device, args.repeats) for run in step(tensors, narrow, causal, None)]
            yield Line(local, causal, "alone", 1, *alone)
            for size, name in itertools.product(args.head_sizes, args.exchanges):
                group = SequenceGroup(exchange=name, head_size=size, ranks_per_node=args.ranks_per_node)
                row = measure(group, tensors, pattern, causal, alone[1], args)
                group.close()
                if isinstance(row, Line):
                    yield row
                elif rank == 0:
                    print(f"{name}: {row}", flush=True)


def joined(rank: int, ranks: int, port: int, args: argparse.Namespace) -> torch.device:
    """Join the process group. Return the device."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    device = torch.device(args.device, rank) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", rank=rank, world_size=ranks)
    return device


def launched(cpu: bool) -> torch.device:
    """Join the group of the processes that torchrun started, over gloo or NCCL, and return this rank's device."""
    device = torch.device("cpu" if cpu else f"cuda:{os.environ['LOCAL_RANK']}")
    if not cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if cpu else "nccl")
    return device


def report_lines(rank: int, head: str, rows: Iterable[object], record: Path | None) -> None:
    """On rank 0, print the lines one by one and append them to the file."""
    written = [head]
    print(head, end="", flush=True) if rank == 0 else None
    for line in rows:
        written.append(str(line))
        print(line, end="", flush=True) if rank == 0 else None
    if record and rank == 0:
        with record.open("a") as file:
            file.writelines(written)
    dist.destroy_process_group()


def work(rank: int, ranks: int, port: int, args: argparse.Namespace) -> None:
    device = joined(rank, ranks, port, args)
    head = (
        f"\n{ranks} ranks, {args.heads} heads of {args.head_dim}, {args.dtype}, geometric({args.first}, N), "
        f"ranks_per_node {args.ranks_per_node or 'all'}, torch {torch.__version__}, "
        f"{torch.cuda.get_device_name(device) if args.device == 'cuda' else 'CPU'}, {datetime.date.today()}\n\n"
        f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
    )
    report_lines(rank, head, lines(rank, args, device), args.record)


def start(work: Callable[..., None], args: argparse.Namespace) -> None:
    count = args.ranks or torch.cuda.device_count()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    mp.spawn(work, args=(count, free, args), nprocs=count)


if __name__ == "__main__":
    start(work, options())
