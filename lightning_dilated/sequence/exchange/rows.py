"""Rows of (B, L, heads, D) tensors by their flat numbers, one by one or two side by side.

Shape letters: B samples, L local tokens, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dilated import kernels


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
