"""Time hashed attention on a GPU, beside dense causal attention of the same heads.

    python benchmarks/hashed_time.py --seq-len 262144 1048576 4194304 16777216
    python benchmarks/hashed_time.py --seq-len 1048576 --parts
    python benchmarks/hashed_time.py --seq-len 1048576 --tiles

q, k, v and logits are bf16. The table has milliseconds of a forward, and of a forward and its backward, including the
sort and the losses; the peak memory in addition to the inputs; and the rows that a query reads. Dense heads are timed up
to `--dense` tokens. With `--parts`, there is a row for each of the longest GPU kernels of both passes. With `--tiles`,
there is a row for each size of tiles of each kernel.
Shape letters: N tokens, H query heads, K kv heads, D head dim, G groups of M codes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

import lightning_dilated as ld
from lightning_dilated.attention import hashed_attention
from lightning_dilated.planning import seconds_of

CUDA = torch.device("cuda")
#: sizes of tiles to time: lookups and query heads, and rows
TILES = {
    "forward": [(32, 32), (32, 16), (16, 32)],
    "over rows": [(32, 32), (32, 16), (16, 32)],
    "over lookups": [(32, 32), (32, 16), (16, 32)],
}


def inputs(a: argparse.Namespace, seq_len: int) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v, z_q, z_k and null, and the gradient of the output."""
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(shape, device=CUDA, dtype=torch.bfloat16)  # noqa: E731
    q, k, v = (draw(1, seq_len, n, a.head_dim) for n in (a.heads, a.kv_heads, a.kv_heads))
    z_q, z_k = (2 * draw(1, seq_len, a.kv_heads, a.groups, a.codes) for _ in range(2))
    if a.equal:
        z_q, z_k = (z.abs_().index_fill_(-1, torch.zeros(1, dtype=torch.int64, device=CUDA), 99) for z in (z_q, z_k))
    return [x.requires_grad_() for x in (q, k, v, z_q, z_k, draw(a.heads))], torch.randn_like(q)


def hashed(a: argparse.Namespace, tensors: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the sum of the losses, and the number of rows that each query reads."""
    out, losses = hashed_attention(*tensors, latest=a.latest, probes=a.probes)
    return out, losses.agree.mean() + losses.contrast.mean() + losses.balance.sum() + losses.spread.sum(), losses.rows


def passes(a: argparse.Namespace, tensors: list[Tensor], grad: Tensor) -> Callable[[], object]:
    def run() -> object:
        out, loss, _ = hashed(a, tensors)
        return torch.autograd.grad((out, loss), tensors, (grad, torch.ones_like(loss)))

    return run


def hashed_row(a: argparse.Namespace, seq_len: int) -> str:
    tensors, grad = inputs(a, seq_len)
    run, before = passes(a, tensors, grad), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    total = seconds_of(run, CUDA, a.repeats)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    with torch.no_grad():
        rows = float(hashed(a, tensors)[2].float().mean())
        forward = seconds_of(lambda: hashed(a, tensors), CUDA, a.repeats)
    return f"| {seq_len:,} | hashed | {1e3 * forward:.2f} | {1e3 * total:.2f} | {peak:.2f} | {rows:.1f} |"


def dense_row(a: argparse.Namespace, seq_len: int) -> str:
    tensors, grad = inputs(a, seq_len)
    call = lambda: ld.dilated_attention(*tensors[:3], ld.DilatedPattern.dense(), causal=True)  # noqa: E731
    total = seconds_of(lambda: torch.autograd.grad(call(), tensors[:3], grad), CUDA, a.repeats)
    with torch.no_grad():
        forward = seconds_of(call, CUDA, a.repeats)
    return f"| {seq_len:,} | dense | {1e3 * forward:.2f} | {1e3 * total:.2f} | | {seq_len / 2:,.0f} |"


def parts(a: argparse.Namespace, seq_len: int) -> Iterator[str]:
    """Yield a row for each of the longest GPU kernels: milliseconds, number of launches, name."""
    run = passes(a, *inputs(a, seq_len))
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda x: -x.self_device_time_total)
    yield f"| {seq_len:,} | all kernels | {sum(x.self_device_time_total for x in events) / 1e3:.3f} | |"
    for event in events[:30]:
        yield f"| {seq_len:,} | {event.key[:70]} | {event.self_device_time_total / 1e3:.3f} | {event.count} |"


def tiles(a: argparse.Namespace, seq_len: int) -> Iterator[str]:
    """Yield a row for each size of tiles: milliseconds of both passes."""
    from lightning_dilated.ext.hashed import kernels

    run, tile = passes(a, *inputs(a, seq_len)), kernels.tile
    for kernel, sizes in TILES.items():
        for size in sizes:
            changed = lambda name, *rest, kernel=kernel, size=size: size if name == kernel else tile(name, *rest)  # noqa: E731
            with mock.patch.object(kernels, "tile", changed):
                yield f"| {seq_len:,} | {kernel} {size} | {1e3 * seconds_of(run, CUDA, a.repeats):.2f} | |"


def rows(a: argparse.Namespace, seq_len: int) -> Iterator[str]:
    for way in (hashed_row, dense_row):
        if way is hashed_row or seq_len <= a.dense:
            try:
                yield way(a, seq_len)
            except torch.OutOfMemoryError as error:
                yield f"| {seq_len:,} | {way.__name__} | out of memory: {str(error)[:60]} | | | |"
            torch.cuda.empty_cache()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seq-len", type=int, nargs="+", default=[262144, 1048576])
    p.add_argument("--heads", type=int, default=1)
    p.add_argument("--kv-heads", type=int, default=1)
    p.add_argument("--head-dim", type=int, default=64)
    p.add_argument("--groups", type=int, default=4)
    p.add_argument("--codes", type=int, default=16)
    p.add_argument("--latest", type=int, default=64)
    p.add_argument("--probes", type=int, default=2)
    p.add_argument("--equal", action="store_true", help="all codes are equal")
    p.add_argument("--dense", type=int, default=262144, help="largest number of tokens for dense heads")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--parts", action="store_true", help="list the longest GPU kernels")
    p.add_argument("--tiles", action="store_true", help="time sizes of tiles")
    a = p.parse_args()
    if a.parts or a.tiles:
        print("| tokens | kernel | ms | launches |\n| --- | --- | --- | --- |")
    else:
        print("| tokens | heads | forward ms | forward+backward ms | GiB beside the inputs | rows a query reads |")
        print("| --- | --- | --- | --- | --- | --- |")
    for seq_len in a.seq_len:
        for row in (parts if a.parts else tiles if a.tiles else rows)(a, seq_len):
            print(row, flush=True)


if __name__ == "__main__":
    main()
