"""Planned against measured: peak memory and seconds of a step over models, lengths and memory settings.

    python benchmarks/memory_points.py --output points.md
    python benchmarks/memory_points.py --only 125M --gpus 4
    python benchmarks/memory_points.py --longest            # and the longest sequence of each row, by true steps

Each point is two steps of random bytes in processes of their own (`find_max`), with AdamW and compiled blocks; the peak is
the allocator's. Planned numbers come from `planning`, before.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_dilated import DilatedPattern
from lightning_dilated.find_max import Trials, longest
from lightning_dilated.models.memory import MemorySettings
from lightning_dilated.planning.estimate import Facts
from lightning_dilated.planning.gpus import find_gpu
from lightning_dilated.planning.longest import Case, in_words
from lightning_dilated.planning.memory import Setup
from lightning_dilated.planning.subjects import language_model, subject_of

FIVE = {"segment_lengths": [2048, 4096, 8192, 16384, 32768], "dilation_rates": [1, 2, 4, 8, 16]}
K, M = 2**10, 2**20
SMALL = {"dim": 768, "depth": 12, "num_heads": 12}
MIDDLE = {"dim": 1024, "depth": 24, "num_heads": 16}
LARGE = {"dim": 2048, "depth": 24, "num_heads": 16}
LLAMA = {"dim": 4096, "depth": 32, "num_heads": 32, "num_kv_heads": 8, "ffn_dim": 14336}
BLOCK, TILED = MemorySettings("block"), MemorySettings("block", tile=16 * K)
HALF = {"residual_dtype": "bfloat16"}


@dataclass(frozen=True)
class Point:
    """A model, how much of it is kept, and tokens of each GPU."""

    name: str
    sizes: dict[str, Any]
    settings: MemorySettings
    tokens: int
    fsdp: bool = False
    more: dict[str, Any] = field(default_factory=dict)


POINTS = [
    Point("125M", SMALL, MemorySettings(), 128 * K),
    Point("125M", SMALL, MemorySettings(), 256 * K),
    Point("125M", SMALL, MemorySettings("attention-kept"), M),
    Point("125M", SMALL, BLOCK, M),
    Point("125M", SMALL | HALF, BLOCK, M),
    Point("125M", SMALL | HALF, TILED, M),
    Point("125M", SMALL | HALF, MemorySettings("block", tile=16 * K, head_chunks=4), M),
    Point("125M", SMALL | HALF, MemorySettings("block", offload=1, tile=16 * K), M),
    Point("125M", SMALL | HALF, MemorySettings("block", tile=16 * K, head_chunks=6), 3 * M),
    Point("125M", SMALL | HALF, MemorySettings("block", every=2, offload=1, tile=16 * K, head_chunks=6), 6 * M),
    Point("350M", MIDDLE | HALF, MemorySettings("block", tile=16 * K, head_chunks=4), 2 * M),
    Point("1.3B", LARGE | HALF, MemorySettings("block", tile=16 * K, head_chunks=4), 768 * K),
    Point("1.3B", LARGE | HALF, MemorySettings("block", offload=1, tile=16 * K, head_chunks=8), M),
    Point("1.3B", LARGE | HALF, MemorySettings("block", tile=16 * K, head_chunks=4), M, fsdp=True),
]


def options() -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", help="points with this in their name")
    p.add_argument("--numbers", type=int, nargs="+", help="points by number")
    p.add_argument("--gpus", type=int, default=1)
    p.add_argument("--gpu", default="H200")
    p.add_argument("--longest", action="store_true")
    p.add_argument("--timeout", type=float, default=300.0)
    p.add_argument("--precision", default="bf16-mixed")
    p.add_argument("--dry", action="store_true", help="planned numbers only")
    p.add_argument("--output", type=Path)
    return p.parse_args()


def strategy_of(point: Point, args: argparse.Namespace) -> str:
    """Of a point on so many GPUs."""
    return "ring_dilated_fsdp" if point.fsdp else "ring_dilated" if args.gpus > 1 else "single"


def case_of(point: Point, args: argparse.Namespace) -> Case:
    """The point's model, planned."""
    gpu = find_gpu(args.gpu)
    model = language_model(DilatedPattern.from_dict(FIVE), **point.sizes)
    subject = subject_of(model, args.precision, None, True, gpu.capability)
    setup = Setup(strategy_of(point, args), args.gpus)
    return Case(subject, Facts.of(model, subject), setup, gpu, host=128 / args.gpus)


def trials_of(point: Point, args: argparse.Namespace) -> Trials:
    """The point's model, to be run."""
    told = {"class_path": "lightning_dilated.callbacks.ActivationRecompute", "init_args": vars(point.settings)}
    words = ["--config", str(Path(__file__).parent.parent / "recipes" / "longest.yaml")]
    words += ["--trainer.precision", args.precision, "--trainer.callbacks", json.dumps([told])]
    words += ["--model.pattern", json.dumps(FIVE), "--model.shift_layers", "none"]
    sizes = {"residual_dtype": None, **point.sizes}
    words += [f"--model.{name}={'null' if value is None else value}" for name, value in sizes.items()]
    strategy = strategy_of(point, args)
    words += [] if strategy == "single" else ["--trainer.strategy", strategy]
    return Trials(words, args.gpus, args.timeout)


def row(number: int, point: Point, args: argparse.Namespace) -> str:
    """One line of the table."""
    case, tokens = case_of(point, args), point.tokens * args.gpus
    planned, time = case.memory(point.settings, tokens), case.time(point.settings, tokens)
    words = in_words(point.settings) + (", bf16 residual" if "residual_dtype" in point.sizes else "")
    head = f"| {number} | {point.name} | {strategy_of(point, args)} x {args.gpus} | {tokens:,} | {words} "
    head += f"| {planned.peak / 2**30:.1f} | "
    if args.dry:
        return f"{head}| | {time.seconds:.2f} | | | {case.longest(point.settings):,} | |"
    trials = trials_of(point, args)
    found = trials(tokens)
    if not found.fits:
        return f"{head} out of memory: {found.message[:80]} |"
    peak, step = found.allocated / 2**30, found.seconds
    head += f"{peak:.1f} | {100 * (planned.peak / found.allocated - 1):+.1f} % | {time.seconds:.2f} | {step:.2f} "
    head += f"| {100 * (time.seconds / step - 1):+.1f} % | {case.longest(point.settings):,} | "
    if not args.longest:
        return head + "|"
    most = longest(lambda n: trials(n).fits, case.longest(point.settings), M * args.gpus // 8)
    return head + f"{most.fits:,} |"


def main() -> None:
    """Print the table."""
    args = options()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    lines = [f"{name}, torch {torch.__version__}, {args.precision}, compiled blocks, AdamW", ""]
    lines += ["| # | model | GPUs | tokens | settings | planned GiB | measured | off | planned s | measured | off "
              "| longest, planned | longest, measured |", "| --- " * 13 + "|"]  # fmt: skip
    print("\n".join(lines), flush=True)
    for number, point in enumerate(POINTS):
        if (args.only and args.only not in point.name) or (args.numbers and number not in args.numbers):
            continue
        if point.fsdp and args.gpus == 1:
            continue
        try:
            lines.append(row(number, point, args))
        except (RuntimeError, TimeoutError) as error:
            lines.append(f"| {number} | {point.name} | failed: {str(error)[-300:]!r} |")
        print(lines[-1], flush=True)
    if args.output is not None:
        args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
