"""Recall against distance: which patterns learn to look up what stands up to 65,536 tokens back.

    python benchmarks/recall_distance.py --arm hybrid
    python benchmarks/recall_distance.py --arm paper --rotary-base 1e4 --seed 1

`FarRecallDataModule` with one pair for 64 tokens, at most 1,024, out of 2,048 keys and values: guessing takes 11 bits.
Sequences of 1,024, 4,096, 16,384 and 65,536 tokens one after another, `--steps` steps of 65,536 tokens of each. A model of
4 layers of width 256 and 4 heads of 64; AdamW at 1e-3, 100 steps of warm-up, constant, linear to 0 over the last fifth; bf16
autocast. Prints one line of JSON: of 32 new sequences of the longest length the share of queries that are answered right and
their bits, also by octave of the distance between query and pair; training bits of each tenth of the steps; seconds, GiB.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_dilated as ld

VOCABULARY, DEPTH, DIM, HEADS = 2048, 4, 256, 4
LENGTHS = (1024, 4096, 16384, 65536)
SEGMENTS, RATES = [2048, 4096, 8192, 16384, 32768, 65536], [1, 2, 4, 8, 8, 8]
LOCAL = ld.DilatedPattern.dense(2048)
FAR = ld.DilatedPattern.longnet(SEGMENTS[1:], RATES[1:])
EVERY_LAYER = ld.DilatedPattern([ld.Branch(2048, 1, heads=range(HEADS - 1)), ld.Branch(None, 1, heads=[HEADS - 1])])
#: pattern of each layer, in turns
ARMS = {
    "walls": [ld.DilatedPattern.longnet([2048, 4096], [1, 2])],
    "window": [LOCAL, LOCAL.shifted()],
    "paper": [ld.DilatedPattern.longnet(SEGMENTS, RATES)],
    "torchscale": [ld.DilatedPattern.longnet(SEGMENTS, RATES, offsets="blocked")],
    "dense": [ld.DilatedPattern.dense()],
    "heads": [EVERY_LAYER, EVERY_LAYER.shifted()],
    "hybrid": ld.DilatedPattern.hybrid(DEPTH, HEADS),
    "hybrid-all": ld.DilatedPattern.hybrid(DEPTH, HEADS, global_heads="all"),
    "hybrid-lite": ld.DilatedPattern.hybrid(DEPTH, HEADS, far=FAR),
}


def data(seq_len: int, steps: int, a: argparse.Namespace) -> ld.data.FarRecallDataModule:
    """The task at N tokens."""
    pairs, batch = min(seq_len // a.tokens_per_pair, 1024, a.vocabulary), max(1, a.tokens // seq_len)
    return ld.data.FarRecallDataModule(
        seq_len,
        pairs,
        a.vocabulary,
        a.queries * pairs,
        batch_size=batch,
        train_size=steps * batch,
        val_size=32,
        seed=a.seed,
    )


def batches(task: ld.data.FarRecallDataModule, split: str, size: int, workers: int = 2) -> Iterator[dict[str, Tensor]]:
    """Batches of a split, in order."""
    return iter(DataLoader(task.dataset(split), batch_size=size, num_workers=workers))


def rate(step: int, steps: int) -> float:
    """Share of the learning rate."""
    return min(1.0, (step + 1) / 100, (steps - step) / (0.2 * steps))


def main() -> None:
    """Train, and print what was learned."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--arm", choices=list(ARMS), required=True)
    p.add_argument("--steps", type=int, default=750, help="of each length")
    p.add_argument("--rotary-base", type=float, help="default: that of 65,536 tokens, 1e7")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--vocabulary", type=int, default=VOCABULARY, help="keys, and values")
    p.add_argument("--queries", type=int, default=1, help="queries in training, for each pair")
    p.add_argument("--tokens", type=int, default=65536, help="of a step, at least one sequence")
    p.add_argument("--tokens-per-pair", type=int, default=64)
    p.add_argument("--kv-conv", type=int, help="taps of the convolution on keys and values")
    p.add_argument("--tie", action=argparse.BooleanOptionalAction, default=True, help="embedding and output projection")
    p.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps(run(p.parse_args())), flush=True)


