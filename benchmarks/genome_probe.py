"""Test whether embeddings of a small genome model separate coding from non-coding windows better than k-mer counts do.

    python benchmarks/genome_probe.py --fasta genome.fa.gz

Labels come from a rule. A stretch without a stop codon in one of the six frames is open. Windows inside an open stretch
of at least 900 bases are coding. Windows that overlap no open stretch of 300 bases or more are non-coding. A LongNetMLM
is trained on the first 70 % of each record. Linear probes, on frozen embeddings and on k-mer frequencies, are fitted to
windows of this part and tested on windows of the other 30 %. Takes under two minutes on a CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc

import lightning_dilated as ld
from lightning_dilated.ext.genomes.bases import COMPLEMENTS

#: TAA, TAG and TGA as numbers in base 4
STOPS = (48, 50, 56)
LONG, OPEN, SHARE = 900, 300, 0.7


def open_stretches(codes: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of every stretch of at least OPEN bases that has no stop codon in one of the six frames."""
    for strand in (codes, np.take(COMPLEMENTS, codes[::-1])):
        triplets = 16 * strand[:-2].astype(int) + 4 * strand[1:-1] + strand[2:]
        for frame in range(3):
            stops = np.flatnonzero(np.isin(triplets[frame::3], STOPS)) * 3 + frame
            edges = np.concatenate([[frame - 3], stops, [len(codes)]])
            for start, stop in zip(edges[:-1] + 3, edges[1:], strict=True):
                if stop - start >= OPEN:
                    yield (start, stop) if strand is codes else (len(codes) - stop, len(codes) - start)


def labelled(codes: np.ndarray, size: int) -> tuple[list[int], list[int]]:
    """Return the starts of coding windows and of non-coding windows."""
    any_open = np.zeros(len(codes) + 1, int)
    coding: list[int] = []
    for start, stop in open_stretches(codes):
        any_open[start] += 1
        any_open[stop] -= 1
        if stop - start >= LONG:
            coding.append(int(start + stop - size) // 2)
    free = np.cumsum(any_open)[:-1] == 0
    edges = np.flatnonzero(np.diff(np.concatenate([[0], free.astype(int), [0]])))
    other = [int(x) for a, b in zip(edges[::2], edges[1::2], strict=True) for x in range(a, b - size + 1, size)]
    return sorted(coding), other


def kmers(tokens: Tensor, k: int) -> Tensor:
    """Return the shares (B, 4^k) of k-mers on both strands of windows (B, N)."""
    strands = [tokens, ld.data.reverse_complement(tokens)]
    total = torch.zeros(len(tokens), 4**k)
    for x in strands:
        numbers = sum(x[:, i : x.shape[1] - k + 1 + i].clamp(max=3) * 4 ** (k - 1 - i) for i in range(k))
        total.scatter_add_(1, numbers, torch.ones(numbers.shape))
    return total / total.sum(1, keepdim=True)


def probe(train: Tensor, y: Tensor, test: Tensor, truth: Tensor) -> tuple[float, float]:
    """Return (AUROC, accuracy) of logistic regression on standardized features, for the test windows."""
    mean, std = train.mean(0), train.std(0) + 1e-8
    train, test = (train - mean) / std, (test - mean) / std
    layer = nn.Linear(train.shape[1], 1)
    nn.init.zeros_(layer.weight)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(layer(train)[:, 0], y.float())
        loss = loss + 1e-2 * layer.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        score = layer(test)[:, 0]
    return float(binary_auroc(score, truth)), float(((score > 0) == truth.bool()).float().mean())


def make_model() -> ld.LongNetMLM:
    torch.manual_seed(0)
    return ld.LongNetMLM(
        {"hybrid": {"local": 128, "global_every": 2}}, vocab_size=5, mask_span=3, ignore_tokens=[4],
        dim=64, depth=2, num_heads=4, kv_conv=4, max_seq_len=256, optimizer=lambda p: torch.optim.AdamW(p, lr=2e-3),
    )  # fmt: skip


def trained(fasta: str, steps: int) -> ld.LongNetMLM:
    data = ld.data.GenomeDataModule(fasta, 256, 8, val_fraction=1 - SHARE, test_fraction=0, short="skip", val_limit=64)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
    }
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        val_check_interval=10**6,
        check_val_every_n_epoch=None,
        **quiet,
    )
    model = make_model()
    trainer.fit(model, data)
    (row,) = trainer.validate(model, data, verbose=False) if steps else ({},)
    print(f"held-out bits per masked base: {row.get('val_bits_per_token', float('nan')):.3f} (2 is guessing)")
    return model


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--fasta", required=True)
    p.add_argument("--size", type=int, default=120, help="bases of a window (default: %(default)s)")
    p.add_argument("--most", type=int, default=600, help="windows of a class and part (default: %(default)s)")
    p.add_argument("--steps", type=int, default=150, help="of training (default: %(default)s)")
    args = p.parse_args()
    began = time.perf_counter()
    genome = ld.data.Genome([args.fasta])
    windows: dict[tuple[str, int], list[Tensor]] = {(part, y): [] for part in ("train", "test") for y in (0, 1)}
    for number, record in enumerate(genome.records):
        codes = genome.read(number, 0, record.length)
        cut = record.length * SHARE
        for y, starts in enumerate(labelled(codes, args.size)[::-1]):
            for start in starts:
                part = "train" if start + args.size <= cut else "test" if start >= cut else None
                if part and (codes[start : start + args.size] < 4).all():
                    windows[part, y].append(torch.from_numpy(codes[start : start + args.size].astype(np.int64)))
    chosen = np.random.default_rng(0)
    tokens, labels = {}, {}
    for part in ("train", "test"):
        least = min(len(windows[part, 0]), len(windows[part, 1]), args.most)
        picked = [windows[part, y][i] for y in (0, 1) for i in chosen.permutation(len(windows[part, y]))[:least]]
        tokens[part], labels[part] = torch.stack(picked), torch.arange(2).repeat_interleave(least)
        # a random strand, because the strand in the file could reveal the class
        turn = torch.from_numpy(chosen.random(2 * least) < 0.5)
        tokens[part][turn] = ld.data.reverse_complement(tokens[part][turn])
    print(
        f"{args.size}-base windows, half of each class: {len(labels['train'])} to train on, {len(labels['test'])} to test"
    )
    features = {f"{k}-mers, both strands": {x: kmers(t, k) for x, t in tokens.items()} for k in (2, 3, 4, 5)}
    for name, model in (
        ("embedding, untrained", make_model()),
        ("embedding, trained", trained(args.fasta, args.steps)),
    ):
        options = {"strands": "both", "batch_size": 64}
        features[name] = {x: model.embed(t, **options) for x, t in tokens.items()}
    joint = {x: torch.cat([features["embedding, trained"][x], features["4-mers, both strands"][x]], 1) for x in tokens}
    features["embedding, trained, and 4-mers"] = joint
    print("| features | number | AUROC | accuracy |\n| --- | --- | --- | --- |")
    for name, x in features.items():
        auroc, accuracy = probe(x["train"], labels["train"], x["test"], labels["test"])
        print(f"| {name} | {x['train'].shape[1]} | {auroc:.3f} | {accuracy:.3f} |")
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
