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
        total_steps: where the cosine ends; training may go on beyond it. None is the Trainer's `max_steps`, which
            DilatedModule fills in.
        warmup_steps: steps of the linear rise, fewer than `total_steps`.
        final_fraction: of the peak, at the end.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int | None = None,
        warmup_steps: int = 0,
        final_fraction: float = 0.1,
    ) -> None:
        self.warmup_steps = integer(warmup_steps, "warmup_steps", 0)
        if not 0 <= final_fraction <= 1:
            raise ValueError(f"final_fraction must lie in [0, 1], got {final_fraction!r}.")
        self.final_fraction = final_fraction
        self.total_steps: int | None = None
        if total_steps is not None:
            self.total_steps = integer(total_steps, "total_steps", 1)
            if self.warmup_steps >= total_steps:
                raise ValueError(f"warmup_steps={warmup_steps} must be below total_steps={total_steps}.")
        super().__init__(optimizer, self.factor)

    def end_at(self, steps: int) -> None:
        """Let the cosine end after `steps` steps, a run's length; a run shorter than the warm-up stays within it.

        Raises:
            ValueError: if the run has no length.
        """
        if steps < 1:
            raise ValueError("WarmupCosine needs total_steps, because the Trainer has no max_steps: give one of them.")
        self.total_steps = steps

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied with at `step`."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.total_steps is None:
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return self.final_fraction + (1 - self.final_fraction) * 0.5 * (1 + math.cos(math.pi * done))
