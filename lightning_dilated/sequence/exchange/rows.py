"""Rows of (B, L, heads, D) tensors by their flat numbers, one by one or two side by side.

Shape letters: B samples, L local tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dilated import kernels


@dataclass(frozen=True)
class Rows:
    """Some rows of a rank's (B, L, J, D) tensors, none twice: (sample, token, head), each (n,) int64."""

    at: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, flat: Tensor, length: int, heads: int) -> Rows:
        """From flat numbers."""
        return cls((flat // (heads * length), flat // heads % length, flat % heads))

    def to(self, device: torch.device) -> Rows:
        """The same on a device."""
        return Rows(tuple(x.to(device) for x in self.at))

    def take(self, x: Tensor) -> Tensor:
        """(n, ...) of a (B, L, J, ...) tensor of any strides."""
        return x[self.at]

    def put(self, x: Tensor, values: Tensor) -> None:
        """Write (n, ...) values, rounded to x's dtype."""
        x[self.at] = values.to(x.dtype)


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
    if x.is_contiguous():
        return x.view(-1, x.shape[-1])[rows]
    heads, length = x.shape[2], x.shape[1]
    return x[rows // (heads * length), rows // heads % length, rows % heads]


def pair(a: Tensor, b: Tensor, rows: Tensor) -> Tensor:
    """(n, 2, D): rows of two tensors side by side."""
    if not _packs(a, b):
        return torch.stack([take(a, rows), take(b, rows)], 1)
    buffer = a.new_empty(len(rows), 2, a.shape[3])
    pack_rows(a, b, rows, None, buffer)
    return buffer


def pack_rows(a: Tensor, b: Tensor, rows: Tensor, at: Tensor | None, buffer: Tensor) -> None:
    """buffer[at] = (a[rows], b[rows]), side by side; buffer (n, 2, D), filled from its first row on without `at`."""
    if _packs(a, b):
        from lightning_dilated.kernels.rows import pack

        return pack(a, b, rows, at, buffer)
    for i, x in enumerate((a, b)):
        buffer[slice(len(rows)) if at is None else at, i] = take(x, rows)


def _packs(a: Tensor, b: Tensor) -> bool:
    """Whether the kernel serves: it moves the rows of both in one launch."""
    alike = a.shape == b.shape and a.dtype == b.dtype and a.stride(-1) == b.stride(-1) == 1
    return alike and a.dtype != torch.float64 and kernels.available(a.device)
