"""TokenMean, the mean over all tokens of an epoch, exact on any number of ranks; Newest, a step's number, which reaches the
host without waiting for the GPU."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_dilated._compat.lightning import set_update_count


def each_batch(batch: Any, loaders: Any, function: Callable[[Any], Any]) -> Any:
    """The function of each of the batches that come together, nested as they are, None for a loader that has ended.

    Args:
        batch: nested as the loaders are, as CombinedLoader's are; or the batch of one loader.
        loaders: a mapping or list of loaders, which may be nested; anything else is one loader.
    """
    if isinstance(loaders, Mapping) and isinstance(batch, Mapping) and batch.keys() == loaders.keys():
        return {name: _unless_ended(batch[name], loader, function) for name, loader in loaders.items()}
    lists = isinstance(loaders, (list, tuple)) and isinstance(batch, (list, tuple)) and len(batch) == len(loaders)
    if lists:
        return [_unless_ended(x, loader, function) for x, loader in zip(batch, loaders, strict=True)]
    return function(batch)


def _unless_ended(batch: Any, loader: Any, function: Callable[[Any], Any]) -> Any:
    return None if batch is None else each_batch(batch, loader, function)


def batches_in(batch: Any, loaders: Any) -> list[Any]:
    """The batches that come together, as `each_batch` tells them."""
    batches: list[Any] = []
    each_batch(batch, loaders, batches.append)
    return batches


class LoaderStates:
    """States of a stage's metrics for each of several loaders, of which the metrics themselves hold one at a time."""

    def __init__(self) -> None:
        self._number = 0
        self._states: dict[int, list[tuple[dict[str, Any], int]]] = {}

    def switch(self, metrics: Sequence[Metric], number: int) -> None:
        """Let the metrics hold the state of loader `number`, an empty one in the beginning."""
        if number == self._number:
            return
        self._states[self._number] = [(_copied(metric), metric.update_count) for metric in metrics]
        for metric in metrics:
            metric.reset()
        for metric, (state, count) in zip(metrics, self._states.pop(number, []), strict=False):
            for name, value in state.items():
                setattr(metric, name, value)
            set_update_count(metric, count)
        self._number = number


def _copied(metric: Metric) -> dict[str, Any]:
    """The state of a metric; a reset clears its lists."""
    return {name: list(x) if isinstance(x, list) else x for name, x in metric.metric_state.items()}


def _moved(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """x on the device where `fn` moves tensors; 0 where it comes from the meta device, which has no numbers."""
    device = fn(x.new_empty(0)).device
    return torch.zeros_like(x, device=device) if x.is_meta and device.type != "meta" else x.to(device)


class Float64Metric(Metric):
    """A metric in float64. It follows a module to another device, but not to another dtype: sums would overflow."""

    full_state_update = False

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Metric:
        return super()._apply(functools.partial(_moved, fn), *args, **kwargs)


class TokenMean(Float64Metric):
    """Sum of losses divided by number of tokens, both in float64 and summed over batches and ranks.

    Unlike torchmetrics' MeanMetric it propagates NaN, and weights exactly by tokens.
    """

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "tokens"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, total: Tensor, tokens: Tensor | int) -> None:
        """Add a batch: the sum of its losses, and the number of tokens they belong to."""
        # not in place: a reset within `trainer.validate` leaves inference tensors, which `trainer.fit` cannot write to
        self.total = self.total + torch.as_tensor(total).detach().to(self.total)
        self.tokens = self.tokens + torch.as_tensor(tokens).to(self.tokens)

    def compute(self) -> Tensor:
        """The mean, fp32; NaN where there was no token."""
        return (self.total / self.tokens).float()


#: numbers being copied at once; their pinned memory is allocated once, since allocation waits for the GPU
SLOTS = 8


class Newest:
    """The latest of a GPU's numbers that has reached the host.

    Lightning reads what is logged with `prog_bar=True` after every batch, which leaves the GPU idle at the start of each
    step; a progress bar that is a step late costs nothing. Numbers on the CPU are read at once.
    """

    def __init__(self) -> None:
        self._free: list[tuple[Tensor, torch.cuda.Event]] | None = None
        self._coming: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._known: float | None = None
        self._last: Tensor | None = None

    def of(self, x: Tensor) -> float | None:
        """Start to copy a scalar (unless `SLOTS` copies are pending); the latest that arrived, None before the first."""
        if x.device.type != "cuda":
            self._known = x.item()
            return self._known
        self._last = x.detach().double()
        if self._free is None:
            with torch.inference_mode(False):  # its memory could not be written to later
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
        """The last number itself; waits for it."""
        return self._known if self._last is None else self._last.item()

    def __reduce__(self) -> tuple[type[Newest], tuple[()]]:
        """Copies of a module, and those sent to other processes, start without a number."""
        return Newest, ()
