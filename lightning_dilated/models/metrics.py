"""TokenMean: the mean over all tokens of an epoch, from sums, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class TokenMean(Metric):
    """Sum of losses over number of tokens, both kept in float64 and added over batches and ranks.

    Unlike torchmetrics' MeanMetric it lets a NaN show in the mean, and weighs exactly by tokens.
    """

    full_state_update = False
    higher_is_better = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "tokens"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> TokenMean:
        """Follows a module to another device, but not to another dtype: sums of losses do not fit into 16 bits."""
        return super()._apply(lambda x: x.to(fn(x.new_empty(0)).device), *args, **kwargs)

    def update(self, total: Tensor, tokens: Tensor | int) -> None:
        """Add a batch: the sum of its losses, and the number of tokens they belong to."""
        self.total += torch.as_tensor(total).detach().to(self.total)
        self.tokens += torch.as_tensor(tokens).to(self.tokens)

    def compute(self) -> Tensor:
        """The mean, fp32; NaN where there was no token."""
        return (self.total / self.tokens).float()
