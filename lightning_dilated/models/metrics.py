"""TokenMean, the exact mean over an epoch's tokens; DeferredScalar, a GPU scalar that is read without waiting."""

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
    """Apply a function to each loader's batch in a combined batch; return the results in the same nesting.

    Args:
        batch: a batch of CombinedLoader, nested as the loaders are, with None for a loader that has ended; or one batch.
        loaders: a mapping or list of loaders, which may be nested; any other object is one loader.
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
    """Return the batches of all loaders in a combined batch as a list; see `each_batch`."""
    batches: list[Any] = []
    each_batch(batch, loaders, batches.append)
    return batches


class LoaderStates:
    """Stores a stage's metric states for each loader; the current loader's states are in the metrics themselves."""

    def __init__(self) -> None:
        self._number = 0
        self._states: dict[int, list[tuple[dict[str, Any], int]]] = {}

    def switch(self, metrics: Sequence[Metric], number: int) -> None:
        """Store the current loader's states, and load the states of loader `number`, which are empty at first."""
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
    """Return the state of a metric with its lists copied, because a reset clears the lists."""
    return {name: list(x) if isinstance(x, list) else x for name, x in metric.metric_state.items()}


def _moved(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return x on the device that `fn` moves tensors to; zeros for a meta tensor, which has no values."""
    device = fn(x.new_empty(0)).device
    return torch.zeros_like(x, device=device) if x.is_meta and device.type != "meta" else x.to(device)


class Float64Metric(Metric):
    """A metric that moves with its module to another device, but stays in float64, where sums do not overflow."""

    full_state_update = False

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Metric:
        return super()._apply(functools.partial(_moved, fn), *args, **kwargs)


class TokenMean(Float64Metric):
    """The sum of losses divided by the number of tokens, both summed over batches and ranks in float64.

    Unlike torchmetrics' MeanMetric, TokenMean propagates NaN and weights exactly by tokens.
    """

    higher_is_better = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "tokens"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, total: Tensor, tokens: Tensor | int) -> None:
        """Add a batch: the sum of its losses, and its number of tokens."""
        # out of place: a reset in `trainer.validate` makes inference tensors, which `trainer.fit` cannot modify
        self.total = self.total + torch.as_tensor(total).detach().to(self.total)
        self.tokens = self.tokens + torch.as_tensor(tokens).to(self.tokens)

    def compute(self) -> Tensor:
        """Return the mean in fp32; NaN if there were no tokens."""
        return (self.total / self.tokens).float()


#: maximum number of copies at a time; their pinned memory is allocated only once, because allocation waits for the GPU
SLOTS = 8


class DeferredScalar:
    """The latest GPU scalar that has reached the host.

    Lightning reads values logged with `prog_bar=True` after every batch, so the GPU idles at the start of each step.
    This class shows a value that is a step or two old, without waiting. CPU scalars are read immediately.
    """

    def __init__(self) -> None:
        self._free: list[tuple[Tensor, torch.cuda.Event]] | None = None
        self._coming: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._known: float | None = None
        self._last: Tensor | None = None

    def of(self, x: Tensor) -> float | None:
        """Start to copy a scalar, unless `SLOTS` copies are pending; return the latest that arrived, or None."""
        if x.device.type != "cuda":
            self._known = x.item()
            return self._known
        self._last = x.detach().double()
        if self._free is None:
            with torch.inference_mode(False):  # later steps could not write to inference tensors
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
        """Wait for the last scalar's value and return it."""
        return self._known if self._last is None else self._last.item()

    def __reduce__(self) -> tuple[type[DeferredScalar], tuple[()]]:
        """Make copies of this object empty: events and pinned memory belong to this process."""
        return DeferredScalar, ()
