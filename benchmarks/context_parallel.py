"""Attention alone on several GPUs beside torch's context parallel (ring, cuDNN), forward and backward, in one run.

    torchrun --nproc-per-node 4 benchmarks/context_parallel.py --dense 131072 524288 --dilated 1048576
    torchrun --nproc-per-node 2 benchmarks/context_parallel.py --dense 4096 --dilated --cpu --heads 4 --dtype float32

N tokens over all ranks, causal. "dense" is every key for every query: torch's context parallel, and ours with each exchange
and layout named. "dilated" is geometric(2048, N), beside torch's dense attention over the same tokens. Median of the
repeats, on the slowest rank. Shape letters: N tokens, L = N / R of a rank, H heads, D head dim.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import lightning_dilated as ld

#: (exchange, head_size, layout) of dense patterns
WAYS = [
    ("auto", 1, "contiguous"),
    ("auto", 1, "zigzag"),
    ("gather", 1, "zigzag"),
    ("auto", 4, "contiguous"),
    ("auto", 2, "zigzag"),
]


def options() -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dense", type=int, nargs="*", default=[131072, 524288], help="N of dense patterns")
    p.add_argument("--dilated", type=int, nargs="*", default=[1048576], help="N of geometric ones")
    p.add_argument("--heads", type=int, default=12)
    p.add_argument("--head-dim", type=int, default=64)
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--rotate", nargs="+", default=["alltoall", "allgather"], help="torch's; alltoall is its ring")
    p.add_argument("--cpu", action="store_true", help="gloo ranks; torch's context parallel is left out")
    p.add_argument("--repeats", type=int, default=3)
    return p.parse_args()


def seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median wall seconds on the slowest rank, after a warm-up."""
    found = []
    for i in range(repeats + 1):
        dist.barrier()
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found += [time.perf_counter() - begin] if i else []
    slowest = torch.tensor(statistics.median(found), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def of_torch(args: argparse.Namespace, n: int, device: torch.device, rotate: str) -> float:
    """Torch's context parallel over N tokens, whose load balance gives a rank an early and a late part."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotate)
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cuda", (ranks,))
    shape, dtype = (1, args.heads, n // ranks, args.head_dim), getattr(torch, args.dtype)
    # torch wants the whole sequence on every rank; what it holds does not change the time, so parts come from a small one
    whole = torch.zeros(1, ranks * 2, device=device)
    q, k, v, grad = (torch.randn(shape, device=device, dtype=dtype).requires_grad_(i < 3) for i in range(4))

    def run() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), grad)

    with context_parallel(mesh, buffers=[whole], buffer_seq_dims=[1]), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return seconds(run, device, args.repeats)


def ours(
    args: argparse.Namespace, n: int, device: torch.device, pattern: ld.DilatedPattern, way: tuple
) -> tuple[float, int, str]:
    """(seconds, bytes received in both passes on the rank that receives most, the exchange)."""
    exchange, head_size, layout = way
    group = ld.sequence.SequenceGroup(exchange=exchange, head_size=head_size, layout=layout)
    shape = 1, group.shard(n).length(group.rank), args.heads, args.head_dim
    make = lambda: torch.randn(shape, device=device, dtype=getattr(torch, args.dtype))  # noqa: E731
    q, k, v, grad = (make().requires_grad_(i < 3) for i in range(4))

    def run() -> None:
        with group.trusting():
            out = ld.dilated_attention(q, k, v, pattern, causal=True, sequence=group)
            torch.autograd.grad(out, (q, k, v), grad)
        group.settle()

    took = seconds(run, device, args.repeats)
    group.forward_traffic.clear(), group.backward_traffic.clear()
    run()
    got = torch.tensor(group.forward_traffic.received + group.backward_traffic.received, device=device)
    dist.all_reduce(got, op=dist.ReduceOp.MAX)
    name = f"{exchange}{f' ({group.plan.exchange})' if exchange == 'auto' and group.plan else ''}"
    group.close()
    return took, got.item(), f"{name}, head_size {head_size}, {layout}"


def main() -> None:
    """One row a way."""
    args = options()
    device = torch.device("cpu" if args.cpu else f"cuda:{os.environ['LOCAL_RANK']}")
    if not args.cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if args.cpu else "nccl")
    say = print if dist.get_rank() == 0 else lambda *unused, **more: None
    say(
        "| tokens | pattern | way | forward + backward ms | times torch's ring | received MB |\n|---|---|---|---|---|---|",
        flush=True,
    )
    dense, dilated = ld.DilatedPattern.dense(), lambda n: ld.DilatedPattern.geometric(2048, n)
    cases = [(n, dense, "dense", WAYS) for n in args.dense] + [
        (n, dilated(n), "geometric(2048, N)", [("auto", 1, "contiguous")]) for n in args.dilated
    ]
    for n, pattern, about, ways in cases:
        ring = float("nan")
        for rotate in [] if args.cpu else args.rotate:
            took = of_torch(args, n, device, rotate)
            ring = took if rotate == "alltoall" else ring
            say(f"| {n:,} | dense | torch {rotate} | {took * 1000:.2f} | {ring / took:.2f} | |", flush=True)
        for way in ways:
            if dist.get_world_size() % way[1]:
                continue
            with contextlib.suppress(torch.OutOfMemoryError):
                took, got, name = ours(args, n, device, pattern, way)
                say(
                    f"| {n:,} | {about} | {name} | {took * 1000:.2f} | {ring / took:.2f} | {got / 1e6:.1f} |",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
