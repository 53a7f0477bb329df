"""Time attention alone on several GPUs, next to torch's context parallel (ring, cuDNN): both passes, in one run.

    torchrun --nproc-per-node 4 benchmarks/context_parallel.py --dense 131072 524288 --dilated 1048576
    torchrun --nproc-per-node 2 benchmarks/context_parallel.py --dense 4096 --dilated --cpu --heads 4 --dtype float32

N tokens over all ranks, causal. "dense": each query attends to all earlier keys, with torch's context parallel, and
with our op for each exchange and layout. "dilated": our op with geometric(first, N), next to torch's dense attention on
the same tokens. Times are medians on the slowest rank. In separate calls of our op, "received" is the bytes of both
passes on the rank that receives most, and "exposed" is the longest time of any rank in which computation waits for rows.
Shape letters: N tokens, L = N / R tokens of a rank, R ranks, H heads, D head dim.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from exchange import awaited, launched, meet, most, report_lines, step
from torch.nn.attention import SDPBackend, sdpa_kernel

import lightning_dilated as ld

#: (exchange, head_size, layout) of dense patterns
WAYS = [
    ("auto", 1, "contiguous"),
    ("auto", 1, "zigzag"),
    ("gather", 1, "zigzag"),
    ("ring", 1, "zigzag"),
    ("auto", 4, "contiguous"),
    ("auto", 2, "zigzag"),
]
COLUMNS = ("tokens", "pattern", "way", "forward + backward ms", "times torch's ring", "received MB", "exposed ms")


def options() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dense", type=int, nargs="*", default=[131072, 524288], help="N of dense patterns")
    p.add_argument("--dilated", type=int, nargs="*", default=[1048576], help="N of geometric ones")
    p.add_argument("--first", type=int, default=2048, help="their shortest segment")
    p.add_argument("--heads", type=int, default=12)
    p.add_argument("--head-dim", type=int, default=64)
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--rotate", nargs="+", default=["alltoall", "allgather"], help="torch's; alltoall is its ring")
    p.add_argument("--cpu", action="store_true", help="gloo ranks; torch's context parallel is left out")
    p.add_argument("--repeats", type=int, default=3)
    return p.parse_args()


def seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median wall seconds on the slowest rank, after a warm-up."""
    times = []
    for i in range(repeats + 1):
        meet(device)
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times += [time.perf_counter() - begin] if i else []
    return most(device, statistics.median(times))[0]


def of_torch(args: argparse.Namespace, n: int, device: torch.device, rotate: str) -> float:
    """Time torch's context parallel over N tokens. Its load balancing gives each rank an early and a late part."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotate)
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cuda", (ranks,))
    shape, dtype = (1, args.heads, n // ranks, args.head_dim), getattr(torch, args.dtype)
    # torch needs the whole sequence on every rank; contents do not affect the time, so a small tensor is repeated
    whole = torch.zeros(1, ranks * 2, device=device)
    q, k, v, grad = (torch.randn(shape, device=device, dtype=dtype).requires_grad_(i < 3) for i in range(4))

    def run() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), grad)

    with context_parallel(mesh, buffers=[whole], buffer_seq_dims=[1]), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return seconds(run, device, args.repeats)


def ours(
    args: argparse.Namespace, n: int, device: torch.device, pattern: ld.DilatedPattern, way: tuple
) -> tuple[str, float, str, str]:
    """Return (exchange, seconds, cells of "exposed ms" and "received MB")."""
    exchange, head_size, layout = way
    group = ld.sequence.SequenceGroup(exchange=exchange, head_size=head_size, layout=layout)
    with contextlib.closing(group):  # also after running out of memory, to free the buffers
        shape = 1, group.shard(n).length(group.rank), args.heads, args.head_dim
        make = lambda: torch.randn(shape, device=device, dtype=getattr(torch, args.dtype))  # noqa: E731
        call = step([make().requires_grad_(i < 3) for i in range(4)], pattern, True, group)[1]

        def run() -> None:
            call()
            group.settle()

        took = seconds(run, device, args.repeats)
        name = f"{exchange}{f' ({group.plan.exchange})' if exchange == 'auto' and group.plan else ''}"
        return f"{name}, head_size {head_size}, {layout}", took, *awaited(call, group, device, args.repeats)


def lines(args: argparse.Namespace, device: torch.device) -> Iterator[str]:
    """Yield the lines of the table, which are equal on all ranks."""
    cases = [(n, ld.DilatedPattern.dense(), "dense", WAYS) for n in args.dense]
    about = f"geometric({args.first}, N)"
    cases += [(n, ld.DilatedPattern.geometric(args.first, n), about, WAYS[:1]) for n in args.dilated]
    for n, pattern, about, ways in cases:
        ring = None
        for rotate in [] if args.cpu else args.rotate:
            took = of_torch(args, n, device, rotate)
            ring = took if rotate == "alltoall" else ring
            yield line(n, "dense", f"torch {rotate}", took, ring)
        for way in ways:
            if dist.get_world_size() % way[1]:
                continue
            with contextlib.suppress(torch.OutOfMemoryError):
                name, took, exposed, received = ours(args, n, device, pattern, way)
                yield line(n, about, name, took, ring, received, exposed)


def line(n: int, pattern: str, way: str, took: float, ring: float | None, received: str = "", exposed: str = "") -> str:
    """Return a row. `ring` is the seconds of torch's ring, or None if it did not run."""
    times = "" if ring is None else f"{ring / took:.2f}"
    return f"| {n:,} | {pattern} | {way} | {took * 1000:.2f} | {times} | {received} | {exposed} |\n"


def main() -> None:
    args = options()
    device = launched(args.cpu)
    head = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
    report_lines(dist.get_rank(), head, lines(args, device), None)


if __name__ == "__main__":
    main()
