"""Time and bytes of each exchange on the GPUs (or gloo ranks) of this machine, forward and backward of the op.

    python benchmarks/exchange.py --local 262144 --record benchmarks/results/....md     # on a machine with GPUs: all of them
    python benchmarks/exchange.py --device cpu --ranks 2 --local 4096 --heads 2 --head-dim 16 --dtype float32

"alone" is the op on one rank over its own tokens only, with the branches that fit a shard: the work that needs no exchange.
"added" is what the widest branches and their exchange add to it. Bytes are those that rank 0..R-1 received at most, as
counted by the exchange itself. Shape letters: L tokens a rank, N = R L, H heads, D head dim.
"""

from __future__ import annotations

import argparse
import datetime
import os
import socket
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_dilated import DilatedPattern, dilated_attention
from lightning_dilated.sequence import SequenceGroup
from lightning_dilated.sequence.exchange import EXCHANGES


def options() -> argparse.Namespace:
    """The command line."""
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
    p.add_argument("--exchanges", nargs="+", default=list(EXCHANGES))
    p.add_argument("--head-sizes", nargs="+", type=int, default=[1])
    p.add_argument(
        "--ranks-per-node", type=int, help="default: all; smaller makes the hierarchical forms run on one node"
    )
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--record", type=Path, help="append the table to this file")
    return p.parse_args()


def seconds(run, device: torch.device, repeats: int) -> float:
    """Median wall seconds of `run` on the slowest rank, after two warm-ups."""
    found = []
    for i in range(repeats + 2):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found += [time.perf_counter() - begin] if i > 1 else []
    slowest = torch.tensor(statistics.median(found), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def step(tensors, pattern, causal: bool, group: SequenceGroup | None):
    """(forward, forward and backward) of the op as functions without arguments."""
    q, k, v, grad = tensors

    def forward():
        with torch.no_grad():
            dilated_attention(q, k, v, pattern, causal=causal, sequence=group)

    def both():
        out = dilated_attention(q, k, v, pattern, causal=causal, sequence=group)
        torch.autograd.grad(out, (q, k, v), grad)

    return forward, both


def rows(rank: int, args: argparse.Namespace, device: torch.device):
    """The lines of the table, equal on all ranks."""
    ranks = dist.get_world_size()
    for local in args.local:
        pattern = DilatedPattern.geometric(args.first, local * ranks)
        narrow = DilatedPattern(tuple(b for b in pattern.branches if b.segment_length <= local))
        shape = (1, local, args.heads, args.head_dim)
        make = lambda shape=shape: torch.randn(shape, device=device, dtype=getattr(torch, args.dtype))  # noqa: E731
        tensors = [make().requires_grad_() for _ in "qkv"] + [make()]
        for causal in map(bool, args.causal):
            alone = [seconds(run, device, args.repeats) for run in step(tensors, narrow, causal, None)]
            yield (local, causal, "alone", 1, *alone, 0.0, 0, 0)
            for size in args.head_sizes:
                for name in args.exchanges:
                    group = SequenceGroup(exchange=name, head_size=size, ranks_per_node=args.ranks_per_node)
                    forward, both = step(tensors, pattern, causal, group)
                    try:
                        forward()
                    except ValueError as error:
                        if rank == 0:
                            print(f"{name}: {error}", flush=True)
                        continue
                    took = [seconds(run, device, args.repeats) for run in (forward, both)]
                    group.forward_traffic.clear(), group.backward_traffic.clear()
                    both()
                    got = torch.tensor([group.forward_traffic.received, group.backward_traffic.received], device=device)
                    dist.all_reduce(got, op=dist.ReduceOp.MAX)
                    yield (local, causal, name, size, *took, took[1] - alone[1], *got.tolist())
                    group.close()


def work(rank: int, ranks: int, port: int, args: argparse.Namespace) -> None:
    """One rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    device = torch.device(args.device, rank) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", rank=rank, world_size=ranks)
    head = (
        f"\n{ranks} ranks, {args.heads} heads of {args.head_dim}, {args.dtype}, geometric({args.first}, N), "
        f"ranks_per_node {args.ranks_per_node or 'all'}, torch {torch.__version__}, "
        f"{torch.cuda.get_device_name(device) if args.device == 'cuda' else 'CPU'}, {datetime.date.today()}\n\n"
        "| tokens a rank | causal | exchange | head_size | forward ms | forward + backward ms | added ms "
        "| received forward MB | backward MB |\n|---|---|---|---|---|---|---|---|---|\n"
    )
    lines = [head]
    print(head, end="", flush=True) if rank == 0 else None
    for local, causal, name, size, forward, both, added, got, back in rows(rank, args, device):
        times = f"{forward * 1e3:.2f} | {both * 1e3:.2f} | {added * 1e3:.2f}"
        lines.append(f"| {local} | {causal} | {name} | {size} | {times} | {got / 1e6:.2f} | {back / 1e6:.2f} |\n")
        print(lines[-1], end="", flush=True) if rank == 0 else None
    if args.record and rank == 0:
        with args.record.open("a") as file:
            file.writelines(lines)
    dist.destroy_process_group()


if __name__ == "__main__":
    given = options()
    count = given.ranks or torch.cuda.device_count()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    mp.spawn(work, args=(count, free, given), nprocs=count)
