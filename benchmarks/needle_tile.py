"""One tile determines the class of a slide: does the class token find it, with and without `global_class_token`?

    python benchmarks/needle_tile.py --tiles 512 --segment 32 --depth 2

Tiles are noise. To one tile, anywhere in the slide, one of four directions is added: the slide's class (guesses:
25 %). AdamW (1e-3), 8 new slides per step. Prints the accuracy on 512 new slides for each arm.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

import lightning_dilated as ld

CLASSES, FEATURES = 4, 16
#: (pool, whether the class token is global)
ARMS = (("class", False), ("class", True), ("mean", False), ("mean", True))


def slides(count: int, tiles: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return (features (count, tiles, F), coords (count, tiles, 2), labels (count,))."""
    features = torch.randn(count, tiles, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    needle = torch.randint(tiles, (count,), generator=generator)
    features[torch.arange(count), needle, labels] += 8.0
    side = 1 << ((tiles - 1).bit_length() + 1) // 2
    place = torch.arange(tiles)
    coords = 256 * torch.stack([place // side, place % side], -1)
    return features, coords.expand(count, -1, -1), labels


def train(pool: str, is_global: bool, a: argparse.Namespace) -> tuple[float, float]:
    """Return (share of new slides that are classified correctly, seconds)."""
    torch.manual_seed(a.seed)
    model = ld.SlideEncoder(
        FEATURES, a.dim, a.depth, 4, pool=pool, task="classification", num_classes=CLASSES, dropout=0.0, drop_path=0.0,
        segment_lengths=[a.segment], dilation_rates=[1], grid=64, global_class_token=is_global,
    )  # fmt: skip
    model.configure_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator, begin = torch.Generator().manual_seed(a.seed), time.perf_counter()
    for _ in range(a.steps):
        features, coords, labels = slides(8, a.tiles, generator)
        loss = torch.nn.functional.cross_entropy(model.head(model(features, coords)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = [
            (model.head(model(features, coords)).argmax(-1) == labels).float().mean()
            for features, coords, labels in (slides(32, a.tiles, generator) for _ in range(16))
        ]
    return float(torch.stack(right).mean()), time.perf_counter() - begin


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tiles", type=int, default=512)
    p.add_argument("--segment", type=int, default=32)
    p.add_argument("--depth", type=int, default=2)
    p.add_argument("--dim", type=int, default=32)
    p.add_argument("--steps", type=int, default=400)
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args()
    print("| pool | class token | right | seconds |\n| --- | --- | --- | --- |")
    for pool, is_global in ARMS:
        right, seconds = train(pool, is_global, a)
        print(f"| {pool} | {'global' if is_global else 'of its segment'} | {right:.1%} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
