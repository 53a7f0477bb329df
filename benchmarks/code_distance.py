"""Ordinary source code: how many bits per byte does a model save if it can read more of the earlier text?

    python benchmarks/code_distance.py make linux-source-6.12 code.bin --limit 310
    python benchmarks/code_distance.py make site-packages code.bin --suffixes .py
    python benchmarks/code_distance.py train code.bin --arm hybrid --windows hybrid.npy
    python benchmarks/code_distance.py train code.bin --arm hashed --short 600 --windows hashed.npy
    python benchmarks/code_distance.py compare hybrid.npy window.npy

`make`: write files of some suffixes (C files and headers) in the order of the tree, one after another. One folder in 16,
by a hash of its path, goes to OUT.val.bin instead. Generated tables (drivers/gpu/drm/amd/include) are omitted.
`train`: train --short steps of 16 windows of 4,096 bytes, and then one epoch of windows of 65,536 bytes, in an order drawn
by the seed, with one window per step (`arms.py`) and a model of 8 layers of width 512 with 8 heads. Print one line of
JSON: bits per byte by octave of the position, over the validation windows. --windows stores them as (windows, octaves).
`compare`: for each octave, print by how many percent the first arm's bits are below the second's, paired by window, and
the difference divided by its standard error.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from arms import Batch, Stage, add_options, model_of, options_of, train
from pairs_distance import token_bits, versions

SEQ_LEN, SIZES = 65536, (256, 512, 8, 8)  # vocabulary, width, layers, heads
SHORT, EACH = 4096, 16  # bytes of a short window, and short windows of a step
LEFT_OUT = "drivers/gpu/drm/amd/include"
#: first position of each octave
OCTAVES = [0, *(1024 << i for i in range(6))]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = p.add_subparsers(dest="command", required=True)
    maker = commands.add_parser("make")
    maker.add_argument("tree", type=Path)
    maker.add_argument("out", type=Path)
    maker.add_argument("--suffixes", nargs="+", default=[".c", ".h"])
    maker.add_argument("--limit", type=float, default=310.0, help="million bytes for training, from the tree's begin")
    trainer = commands.add_parser("train")
    trainer.add_argument("data", type=Path)
    add_options(trainer)
    trainer.add_argument("--steps", type=int, help="instead of an epoch")
    trainer.add_argument("--short", type=int, default=0, help="steps of short windows first")
    trainer.add_argument("--samples", type=int, default=256, help="windows of validation")
    trainer.add_argument("--windows", type=Path, help="where bits by window and octave go")
    pair = commands.add_parser("compare")
    pair.add_argument("first", type=Path)
    pair.add_argument("second", type=Path)
    a = p.parse_args()
    result = {"make": make, "train": run, "compare": compare}[a.command](a)
    print(json.dumps(result), flush=True)


def make(a: argparse.Namespace) -> dict[str, object]:
    written = {"train": 0, "val": 0}
    with open(a.out, "wb") as train_file, open(a.out.with_suffix(".val.bin"), "wb") as val_file:
        for folder, folders, names in os.walk(a.tree):
            folders.sort()
            place = Path(folder).relative_to(a.tree).as_posix()
            if place.startswith(LEFT_OUT):
                continue
            held_out = hashlib.sha256(place.encode()).digest()[0] % 16 == 0
            split, file = ("val", val_file) if held_out else ("train", train_file)
            for name in sorted(names):
                path = Path(folder, name)
                if path.suffix not in a.suffixes or path.is_symlink() or written["train"] > a.limit * 1e6:
                    continue
                written[split] += file.write(path.read_bytes())
    return {"tree": a.tree.name, **written}


def run(a: argparse.Namespace) -> dict[str, object]:
    """Train an arm. Return bits by octave of the position."""
    steps = a.steps or a.data.stat().st_size // SEQ_LEN
    model = model_of(a, *SIZES, SEQ_LEN)
    stages = [Stage(SHORT, a.short, short_windows(a))] if a.short else []
    trained = train(model, [*stages, Stage(SEQ_LEN, steps, versions(a, SEQ_LEN, "train", steps))], a)
    bits = token_bits(model, versions(a, SEQ_LEN, "val", a.samples), a.device).numpy()
    by_octave = np.stack([x.mean(1) for x in np.split(bits, OCTAVES[1:], 1)], 1)
    if a.windows:
        np.save(a.windows, by_octave)
    means, errors = by_octave.mean(0), by_octave.std(0, ddof=1) / len(bits) ** 0.5
    return {
        "data": a.data.name, **options_of(a, model, trained), "samples": len(bits), "octaves": OCTAVES,
        "bits": [round(x, 4) for x in means.tolist()], "errors": [round(x, 4) for x in errors.tolist()],
        "all": round(float(bits.mean()), 4),
    }  # fmt: skip


def short_windows(a: argparse.Namespace) -> Iterator[Batch]:
    """Yield batches of short windows."""
    every = versions(a, SHORT, "train", a.short * EACH)
    for first in every:
        batch = [first, *itertools.islice(every, EACH - 1)]
        yield {name: torch.cat([x[name] for x in batch]) for name in first}


def compare(a: argparse.Namespace) -> dict[str, object]:
    """Return by how many percent the first arm's bits are lower: for each octave, and for the last two together."""
    first, second = np.load(a.first), np.load(a.second)
    far = slice(OCTAVES.index(16384), None)
    weights = np.array([16384.0, 32767.0])
    together: Sequence[np.ndarray] = [(x[:, far] * weights).sum(1) / weights.sum() for x in (first, second)]
    pairs = [*((first[:, i], second[:, i]) for i in range(len(OCTAVES))), tuple(together)]
    rows = []
    for one, other in pairs:
        gain = other - one
        error = gain.std(ddof=1) / len(gain) ** 0.5
        rows.append((round(100 * gain.mean() / other.mean(), 2), round(gain.mean() / error, 1)))
    return {"octaves": OCTAVES, "percent, standard errors": rows[:-1], "beyond 16,384": rows[-1]}


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    main()
