"""Planned against measured peak memory and seconds of a step, for several models, lengths and memory settings.

    python benchmarks/memory_points.py --output points.md
    python benchmarks/memory_points.py --only 125M --gpus 4
    python benchmarks/memory_points.py --search             # and the longest sequence of each row, by true steps

A point is two steps on random bytes in new processes (`find_max`), with AdamW and compiled blocks. The measured peak is
the allocator's. The planned numbers are computed by `planning` before the run.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from find_max import Trials, longest

from lightning_dilated import DilatedPattern, LongNetLM
from lightning_dilated.ext.planning.candidates import in_words
from lightning_dilated.ext.planning.counting.model_specs import counted_model_of
from lightning_dilated.ext.planning.estimate import Case, Facts
from lightning_dilated.ext.planning.gpus import find_gpu
from lightning_dilated.ext.planning.memory import GIB
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.memory.settings import MemorySettings

FIVE = {"segment_lengths": [2048, 4096, 8192, 16384, 32768], "dilation_rates": [1, 2, 4, 8, 16]}
#: branches that leave no wall if layers are shifted
SIX = {
    "segment_lengths": [2048, 8192, 32768, 131072, 524288, 2097152],
    "dilation_rates": [1, 4, 16, 64, 256, 1024],
}
K, M = 2**10, 2**20
SMALL = {"dim": 768, "depth": 12, "num_heads": 12}
MIDDLE = {"dim": 1024, "depth": 24, "num_heads": 16}
LARGE = {"dim": 2048, "depth": 24, "num_heads": 16}
LLAMA = {"dim": 4096, "depth": 32, "num_heads": 32, "num_kv_heads": 8, "ffn_dim": 14336}
BLOCK, TILED = MemorySettings("block"), MemorySettings("block", tile=16 * K)
HALF = {"residual_dtype": "bfloat16"}
WORDS = {"vocab_size": 128256, "tie_embeddings": False}


@dataclass(frozen=True)
class Point:
    """A model, its memory settings, and the number of tokens per GPU."""

    name: str
    sizes: dict[str, Any]
    settings: MemorySettings
    tokens: int
    strategy: str | None = None
    precision: str = "bf16-mixed"
    optimizer: str = "adamw"
    shifted: bool = False  # six branches, and every other layer is shifted
    hybrid: int | None = None  # if set, a dense head in every `hybrid`-th layer, and local segments

    @property
    def pattern(self) -> dict[str, Any]:
        """Return the pattern as in a recipe: segments and rates, or a hybrid."""
        if self.hybrid:
            return {"hybrid": {"global_every": self.hybrid}}
        return SIX if self.shifted else FIVE

    @property
    def shift(self) -> str:
        """Return the model's shift_layers."""
        return "odd" if self.shifted else "none"


def block(tile: int | None = 32 * K, **settings: Any) -> MemorySettings:
    """Return memory settings that recompute blocks."""
    return MemorySettings("block", tile=tile, **settings)


