"""Time the host in one small call of the op: microseconds of a forward, and of a forward and backward.

    python benchmarks/host_time.py                  # on a CPU
    python benchmarks/host_time.py --device cuda    # only the part that does not overlap with GPU kernels
    python benchmarks/host_time.py --device cuda --profile

A call has 64 tokens, 4 heads of 8 (on a GPU 64, in bfloat16) and two branches. The time is the smallest of nine means,
on one thread. `--profile` prints the most expensive functions. To compare two versions, run them alternately on one
machine with PYTHONPATH set to each of them.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable

import torch

import lightning_dilated as ld


def least(function: Callable[[], object], calls: int, repeats: int = 9) -> float:
    """Return the microseconds of a call: the smallest mean of several series."""
    means = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        means.append((time.perf_counter() - begin) / calls * 1e6)
    return min(means)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    p.add_argument("--profile", action="store_true")
    a = p.parse_args()
    torch.set_num_threads(1)
    pattern = ld.DilatedPattern.longnet([16, 32], [1, 2])
    dim, dtype = (64, torch.bfloat16) if a.device == "cuda" else (8, torch.float32)
    q, k, v = (torch.randn(1, 64, 4, dim, device=a.device, dtype=dtype, requires_grad=True) for _ in range(3))
    grad = torch.ones_like(q)

    def forward() -> torch.Tensor:
        return ld.dilated_attention(q, k, v, pattern, causal=True)

    def both() -> None:
        torch.autograd.grad(forward(), (q, k, v), grad)

    both()
    if a.profile:
        with cProfile.Profile() as profiler:
            for _ in range(300):
                both()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
        return
    with torch.no_grad():
        alone = least(forward, 200)
    print(f"{ld.__file__}: forward {alone:.0f} us, forward and backward {least(both, 100):.0f} us")
    if a.device == "cuda":
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(100):
            both()
        issued = time.perf_counter() - begin
        torch.cuda.synchronize()
        waits = time.perf_counter() - begin - issued
        print(f"after 100 calls the GPU needed {1e4 * waits:.1f} us a call more than the host")


if __name__ == "__main__":
    main()
