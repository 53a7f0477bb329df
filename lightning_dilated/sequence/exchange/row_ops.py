"""Rows of (B, L, heads, D) tensors by their flat numbers, one by one or two side by side.

Shape letters: B samples, L local tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from lightning_dilated import kernels


@dataclass(frozen=True)
class Rows:
    """Some rows of a rank's (B, L, J, D) tensors, none twice, (n,) int64 each.

    Attributes:
        at: their sample, token and head.
        flat: their numbers where rows lie in this order, and (`turned`) in the order (B, J, L). One index is launched faster
            than three.
    """

    at: tuple[Tensor, Tensor, Tensor]
    flat: Tensor
    turned: Tensor

    @classmethod
    def of(cls, flat: Tensor, length: int, heads: int) -> Rows:
        """From flat numbers."""
        sample, token, head = at = flat // (heads * length), flat // heads % length, flat % heads
        return cls(at, flat, (sample * heads + head) * length + token)

    def to(self, device: torch.device) -> Rows:
        """The same on a device."""
        return Rows(tuple(x.to(device) for x in self.at), self.flat.to(device), self.turned.to(device))

    def take(self, x: Tensor) -> Tensor:
        """(n, ...) of a (B, L, J, ...) tensor of any strides."""
        found = self._one(x)
        return x[self.at] if found is None else found[0].index_select(0, found[1])

    def put(self, x: Tensor, values: Tensor) -> None:
        """Write (n, ...) values, rounded to x's dtype."""
        found, values = self._one(x), values.to(x.dtype)
        if found is None:
            x[self.at] = values
        else:
            found[0].index_copy_(0, found[1], values)

    def _one(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """x with its rows in one dimension, and their numbers there; None where they do not lie so."""
        if x.is_contiguous():
            return x.flatten(0, 2), self.flat
        turned = x.transpose(1, 2)
        return (turned.flatten(0, 2), self.turned) if turned.is_contiguous() else None


def add_rows(some: Rows | None, x: Tensor, values: Tensor) -> None:
    """Add (n, D) values in their dtype to some rows of a (B, L, J, D) tensor, or to all of them; x is rounded once."""
    if some is None:
        x.copy_(x.to(values.dtype) + values.view(x.shape))
    else:
        some.put(x, some.take(x).to(values.dtype) + values)


def numbered(found: Sequence[Tensor], rows: int, length: int, heads: int) -> tuple[Rows | None, list[Tensor]]:
    """(the rows that flat numbers name, the numbers among these), or (None, the numbers) where they are many of all `rows`.

    What is done to few rows of a tensor needs no fp32 copy of all of it.
    """
    flat, inverse = torch.unique(
        torch.cat([x.flatten() for x in found] or [torch.empty(0, dtype=torch.int64)]), return_inverse=True
    )
    if len(flat) > FEW * rows:
        return None, list(found)
    parts = inverse.split([x.numel() for x in found]) if found else []
    return Rows.of(flat, length, heads), [part.view(x.shape) for part, x in zip(parts, found, strict=True)]


#: up to this share of a tensor's rows
FEW = 0.25


def take(x: Tensor, rows: Tensor) -> Tensor:
    """Rows (..., D) of a (B, L, heads, D) tensor of any strides, by their flat numbers."""
    if _moves(x, rows):
        found = x.new_empty(*rows.shape, x.shape[3])
        _kernel().pick([x], rows.contiguous(), None, [found.view(-1, x.shape[3])])
        return found
    if x.is_contiguous():
        return x.view(-1, x.shape[-1])[rows]
    heads, length = x.shape[2], x.shape[1]
    return x[rows // (heads * length), rows // heads % length, rows % heads]


def take_apart(store: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The first and second halves, (..., D) each, of rows of a (n, 2, D) store.

    Many rows of a GPU in memory of their own: causal cuDNN is a third slower over rows that lie beside each other.
    """
    if not _moves(store, rows):
        return store[rows].unbind(-2)
    found = store.new_empty(2, *rows.shape, store.shape[2])
    halves = [store[None, :, None, i] for i in range(2)]
    _kernel().pick(halves, rows, None, list(found.view(2, -1, store.shape[2])))
    return found[0], found[1]


def pair(a: Tensor, b: Tensor, rows: Tensor) -> Tensor:
    """(n, 2, D): rows of two tensors side by side."""
    if not _pairs(a, b):
        return torch.stack([take(a, rows), take(b, rows)], 1)
    buffer = a.new_empty(len(rows), 2, a.shape[3])
    pack_rows(a, b, rows, None, buffer)
    return buffer


def pack_rows(a: Tensor, b: Tensor, rows: Tensor, at: Tensor | None, buffer: Tensor) -> None:
    """buffer[at] = (a[rows], b[rows]), side by side; buffer (n, 2, D), filled from its first row on without `at`."""
    if _pairs(a, b):
        return _kernel().pick([a, b], rows, at, buffer.unbind(1))
    for i, x in enumerate((a, b)):
        buffer[slice(len(rows)) if at is None else at, i] = take(x, rows)


def add_at(total: Tensor, rows: Tensor, parts: Sequence[Tensor], distinct: bool = False) -> None:
    """Add parts (G, n, D), rounded to its dtype, to rows of a total: one part to (m, D), two to (m, 2, D).

    Args:
        rows: (G, n) numbers.
        distinct: that no number occurs twice.
    """
    bare = not distinct and torch.are_deterministic_algorithms_enabled()  # a sum in an order of its own
    if not bare and total.is_contiguous() and _moves(total, rows) and all(x.stride(-1) == 1 for x in parts):
        return _kernel().add(total.unbind(1) if len(parts) == 2 else [total], rows.contiguous(), parts, distinct)
    flat = [x.flatten(0, 1).to(total.dtype) for x in parts]
    total.index_add_(0, rows.flatten(), torch.stack(flat, 1) if len(parts) == 2 else flat[0])


#: from so many rows on they are moved by our kernels: torch's take longer there, but less of the host to be launched
MANY = 2**17


def _moves(x: Tensor, rows: Tensor) -> bool:
    """Whether rows of x by their numbers are moved by our kernels."""
    return rows.numel() >= MANY and _serves(x)


def _serves(x: Tensor) -> bool:
    return x.stride(-1) == 1 and x.dtype != torch.float64 and kernels.available(x.device)


def _pairs(a: Tensor, b: Tensor) -> bool:
    """Whether a kernel moves the rows of both in one launch."""
    return a.shape == b.shape and a.dtype == b.dtype and _serves(a) and _serves(b)


def _kernel() -> ModuleType:
    from lightning_dilated.kernels import rows

    return rows
