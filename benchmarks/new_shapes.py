"""What a shape costs that cuDNN's attention backward has not seen, beside Triton's backward of the same: the host's time of
the first call, and the GPU's of later ones. A chunk of a stream reads other numbers of keys than the chunks before it.

    python benchmarks/new_shapes.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_dilated._compat import torch as compat
from lightning_dilated.kernels import dense

#: queries -> keys: such as chunks of 1,048,576 tokens have with geometric(2048, 2**30)
SHAPES = {2: range(1906, 1886, -2), 16: range(912, 752, -16), 128: range(1920, 640, -128), 1024: (1024, 2048, 3072)}
HEADS, DIM, REPEATS = 6, 64, 20


def tensors(queries: int, keys: int) -> tuple[Tensor, ...]:
    """grad, q, k, v, out, lse of a batch; K and V side by side, as carried rows lie."""
    rows = lambda *n: torch.randn(HEADS, 1, *n, DIM, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    k, v = rows(keys, 2).unbind(3)
    return rows(queries), rows(queries), k, v, rows(queries), torch.zeros(HEADS, 1, queries, device="cuda")


def times(backward: Callable[..., object], queries: int, keys: int) -> tuple[float, float]:
    """(ms of the host for the first call, ms of the GPU for a later one)."""
    arguments = (*tensors(queries, keys), False, 0.125)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    backward(*arguments)
    first = 1e3 * (time.perf_counter() - begin)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(REPEATS):
        backward(*arguments)
    events[1].record()
    torch.cuda.synchronize()
    return first, events[0].elapsed_time(events[1]) / REPEATS


def main() -> None:
    """Print a table."""
    print(
        "| engine | queries | shapes | first call, ms of the host | later calls, ms |\n| --- | --- | --- | --- | --- |"
    )
    for name, backward in (("cudnn", compat.cudnn_attention_backward), ("triton", dense.backward)):
        times(backward, 64, 256)  # loads libraries, compiles
        for queries, keys in SHAPES.items():
            first, later = zip(*(times(backward, queries, n) for n in keys), strict=True)
            means = f"{sum(first) / len(first):.2f} | {sum(later) / len(later):.3f}"
            print(f"| {name} | {queries} | {len(keys)} | {means} |", flush=True)


if __name__ == "__main__":
    main()
