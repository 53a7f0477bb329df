"""Loss by position if the second half resembles the first: two strains of a species, or two versions of a source tree.

    python benchmarks/pairs_distance.py strains genomes --arm hybrid --kv-conv 4
    python benchmarks/pairs_distance.py versions pairs.bin --arm paper --minutes 7.8

`strains` FOLDER: FOLDER has a folder of FASTA files for each species. The species pylori is for validation
(`StrainPairsDataModule`; the boundary varies by up to a tenth of N/2, and up to 63 bases are dropped). A model of 8
layers of width 256 with 4 heads trains on samples of 4,096, then 16,384, then 65,536 bases.
`versions` FILE: samples of 65,536 bytes from `version_pairs.py`; FILE.val.bin is for validation. A model of 8 layers of
width 512 with 8 heads.
A step has 65,536 tokens (`arms.py`). Prints one line of JSON: bits per token of the first and the second half, the
latter with a standard error over samples; bits by eighth of the position; training bits; seconds, GiB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from arms import Batch, Stage, add_options, batches, model_of, options_of, train
from strain_pairs import StrainPairsDataModule
from torch.nn.functional import cross_entropy

import lightning_dilated as ld

TOKENS = 65536
#: (sequence length, steps)
STAGES = {"strains": ((4096, 1000), (16384, 700), (65536, 1500)), "versions": ((65536, 1200),)}
SIZES = {"strains": (4, 256, 8, 4), "versions": (256, 512, 8, 8)}  # vocabulary, width, layers, heads


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kind", choices=list(STAGES))
    p.add_argument("data", type=Path)
    add_options(p)
    p.add_argument("--lengths", type=int, nargs="+", help="instead of those above")
    p.add_argument("--steps", type=int, nargs="+", help="of each length, instead of those above")
    p.add_argument("--samples", type=int, default=64, help="of validation")
    print(json.dumps(run(p.parse_args())), flush=True)


def run(a: argparse.Namespace) -> dict[str, object]:
    lengths, steps = zip(*STAGES[a.kind], strict=True)
    lengths, steps = a.lengths or lengths, a.steps or steps
    longest = max(lengths)
    model = model_of(a, *SIZES[a.kind], longest)
    make = strains if a.kind == "strains" else versions
    # if minutes are limited, the last length uses the remaining time
    stages = [
        Stage(n, k, make(a, n, "train", k * (20 if a.minutes else 1))) for n, k in zip(lengths, steps, strict=True)
    ]
    trained = train(model, stages, a)
    where = {"kind": a.kind, "data": a.data.name, "lengths": lengths}
    return {**where, **options_of(a, model, trained), **validate(model, make(a, longest, "val", a.samples), a.device)}


def strains(a: argparse.Namespace, seq_len: int, split: str, steps: int) -> Iterator[Batch]:
    """Yield batches of strain pairs with N bases. In validation, a batch is one sample."""
    species = {f.name: str(f) for f in sorted(a.data.iterdir()) if f.is_dir()}
    size = max(1, TOKENS // seq_len) if split == "train" else 1
    data = StrainPairsDataModule(
        species, val="pylori", seq_len=seq_len, batch_size=size, train_size=steps * size, val_size=steps, seed=a.seed
    )
    data.check()
    return batches(data, split, size, workers=6 if split == "train" else 0)


def versions(a: argparse.Namespace, seq_len: int, split: str, steps: int) -> Iterator[Batch]:
    """Yield samples of a file of bytes, each as a batch. In training, the seed determines the order."""
    path = a.data if split == "train" else a.data.with_suffix(".val.bin")
    flat = np.memmap(path, np.uint8, "r")
    rows = flat[: len(flat) // seq_len * seq_len].reshape(-1, seq_len)
    draw = np.random.default_rng(a.seed)
    epochs = itertools.count() if split == "train" else range(1)
    order = itertools.chain.from_iterable(
        draw.permutation(len(rows)) if split == "train" else range(len(rows)) for _ in epochs
    )
    for i in itertools.islice(order, steps):
        tokens = torch.from_numpy(rows[i].astype(np.int64))[None]
        yield {"tokens": tokens, "labels": torch.cat([tokens[:, 1:], torch.full((1, 1), -100)], 1)}


@torch.no_grad()
def token_bits(model: ld.LongNetLM, samples: Iterator[Batch], device: str) -> torch.Tensor:
    """Return the bits of each predicted token, (samples, N - 1) float64."""
    model.eval()
    rows = []
    for batch in samples:
        with torch.autocast(device, torch.bfloat16):
            logits = model(batch["tokens"].to(device))[0]
        labels = batch["labels"][0].to(device)
        tiles = zip(logits.split(8192), labels.split(8192), strict=True)
        nats = [cross_entropy(x.float(), y, reduction="none", ignore_index=-100) for x, y in tiles]
        rows.append(torch.cat(nats).double().cpu() / math.log(2))
    return torch.stack(rows)[:, :-1]


def validate(model: ld.LongNetLM, samples: Iterator[Batch], device: str) -> dict[str, object]:
    """Return bits of both halves and of eighths. Halves exclude the N/16 positions before and after the middle."""
    bits = token_bits(model, samples, device)
    half = bits.shape[1] // 2
    second = bits[:, half + half // 8 :].mean(1)
    return {
        "samples": len(bits),
        "first": round(float(bits[:, : half - half // 8].mean()), 4),
        "second": round(float(second.mean()), 4),
        "error": round(float(second.std() / len(second) ** 0.5), 4),
        "eighths": [round(float(x.mean()), 3) for x in bits.tensor_split(8, 1)],
    }


if __name__ == "__main__":
    main()