POINTS = [
    Point("125M", SMALL, MemorySettings(), 128 * K),
    Point("125M", SMALL, MemorySettings(), 256 * K),
    Point("125M", SMALL, MemorySettings("attention-kept"), M),
    Point("125M", SMALL, block(None), M),
    Point("125M", SMALL | HALF, block(None), M),
    Point("125M", SMALL | HALF, block(), M),
    Point("125M", SMALL | HALF, block(head_chunks=4), M),
    Point("125M", SMALL | HALF, block(offload=1), M),
    Point("125M", SMALL | HALF, block(head_chunks=6), 3 * M),
    Point("125M", SMALL | HALF, block(every=2, offload=1, head_chunks=6), 6 * M),
    Point("350M", MIDDLE | HALF, block(head_chunks=4), 2 * M),
    Point("1.3B", LARGE | HALF, block(16 * K, head_chunks=4), 800 * K),
    Point("1.3B", LARGE | HALF, block(16 * K, offload=1, head_chunks=8), M),
    # the longest sequences
    Point("125M", SMALL | HALF, block(head_chunks=4), 4864 * K),
    Point("125M", SMALL | HALF, block(every=2, head_chunks=12), 7424 * K),
    Point("125M", SMALL | HALF, block(every=2, offload=1, head_chunks=12), 11 * M),
    Point("350M", MIDDLE | HALF, block(every=2, head_chunks=8), 3584 * K),
    Point("350M", MIDDLE | HALF, block(every=2, offload=1, head_chunks=8), 4352 * K),
    Point("1.3B", LARGE | HALF, block(16 * K, every=2, head_chunks=8), 1664 * K),
    Point("8B", LLAMA | HALF, block(8 * K, every=2, offload=1, head_chunks=8), 400 * K, None, "bf16-true", "adamw8bit"),
    Point("8B", LLAMA | HALF, block(8 * K, every=2, offload=1, head_chunks=8), 800 * K, None, "bf16-true", "adamw8bit"),
    # on several GPUs: --gpus
    Point("1.3B", LARGE | HALF, block(16 * K, head_chunks=4), M, "ring_dilated_fsdp"),
    Point("1.3B", LARGE | HALF, block(16 * K, every=2, offload=1, head_chunks=8), 2 * M, "ring_dilated_fsdp"),
    Point("125M", SMALL | HALF, block(every=2, offload=1, head_chunks=12), 6 * M, "ring_dilated", shifted=True),
    Point("125M", SMALL | HALF, block(every=2, offload=1, head_chunks=12), 12 * M, "ring_dilated"),
    # the cost of offloading
    Point("125M", SMALL | HALF, block(None, offload=1), M),
    # a word vocabulary instead of bytes: 8.03 billion parameters
    Point("8B, words", LLAMA | HALF | WORDS, block(8 * K, every=2, offload=1, head_chunks=8), 800 * K, None, "bf16-true",
          "adamw8bit"),
    Point("125M hybrid", SMALL, MemorySettings(), 256 * K, hybrid=4),
    Point("125M hybrid", SMALL | HALF, MemorySettings("attention-kept"), M, hybrid=6),
    Point("125M hybrid", SMALL | HALF, MemorySettings("attention-kept"), M, hybrid=12),
]  # fmt: skip


def options() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", help="points with this in their name")
    p.add_argument("--numbers", type=int, nargs="+", help="points by number")
    p.add_argument("--tokens", type=int, help="of each GPU, in place of the points' own")
    p.add_argument("--gpus", type=int, default=1)
    p.add_argument("--gpu", default="H200")
    p.add_argument("--host", type=float, default=128.0, help="GiB of the machine")
    p.add_argument("--search", action="store_true", help="and the longest sequence of each point, by true steps")
    p.add_argument("--timeout", type=float, default=400.0)
    p.add_argument("--dry", action="store_true", help="planned numbers only")
    p.add_argument("--output", type=Path)
    return p.parse_args()


def strategy_of(point: Point, args: argparse.Namespace) -> str:
    """Return the strategy for a point on this number of GPUs."""
    return point.strategy or ("ring_dilated" if args.gpus > 1 else "single")


def case_of(point: Point, args: argparse.Namespace) -> Case:
    """Return the case of a point's model for planning."""
    gpu = find_gpu(args.gpu)
    pattern: Any = point.pattern
    if point.hybrid is None:
        pattern = DilatedPattern.from_dict(pattern)
    else:
        pattern = DilatedPattern.hybrid(point.sizes["depth"], point.sizes["num_heads"], **pattern["hybrid"])
    sizes = point.sizes | ({} if point.hybrid is None else {"max_seq_len": point.tokens})
    model = LongNetLM(pattern, shift_layers=point.shift, **sizes)
    subject = counted_model_of(model, point.precision, None, True, gpu.capability)
    setup = Setup(strategy_of(point, args), args.gpus, optimizer=point.optimizer)
    return Case(subject, Facts.of(model, subject), setup, gpu, host=args.host / args.gpus)


@dataclass(frozen=True)
class Planned:
    """Planned bytes at the peak and on the host, seconds of a step, and the largest number of tokens that would fit."""

    peak: int
    host: int
    seconds: float
    longest: int


def planned_of(point: Point, args: argparse.Namespace) -> Planned:
    """Plan the case as `lightning-dilated plan` does."""
    torch.set_num_threads(1)
    case, tokens = case_of(point, args), tokens_of(point, args)
    memory, longest = case.memory(point.settings, tokens), case.longest(point.settings)
    return Planned(memory.peak, memory.host, case.time(point.settings, tokens).seconds, longest)


