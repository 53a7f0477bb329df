"""Time the op, forward and backward, next to dense attention with the same FLOPs.

    python benchmarks/attention.py                                          # this machine
    python benchmarks/attention.py --device cuda --dtype bfloat16 --seq-len 1048576 --heads 12 --head-dim 64 \
        --segments 2048 4096 8192 16384 32768 --dilations 1 2 4 8 16

Shape letters: N tokens, H heads, D head dim.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.figure
import torch

from lightning_dilated._validation import integer
from lightning_dilated.attention import DilatedAttention, dilated_attention
from lightning_dilated.attention.backends import Request, choose, engine_names
from lightning_dilated.cli.errors import check_device
from lightning_dilated.ext.planning import dense_yardstick, peak_memory, seconds_of
from lightning_dilated.pattern import DilatedPattern, Window
from lightning_dilated.pattern.rows import pairs

DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Row:
    """One measured case. `engine` is "dense" for the reference, which has neither a separate forward nor memory."""

    seq_len: int
    causal: bool
    engine: str
    both: float
    tflops: float
    forward: float | None = None
    memory: float | None = None
    ratio: float | None = None


def attention_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", choices=DTYPES, help="(default bfloat16 on a GPU, float32 on a CPU)")
    p.add_argument(
        "--seq_len", "--seq-len", type=int, nargs="+", help="tokens (default 131072 on a GPU, 16384 on a CPU)"
    )
    p.add_argument("--heads", type=int, default=12)
    p.add_argument("--kv_heads", "--kv-heads", type=int)
    p.add_argument("--head_dim", "--head-dim", type=int, default=64)
    p.add_argument("--segments", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768], help="segment lengths")
    p.add_argument("--dilations", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="dilation rates")
    p.add_argument("--windows", type=int, nargs="+", help="widths of windows, in place of segments; not dilated")
    p.add_argument("--offsets", default="interleaved")
    p.add_argument("--engines", nargs="+", help="(default: auto's choice, and triton on a GPU)")
    p.add_argument("--module", action="store_true", help="also each engine as the module DilatedAttention calls it")
    p.add_argument("--causal", nargs="+", type=int, choices=[0, 1], default=[0, 1])
    p.add_argument("--repeats", type=int, default=5, help="samples of a median (default %(default)s)")
    p.add_argument("--no_dense", "--no-dense", action="store_true", help="leave the yardstick out")
    p.add_argument("--plot", type=Path, help="draw the table into this PNG")
    p.add_argument("--record", type=Path, help="append the table to this file")


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options with defaults filled in. Raise ValueError for impossible options before any measurement."""
    check_device(args.device)
    on_gpu = torch.device(args.device).type == "cuda"
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    args.seq_len = args.seq_len or [131072 if on_gpu else 16384]
    args.kv_heads = args.kv_heads or args.heads
    args.engines = args.engines or (["auto", "triton"] if on_gpu else ["auto"])
    for name, values in (("seq_len", args.seq_len), ("heads", [args.heads]), ("repeats", [args.repeats])):
        integer(min(values), f"--{name}", 1)
    if args.heads % args.kv_heads or args.kv_heads < 1:
        raise ValueError(f"--kv_heads {args.kv_heads} must divide --heads {args.heads}.")
    unknown = [name for name in args.engines if name not in engine_names()]
    if unknown:
        raise ValueError(f"--engines {unknown[0]}: no engine has that name; use {', '.join(engine_names())}.")
    request = Request(torch.device(args.device), getattr(torch, args.dtype), args.head_dim)
    for name in args.engines:
        choose(name, request)
    return args


