"""Recall with a far head by sequence length: train at short lengths, test at longer ones. E0 and E1 of README.md.

    python benchmarks/far/recall.py --far codes --out rows                               # E1
    python benchmarks/far/recall.py --far dense --haystack filler --lr 2e-3 --before 0 --steps 400 400 400 400 \
        --local 2048 2048 2048 2048 --out rows                                           # E0
    # on a core of a CPU, two minutes
    python benchmarks/far/recall.py --far codes --device cpu --width 64 --keys 64 --per-pair 16 --queries 3 \
        --lengths 64 256 --steps 150 100 --local 16 32 --soft-until 64 --tokens 4096 --test 256 1024 4096 \
        --test-tokens 8192 --out rows

Appends a line of JSON to OUT/NAME.jsonl after each tenth of the training and each test. Saves the weights in OUT/NAME.pt.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import codes
import model as models
import torch
import torch.nn.functional as F
from model import FAR, Model, Settings, Sizes
from task import KINDS, Task
from torch import Tensor

LossOf = Callable[..., tuple[Tensor, Tensor, dict[str, Tensor]]]


def options(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--far", choices=FAR, default="codes")
    p.add_argument("--far-layer", type=int, default=0)
    p.add_argument("--haystack", choices=KINDS, default="noise")
    p.add_argument("--text", help="a file whose bytes are the haystack; --haystack text")
    p.add_argument("--keys", type=int, default=2048)
    p.add_argument("--key-tokens", type=int, default=1, choices=(1, 2), help="E3: 2")
    p.add_argument("--full", action="store_true", help="E3: the haystack is pairs, and each one is asked once")
    p.add_argument("--per-pair", type=int, default=64, help="tokens of a sequence for each pair")
    p.add_argument("--queries", type=int, default=8, help="how often each key is asked in training")
    p.add_argument("--width", type=int, default=256)
    p.add_argument("--groups", type=int, default=4)
    p.add_argument("--codes", type=int, default=16, help="codes of a group")
    p.add_argument("--latest", type=int, default=64, help="rows that a lookup reads at most")
    p.add_argument("--probes", type=int, default=2, help="lookups of a query in training")
    p.add_argument("--start", choices=("pair", "trigram"), default="trigram", help="convolutions of codes, at first")
    p.add_argument("--before", type=float, default=1.0, help="tap of the token before in the far head's keys, at first")
    p.add_argument("--query-taps", action="store_true", help="E3: a convolution on the far head's queries, too")
    p.add_argument("--alike", action="store_true", help="projections of codes begin with equal weights")
    p.add_argument("--std", type=float, help="of the embedding, at first; default: small, as that of all matrices")
    p.add_argument("--sharp", type=float, help="root mean square of the code logits of a group; default: as they are")
    p.add_argument("--agree", type=float, default=0.1, help="weight of the loss")
    p.add_argument("--contrast", type=float, default=0.1)
    p.add_argument("--balance", type=float, default=0.1)
    p.add_argument("--spread", type=float, default=0.0, help="balance of the codes of asked queries")
    p.add_argument(
        "--taught-from", type=int, help="codes have no part in soft scores; their losses count from this step on"
    )
    p.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    p.add_argument("--steps", type=int, nargs="+", default=[400, 400, 300, 200], help="of each length")
    p.add_argument("--local", type=int, nargs="+", default=[128, 512, 2048, 2048], help="local segments at each length")
    p.add_argument("--soft-until", type=int, default=4096, help="codes read all rows up to this length")
    p.add_argument("--tokens", type=int, default=65536, help="of a step, at least one sequence")
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--test", type=int, nargs="+", default=[65536, 262144, 1048576])
    p.add_argument("--test-probes", type=int, nargs="+", default=[2, 1])
    p.add_argument("--test-tokens", type=int, default=1 << 20, help="of each test, at least two sequences")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--name", default="run", help="of the files")
    p.add_argument("--out", type=Path, required=True, help="folder of the files")
    a = p.parse_args(argv)
    if not len(a.lengths) == len(a.steps) == len(a.local):
        p.error(f"{len(a.lengths)} lengths, {len(a.steps)} steps and {len(a.local)} local: give one for each length")
    return a


def prepare(compiled: bool) -> None:
    """Compile operations that memory bandwidth limits, if `compiled` is set."""
    if compiled:
        models.convolve, models.turn = (torch.compile(f, dynamic=True) for f in (models.convolve, models.turn))
        codes.attend = torch.compile(codes.attend, dynamic=True)


def task_of(a: argparse.Namespace) -> Task:
    """Return the task that the command line describes."""
    words = {"text": a.text, "key_tokens": a.key_tokens, "full": a.full}
    return Task(a.haystack, a.keys, a.per_pair, device=a.device, **words)


def sizes_of(a: argparse.Namespace, vocabulary: int) -> Sizes:
    """Return the sizes of the model that the command line describes."""
    names = ("far", "far_layer", "width", "groups", "codes", "latest", "before", "start", "alike", "std", "sharp")
    names += ("query_taps",)
    return Sizes(vocabulary, **{name: getattr(a, name) for name in names})


def write(a: argparse.Namespace, row: dict[str, Any]) -> None:
    """Append a line to the run's file."""
    line = json.dumps({"name": a.name, **row})
    with (a.out / f"{a.name}.jsonl").open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def loss_of(
    model: Model, batch: tuple[Tensor, ...], settings: Settings, a: argparse.Namespace, step: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return (training loss, nats of the answers, losses and counts of the far head)."""
    tokens, at, answers, _ = batch
    with torch.autocast(a.device, torch.bfloat16, enabled=a.device == "cuda"):
        logits, aux = model(tokens, at, settings)
        nats = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
    extra = sum(getattr(a, name) * aux[name] for name in ("agree", "contrast", "balance", "spread") if name in aux)
    return nats + extra * (step >= (a.taught_from or 0)), nats.detach(), aux


def train(model: Model, task: Task, a: argparse.Namespace, loss_of: LossOf = loss_of) -> dict[str, Any]:
    """Train at each length, until its steps are done or `a.seconds` have passed. Return the results."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=a.device == "cuda"
    )
    gen = torch.Generator(a.device).manual_seed(1000 + a.seed)
    total, step, began, curve, seconds = sum(a.steps), 0, time.monotonic(), [], {}
    limit = getattr(a, "seconds", None) or math.inf
    for size, steps, local in zip(a.lengths, a.steps, a.local, strict=True):
        settings = Settings(local, a.probes, size <= a.soft_until, a.taught_from is not None, getattr(a, "sample", 0))
        for _ in range(steps):
            done = max(step / total, (time.monotonic() - began) / limit)
            if done >= 1:
                break
            batch = task.draw(size, max(1, a.tokens // size), gen, a.queries)
            loss, nats, aux = loss_of(model, batch, settings, a, step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = a.lr * min(1, (step + 1) / 100, (1 - done) / 0.2)
            optimizer.step()
            optimizer.zero_grad()
            curve.append(nats)
            step += 1
            if step % max(1, total // 10) == 0:
                recent = torch.stack(curve[-max(1, total // 10) :]).mean().item() / math.log(2)
                extra = {k: round(v.float().mean().item(), 4) for k, v in aux.items()}
                write(
                    a,
                    {
                        "step": step,
                        "length": size,
                        "bits": round(recent, 3),
                        **extra,
                        "seconds": round(time.monotonic() - began, 1),
                    },
                )
        seconds[size] = round(time.monotonic() - began, 1)
    tenths = [round(x.mean().item() / math.log(2), 3) for x in torch.stack(curve).tensor_split(10)]
    return {"trained": step, "train bits": tenths, "seconds": seconds}


@torch.no_grad()
def test(model: Model, task: Task, size: int, settings: Settings, a: argparse.Namespace) -> dict[str, Any]:
    """Return the share of right answers, bits, and numbers of rows read, for new sequences of this length."""
    gen = torch.Generator(a.device).manual_seed(7)
    right, nats, rows, far, count = [], [], [], [], max(2, a.test_tokens // size)
    for _ in range(count):
        tokens, at, answers, distance = task.draw(size, 1, gen, training=False)
        with torch.autocast(a.device, torch.bfloat16, enabled=a.device == "cuda"):
            logits, aux = model(tokens, at, settings)
        right.append((logits.argmax(-1) == answers).flatten())
        nats.append(F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none"))
        far.append(distance.flatten())
        if "rows" in aux:
            read = aux["rows"].float()
            rows.append(torch.stack([read.mean(), read.gather(1, at).mean()]))
    right, octave = torch.cat(right).double(), torch.cat(far).double().log2().floor().long()
    by = {
        2**o: [round(right[octave == o].mean().item() * 100, 1), int((octave == o).sum())]
        for o in octave.unique().tolist()
    }
    read = dict(zip(("rows", "rows asked"), torch.stack(rows).mean(0).tolist(), strict=True)) if rows else {}
    return {
        "test": size,
        "right": round(right.mean().item() * 100, 2),
        "asked": len(right),
        "sequences": count,
        "bits": round(torch.cat(nats).mean().item() / math.log(2), 4),
        **{k: round(v, 2) for k, v in read.items()},
        "by octave": by,
    }


def main(argv: list[str] | None = None) -> None:
    a = options(argv)
    a.out.mkdir(parents=True, exist_ok=True)
    prepare(a.compile)
    torch.manual_seed(a.seed)
    task = task_of(a)
    model = Model(sizes_of(a, task.vocabulary)).to(a.device)
    args = {k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items()}
    write(a, {"options": args, "torch": torch.__version__, "parameters": sum(p.numel() for p in model.parameters())})
    write(a, train(model, task, a))
    torch.save({"sizes": vars(model.sizes), "options": args, "weights": model.state_dict()}, a.out / f"{a.name}.pt")
    model.eval()
    for size in a.test:
        for probes in a.test_probes if a.far == "codes" else [1]:
            if a.device == "cuda":
                torch.cuda.empty_cache()
            began = time.monotonic()
            row = test(model, task, size, Settings(a.local[-1], probes), a)
            write(
                a,
                {**row, "probes": probes if a.far == "codes" else None, "seconds": round(time.monotonic() - began, 1)},
            )


if __name__ == "__main__":
    main()
