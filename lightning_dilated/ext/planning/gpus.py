"""List known GPUs (memory, bandwidth, FLOP/s in 16 bits, links), and measure the time and peak memory of a call.

Shape letters: N tokens, H heads, D head dim.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lightning_dilated._device import ROOM
from lightning_dilated.ext._compat.torch import occupy_gpu
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import blocks
from lightning_dilated.sequence.links import Links
from lightning_dilated.sequence.planner import DEFAULTS

GIB = 2**30
#: share of a GPU's memory that is left free for fragments of the allocator and for memory that is not counted, and the
#: minimum number of bytes that is left free (see `_device.ROOM`)
MARGIN, LEAST = 0.03, ROOM
#: bytes that CUDA and its libraries use outside torch's allocator, and that NCCL uses on several ranks. On two H200 the
#: sum was 2.85 GiB at the start of training, and 3.02 GiB later
CONTEXT, NCCL = GIB // 2, 5 * GIB // 2


#: bytes/s in one direction, from data sheets. In both directions together, NVLink 4 (H200, H100) has 900 GB/s, NVLink 3
#: (A100) has 600 GB/s, and 16 lanes of PCIe 4.0 (L40S, A10) have 64 GB/s, or 63 GB/s after the 128b/130b code
NVLINK4, NVLINK3, PCIE4 = 450e9, 300e9, 31.5e9
#: share of NVLink's speed that an all-to-all reached on H200: 259 GB/s. The same share is assumed for other links
REACHED = DEFAULTS.near / NVLINK4
#: bytes/s of a network adapter; a node is assumed to have one adapter for each GPU. The data sheet of a DGX A100 states
#: 200 Gb/s. The 100 Gb/s for GPUs without NVLink are a guess
ADAPTER200, ADAPTER100 = 25e9, 12.5e9
_MEASURE = "a guess; `lightning-dilated bench links` measures, --links FILE takes it"


def _nvlink(stated: float, far: float, what: str) -> Links:
    near = round(stated * REACHED / 1e9) * 1e9
    text = f"{what}, {stated / 1e9:.0f} GB/s one way, {REACHED:.0%} of it, as H200 reached: {_MEASURE}"
    return Links(near, far, source=text)


def _pcie(staged: bool, without: str = "no NVLink") -> Links:
    """Return the links of cards without NVLink; `staged`: copies pass through host memory, without peer access."""
    near = round(PCIE4 * REACHED / (2 if staged else 1) / 1e9) * 1e9
    how = (
        f"half of {REACHED:.0%} of it, through the host's memory"
        if staged
        else f"{REACHED:.0%} of it, as of H200's NVLink"
    )
    text = f"{without}; PCIe 4.0 x16, {PCIE4 / 1e9:g} GB/s one way, {how}: {_MEASURE}"
    return Links(near, min(near, ADAPTER100), source=text)


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU.

    Attributes:
        memory: bytes that the driver reports.
        flops: FLOP/s of dense products in bf16, from the data sheet.
        bandwidth: bytes/s of the memory, from the data sheet.
        capability: compute capability.
        links: assumed speeds between GPUs, with their source.
    """

    name: str
    memory: int
    flops: float
    bandwidth: float
    capability: tuple[int, int]
    links: Links = DEFAULTS

    def usable(self, ranks: int = 1) -> int:
        """Return the bytes that torch's allocator may take in a step."""
        return self.memory - max(LEAST, int(self.memory * MARGIN)) - CONTEXT - (NCCL if ranks > 1 else 0)


def _gpu(name: str, gib: float, tflops: float, terabytes: float, capability: tuple[int, int], links: Links) -> Gpu:
    return Gpu(name, int(gib * GIB), tflops * 1e12, terabytes * 1e12, capability, links)


_H200 = Links(source="defaults: near measured on H200 over NVLink, far a 400 Gb/s adapter a GPU")
_H100 = replace(_H200, source="defaults: those of H200, whose NVLink an SXM H100 has")
_A100 = _nvlink(NVLINK3, ADAPTER200, "NVLink of an SXM A100")


