"""What tensors belong to a kind of memory: parameters, gradients, optimizer states, batch, what exchanges read and write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_dilated.planning.counting.memory_tracker import (
    ACTIVATIONS,
    BATCH,
    EXCHANGE,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARY,
    parts,
)

#: of `lightning_dilated::attention`, which result holds the rows that other ranks sent and the backward needs
RECEIVED = 2


def weights(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those that are there."""
    return [p.grad for p in parameters if p.grad is not None]


def states(optimizers: Iterable[Any]) -> list[Tensor]:
    """The tensors that optimizers keep."""
    found = (getattr(x, "state", {}) for x in optimizers)
    return [t for state in found for t in tree_leaves(list(dict(state).values())) if isinstance(t, Tensor)]


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch."""
    return [t for t in tree_leaves(batch) if isinstance(t, Tensor)]


def bytes_of(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes on a device; what lies in one storage counts once."""
    sizes: dict[int, int] = {}
    for t in tensors:
        for part in parts(t):
            if part.device == device:
                storage = part.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def exchanged(func: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> Iterator[tuple[Tensor, str]]:
    """The tensors that a collective reads or writes, and the rows that attention keeps of those it received."""
    if func.namespace == "c10d":
        yield from ((t, EXCHANGE) for t in (*given, *made))
    elif func.name() == "lightning_dilated::attention" and made[RECEIVED].numel():
        yield made[RECEIVED], EXCHANGE


def shares(total: int, known: Mapping[str, int]) -> dict[str, int]:
    """`total` bytes by kind: what is known, as far as there is room, and the rest as temporary."""
    found, left = {}, total
    for kind in (PARAMETERS, OPTIMIZER, GRADIENTS, BATCH, EXCHANGE, ACTIVATIONS):
        found[kind] = max(0, min(known.get(kind, 0), left))
        left -= found[kind]
    return {**found, TEMPORARY: left}
