"""Recall by distance: patterns that learn to look up a token up to 65,536 tokens back.

    python benchmarks/recall_distance.py --arm hybrid --kv-conv 4 --lr 2e-3 --queries 8 --steps 400
    python benchmarks/recall_distance.py --arm paper --rotary-base 1e4 --seed 1
    # on a core of a CPU, 3 minutes
    python benchmarks/recall_distance.py --arm hybrid-first --local 64 --kv-conv 4 --lr 3e-3 --queries 4 --steps 300 \
        --dim 64 --vocabulary 64 --lengths 64 128 512 --tokens 4096 --tokens-per-pair 16

The task is `FarRecallDataModule` with one pair per 64 tokens, at most 1,024, from 2,048 keys and values: a guess costs
11 bits. Sequences have 1,024, then 4,096, 16,384 and 65,536 tokens, for `--steps` steps each of 65,536 tokens (at least
one sequence); `--lengths 1024 .. 1048576 --steps 400 .. 40 --recompute` continues to a million. The model has 4 layers
of width 256 with 4 heads of 64, trained by `arms.py`. Prints one line of JSON: the share of right answers in 32 new
sequences of the longest length, and their bits, also by octave of the distance between query and pair; training bits of
each tenth of the steps; seconds, GiB.
"""

from __future__ import annotations

import argparse
import json
import math

import torch
from arms import Stage, add_options, batches, model_of, options_of, train

import lightning_dilated as ld
from lightning_dilated.memory.settings import MemorySettings

VOCABULARY, DEPTH, DIM, HEADS = 2048, 4, 256, 4
LENGTHS = (1024, 4096, 16384, 65536)


def data(seq_len: int, steps: int, a: argparse.Namespace) -> ld.data.FarRecallDataModule:
    """Return the task for sequences of N tokens."""
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


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(p)
    p.add_argument(
        "--steps", type=int, nargs="+", default=[750], help="of each length; one number for all, or one each"
    )
    p.add_argument("--recompute", action="store_true", help="blocks once more in the backward, which takes less memory")
    p.add_argument("--vocabulary", type=int, default=VOCABULARY, help="keys, and values")
    p.add_argument("--queries", type=int, default=1, help="queries in training, for each pair")
    p.add_argument("--tokens", type=int, default=65536, help="of a step, at least one sequence")
    p.add_argument("--tokens-per-pair", type=int, default=64)
    p.add_argument("--dim", type=int, default=DIM)
    p.add_argument("--tie", action=argparse.BooleanOptionalAction, default=True, help="embedding and output projection")
    p.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    print(json.dumps(run(p.parse_args())), flush=True)


def run(a: argparse.Namespace) -> dict[str, object]:
    model = model_of(a, 1 + 2 * a.vocabulary, a.dim, DEPTH, HEADS, max(a.lengths), tie_embeddings=a.tie)
    if a.recompute:
        model.transformer.memory = MemorySettings("block")
    steps = a.steps * len(a.lengths) if len(a.steps) == 1 else a.steps
    stages = []
    for n, k in zip(a.lengths, steps, strict=True):
        task = data(n, k, a)
        stages.append(Stage(n, k, batches(task, "train", task.batch_size)))
    trained = train(model, stages, a)
    listed = ("lengths", "vocabulary", "queries", "tokens", "tokens_per_pair", "tie", "dim")
    return {**options_of(a, model, trained), **{name: getattr(a, name) for name in listed}, **validate(model, a)}


@torch.no_grad()
def validate(model: ld.LongNetLM, a: argparse.Namespace) -> dict[str, object]:
    """Return accuracy and bits at the longest length, overall and by octave of the distance."""
    task = data(max(a.lengths), 1, a)
    model.eval()
    right, nats, far = [], [], []
    for batch in batches(task, "val", 1, workers=0):
        tokens, labels = batch["tokens"], batch["labels"]
        queries = labels[0] != -100
        with torch.autocast(a.device, torch.bfloat16):
            logits = model(tokens.to(a.device))[0][queries.to(a.device)].float().cpu()
        far.append(task.distances("val", int(batch["index"]))[queries])
        right.append(logits.argmax(1) == labels[0][queries])
        nats.append(torch.nn.functional.cross_entropy(logits, labels[0][queries], reduction="none"))
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
