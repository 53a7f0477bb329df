"""Time and peak memory of a call on this machine, and the yardstick: dense attention of the same FLOPs.

Shape letters: N tokens, H heads, D head dim.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import blocks

GIB = 2**30


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of `run` after a warm-up; on a GPU each sample is of as many runs, one after another, as fill 20 ms."""
    run()
    if device.type != "cuda":
        found = []
        for _ in range(repeats):
            begin = time.perf_counter()
            run()
            found.append(time.perf_counter() - begin)
        return statistics.median(found)
    with torch.cuda.device(device):
        times = max(1, round(0.02 / on_gpu(run, 1)))
        return statistics.median(on_gpu(run, times) for _ in range(repeats))


def device_seconds_of(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """As `seconds_of`, but on a GPU the time of its kernels alone: they begin once the calls have been asked for, as in a
    step whose host is ahead."""
    if device.type != "cuda":
        return seconds_of(run, device, repeats)
    run()
    with torch.cuda.device(device):
        each = on_gpu(run, 1)
        times = min(16, max(1, round(0.01 / each)))  # few enough launches for a stream's queue
        return statistics.median(on_gpu(run, times, min(2 * times * each, 0.05)) for _ in range(repeats))


#: cycles a second of a GPU's clock, about
CLOCK = 2e9


def on_gpu(run: Callable[[], object], times: int, ahead: float = 0.0) -> float:
    """Seconds of a call, of `times` of them; the GPU is kept busy for `ahead` seconds before."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if ahead:
        torch.cuda._sleep(int(ahead * CLOCK))
    start.record()
    for _ in range(times):
        run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1000 / times


def peak_memory(run: Callable[[], object], device: torch.device) -> float:
    """GiB above what is held before `run`, at its highest; NaN where the system does not say."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / GIB
    if sys.platform != "linux":
        return float("nan")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the resident peak starts anew
    except OSError:
        return float("nan")
    before = _resident("VmRSS")
    run()
    return (_resident("VmHWM") - before) / GIB


def _resident(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def dense_yardstick(
    pattern: DilatedPattern,
    seq_len: int,
    heads: int,
    head_dim: int,
    causal: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[], None]:
    """Torch's own attention, forward and backward, over contiguous tensors with the sizes of a pattern's blocks.

    As many segments, heads and rows, with no dilation, no merge and no joint backward: what the FLOPs alone cost.
    """
    sizes = [(b.segments, b.heads, b.rows, head_dim) for b in blocks(pattern, seq_len, heads, heads)]
    make = lambda size: torch.randn(size, device=device, dtype=dtype)  # noqa: E731
    inputs = [[make(size).requires_grad_() for _ in range(3)] for size in sizes]
    grads = [make(size) for size in sizes]

    def run() -> None:
        for (q, k, v), grad in zip(inputs, grads, strict=True):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
            torch.autograd.grad(out, (q, k, v), grad)

    return run