def measure(args: argparse.Namespace, pattern: DilatedPattern, seq_len: int) -> list[Row]:
    """Measure all cases of one sequence length."""
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    make = lambda heads: torch.randn(1, seq_len, heads, args.head_dim, device=device, dtype=dtype)  # noqa: E731
    q, k, v = make(args.heads).requires_grad_(), *(make(args.kv_heads).requires_grad_() for _ in range(2))
    grad, rows = torch.randn_like(q), []
    for causal in map(bool, args.causal):
        flops = 14 * args.head_dim * pairs(pattern, seq_len, args.heads, args.kv_heads, causal)
        dense = None
        if not args.no_dense:
            yardstick = dense_yardstick(pattern, seq_len, args.heads, args.head_dim, causal, dtype, device)
            dense = seconds_of(yardstick, device, args.repeats)
            del yardstick
            rows.append(Row(seq_len, causal, "dense", dense, flops / dense / 1e12))
        for engine, by_module in itertools.product(args.engines, [False, *([True] if args.module else [])]):
            module = DilatedAttention(pattern, causal=causal, engine=engine)
            op = functools.partial(dilated_attention, pattern=pattern, causal=causal, engine=engine)

            def forward(attend: Callable[..., Any] = module if by_module else op) -> None:
                with torch.no_grad():
                    attend(q, k, v)

            def both(attend: Callable[..., Any] = module if by_module else op) -> None:
                torch.autograd.grad(attend(q, k, v), (q, k, v), grad)

            name = module.engine_choice(q, args.kv_heads).name + (", by the module" if by_module else "")
            seconds = seconds_of(both, device, args.repeats)
            alone = seconds_of(forward, device, args.repeats)
            ratio = None if dense is None else seconds / dense
            row = Row(seq_len, causal, name, seconds, flops / seconds / 1e12, alone, peak_memory(both, device), ratio)
            rows.append(row)
    return rows


def table(rows: list[Row]) -> list[str]:
    lines = [
        "| tokens | causal | engine | forward ms | forward+backward ms | TFLOP/s | times dense | GiB beyond q, k, v, dO |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    number = lambda x, digits: "" if x is None else f"{x:.{digits}f}"  # noqa: E731
    for r in rows:
        name = "dense, equal FLOPs" if r.engine == "dense" else r.engine
        forward = None if r.forward is None else r.forward * 1000
        lines.append(
            f"| {r.seq_len:,} | {'yes' if r.causal else 'no'} | {name} | {number(forward, 2)} | {r.both * 1000:.2f} "
            f"| {r.tflops:.3g} | {number(r.ratio, 2)} | {number(r.memory, 2)} |"
        )
    return lines


def plot(rows: list[Row], path: Path, title: str) -> None:
    """Plot TFLOP/s of all cases as bars, with a colour per engine."""
    cases = list(dict.fromkeys((r.seq_len, r.causal) for r in rows))
    engines = list(dict.fromkeys(r.engine for r in rows))
    figure = matplotlib.figure.Figure(figsize=(1.5 + 1.4 * len(cases), 3.5), layout="constrained")
    axes = figure.add_subplot()
    for i, engine in enumerate(engines):
        values = {(r.seq_len, r.causal): r.tflops for r in rows if r.engine == engine}
        positions = [c + (i + 0.5) * 0.8 / len(engines) - 0.4 for c in range(len(cases))]
        axes.bar(positions, [values.get(case, 0.0) for case in cases], 0.8 / len(engines), label=engine)
    axes.set_xticks(range(len(cases)), [f"{n:,}\n{'causal' if causal else 'full'}" for n, causal in cases])
    axes.set_ylabel("TFLOP/s, forward + backward")
    axes.set_title(title, fontsize=9)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def measure_attention(args: argparse.Namespace, command: str) -> None:
    """Measure, print the table, and write the plot and the record if requested."""
    args = checked(args)
    if args.windows:
        pattern = DilatedPattern([Window(width) for width in args.windows])
    else:
        pattern = DilatedPattern.longnet(args.segments, args.dilations, offsets=args.offsets)
    pattern.check_heads(args.heads, args.kv_heads)
    device = torch.device(args.device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    rows = [row for n in args.seq_len for row in measure(args, pattern, n)]
    text = "\n".join(
        [
            f"{datetime.date.today()}, {where}, Python {platform.python_version()}, torch {torch.__version__}",
            f"`{command}`",
            f"{pattern}, {args.heads} heads, {args.kv_heads} kv heads, D={args.head_dim}, {args.dtype}",
            "",
            *table(rows),
            "",
        ]
    )
    print(text)
    if args.record:
        with args.record.open("a") as file:
            file.write("\n" + text)
    if args.plot:
        plot(rows, args.plot, f"{where}, {args.dtype}, {args.heads} heads of {args.head_dim}")
        print(f"plot: {args.plot}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    attention_options(parser)
    measure_attention(parser.parse_args(), " ".join(["python benchmarks/attention.py", *sys.argv[1:]]))
