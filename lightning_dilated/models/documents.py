"""Checks of the entries of batches; documents packed into one row, and a rank's part of these documents.

Shape letters: D documents, L tokens of this rank, E features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_dilated._device import send
from lightning_dilated.attention.rotary import token_positions
from lightning_dilated.sequence import sequence_mean, sequence_sum

#: (the required shape of a batch's entry, in shape letters; the kind of its values)
Form: TypeAlias = tuple[str, Literal["tokens", "integers", "floats", "numbers"]]
_ALLOWED = {"tokens": "int64 or int32", "integers": "integers", "floats": "floating numbers", "numbers": "real numbers"}


def check_form(owner: object, batch: Any, **forms: Form) -> None:
    """Check that a batch is a mapping that contains these tensors.

    Raises:
        TypeError: if the batch is not a mapping, or an entry is not a tensor or has a wrong dtype.
        ValueError: if an entry is missing or has a wrong number of dimensions.
    """
    name, expected = type(owner).__name__, ", ".join(f"{x} {shape}" for x, (shape, _) in forms.items())
    remedy = check_mapping(owner, batch, expected, *forms)
    for entry, (shape, kind) in forms.items():
        if entry not in batch:
            raise ValueError(
                f"{name} takes batches with {expected}; this one has {list(batch)} and no {entry!r}. {remedy}"
            )
        x = batch[entry]
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: {entry} must be a tensor {shape}, got {_form_of(x)}. {remedy}")
        if x.ndim != shape.count(",") + 1 - shape.count(",)"):
            raise ValueError(f"{name}: {entry} must be {shape}, got {_form_of(x)}. {remedy}")
        if not _holds(x.dtype, kind):
            raise TypeError(f"{name}: {entry} must hold {_ALLOWED[kind]}, got {_form_of(x)}: convert the entry.")


def check_mapping(owner: object, batch: Any, expected: str, *names: str) -> str:
    """Raise TypeError if a batch is not a mapping; else return advice that other errors about the batch can use."""
    example = ", ".join(f'"{x}": ...' for x in names)
    remedy = f"Let the dataset, or the loader's collate_fn, return {{{example}}}."
    if isinstance(batch, Mapping):
        return remedy
    parts = f" of {', '.join(map(_form_of, batch[:4]))}" if isinstance(batch, (tuple, list)) else ""
    raise TypeError(
        f"{type(owner).__name__} takes batches that are mappings with {expected}, got a {type(batch).__name__}{parts}. "
        f"{remedy}"
    )


def _form_of(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _holds(dtype: torch.dtype, kind: str) -> bool:
    if kind == "tokens":
        return dtype in (torch.int64, torch.int32)
    other = dtype.is_complex or dtype == torch.bool
    return not other and (kind == "numbers" or dtype.is_floating_point is (kind == "floats"))


@dataclass(frozen=True)
class Documents:
    """The sizes of a row's documents, and the places of this rank's tokens in these documents; all on the CPU.

    Attributes:
        sizes: (D,) int64, the number of tokens of each document in the whole row.
        number: (L,) int64, the index of the document that each of this rank's tokens belongs to.
        position: (L,) int64, the position of each of these tokens in its document.
    """

    sizes: Tensor
    number: Tensor
    position: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, tokens: int) -> Documents:
        """Make Documents from the documents' bounds (D + 1,) in the whole row, and this rank's number of tokens."""
        bounds, positions = torch.as_tensor(cu_seqlens).cpu().long(), token_positions(0, tokens)
        number = torch.searchsorted(bounds, positions, right=True).clamp(1, len(bounds) - 1) - 1
        return cls(bounds.diff(), number, positions - bounds[number])

    def __len__(self) -> int:
        return len(self.sizes)

    def first(self, x: Tensor) -> Tensor:
        """Return the row of each document's first token, (D, E) on every rank, from x (1, L, E)."""
        at = (self.position == 0).nonzero()[:, 0]
        rows = x.new_zeros(len(self), x.shape[2]).index_copy(
            0, send(self.number[at], x.device), x[0, send(at, x.device)]
        )
        return sequence_sum(rows)

    def mean(self, x: Tensor, start: int = 0) -> Tensor:
        """Return the mean of x (1, L, E) over each document's positions from `start` on: (D, E) on every rank."""
        wide = torch.promote_types(x.dtype, torch.float32)
        total = self.sum(x[0].to(wide), self.position >= start)
        return (total / send((self.sizes - start).clamp(min=1), x.device)[:, None]).to(x.dtype)

    def sum(self, x: Tensor, counted: Tensor | None = None) -> Tensor:
        """Return the sum of x (L, ...) over each document: (D, ...) on every rank.

        With `counted` (L,), sum only the tokens where `counted` is True; x may be NaN at the other tokens.
        """
        if counted is not None:
            mask = send(counted, x.device).view(-1, *[1] * (x.ndim - 1))
            x = torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))
        here = torch.bincount(self.number, minlength=len(self))
        # segment_reduce adds in order, so a GPU gives the same sum every time
        return sequence_sum(
            torch.segment_reduce(x, "sum", lengths=send(here, x.device), axis=0, initial=0, unsafe=True)
        )


def sample_documents(batch: Mapping[str, Any], tokens: int) -> Documents | None:
    """Return the documents of a batch if each of them is a sample with an entry in `index`, else None.

    Args:
        tokens: L, this rank's number of tokens.
    """
    bounds, index = batch.get("cu_seqlens"), batch.get("index")
    if bounds is None or index is None or len(index) != len(bounds) - 1:
        return None
    return Documents.of(bounds, tokens)


def mean_token(
    x: Tensor, positions: Tensor, lengths: Tensor | None, start: int = 0, documents: Documents | None = None
) -> Tensor:
    """Return the mean of x (B, L, E) over each sample's positions from `start` on: (B, E) on every rank.

    For a row of D `documents`, return the mean of each document, (D, E).
    """
    if documents is not None:
        return documents.mean(x, start)
    counted = (positions >= start).expand(x.shape[:2])
    if lengths is not None:
        counted = counted & (positions < torch.as_tensor(lengths).cpu()[:, None])
    return sequence_mean(x, mask=send(counted, x.device))
