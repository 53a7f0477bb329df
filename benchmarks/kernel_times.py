"""Time the op on a GPU by kernel: milliseconds of each kernel, in both passes, and the wall time.

    python benchmarks/kernel_times.py --seq-len 1048576 --heads 12 --head-dim 64 \
        --segments 2048 4096 8192 16384 32768 --dilations 1 2 4 8 16 --causal 0 1

Shape letters: N tokens, H heads, D head dim.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_dilated import DilatedPattern, dilated_attention


def options() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seq-len", type=int, default=1048576)
    p.add_argument("--heads", type=int, default=12)
    p.add_argument("--head-dim", type=int, default=64)
    p.add_argument("--segments", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768])
    p.add_argument("--dilations", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    p.add_argument("--engine", default="auto")
    p.add_argument("--causal", type=int, nargs="+", default=[0, 1])
    p.add_argument("--rows", type=int, default=12)
    return p.parse_args()


def kernel_times(run: Callable[[], None]) -> tuple[dict[str, tuple[float, int]], float]:
    """Return ({kernel: (ms, calls)}, wall ms) for one run after two warm-ups."""
    run()
    run()
    torch.cuda.synchronize()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:100]][0] += event.device_time / 1000
            times[event.name[:100]][1] += 1
    return {name: (ms, int(n)) for name, (ms, n) in times.items()}, start.elapsed_time(stop)


def main() -> None:
    args = options()
    pattern = DilatedPattern.longnet(args.segments, args.dilations)
    shape = 1, args.seq_len, args.heads, args.head_dim
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    grad = torch.randn_like(q)
    for causal in map(bool, args.causal):

        def run(causal: bool = causal) -> None:
            out = dilated_attention(q, k, v, pattern, causal=causal, engine=args.engine)
            torch.autograd.grad(out, (q, k, v), grad)

        times, wall = kernel_times(run)
        total = sum(ms for ms, _ in times.values())
        print(
            f"\ncausal={causal}: wall {wall:.2f} ms, kernels {total:.2f} ms\n\n| kernel | ms | calls |\n| --- | --- | --- |"
        )
        for name, (ms, calls) in sorted(times.items(), key=lambda x: -x[1][0])[: args.rows]:
            print(f"| `{name}` | {ms:.3f} | {calls} |")


if __name__ == "__main__":
    main()
