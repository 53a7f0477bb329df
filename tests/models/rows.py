"""Separate samples, and a row in which the same samples are packed."""

from typing import Any

import torch

from ..ext.slides.slides import batch

ALONG = ("features", "coords", "tokens", "labels")


def texts(*sizes: int, vocab: int = 11, label: bool = False) -> list[dict[str, Any]]:
    """Return samples of tokens, each as a batch of one."""
    rng, samples = torch.Generator().manual_seed(3), []
    for i, n in enumerate(sizes):
        values = torch.randint(vocab, (n + 1,), generator=rng)
        sample = {"tokens": values[None, :-1], "index": torch.tensor([5 * i + 2])}
        labels = values[None, 1:].clone()
        labels[0, -1] = -100
        samples.append(sample | ({"label": torch.tensor([i % 2])} if label else {"labels": labels}))
    return samples


def slides(*tiles: int) -> list[dict[str, Any]]:
    """Return slides, each as a padded batch of one."""
    whole = batch(*tiles)
    return [
        {name: x[i : i + 1, :n] if name in ALONG else x[i : i + 1] for name, x in whole.items() if name != "lengths"}
        for i, n in enumerate(whole["lengths"].tolist())
    ]


def packed(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Pack samples into one row."""
    sizes = [next(x.shape[1] for name, x in s.items() if name in ALONG) for s in samples]
    row = {n: torch.cat([s[n] for s in samples], 1 if n in ALONG else 0) for n in samples[0]}
    return {**row, "cu_seqlens": torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)}
