"""Arms of the learning experiments (patterns by layer), and the training that all of them share.

AdamW(betas=(0.9, 0.95), weight_decay=0.1), gradients clipped at 1. The learning rate rises over 100 steps, stays constant,
and falls linearly to 0 over the last fifth of the steps (of the minutes, if --minutes is set). bf16 autocast is used.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_dilated as ld

SEGMENTS, RATES = [2048, 4096, 8192, 16384, 32768, 65536], [1, 2, 4, 8, 8, 8]
NAMES = (
    "walls",
    "window",
    "paper",
    "torchscale",
    "dense",
    "heads",
    "hybrid",
    "hybrid-all",
    "hybrid-lite",
    "hybrid-half",
    "hybrid-first",
    "hybrid-ends",
    "hybrid-window",
    "hashed",
)
Batch = dict[str, Tensor]


def pattern_of(arm: str, depth: int, heads: int, local: int = 2048) -> list[ld.DilatedPattern]:
    """Return the patterns of alternating layers. The arm `hashed` has the patterns of `window`.

    Args:
        local: segment length of local heads, which the arms window and heads and all hybrids have.
    """
    near, hybrid = ld.DilatedPattern.dense(local), ld.DilatedPattern.hybrid
    if arm == "heads":
        branches = [ld.Branch(local, 1, heads=range(heads - 1)), ld.Branch(None, 1, heads=[heads - 1])]
        return [ld.DilatedPattern(branches), ld.DilatedPattern(branches).shifted()]
    far = ld.DilatedPattern.longnet(SEGMENTS[1:], RATES[1:])
    if arm == "hashed":
        arm = "window"
    return {
        "walls": lambda: [ld.DilatedPattern.longnet([2048, 4096], [1, 2])],
        "window": lambda: [near, near.shifted()],
        "paper": lambda: [ld.DilatedPattern.longnet(SEGMENTS, RATES)],
        "torchscale": lambda: [ld.DilatedPattern.longnet(SEGMENTS, RATES, offsets="blocked")],
        "dense": lambda: [ld.DilatedPattern.dense()],
        "hybrid": lambda: hybrid(depth, heads, local=local),
        "hybrid-all": lambda: hybrid(depth, heads, local=local, global_heads="all"),
        "hybrid-lite": lambda: hybrid(depth, heads, local=local, far=far),
        "hybrid-first": lambda: hybrid(depth, heads, local=local, global_first=0),
        # layer 0, in which recall learns dense heads, and every fourth layer, in which copying learns them
        "hybrid-ends": lambda: (
            hybrid(depth, heads, local=local, global_first=0)[:1] + hybrid(depth, heads, local=local)[1:]
        ),
        # windows have half the width of segments, so that a query sees on average the same number of keys
        "hybrid-window": lambda: hybrid(depth, heads, local=local // 2, window=True),
        "hybrid-half": lambda: hybrid(depth, heads, local=local, global_every=2),
    }[arm]()


def add_options(p: argparse.ArgumentParser, lr: float = 1e-3) -> None:
    """Add the options that all experiments share."""
    p.add_argument("--arm", choices=NAMES, required=True)
    p.add_argument("--local", type=int, default=2048, help="segment length of local heads")
    p.add_argument("--rotary-base", type=float, help="default: for the longest sequence")
    p.add_argument("--kv-conv", type=int, help="taps of the convolution on keys and values")
    p.add_argument("--lr", type=float, default=lr)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--minutes", type=float, help="length of the training, instead of the steps of the last length")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def model_of(
    a: argparse.Namespace, vocabulary: int, dim: int, depth: int, heads: int, longest: int, **options: Any
) -> ld.LongNetLM:
    """Build the model of the arm on its device."""
    torch.manual_seed(a.seed)
    positions = {"rotary_base": a.rotary_base} if a.rotary_base else {"max_seq_len": longest}
    pattern = pattern_of(a.arm, depth, heads, a.local)
    if a.arm == "hashed":  # in the layers in which `hybrid` has dense heads
        options["hashed"] = ld.Hashed(layers=tuple(range(3, depth, 4)))
    model = ld.LongNetLM(
        pattern, vocabulary, dim, depth, heads, compile_blocks=a.compile, kv_conv=a.kv_conv, **positions, **options
    )
    model.configure_model()
    return model.to(a.device)


def batches(data: ld.data.RuleDataModule, split: str, size: int, workers: int = 2) -> Iterator[Batch]:
    """Yield batches of a split of a generated task, in order."""
    return iter(DataLoader(data.dataset(split), batch_size=size, num_workers=workers))


@dataclass
class Stage:
    """Batches of one sequence length."""

    seq_len: int
    steps: int
    batches: Iterable[Batch]


@dataclass
class Trained:
    """Training bits averaged over each tenth of the run, milliseconds per step by length, total steps and seconds."""

    curve: list[float]
    ms: dict[int, float]
    steps: int
    seconds: float


def train(model: ld.LongNetLM, stages: list[Stage], a: argparse.Namespace) -> Trained:
    """Train on the stages in order, each for its steps. In the last stage, `a.minutes` may end the run instead."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=a.device == "cuda"
    )
    total, begin = sum(stage.steps for stage in stages), time.monotonic()
    sums, counts = torch.zeros(10, dtype=torch.float64, device=a.device), [0] * 10
    step, ms, done = 0, {}, 0.0
    for stage in stages:
        first, started = step, time.monotonic()
        for batch in stage.batches:
            done = (time.monotonic() - begin) / 60 / a.minutes if a.minutes else step / total
            if done >= 1 or ((not a.minutes or stage is not stages[-1]) and step - first == stage.steps):
                break
            for group in optimizer.param_groups:
                group["lr"] = a.lr * min(1.0, (step + 1) / 100, (1 - done) / 0.2)
            loss = _step(model, batch, a.device)
            optimizer.step()
            optimizer.zero_grad()
            tenth = min(9, int(10 * done))
            sums[tenth] += loss
            counts[tenth] += 1
            step += 1
            if counts[tenth] == 1:  # the first step of a tenth
                print(f"{sys.argv[1:]} {step}: {float(loss):.3f} bits", file=sys.stderr, flush=True)
            if step - first == stage.steps // 5 + 1:  # the measured time starts after compilation
                synchronise(a.device)
                started = time.monotonic()
        synchronise(a.device)
        ms[stage.seq_len] = round((time.monotonic() - started) / max(1, step - first - stage.steps // 5 - 1) * 1e3, 1)
    curve = [round(x / max(1, n), 3) for x, n in zip(sums.tolist(), counts, strict=True)]
    return Trained(curve, ms, step, round(time.monotonic() - begin))


def _step(model: ld.LongNetLM, batch: Batch, device: str) -> Tensor:
    """Run forward and backward. Return the loss in bits."""
    with torch.autocast(device, torch.bfloat16):
        loss, _ = model.token_mean({k: v.to(device) for k, v in batch.items() if k != "index"})
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss.detach().double() / math.log(2)


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def options_of(a: argparse.Namespace, model: ld.LongNetLM, trained: Trained) -> dict[str, Any]:
    """Return the fields of a row that describe its arm and training."""
    memory = torch.cuda.max_memory_allocated() / 2**30 if a.device == "cuda" else 0.0
    return {
        "arm": a.arm, "local": a.local, "base": model.rotary_bases[0], "kv_conv": a.kv_conv, "lr": a.lr, "seed": a.seed,
        "steps": trained.steps, "train": trained.curve, "ms": trained.ms, "seconds": trained.seconds,
        "gib": round(memory, 2),
    }  # fmt: skip
