"""Small slide encoders, and slides for them, for all tests of slide models.

Shape letters: B slides, T tiles, F features.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_dilated import SlideEncoder

SIZES = {"feature_dim": 12, "dim": 16, "depth": 2, "num_heads": 4, "grid": 8, "dropout": 0.0, "drop_path": 0.0}
SIZES |= {"segment_lengths": [4, 8, 32], "dilation_rates": [1, 2, 4]}
GOLDEN = Path(__file__).parents[2] / "golden" / "gigapath_slide_encoder"


def encoder(cls: type = SlideEncoder, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Build an encoder with random weights, which are the same in every call."""
    model = cls(**{**SIZES, **options})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        model.configure_model()
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model.to(dtype)


def slides(*tiles: int, features: int = 12, grid: int = 8, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return (features (B, T, F) float64, coords (B, T, 2) int64 of distinct cells, tiles (B,)). Padding: 7 and -5."""
    rng, longest = torch.Generator().manual_seed(seed), max(tiles)
    x = torch.randn(len(tiles), longest, features, generator=rng, dtype=torch.float64)
    cells = torch.stack([torch.randperm(grid * grid, generator=rng)[:longest] for _ in tiles])
    coords = 256 * torch.stack([cells // grid, cells % grid], -1) + 17
    for i, n in enumerate(tiles):
        x[i, n:], coords[i, n:] = 7.0, -5
    return x, coords, torch.tensor(tiles)


def batch(*tiles: int, **options: Any) -> dict[str, Tensor]:
    """Return a batch like the DataModule's: lengths include the blank first row, and labels are 0 and 1."""
    x, coords, lengths = slides(*tiles, **options)
    features = torch.cat([torch.zeros_like(x[:, :1]), x], 1)
    coords = torch.cat([torch.full_like(coords[:, :1], -1), coords], 1)
    index = torch.arange(len(tiles))
    return {"features": features, "coords": coords, "lengths": lengths + 1, "label": index % 2, "index": index}