def tokens_of(point: Point, args: argparse.Namespace) -> int:
    """Return the number of tokens on all GPUs together."""
    return (args.tokens or point.tokens) * args.gpus


def trials_of(point: Point, args: argparse.Namespace) -> Trials:
    """Return `Trials` for the model of a point."""
    callback = {"class_path": "lightning_dilated.callbacks.ActivationRecompute", "init_args": vars(point.settings)}
    words = ["--config", str(Path(__file__).parent.parent / "recipes" / "longest.yaml")]
    words += ["--trainer.precision", point.precision, "--trainer.callbacks", json.dumps([callback])]
    words += ["--model.pattern", json.dumps(point.pattern), "--model.shift_layers", point.shift]
    if point.optimizer == "adamw8bit":
        eight = {"class_path": "torchao.optim.AdamW8bit", "init_args": {"lr": 1e-4, "weight_decay": 0.1}}
        words += ["--model.optimizer", json.dumps(eight)]
    sizes = {"residual_dtype": None, **point.sizes}
    words += [f"--model.{name}={'null' if value is None else value}" for name, value in sizes.items()]
    strategy = strategy_of(point, args)
    words += [] if strategy == "single" else ["--trainer.strategy", strategy]
    return Trials(words, args.gpus, args.timeout)


def row(number: int, point: Point, planned: Future[Planned], args: argparse.Namespace) -> str:
    tokens, trials = tokens_of(point, args), trials_of(point, args)
    done = None if args.dry else trials(tokens)
    plan = planned.result()
    words = in_words(point.settings) + (", bf16 residual" if "residual_dtype" in point.sizes else "")
    words += ", shifted" if point.shifted else ""
    words += f", one dense head in one layer of {point.hybrid}" if point.hybrid else ""
    words += "" if point.optimizer == "adamw" else f", {point.optimizer}, {point.precision}"
    cells = [number, point.name, f"{strategy_of(point, args)} x {args.gpus}", f"{tokens:,}", words]
    if done is None or not done.fits:
        peak = [f"{plan.peak / GIB:.1f}", done.message[:400] if done else "", ""]
        time = [f"{plan.seconds:.2f}", "", "", ""]
    else:
        off = [f"{100 * (a / b - 1):+.1f} %" for a, b in ((plan.peak, done.allocated), (plan.seconds, done.seconds))]
        peak = [f"{plan.peak / GIB:.1f}", f"{done.allocated / GIB:.1f}", off[0]]
        time = [f"{plan.seconds:.2f}", f"{done.seconds:.2f}", off[1], f"{tokens / done.seconds / 1000:.1f}K"]
    most = ""
    if args.search and done is not None and done.fits:
        most = f"{longest(lambda n: trials(n).fits, plan.longest, M * args.gpus // 8).fits:,}"
    host = [f"{x / GIB:.1f}" for x in (done.pinned, done.host)] if done is not None and done.fits else ["", ""]
    cells += [*peak, *time, f"{plan.host / GIB:.1f}", *host, f"{plan.longest:,}", most]
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def main() -> None:
    args = options()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    lines = [f"{name}, torch {torch.__version__}, bf16-mixed unless stated, compiled blocks, AdamW", ""]
    lines += ["| # | model | GPUs | tokens | settings | planned GiB | measured | off | planned s | measured | off "
              "| tokens/s | planned host GiB | page-locked | resident | longest, planned | measured |",
              "| --- " * 17 + "|"]  # fmt: skip
    print("\n".join(lines), flush=True)
    chosen = [
        (number, point) for number, point in enumerate(POINTS)
        if (not args.only or args.only in point.name) and (not args.numbers or number in args.numbers)
        and (args.gpus > 1 or point.strategy is None)
    ]  # fmt: skip
    with ProcessPoolExecutor(4, get_context("spawn")) as pool:  # computed while the GPUs run earlier points
        planned = [pool.submit(planned_of, point, args) for _, point in chosen]
        for (number, point), plan in zip(chosen, planned, strict=True):
            try:
                lines.append(row(number, point, plan, args))
            except (RuntimeError, TimeoutError) as error:
                lines.append(f"| {number} | {point.name} | failed: {str(error)[-1500:]!r} |")
            print(lines[-1], flush=True)
    if args.output is not None:
        args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
