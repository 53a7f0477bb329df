"""Samples of unequal length that are packed into one row, as a rank sees its part of them: which token lies where.

Shape letters: D documents, L tokens of this rank, E features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_dilated._device import send
from lightning_dilated.attention.rotary import token_positions
from lightning_dilated.sequence import sequence_sum


@dataclass(frozen=True)
class Documents:
    """The documents of a row, and this rank's tokens of them; all on the CPU.

    Attributes:
        sizes: (D,) int64, tokens of each document.
        number: (L,) int64, the document of each token of this rank.
        position: (L,) int64, its place there.
    """

    sizes: Tensor
    number: Tensor
    position: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, tokens: int) -> Documents:
        """From the bounds (D + 1,) of documents in the whole row, and this rank's number of tokens L."""
        bounds, positions = torch.as_tensor(cu_seqlens).cpu().long(), token_positions(0, tokens)
        number = torch.searchsorted(bounds, positions, right=True).clamp(1, len(bounds) - 1) - 1
        return cls(bounds.diff(), number, positions - bounds[number])

    def __len__(self) -> int:
        return len(self.sizes)

    def first(self, x: Tensor) -> Tensor:
        """(D, E), on every rank, of x (1, L, E): each document's first token."""
        at = (self.position == 0).nonzero()[:, 0]
        rows = x.new_zeros(len(self), x.shape[2]).index_copy(
            0, send(self.number[at], x.device), x[0, send(at, x.device)]
        )
        return sequence_sum(rows)

    def mean(self, x: Tensor, start: int = 0) -> Tensor:
        """(D, E), on every rank, of x (1, L, E): the mean over each document's tokens from its position `start` on."""
        wide = torch.promote_types(x.dtype, torch.float32)
        total = self.sum(x[0].to(wide), self.position >= start)
        return (total / send((self.sizes - start).clamp(min=1), x.device)[:, None]).to(x.dtype)

    def sum(self, x: Tensor, counted: Tensor | None = None) -> Tensor:
        """(D, ...), on every rank, of x (L, ...): the sum over each document's tokens, of those with `counted` (L,) True.

        What does not count may be NaN.
        """
        if counted is not None:
            mask = send(counted, x.device).view(-1, *[1] * (x.ndim - 1))
            x = torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))
        here = torch.bincount(self.number, minlength=len(self))
        # in order, so that a GPU adds the same way every time
        return sequence_sum(
            torch.segment_reduce(x, "sum", lengths=send(here, x.device), axis=0, initial=0, unsafe=True)
        )


def sample_documents(batch: Mapping[str, Any], tokens: int) -> Documents | None:
    """The documents of a batch in which each is a sample with a number of its own in `index`; else None.

    Args:
        tokens: L, of this rank.
    """
    bounds, index = batch.get("cu_seqlens"), batch.get("index")
    if bounds is None or index is None or len(index) != len(bounds) - 1:
        return None
    return Documents.of(bounds, tokens)


def check_documents(batch: Mapping[str, Any], rows: int, least: int, what: str) -> None:
    """Raise ValueError for packed samples that a pooled model cannot tell apart.

    Args:
        rows: B of the batch.
        least: the fewest tokens of a sample; `what` says why.
    """
    bounds = batch.get("cu_seqlens")
    if bounds is None:
        return
    bounds = torch.as_tensor(bounds)
    if bounds.is_floating_point() or bounds.ndim != 1 or len(bounds) < 2 or rows != 1:
        raise ValueError(
            f"samples packed into one row have cu_seqlens (D + 1,) integers and a batch of 1, got {tuple(bounds.shape)} of "
            f"{bounds.dtype} and a batch of {rows}."
        )
    if batch.get("lengths") is not None:
        raise ValueError(
            "the batch holds lengths (padded samples) and cu_seqlens (packed ones): leave one of them out."
        )
    sizes = bounds.diff().tolist()
    for i, n in enumerate(sizes):
        if n < least:
            raise ValueError(f"document {i} of cu_seqlens has {n} tokens; {what}, so it must have at least {least}.")
    label = batch.get("label")
    if label is not None and len(torch.as_tensor(label)) != len(sizes):
        raise ValueError(
            f"the batch packs {len(sizes)} samples (cu_seqlens), but has {len(torch.as_tensor(label))} labels: give one a "
            "sample."
        )
