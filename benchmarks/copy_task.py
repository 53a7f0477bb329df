"""Copying over a distance, by pattern: a small LongNetLM on sequences in which the second half repeats the first.

    python benchmarks/copy_task.py --arm paper --steps 10000
    python benchmarks/copy_task.py --arm paper --steps 10000 --distance 48
    python benchmarks/copy_task.py --arm heads

A sequence has 128 tokens of 32 symbols. Token p of the second half is token p - d, where d is drawn for each sequence
from 33 to 64, or is fixed. The loss counts the second half without its first 8 tokens; a guess costs 5 bits. The model
has 3 layers of width 64 with 4 heads. Prints one line of JSON: bits on 512 new sequences, also by (d - 1) mod 4, and
training bits of each tenth of the steps.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import lightning_dilated as ld

TOKENS, SYMBOLS, RATE = 128, 32, 4
HALF = TOKENS // 2
#: pattern, and how its layers are shifted
ARMS = {
    "paper": (ld.DilatedPattern.longnet([16, TOKENS], [1, RATE]), "odd"),
    "local": (ld.DilatedPattern.longnet([16], [1]), "odd"),
    "heads": (ld.DilatedPattern([ld.Branch(16, 1, heads=[0, 1, 2]), ld.Branch(None, 1, heads=[3])]), "odd"),
    "hybrid": (ld.DilatedPattern.hybrid(3, 4, local=16, global_every=3), "none"),
    "dense": (ld.DilatedPattern.dense(), "none"),
}


def batch(size: int, distance: int | None, device: str, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return (tokens (B, N), labels (B, N), distances (B,)). The label -100 excludes a prediction from the loss."""
    d = torch.randint(HALF // 2 + 1, HALF + 1, (size,), generator=generator)
    if distance is not None:
        d.fill_(distance)
    first = torch.randint(SYMBOLS, (size, HALF), generator=generator)
    # a token of the second half equals the token d before it; if that is in the second half as well, the one 2 d before it
    source = torch.arange(HALF, TOKENS + 1) - d[:, None]
    source = torch.where(source < HALF, source, source - d[:, None])
    tokens = torch.cat([first, first.gather(1, source)], 1)
    labels = tokens[:, 1:].clone()
    labels[:, : HALF + 8] = -100
    return tokens[:, :-1].to(device), labels.to(device), d


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--arm", choices=list(ARMS), required=True)
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument(
        "--schedule", type=int, help="steps of the learning rate's cosine, at least --steps (default: these)"
    )
    p.add_argument("--distance", type=int, help="one distance for all sequences, 33 to 64")
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--rotary-base", type=float, default=1e4)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a = p.parse_args()
    if a.distance is not None and not HALF // 2 < a.distance <= HALF:
        p.error(f"--distance must be {HALF // 2 + 1} to {HALF}, got {a.distance}")
    if a.schedule is not None and a.schedule < a.steps:
        p.error(f"--schedule must be at least --steps={a.steps}, got {a.schedule}")
    print(json.dumps(run(a)), flush=True)


def run(a: argparse.Namespace) -> dict[str, object]:
    torch.manual_seed(a.seed)
    generator, begin = torch.Generator().manual_seed(a.seed + 1), time.monotonic()
    pattern, shift = ARMS[a.arm]
    model = ld.LongNetLM(
        pattern,
        vocab_size=SYMBOLS,
        dim=64,
        depth=3,
        num_heads=4,
        rotary_base=a.rotary_base,
        shift_layers=shift,
        shift_below=TOKENS if shift == "odd" else None,
        engine="math",
    )
    model.configure_model()
    model.to(a.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=a.lr, betas=(0.9, 0.98), weight_decay=0.01)
    rate = lambda i: min(1, (i + 1) / 100) * (0.1 + 0.45 * (1 + math.cos(math.pi * i / (a.schedule or a.steps))))  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    curve = torch.zeros(10, dtype=torch.float64, device=a.device)
    for i in range(a.steps):
        tokens, labels, _ = batch(a.batch_size, a.distance, a.device, generator)
        loss = cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        curve[i * 10 // a.steps] += loss.detach() / math.log(2) / (a.steps / 10)
    options = {
        "arm": a.arm, "distance": a.distance or "33-64", "steps": a.steps, "schedule": a.schedule or a.steps,
        "seed": a.seed, "base": a.rotary_base,
    }  # fmt: skip
    seconds = round(time.monotonic() - begin)
    return {**options, **validate(model, a), "train": [round(x, 3) for x in curve.tolist()], "seconds": seconds}


@torch.no_grad()
def validate(model: ld.LongNetLM, a: argparse.Namespace) -> dict[str, object]:
    """Return bits per symbol on 512 sequences that no seed trains on, overall and by distance modulo the rate."""
    tokens, labels, d = batch(512, a.distance, a.device, torch.Generator().manual_seed(99))
    losses = cross_entropy(model(tokens).transpose(1, 2).float(), labels, ignore_index=-100, reduction="none")
    each = (losses.sum(1) / (labels != -100).sum(1) / math.log(2)).tolist()
    by_residue = defaultdict(list)
    for bits, distance in zip(each, d.tolist(), strict=True):
        by_residue[(distance - 1) % RATE].append(bits)
    return {
        "bits": round(sum(each) / len(each), 3),
        "by_residue": {k: round(sum(v) / len(v), 3) for k, v in sorted(by_residue.items())},
    }


if __name__ == "__main__":
    main()
