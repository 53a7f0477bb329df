"""Learning-rate schedules that a YAML recipe can name."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_dilated.pattern.branch import integer


class WarmupCosine(LambdaLR):
    """Linear warm-up, then half a cosine down to `final_fraction` of the peak, then constant; one step a batch.

    Args:
        optimizer: whose own learning rates are the peak.
        total_steps: where the cosine ends; training may go on beyond it.
        warmup_steps: steps of the linear rise, fewer than `total_steps`.
        final_fraction: of the peak, at the end.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, final_fraction: float = 0.1
    ) -> None:
        total = integer(total_steps, "total_steps", 1)
        warmup = integer(warmup_steps, "warmup_steps", 0)
        if warmup >= total:
            raise ValueError(f"warmup_steps={warmup} must be below total_steps={total}.")
        if not 0 <= final_fraction <= 1:
            raise ValueError(f"final_fraction must lie in [0, 1], got {final_fraction!r}.")

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            done = min(1.0, (step - warmup) / (total - warmup))
            return final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * done))

        super().__init__(optimizer, factor)
