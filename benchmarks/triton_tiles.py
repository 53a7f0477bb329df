"""Time the triton engine's kernels against cuDNN's on one branch of 2,048-token segments, with several tile sizes.

    python benchmarks/triton_tiles.py

Prints milliseconds and the ratio of cuDNN's time to ours. Shape letters: G segments, J heads, n rows, D head dim.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_dilated.attention.backends.base import Terms
from lightning_dilated.attention.backends.sdpa import CUDNN
from lightning_dilated.kernels import dense, pipelined
from lightning_dilated.planning import seconds_of

ROWS, SEGMENTS = 2048, 128
FORWARD = [(128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 32, 4, 4), (64, 128, 4, 2)]
PIPELINED = [(64, 128, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 2), (128, 128, 8, 2)]
OVER_KEYS = [(64, 128, 8, 2), (64, 64, 4, 2), (32, 128, 8, 2), (64, 128, 4, 2), (32, 64, 4, 3), (32, 128, 4, 2)]
OVER_ROWS = [(128, 64, 8, 2), (64, 64, 4, 2), (128, 128, 8, 2), (128, 64, 4, 2), (128, 32, 4, 3), (64, 128, 4, 2)]


def milliseconds(run: Callable[[], object]) -> float:
    """Time a run. Return NaN if the tiles do not fit the GPU."""
    try:
        return 1000 * seconds_of(run, torch.device("cuda"), 3)
    except Exception as error:  # usually out of shared memory
        print(f"    {type(error).__name__}: {str(error)[:80]}")
        return float("nan")


def tried(table: dict[Any, tuple[int, ...]], dim: Any, tiles: list[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Yield the tiles one at a time, each set in a kernel's table. Restore the table at the end."""
    before = table[dim]
    for tile in tiles:
        table[dim] = tile
        yield tile
    table[dim] = before


def case(dim: int, heads: int, causal: bool, rate: int) -> None:
    """Time all tiles for one case. With a dilation above 1, only the pipelined forward is timed."""
    shape = SEGMENTS, ROWS * rate, heads, dim
    make = lambda: torch.randn(shape, device="cuda", dtype=torch.bfloat16)[:, ::rate].transpose(1, 2)  # noqa: E731
    q, k, v, grad = make(), make(), make(), make()
    scale = dim**-0.5
    out, lse = CUDNN.forward(q, k, v, Terms(causal, scale))
    theirs = milliseconds(lambda: CUDNN.forward(q, k, v, Terms(causal, scale)))
    print(f"D={dim} causal={causal} dilation {rate}: cuDNN forward {theirs:.3f} ms")
    for tile in tried(pipelined.CONFIGS, (dim, causal), PIPELINED):
        ours = milliseconds(lambda: pipelined.forward(q, k, v, causal, scale))
        print(f"  pipelined forward {tile}: {ours:.3f} ms, ratio {theirs / ours:.2f}")
    if rate > 1:
        return
    for tile in tried(dense.CONFIGS, dim, FORWARD):
        ours = milliseconds(lambda: dense.forward(q, k, v, causal, scale))
        print(f"  forward {tile}: {ours:.3f} ms, ratio {theirs / ours:.2f}")
    theirs = milliseconds(lambda: CUDNN.backward(grad, q, k, v, out, lse, Terms(causal, scale)))
    print(f"D={dim} causal={causal}: cuDNN backward {theirs:.3f} ms")
    over_keys = dense.OVER_KEYS_CAUSAL if causal else dense.OVER_KEYS
    for name, table, tiles in (("keys", over_keys, OVER_KEYS), ("rows", dense.OVER_ROWS, OVER_ROWS)):
        for tile in tried(table, dim, tiles):
            ours = milliseconds(lambda: dense.backward(grad, q, k, v, out, lse, causal, scale))
            print(f"  backward, over {name} {tile}: {ours:.3f} ms, ratio {theirs / ours:.2f}")


if __name__ == "__main__":
    about = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=about).parse_args()
    for dim, heads in ((64, 12), (128, 6)):
        for causal in (False, True):
            for rate in (1, 4):
                case(dim, heads, causal, rate)