#: known GPUs. `memory` is the size that drivers report; for H200 and H100 it was read on the machines of this project
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("H200", 139.8, 989.4, 4.8, (9, 0), _H200),
        _gpu("H100", 79.1, 989.4, 3.35, (9, 0), _H100),
        _gpu("A100-80GB", 79.1, 312, 2.039, (8, 0), _A100),
        _gpu("A100-40GB", 39.4, 312, 1.555, (8, 0), _A100),
        _gpu("L40S", 44.4, 362, 0.864, (8, 9), _pcie(staged=False)),
        _gpu("RTX4090", 23.5, 165.2, 1.008, (8, 9), _pcie(staged=True)),
        _gpu("RTX3090", 23.5, 71, 0.936, (8, 6), _pcie(staged=True, without="no NVLink bridge")),
        _gpu("A10", 22.0, 125, 0.6, (8, 6), _pcie(staged=False)),
    )
}


def find_gpu(name: str, gib: float | None = None) -> Gpu:
    """Return the GPU with a name, ignoring case and punctuation; `gib` replaces its memory.

    Raises:
        ValueError: if the name is unknown (the message lists known names) or the memory is out of range.
    """
    plain = lambda x: "".join(c for c in x.lower() if c.isalnum())  # noqa: E731
    known = {plain(x): gpu for x, gpu in GPUS.items()} | {"a100": GPUS["A100-80GB"], "h10080gb": GPUS["H100"]}
    gpu = known.get(plain(name))
    if gpu is None:
        raise ValueError(
            f"--gpu must be one of {', '.join(GPUS)}; got {name!r}. For others, take the nearest and --gpu-memory GIB."
        )
    if gib is None:
        return gpu
    if not 1 <= gib < 10000:
        raise ValueError(f"--gpu-memory must be GiB of one GPU, at least 1; got {gib!r}.")
    return replace(gpu, name=f"{gpu.name} with {gib:g} GiB", memory=int(gib * GIB))


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds of `run` over `repeats` samples, after one call as a warm-up.

    If `device` is a GPU, each sample repeats `run` for about 20 ms.
    """
    run()
    if device.type != "cuda":
        samples = []
        for _ in range(repeats):
            begin = time.perf_counter()
            run()
            samples.append(time.perf_counter() - begin)
        return statistics.median(samples)
    with torch.cuda.device(device):
        calls = max(1, round(0.02 / on_gpu(run, 1)))
        return statistics.median(on_gpu(run, calls) for _ in range(repeats))


#: approximate frequency of a GPU's clock in Hz
CLOCK = 2e9


def on_gpu(run: Callable[[], object], times: int, ahead: float = 0.0) -> float:
    """Return the mean GPU seconds of `times` calls, launched while the GPU is kept busy for `ahead` seconds."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if ahead:
        occupy_gpu(int(ahead * CLOCK))
    start.record()
    for _ in range(times):
        run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1000 / times


def peak_memory(run: Callable[[], object], device: torch.device) -> float:
    """Return the GiB by which peak memory in `run` exceeds the memory before it; NaN if the system does not report it.

    If `device` is a GPU, its allocated memory is measured; if it is a CPU, the process's resident memory.
    """
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
        Path("/proc/self/clear_refs").write_text("5")  # resets the resident peak
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
    """Return a function that runs torch's attention, forward and backward, on contiguous tensors of a pattern's sizes.

    The tensors have the pattern's segments, heads and rows, but the function does no dilation, no merging and no joint
    backward, so it measures the cost of the FLOPs alone. Segments with the same pairs per row replace a window.

    Args:
        pattern: the pattern.
        seq_len, heads, head_dim: N, H and D.
        causal: whether half of each block is masked.
        dtype, device: dtype and device of the tensors.

    Returns:
        a function without arguments.
    """
    sizes = []
    for b in blocks(pattern, seq_len, heads, heads):
        rows = b.rows if b.width is None else min(b.rows, 2 * b.width - (not causal))
        outer = b.segments * round(b.rows / rows), b.heads
        if b.pairs(causal):
            sizes.append(((*outer, rows, head_dim), (*outer, rows if b.keys is None else b.keys[1], head_dim)))
    make = lambda size: torch.randn(size, device=device, dtype=dtype)  # noqa: E731
    inputs = [[make(size).requires_grad_() for size in (rows, keys, keys)] for rows, keys in sizes]
    grads = [make(rows) for rows, _ in sizes]

    def run() -> None:
        for (q, k, v), grad in zip(inputs, grads, strict=True):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal and q.shape == k.shape)
            torch.autograd.grad(out, (q, k, v), grad)

    return run
