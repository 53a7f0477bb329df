"""Newest: a number that a GPU computes each step, as the host knows it, without waiting for it."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor


class Newest:
    """The last of a GPU's numbers to have reached the host.

    Lightning reads what is logged with `prog_bar=True` after every batch, so that every step begins on an idle GPU; a bar
    that is a step behind costs nothing. Numbers of a CPU are read at once.
    """

    def __init__(self) -> None:
        self._coming: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._known: float | None = None

    def of(self, x: Tensor) -> float | None:
        """Send a scalar on its way; the newest that has arrived, None before the first."""
        x = x.detach()
        if x.device.type != "cuda":
            return x.item()
        sent = torch.cuda.Event()
        host = torch.empty((), dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
        sent.record(torch.cuda.current_stream(x.device))
        self._coming.append((host, sent))
        while self._coming and self._coming[0][1].query():
            self._known = self._coming.popleft()[0].item()
        return self._known

    def __reduce__(self) -> tuple[type[Newest], tuple[()]]:
        """Copies of a module, and those sent to other processes, begin without a number."""
        return Newest, ()
