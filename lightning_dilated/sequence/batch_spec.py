"""SequenceSpec: which entries of a batch are sequences, declared and never guessed, and the cut of a batch to one rank.

Shape letters: B batch, N tokens of the sequence, L tokens of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_dilated.sequence.shard import Shard, check_layout


@dataclass(frozen=True)
class Place:
    """One rank's place in a sequence: what a loader has to know, also in a worker process."""

    ranks: int = 1
    rank: int = 0
    layout: str = "contiguous"

    def __post_init__(self) -> None:
        check_layout(self.layout)

    def ranges(self, seq_len: int) -> tuple[range, ...]:
        """The global positions of this rank's tokens, in local order."""
        return Shard(seq_len, self.ranks, self.layout).ranges(self.rank)


@dataclass(frozen=True)
class SequenceSpec:
    """The entries of a batch, by name (or by number, for batches that are tuples).

    Args:
        dims: {entry: its dimension that runs over the tokens}; these are cut.
        whole: entries that every rank gets whole: `lengths`, `cu_seqlens`, an index, a label of the whole sequence.
        shift: {entry: fill}: entries that hold the tokens themselves and become the next token of each position before the
            cut; the last position of the sequence, of each length and of each document gets `fill` (-100 is left out of
            the loss). An entry that is not named here is taken as shifted already.

    Raises:
        TypeError, ValueError: naming the entry.
    """

    dims: Mapping[Any, int]
    whole: Sequence[Any] = ()
    shift: Mapping[Any, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", dict(self.dims))
        object.__setattr__(self, "whole", tuple(self.whole))
        object.__setattr__(self, "shift", dict(self.shift))
        if not self.dims:
            raise ValueError("SequenceSpec.dims names no entry: say which entries of a batch run over the tokens.")
        for name, dim in self.dims.items():
            if isinstance(dim, bool) or not isinstance(dim, int):
                raise TypeError(f"SequenceSpec.dims[{name!r}] must be a dimension (an integer), got {dim!r}.")
        both = [name for name in self.whole if name in self.dims]
        if both:
            raise ValueError(f"SequenceSpec names {both} both in dims and in whole; an entry is either cut or whole.")
        lost = [name for name in self.shift if name not in self.dims]
        if lost:
            raise ValueError(f"SequenceSpec.shift names {lost}, which dims does not: only sequences can be shifted.")

    def cut(self, batch: Any, place: Place) -> Any:
        """This rank's part of a batch; a batch of the same kind.

        Raises:
            ValueError: for an entry that was not declared or is missing, or sequences of different lengths.
        """
        entries = self._entries(batch)
        seq_len = self._seq_len(entries)
        out = dict(entries)
        for name in self.dims:
            if name in entries:
                x = self._shifted(name, entries) if name in self.shift else entries[name]
                out[name] = _take(x, self.dims[name], place.ranges(seq_len))
        if isinstance(batch, Mapping):
            return out
        return type(batch)(*out.values()) if hasattr(batch, "_fields") else type(batch)(out.values())

    def _entries(self, batch: Any) -> dict[Any, Any]:
        if isinstance(batch, Mapping):
            entries = dict(batch)
        elif isinstance(batch, (tuple, list)):
            entries = dict(enumerate(batch))
        else:
            raise ValueError(
                f"a batch must be a mapping or a tuple for its sequences to be cut, got {type(batch).__name__}; "
                'let the dataset return {"tokens": ...}.'
            )
        unknown = [name for name in entries if name not in self.dims and name not in self.whole]
        if unknown:
            shapes = {
                name: tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for name, x in entries.items()
            }
            raise ValueError(
                f"the batch holds {unknown}, which the sequence_spec does not declare, so it is not known whether to cut "
                f"them. Name each in SequenceSpec.dims (cut along a dimension) or SequenceSpec.whole. The batch: {shapes}."
            )
        return entries

    def _seq_len(self, entries: Mapping[Any, Any]) -> int:
        sizes = {}
        for name, dim in self.dims.items():
            if name in entries:
                x = entries[name]
                if not isinstance(x, Tensor) or not -x.ndim <= dim < x.ndim:
                    found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                    raise ValueError(f"batch entry {name!r} should be a tensor with dimension {dim}, got {found}.")
                sizes[name] = x.shape[dim]
        if not sizes:
            raise ValueError(
                f"the batch holds none of {list(self.dims)}, which the sequence_spec declares as sequences, but "
                f"{list(entries)}: let the dataset return what is to be cut, or train without a strategy that cuts."
            )
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"the sequences of a batch have different numbers of tokens: {sizes}. Entries that are cut must agree; "
                "an entry with one value a sample belongs into SequenceSpec.whole."
            )
        return next(iter(sizes.values()))

    def _shifted(self, name: Any, entries: Mapping[Any, Any]) -> Tensor:
        """The next token of each position, over the whole sequence."""
        x, dim, fill = entries[name], self.dims[name] % entries[name].ndim, self.shift[name]
        out = torch.full_like(x, fill)
        if x.shape[dim] > 1:
            out.narrow(dim, 0, x.shape[dim] - 1).copy_(x.narrow(dim, 1, x.shape[dim] - 1))
        moved = out.movedim(dim, 0)
        if entries.get("cu_seqlens") is not None:
            ends = entries["cu_seqlens"][1:].long() - 1
            moved[ends[ends >= 0]] = fill
        if entries.get("lengths") is not None:
            position = torch.arange(x.shape[dim])[:, None] + 1
            last = position >= torch.as_tensor(entries["lengths"])[None]
            moved[last] = fill  # (N, B) of a (B, N, ...) entry
        return out


def _take(x: Tensor, dim: int, ranges: tuple[range, ...]) -> Tensor:
    """The positions along a dimension, in storage of their own: what a worker hands over is only these bytes."""
    parts = [x.narrow(dim, r.start, len(r)) if r.step == 1 else _strided(x, dim, r) for r in ranges]
    if not parts:
        return x.narrow(dim, 0, 0).clone()
    return parts[0].clone(memory_format=torch.contiguous_format) if len(parts) == 1 else torch.cat(parts, dim)


def _strided(x: Tensor, dim: int, r: range) -> Tensor:
    slices = [slice(None)] * x.ndim
    slices[dim] = slice(r.start, r.stop, r.step)
    return x[tuple(slices)]
