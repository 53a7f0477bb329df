"""Bits per byte of the new version of source files, 32,768 bytes after the old version. Experiment E4 of README.md.

    python benchmarks/far/versions.py --data corpus.bin --far codes --compile --out rows

A model of bytes as in `benchmarks/results/2026-11-24_h100_version_pairs.md`: 8 layers of width 512, 8 heads of 64, the
last head of layers 3 and 7 is a far head. It trains on short samples first. `pairs.py` writes the corpus.
Appends a line of JSON to OUT/NAME.jsonl after each tenth of the training (bits of the second half) and each test.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from model import FAR, Model, Settings, Sizes
from pairs import Versions, asked, second, spread_out
from recall import prepare, train, write
from torch import Tensor


def options(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", type=Path, required=True, help="a corpus of pairs.py")
    p.add_argument("--far", choices=FAR, default="codes")
    p.add_argument("--far-layers", type=int, nargs="+", default=[3, 7])
    p.add_argument("--depth", type=int, default=8)
    p.add_argument("--width", type=int, default=512)
    p.add_argument("--heads", type=int, default=8)
    p.add_argument("--probes", type=int, default=2, help="lookups of a query")
    p.add_argument("--copies", type=float, default=0.05, help="part of the training samples with two equal halves")
    p.add_argument("--agree", type=float, default=0.1, help="weight of the loss")
    p.add_argument("--contrast", type=float, default=1.0)
    p.add_argument("--balance", type=float, default=0.1)
    p.add_argument("--spread", type=float, default=0.1)
    p.add_argument("--taught-from", type=int, default=300, help="the losses of codes count from this step on")
    p.add_argument("--sample", type=int, default=256, help="positions of a sample that teach codes in soft steps")
    p.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    p.add_argument("--steps", type=int, nargs="+", default=[600, 300, 300, 800], help="of each length")
    p.add_argument("--local", type=int, nargs="+", default=[128, 512, 2048, 2048], help="local segments at each length")
    p.add_argument("--soft-until", type=int, default=16384, help="codes read all rows up to this length")
    p.add_argument("--tokens", type=int, default=65536, help="of a step, at least one sample")
    p.add_argument("--seconds", type=float, help="end the training, its falling learning rate included, by then")
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--test", type=int, nargs="+", default=[65536])
    p.add_argument("--test-probes", type=int, nargs="+", default=[2, 1])
    p.add_argument("--samples", type=int, default=64, help="of a test")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--name", default="versions", help="of the files")
    p.add_argument("--out", type=Path, required=True, help="folder of the files")
    a = p.parse_args(argv)
    if not len(a.lengths) == len(a.steps) == len(a.local):
        p.error(f"{len(a.lengths)} lengths, {len(a.steps)} steps and {len(a.local)} local: give one for each length")
    a.queries = 1
    return a


def sizes_of(a: argparse.Namespace) -> Sizes:
    first, *also = a.far_layers
    names = {"far": a.far, "depth": a.depth, "width": a.width, "heads": a.heads}
    return Sizes(256, **names, far_layer=first, also=tuple(also), start="trigram", query_taps=True)


def loss_of(
    model: Model, batch: tuple[Tensor, ...], settings: Settings, a: argparse.Namespace, step: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return (training loss, nats of the second half, losses and counts of the far heads)."""
    tokens, at, answers, _ = batch
    with torch.autocast(a.device, torch.bfloat16, enabled=a.device == "cuda"):
        logits, aux = model(tokens, at, settings)
        nats = F.cross_entropy(logits.mT, answers, reduction="none")
    extra = sum(getattr(a, name) * aux[name] for name in ("agree", "contrast", "balance", "spread") if name in aux)
    return nats.mean() + extra * (step >= a.taught_from), nats[:, second(tokens.shape[1]) :].mean().detach(), aux


@torch.no_grad()
def test(model: Model, task: Versions, size: int, settings: Settings, a: argparse.Namespace) -> dict[str, Any]:
    """Return bits per byte of both halves of held-out samples, the standard error of the second half, and rows read."""
    bits, rows = [], []
    for place in spread_out(task.held.walk(size), a.samples):
        tokens, at, answers, _ = asked(task.held.samples(place[None], size))
        with torch.autocast(a.device, torch.bfloat16, enabled=a.device == "cuda"):
            logits, aux = model(tokens, at, settings)
        bits.append(F.cross_entropy(logits.mT, answers, reduction="none")[0].double() / math.log(2))
        if "rows" in aux:
            read = aux["rows"][0].double() / len(a.far_layers)
            rows.append(torch.stack([read.mean(), read[second(size) :].mean()]))
    bits = torch.stack(bits)
    late = bits[:, second(size) :].mean(1)
    read = dict(zip(("rows", "rows second"), torch.stack(rows).mean(0).tolist(), strict=True)) if rows else {}
    return {
        "test": size,
        "samples": len(bits),
        "first": round(bits[:, : size // 2 - size // 16].mean().item(), 4),
        "second": round(late.mean().item(), 4),
        "error": round((late.std() / len(late) ** 0.5).item(), 4),
        **{k: round(v, 2) for k, v in read.items()},
        "eighths": [round(x.mean().item(), 3) for x in bits.tensor_split(8, 1)],
    }


def main(argv: list[str] | None = None) -> None:
    a = options(argv)
    a.out.mkdir(parents=True, exist_ok=True)
    prepare(a.compile)
    torch.manual_seed(a.seed)
    task = Versions(a.data, a.device, a.copies)
    model = Model(sizes_of(a)).to(a.device)
    args = {k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items()}
    write(a, {"options": args, "torch": torch.__version__, "parameters": sum(p.numel() for p in model.parameters())})
    write(a, train(model, task, a, loss_of))
    torch.save({"sizes": vars(model.sizes), "options": args, "weights": model.state_dict()}, a.out / f"{a.name}.pt")
    model.eval()
    for size in a.test:
        for probes in a.test_probes if a.far == "codes" else [1]:
            began = time.monotonic()
            local = max(w for n, w in zip(a.lengths, a.local, strict=True) if n <= max(size, min(a.lengths)))
            row = test(model, task, size, Settings(local, probes), a)
            write(
                a,
                {**row, "probes": probes if a.far == "codes" else None, "seconds": round(time.monotonic() - began, 1)},
            )


if __name__ == "__main__":
    main()
