"""Newest: a number that a GPU computes each step, as the host knows it, without waiting for it."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

#: numbers under way at once; pinned memory is taken once, since taking it waits for the GPU
SLOTS = 8


class Newest:
    """The last of a GPU's numbers to have reached the host.

    Lightning reads what is logged with `prog_bar=True` after every batch, so that every step begins on an idle GPU; a bar
    that is a step behind costs nothing. Numbers of a CPU are read at once.
    """

    def __init__(self) -> None:
        self._free: list[tuple[Tensor, torch.cuda.Event]] | None = None
        self._coming: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._known: float | None = None
        self._last: Tensor | None = None

    def of(self, x: Tensor) -> float | None:
        """Send a scalar on its way (unless `SLOTS` of them are); the newest that has arrived, None before the first."""
        if x.device.type != "cuda":
            self._known = x.item()
            return self._known
        self._last = x.detach().double()
        if self._free is None:
            with torch.inference_mode(False):  # whose memory could not be written to later
                slots = torch.empty(SLOTS, dtype=torch.float64, pin_memory=True).unbind()
            self._free = [(slot, torch.cuda.Event()) for slot in slots]
        while self._coming and self._coming[0][1].query():
            slot, _ = arrived = self._coming.popleft()
            self._known = slot.item()
            self._free.append(arrived)
        if self._free:
            slot, sent = self._free.pop()
            slot.copy_(self._last, non_blocking=True)
            sent.record(torch.cuda.current_stream(x.device))
            self._coming.append((slot, sent))
        return self._known

    def last(self) -> float | None:
        """The last number itself, which is waited for."""
        return self._known if self._last is None else self._last.item()

    def __reduce__(self) -> tuple[type[Newest], tuple[()]]:
        """Copies of a module, and those sent to other processes, begin without a number."""
        return Newest, ()