def run(a: argparse.Namespace) -> dict[str, object]:
    """One arm."""
    torch.manual_seed(a.seed)
    begin = time.monotonic()
    options = {"rotary_base": a.rotary_base} if a.rotary_base else {"max_seq_len": max(a.lengths)}
    options |= {"compile_blocks": a.compile, "tie_embeddings": a.tie, "kv_conv": a.kv_conv}
    model = ld.LongNetLM(ARMS[a.arm], 1 + 2 * a.vocabulary, DIM, DEPTH, HEADS, **options)
    model.configure_model()
    model.to(a.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=a.device == "cuda"
    )
    total = a.steps * len(a.lengths)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: rate(i, total))
    curve, seconds = torch.zeros(10, dtype=torch.float64, device=a.device), {}
    step = 0
    for seq_len in a.lengths:
        task, started = data(seq_len, a.steps, a), time.monotonic()
        for i, batch in enumerate(batches(task, "train", task.batch_size)):
            with torch.autocast(a.device, torch.bfloat16):
                nats, count = model.loss_terms({k: v.to(a.device) for k, v in batch.items() if k != "index"})
            loss = nats / count
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            curve[step * 10 // total] += loss.detach().double() / math.log(2) / (total / 10)
            step += 1
            if step % (total // 10) == 0:
                print(
                    f"{sys.argv[1:]} {step}: {float(curve[step * 10 // total - 1]):.3f} bits",
                    file=sys.stderr,
                    flush=True,
                )
            if i == a.steps // 5:  # past what compiles
                synchronise(a.device)
                started = time.monotonic()
        synchronise(a.device)
        seconds[seq_len] = round((time.monotonic() - started) / (a.steps - a.steps // 5 - 1) * 1e3, 1)
    options = {
        "arm": a.arm,
        "base": model.rotary_bases[0],
        "lr": a.lr,
        "steps": total,
        "vocabulary": a.vocabulary,
        "queries": a.queries,
        "tokens": a.tokens,
        "tokens_per_pair": a.tokens_per_pair,
        "tied": a.tie,
        "kv_conv": a.kv_conv,
        "seed": a.seed,
    }
    seen = validate(model, a)
    memory = torch.cuda.max_memory_allocated() / 2**30 if a.device == "cuda" else 0.0
    return {
        **options, **seen, "train": [round(x, 3) for x in curve.tolist()], "ms": seconds,
        "seconds": round(time.monotonic() - begin), "gib": round(memory, 2),
    }  # fmt: skip


def synchronise(device: str) -> None:
    """Wait for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def validate(model: ld.LongNetLM, a: argparse.Namespace) -> dict[str, object]:
    """Accuracy and bits of the longest length, all and by octave of the distance."""
    task = data(max(a.lengths), 1, a)
    model.eval()
    right, nats, far = [], [], []
    for batch in batches(task, "val", 1, workers=0):
        tokens, labels = batch["tokens"], batch["labels"]
        asked = labels[0] != -100
        with torch.autocast(a.device, torch.bfloat16):
            logits = model(tokens.to(a.device))[0][asked.to(a.device)].float().cpu()
        where = torch.zeros(1 + 2 * a.vocabulary, dtype=torch.int64)
        half = task.seq_len // 2
        where[tokens[0, :half]] = torch.arange(half)
        far.append(asked.nonzero()[:, 0] - where[tokens[0][asked]])
        right.append(logits.argmax(1) == labels[0][asked])
        nats.append(torch.nn.functional.cross_entropy(logits, labels[0][asked], reduction="none"))
    right, nats, far = torch.cat(right).double(), torch.cat(nats).double(), torch.cat(far)
    octave = far.double().log2().floor().long()
    by = {
        f"{2**o}": [round(float(right[octave == o].mean()), 4), int((octave == o).sum())]
        for o in sorted(set(octave.tolist()))
    }
    residues = [round(float(right[(far - 1) % 8 == r].mean()), 4) for r in range(8)]
    bits = round(float(nats.mean()) / math.log(2), 3)
    return {"accuracy": round(float(right.mean()), 4), "bits": bits, "by_octave": by, "by_residue": residues}


if __name__ == "__main__":
    main()
