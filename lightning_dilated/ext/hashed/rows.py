"""Rows of hashed heads that later calls read, and how a stream carries these rows and their gradients from chunk to chunk.

If ranks share the stream, each rank carries the rows that it computed.

Shape letters: S samples, K kv heads, D head dim, G groups of M codes, L latest rows, n rows, T keys (S K M ** G).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightning_dilated.ext.streams.stream import Store


@dataclass(frozen=True)
class HashedRows:
    """Rows of earlier tokens, in the order of positions; in a stream, at most L for each sample, kv head and code.

    Attributes:
        samples, heads: S and K.
        keys: (n,) int64, (sample * K + head) * 2**31 + code.
        numbers: (n,) int64, which rise by 1 from a row to the next row with its key, on all ranks together.
        k, v: (n, D).
        chances: (n, G, M), softmax of the logits of codes, fp32 or fp64.
    """

    samples: int
    heads: int
    keys: Tensor
    numbers: Tensor
    k: Tensor
    v: Tensor
    chances: Tensor

    @classmethod
    def empty(cls, k: Tensor, z: Tensor) -> HashedRows:
        """Return no rows, for k (S, N, K, D) and logits z (S, N, K, G, M)."""
        keys, rows = torch.empty(0, dtype=torch.int64, device=k.device), k.new_empty(0, k.shape[3])
        dtype = torch.promote_types(z.dtype, torch.float32)
        return cls(len(k), k.shape[2], keys, keys, rows, rows, z.new_empty(0, *z.shape[3:], dtype=dtype))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return keys, numbers, k, v and chances."""
        return self.keys, self.numbers, self.k, self.v, self.chances

    def with_tensors(self, tensors: Sequence[Tensor]) -> HashedRows:
        """Return the same object with other `tensors`."""
        return HashedRows(self.samples, self.heads, *tensors)

    def of_samples(self) -> Tensor:
        """Return the sample of each row, (n,)."""
        return self.keys // (self.heads << 31)

    def at(self, index: Tensor) -> HashedRows:
        """Return the rows at these indices."""
        return self.with_tensors([x[index] for x in self.tensors()])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in self.tensors())

    def detach(self) -> HashedRows:
        """Return the same rows without a gradient to earlier calls."""
        return self.with_tensors([x.detach() for x in self.tensors()])

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> HashedRows:
        """Return the same rows on another device, and in another dtype unless `dtype` is None."""
        wide = None if dtype is None else torch.promote_types(dtype, torch.float32)
        kinds = None, None, dtype, dtype, wide
        return self.with_tensors([x.to(device, kind) for x, kind in zip(self.tensors(), kinds, strict=True)])

    def zeros(self) -> HashedRows:
        """Return the state before the first token: no rows."""
        return self.with_tensors([x[:0] for x in self.tensors()])

    def select(self, samples: Sequence[int]) -> HashedRows:
        """Return a copy with the samples at these indices, in this order."""
        sample, width = self.of_samples(), self.heads << 31
        index = [(sample == i).nonzero()[:, 0] for i in samples]
        rows = self.at(torch.cat([self.keys[:0], *index]))
        moved = [self.keys[x] + (new - old) * width for new, (old, x) in enumerate(zip(samples, index, strict=True))]
        return replace(rows, samples=len(samples), keys=torch.cat([self.keys[:0], *moved]))

    @classmethod
    def join(cls, states: Sequence[HashedRows]) -> HashedRows:
        """Concatenate the samples of several states."""
        parts, samples = [], 0
        for state in states:
            parts.append(replace(state, keys=state.keys + samples * (state.heads << 31)).tensors())
            samples += state.samples
        return cls(samples, states[0].heads, *map(torch.cat, zip(*parts, strict=True)))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a dict of tensors and numbers, for checkpoints."""
        return {"rows": list(self.tensors()), "samples": self.samples, "heads": self.heads}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> HashedRows:
        """Restore a state from its `state_dict`."""
        return cls(state["samples"], state["heads"], *state["rows"])


def slots(keys: Tensor, codes: int) -> Tensor:
    """Return the index of each key among the keys of all samples, kv heads and codes (M ** G `codes`)."""
    return (keys >> 31) * codes + keys % 2**31


def numbered(keys: Tensor) -> Tensor:
    """Return the number of earlier equal keys of each key, (n,)."""
    ordered, order = keys.sort(stable=True)
    number = torch.arange(len(keys), device=keys.device) - torch.searchsorted(ordered, ordered)
    return torch.empty_like(number).scatter_(0, order, number)


class HashedCarry:
    """The rows that a layer carries to the current chunk of a stream, and their gradients in the descent.

    The store needs memory for the rows that a chunk replaced, so at most for all rows of the sequence.

    Args:
        store: the store for replaced rows; None: chunks are not computed again.
        rows: rows of earlier calls.

    Attributes:
        chunk: the current chunk.
        rows: rows of earlier chunks.
        counts: (T,) int64, the next of each key's `HashedRows.numbers`; None: as in `rows`.
        grads: gradients of k, v and chances of `rows`, in fp32 or wider; None: they are 0.
        own: indices of rows that the current chunk left, and these rows' gradients, which later chunks computed.
        totals: statistics of all chunks up to each chunk, for losses.
    """

    def __init__(self, store: Store | None, rows: HashedRows | None = None) -> None:
        self.chunk, self.rows, self.counts, self.grads, self.own = 0, rows, None, None, None
        self.totals: dict[int, Tensor] = {}
        self._leaving: tuple[Any, ...] | None = None
        self._store, self._replaced = store, []

    def enter(self, chunk: int, empty: HashedRows) -> HashedRows:
        """Enter the same chunk again, the next one or, in the descent, the previous one; return the rows before it."""
        self.rows = empty if self.rows is None else self.rows.to(empty.k.device, empty.k.dtype)
        if chunk == self.chunk + 1 and self._leaving is not None:
            self._ascend()
        elif chunk == self.chunk - 1 and self._replaced:
            self._descend()
        elif chunk != self.chunk:
            raise RuntimeError(f"a stream's hashed heads cannot go from chunk {self.chunk} to chunk {chunk}.")
        self.chunk = chunk
        return self.rows

    def leave(
        self, rows: HashedRows, index: Tensor, stays: Tensor, latest: int, total: Tensor, lower: Tensor | int
    ) -> None:
        """Let the next chunk read the chunk's `rows`, too.

        Args:
            rows: this rank's rows; `numbers` count this rank's rows in the chunk only.
            index: (n,) the indices of the rows in the chunk.
            stays: (S,) bool, whether a sample's document began before the chunk and continues after it.
            latest: L.
            total, lower: (T,) numbers of the chunk's rows on all ranks, and on lower ranks.
        """
        codes = len(total) // (rows.samples * rows.heads)
        if self.counts is None:
            old, self.counts = self.rows, torch.zeros_like(total, dtype=torch.int64)
            self.counts.scatter_reduce_(0, slots(old.keys, codes), old.numbers + 1, "amax")
        rows = replace(rows, numbers=rows.numbers + (self.counts + lower)[slots(rows.keys, codes)])
        counts = self.counts + total
        is_latest = [x.numbers >= counts[slots(x.keys, codes)] - latest for x in (self.rows, rows)]
        stay, come = is_latest[0] & stays[self.rows.of_samples()], is_latest[1]
        self._leaving = rows.at(come), index[come], stay, counts

    def after(self) -> HashedRows:
        """Return the rows that are carried beyond the last chunk, which must be the current one."""
        self._ascend()
        return self.rows

    def _ascend(self) -> None:
        (new, index, stay, self.counts), old = self._leaving, self.rows
        if self._store is not None:
            gone = (~stay).nonzero()[:, 0]
            self._replaced.append((index, gone, [self._store.put(x[gone]) for x in old.tensors()]))
        pairs = zip(old.tensors(), new.tensors(), strict=True)
        self.rows, self._leaving = old.with_tensors([torch.cat([x[stay], y]) for x, y in pairs]), None

    def _descend(self) -> None:
        index, gone, parts = self._replaced.pop()
        count = len(self.rows.keys) - len(index)
        stay = torch.ones(count + len(gone), dtype=torch.bool, device=gone.device)
        stay[gone] = False
        before = [x.new_empty(len(stay), *x.shape[1:]) for x in self.rows.tensors()]
        for x, y, stored in zip(before, self.rows.tensors(), parts, strict=True):
            x[stay], x[gone] = y[:count], self._store.take(stored, x.device)
        self.rows = self.rows.with_tensors(before)
        if self.grads is not None:
            self.own, after = (index, [x[count:] for x in self.grads]), self.grads
            self.grads = [x.new_zeros(len(stay), *x.shape[1:]) for x in after]
            for x, y in zip(self.grads, after, strict=True):
                x[stay] = y[:count]

    def add_grads(self, index: Tensor, grads: Sequence[Tensor]) -> None:
        """Add gradients of k, v and chances of the rows at these indices, which differ."""
        if self.grads is None:
            wide = torch.promote_types(grads[0].dtype, torch.float32)
            self.grads = [x.new_zeros(len(self.rows.keys), *x.shape[1:], dtype=wide) for x in grads]
        for total, grad in zip(self.grads, grads, strict=True):
            total[index] += grad
