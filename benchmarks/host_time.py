"""What the host does in one small call of the op: microseconds of a forward, and of a forward and backward, on a CPU.

    python benchmarks/host_time.py

A call of 64 tokens, 4 heads of 8, two branches: the least of nine means, on one thread. To compare two versions run both in
turn on one machine, with PYTHONPATH set to each.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import lightning_dilated as ld


def least(function: Callable[[], object], calls: int, repeats: int = 9) -> float:
    """Microseconds of a call, the least mean of several series."""
    means = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        means.append((time.perf_counter() - begin) / calls * 1e6)
    return min(means)


def main() -> None:
    torch.set_num_threads(1)
    pattern = ld.DilatedPattern.longnet([16, 32], [1, 2])
    q, k, v = (torch.randn(1, 64, 4, 8, requires_grad=True) for _ in range(3))

    def forward() -> torch.Tensor:
        return ld.dilated_attention(q, k, v, pattern, causal=True)

    forward().sum().backward()
    with torch.no_grad():
        alone = least(forward, 200)
    both = least(lambda: forward().sum().backward(), 100)
    print(f"{ld.__file__}: forward {alone:.0f} us, forward and backward {both:.0f} us")


if __name__ == "__main__":
    main()
