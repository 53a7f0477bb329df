"""Time and peak memory of the op, forward and backward, beside dense attention of the same FLOPs; CPU or GPU.

    python benchmarks/attention.py                                          # the CPU case of the README
    python benchmarks/attention.py --device cuda --dtype bfloat16 --seq-len 1048576 --heads 12 --head-dim 64 \
        --segments 2048 4096 8192 16384 32768 --dilations 1 2 4 8 16

The yardstick "dense, equal FLOPs" runs torch's own attention on contiguous tensors of the same blocks: as many segments,
heads and rows, with no dilation, no merge and no joint backward. Prints a Markdown table; `--record FILE` appends it.
Shape letters: N tokens, H heads, D head dim.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lightning_dilated import DilatedPattern, dilated_attention
from lightning_dilated.attention.engines import Request, choose
from lightning_dilated.pattern.rows import blocks, pairs

GIB = 2**30


def options() -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cpu")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--seq-len", type=int, default=65536)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--kv-heads", type=int)
    p.add_argument("--head-dim", type=int, default=32)
    p.add_argument("--segments", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    p.add_argument("--dilations", type=int, nargs="+", default=[1, 2, 4, 8])
    p.add_argument("--offsets", default="interleaved")
    p.add_argument("--engines", nargs="+", default=["auto"])
    p.add_argument("--causal", nargs="+", type=int, default=[0, 1])
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--no-dense", action="store_true", help="leave the yardstick out")
    p.add_argument("--record", type=Path, help="append the table to this file")
    return p.parse_args()


def timed(run: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Median seconds of `run` after a warm-up; on a GPU each sample is of as many runs, one after another, as fill 20 ms."""
    run()
    seconds = []
    inner = 1
    if device.type == "cuda":
        inner = max(1, round(0.02 / _on_gpu(run, 1)))
    for _ in range(repeats):
        if device.type == "cuda":
            seconds.append(_on_gpu(run, inner))
        else:
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _on_gpu(run: Callable[[], None], times: int) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1000 / times


def peak(run: Callable[[], None], device: torch.device) -> float:
    """GiB of memory above what is held before `run`, at its highest."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / GIB
    if sys.platform != "linux":
        return float("nan")
    Path("/proc/self/clear_refs").write_text("5")  # the resident peak starts anew
    before = _resident("VmRSS")
    run()
    return (_resident("VmHWM") - before) / GIB


def _resident(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def dense_case(
    pattern: DilatedPattern, args: argparse.Namespace, causal: bool, dtype: torch.dtype
) -> Callable[[], None]:
    """Torch's attention over contiguous tensors with the blocks' sizes, forward and backward."""
    sizes = [(b.segments, b.heads, b.rows) for b in blocks(pattern, args.seq_len, args.heads, args.heads)]
    inputs = [
        [torch.randn(*s, args.head_dim, device=args.device, dtype=dtype, requires_grad=True) for _ in range(3)]
        for s in sizes
    ]
    grads = [torch.randn_like(x[0]) for x in inputs]

    def run() -> None:
        for (q, k, v), grad in zip(inputs, grads, strict=True):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
            torch.autograd.grad(out, (q, k, v), grad)

    return run


def main() -> None:
    """Run the cases and print the table."""
    args = options()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    pattern = DilatedPattern.longnet(args.segments, args.dilations, offsets=args.offsets)
    kv_heads = args.kv_heads or args.heads
    torch.manual_seed(0)
    shape = (1, args.seq_len)
    q = torch.randn(*shape, args.heads, args.head_dim, device=device, dtype=dtype, requires_grad=True)
    k, v = (
        torch.randn(*shape, kv_heads, args.head_dim, device=device, dtype=dtype, requires_grad=True) for _ in range(2)
    )
    grad = torch.randn_like(q)
    lines = [
        "| what | causal | engine | forward s | forward+backward s | TFLOP/s | peak GiB beyond q, k, v, dO |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for causal in map(bool, args.causal):
        flops = 14 * args.head_dim * pairs(pattern, args.seq_len, args.heads, kv_heads, causal)
        for engine in args.engines:
            name = choose(engine, Request.of(q)).name

            def forward(engine: str = engine, causal: bool = causal) -> None:
                with torch.no_grad():
                    dilated_attention(q, k, v, pattern, causal=causal, engine=engine)

            def both(engine: str = engine, causal: bool = causal) -> None:
                out = dilated_attention(q, k, v, pattern, causal=causal, engine=engine)
                torch.autograd.grad(out, (q, k, v), grad)

            t_forward, t_both = timed(forward, device, args.repeats), timed(both, device, args.repeats)
            memory = peak(both, device)
            row = f"| dilated_attention | {causal} | {name} | {t_forward:.4f} | {t_both:.4f} | {flops / t_both / 1e12:.3g} "
            lines.append(row + f"| {memory:.2f} |")
        if not args.no_dense:
            seconds = timed(dense_case(pattern, args, causal, dtype), device, args.repeats)
            lines.append(
                f"| dense, equal FLOPs | {causal} | torch's choice | | {seconds:.4f} | {flops / seconds / 1e12:.3g} | |"
            )
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    text = "\n".join(
        [
            f"{datetime.date.today()}, {where}, Python {platform.python_version()}, torch {torch.__version__}",
            f"`python {' '.join(sys.argv)}`",
            f"{pattern}, N={args.seq_len}, H={args.heads}, kv heads {kv_heads}, D={args.head_dim}, {args.dtype}",
            "",
            *lines,
            "",
        ]
    )
    print(text)
    if args.record:
        with args.record.open("a") as file:
            file.write("\n" + text)


if __name__ == "__main__":
    main()
