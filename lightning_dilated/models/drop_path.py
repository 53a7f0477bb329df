"""Stochastic depth: whole branches of a block dropped for whole samples, alike on all ranks of a sequence.

Shape letters: B batch, N tokens, E embedding dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dilated.sequence import active_sequence


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """Each layer's probability: linearly from 0 in the first to `rate` in the last (arXiv 1603.09382)."""
    return [rate * i / max(1, depth - 1) for i in range(depth)]


def drop_path_factors(rate: float, depth: int, x: Tensor) -> Tensor | None:
    """(depth, 2, B, 1, 1) factors of the two branches of every layer, 0 or 1 / (1 - p); None where nothing is dropped.

    The ranks of a sequence hold parts of one sample, so they have to drop it together: they take rank 0's seed, as attention
    dropout does. It comes from torch's CPU generator, so `torch.manual_seed` repeats it.

    Args:
        rate: of the last layer, in [0, 1).
        x: (B, N, E), for its batch, dtype and device.
    """
    if rate == 0:
        return None
    seed, group = int(torch.randint(2**62, ())), active_sequence()
    if group is not None:
        seed = group.agree({"call": "drop_path", "rate": rate, "samples": len(x)}, seed=seed).seed
    drawn = torch.rand(depth, 2, len(x), 1, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    p = torch.tensor(drop_path_rates(rate, depth), dtype=torch.float64)[:, None, None, None, None]
    return ((drawn >= p) / (1 - p)).to(x.device, x.dtype)
