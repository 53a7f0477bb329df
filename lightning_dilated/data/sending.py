"""Batches that a worker can send to the process that trains.

torch sends a batch from a thread of the worker. What cannot be sent is printed there, and the training process waits for the
batch for ever; so it is found before, where an error still reaches the training process.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info


class SendableCollate:
    """A collate function (None: torch's default) whose batches can leave a worker, see `sendable`."""

    def __init__(self, collate: Callable[[Any], Any] | None = None) -> None:
        self.collate = default_collate if collate is None else collate

    def __call__(self, samples: Any) -> Any:
        return sendable(self.collate(detached(samples)))


def sendable(batch: Any) -> Any:
    """The batch with its tensors detached from the graph of whatever made them; data has no gradient, in a worker or not.

    Raises:
        TypeError: in a worker, for what cannot be sent to another process, naming the entry.
    """
    batch = detached(batch)
    if get_worker_info() is not None:
        _refuse_unsendable(batch)
    return batch


def detached(batch: Any) -> Any:
    """The batch, or a copy of its containers where a tensor in mappings, lists or tuples has to be detached."""
    if isinstance(batch, Tensor):
        return batch.detach() if batch.requires_grad else batch
    if isinstance(batch, Mapping):
        new = {name: detached(x) for name, x in batch.items()}
        if all(new[name] is x for name, x in batch.items()):
            return batch
        return new if type(batch) is dict else _rebuilt(batch, new)
    if isinstance(batch, list | tuple):
        parts = [detached(x) for x in batch]
        if all(new is old for new, old in zip(parts, batch, strict=True)):
            return batch
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _rebuilt(batch: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """A mapping of a kind of its own; a plain dict where that kind cannot be made from one."""
    try:
        return type(batch)(entries)  # type: ignore[call-arg]
    except TypeError:
        return entries


class _WithoutArrays(pickle.Pickler):
    """Pickles everything but tensors and plain arrays, which can be sent and are large."""

    def persistent_id(self, x: Any) -> str | None:
        if isinstance(x, Tensor) and not x.is_leaf:
            raise TypeError("a tensor in it has a graph: detach it")
        large = isinstance(x, Tensor) or (isinstance(x, np.ndarray) and not x.dtype.hasobject)
        return "array" if large else None


def _refuse_unsendable(batch: Any) -> None:
    entries = batch.items() if isinstance(batch, Mapping) else [(None, batch)]
    for name, x in entries:
        try:
            _WithoutArrays(io.BytesIO()).dump(x)
        except Exception as error:  # pickle lets through whatever an object's own methods raise
            where = "a batch" if name is None else f"the entry {name!r} of a batch"
            raise TypeError(
                f"{where} is a {type(x).__name__} that cannot be sent from a worker process ({error}): let the dataset or "
                "the collate function return tensors, numbers and strings, or set num_workers to 0"
            ) from error
