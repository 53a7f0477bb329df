"""Rows of (B, L, heads, D) tensors by number: index tensors for messages and batches, and copies of rows by index.

A row's flat number is its index in a contiguous (B, L, heads) tensor.

Shape letters: B samples, L local tokens, D head dim.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_dilated import kernels
from lightning_dilated._device import send
from lightning_dilated.sequence.exchange.program import Message, RowSet
from lightning_dilated.sequence.ranges import intersect, remove
from lightning_dilated.sequence.requirements import Document, Problem, RowRequest

#: an arithmetic progression as (start, step, count)
Progression = tuple[int, int, int]


class CarriedRange(Protocol):
    """Rows of one head at some positions of a document, in each of its samples."""

    @property
    def document(self) -> Document: ...
    @property
    def head(self) -> int: ...
    @property
    def rows(self) -> range: ...


def expand(runs: Iterable[Progression]) -> Tensor:
    """Return all numbers of the runs, one after another, int64."""
    start, step, count = np.array(list(runs), dtype=np.int64).reshape(-1, 3).T
    numbers = np.repeat(start - step * (count.cumsum() - count), count)
    numbers += np.repeat(step, count) * np.arange(len(numbers))
    return torch.from_numpy(numbers)


def _overlap(rows: range, other: range) -> tuple[Progression, Progression] | None:
    """Return the indices of the common elements in `rows` and in `other`; None if there are none."""
    step, first, begin = rows.step, rows.start, other.start
    if step == other.step and (first - begin) % step == 0:  # a fast path for the usual case
        start = max(first, begin)
        count = (min(rows.stop, other.stop) - start + step - 1) // step
        return (((start - first) // step, 1, count), ((start - begin) // step, 1, count)) if count > 0 else None
    common = intersect(rows, other)
    if not common:
        return None
    index = lambda x: ((common.start - x.start) // x.step, common.step // x.step, len(common))  # noqa: E731
    return index(rows), index(other)


@dataclass
class LocalRows:
    """The rows of a rank's (B, L, heads, D) tensor, for the heads [first, stop)."""

    pieces: tuple[range, ...]
    heads: tuple[int, int]

    @property
    def length(self) -> int:
        return sum(map(len, self.pieces))

    def find(
        self, document: Document, head: int, rows: range, sample: int
    ) -> Iterator[tuple[Progression, Progression]]:
        """Yield (indices in `rows`, flat numbers) of the elements of `rows` that the rank holds."""
        count, start = self.heads[1] - self.heads[0], 0
        for piece in self.pieces:
            overlap = _overlap(rows, piece)
            if overlap:
                inside, (first, step, n) = overlap
                row = (document.sample + sample) * self.length + start + first
                yield inside, (row * count + head - self.heads[0], step * count, n)
            start += len(piece)


class RangeIndex:
    """Disjoint ranges of rows, each with the number of its first row in a store.

    Ranges are indexed by step and residue, so that a look-up skips ranges that cannot share rows with the given range.
    """

    def __init__(self) -> None:
        self._of_step: dict[int, dict[int, list[tuple[range, int]]]] = {}
        self._sorted = True

    def add(self, rows: range, number: int) -> None:
        """Add a range that is not empty."""
        residues = self._of_step.setdefault(rows.step, {})
        residues.setdefault(rows.start % rows.step, []).append((rows, number))
        self._sorted = False

    def sharing(self, rows: range) -> Iterator[tuple[range, int]]:
        """Yield (range, number) of ranges that may share elements with `rows`."""
        if not self._sorted:
            for residues in self._of_step.values():
                for entries in residues.values():
                    entries.sort(key=_start)
            self._sorted = True
        for step, residues in self._of_step.items():
            common = math.gcd(step, rows.step)
            if step // common < len(residues):
                candidates = (residues.get(x, ()) for x in range(rows.start % common, step, common))
            else:
                candidates = (entries for x, entries in residues.items() if (x - rows.start) % common == 0)
            for entries in candidates:
                # disjoint ranges of one step and residue do not interleave
                i = max(0, bisect.bisect_right(entries, rows.start, key=_start) - 1)
                while i < len(entries) and entries[i][0].start < rows.stop:
                    yield entries[i]
                    i += 1


def _start(entry: tuple[range, int]) -> int:
    return entry[0].start


class ManyRanges:
    """Thousands of disjoint ranges of a few rows each, stored one after another from number 0 on, sample by sample.

    A look-up searches arrays of rows, which is many times faster than a loop over the ranges.
    """

    def __init__(self, ranges: Sequence[CarriedRange]) -> None:
        group_of: dict[tuple[Document, int], int] = {}
        groups = [group_of.setdefault((x.document, x.head), len(group_of)) for x in ranges]
        table = [
            (group, x.rows.start, x.rows.step, len(x.rows), x.document.samples)
            for group, x in zip(groups, ranges, strict=True)
        ]
        group, start, step, count, samples = np.array(table, dtype=np.int64).reshape(-1, 5).T
        first = (samples * count).cumsum() - samples * count
        within = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
        positions, row_groups = np.repeat(start, count) + within * np.repeat(step, count), np.repeat(group, count)
        order = np.lexsort((positions, row_groups))
        self.size = int((samples * count).sum())
        self._group_of = group_of
        self._ends = row_groups[order].searchsorted(np.arange(len(group_of) + 1))
        self._positions = positions[order]
        self._numbers, self._each = (np.repeat(first, count) + within)[order], np.repeat(count, count)[order]

    def find(self, document: Document, head: int, rows: range, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (indices in `rows`, numbers in the store), int64, of all elements of `rows` that are in the store."""
        group = self._group_of.get((document, head))
        if group is None or not rows:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        begin, end = self._ends[group], self._ends[group + 1]
        low, high = begin + self._positions[begin:end].searchsorted((rows.start, rows.stop))
        from_start = self._positions[low:high] - rows.start
        if rows.step == 1:
            return from_start, self._numbers[low:high] + sample * self._each[low:high]
        here = from_start % rows.step == 0
        return from_start[here] // rows.step, (self._numbers[low:high] + sample * self._each[low:high])[here]


@dataclass
class ReceivedRows:
    """A store of rows: first carried rows, if any, then the received sets of rows; a set is stored sample by sample."""

    size: int = 0
    ranges: dict[tuple[Document, int], RangeIndex] = field(default_factory=dict)
    carried: ManyRanges | None = None

    @classmethod
    def after(cls, carried: Sequence[CarriedRange]) -> ReceivedRows:
        """Return a store that begins with the carried rows."""
        ranges = ManyRanges(carried) if carried else None
        return cls(ranges.size if ranges else 0, carried=ranges)

    def add(self, message: Message) -> None:
        """Reserve numbers at the end of the store for the rows of a message."""
        for rows in message:
            self.ranges.setdefault((rows.document, rows.head), RangeIndex()).add(rows.rows, self.size)
            self.size += len(rows)

    def find(
        self, document: Document, head: int, rows: range, sample: int
    ) -> Iterator[tuple[Progression, Progression]]:
        """Yield (indices in `rows`, numbers in the store) of the elements of `rows` that are in the store."""
        if self.carried is not None:
            for at, number in zip(*(x.tolist() for x in self.carried.find(document, head, rows, sample)), strict=True):
                yield (at, 1, 1), (number, 1, 1)
        yield from self.find_received(document, head, rows, sample)

    def find_received(
        self, document: Document, head: int, rows: range, sample: int
    ) -> Iterator[tuple[Progression, Progression]]:
        """Find received rows only, as `find` does."""
        index = self.ranges.get((document, head))
        for received, start in index.sharing(rows) if index else ():
            overlap = _overlap(rows, received)
            if overlap:
                inside, (first, step, n) = overlap
                yield inside, (start + sample * len(received) + first, step, n)


@dataclass
class Packing:
    """Indices that fill a send buffer: buffer[own_at] = own rows [own], buffer[store_at] = received rows [store].

    If `own_at` is None, own rows fill the whole buffer in order.
    """

    own: Tensor
    own_at: Tensor | None
    store: Tensor
    store_at: Tensor

    @classmethod
    def of(cls, sets: Iterable[RowSet], own: LocalRows, store: ReceivedRows) -> Packing:
        """Make the indices for the rows of all messages of a round, in the order of the peers."""
        runs: dict[str, list[Progression]] = {"own": [], "own_at": [], "store": [], "store_at": []}
        base, located = 0, {}
        for rows in sets:
            if rows not in located:  # the same rows often go to several ranks
                located[rows] = _located(rows, own, store)
            for name, (first, step, n), numbers in located[rows]:
                runs[f"{name}_at"].append((base + first, step, n))
                runs[name].append(numbers)
            base += len(rows)
        indices = {name: expand(x) for name, x in runs.items()}
        if torch.equal(indices["own_at"], torch.arange(base)):
            indices["own_at"] = None
        return cls(**indices)

    def to(self, device: torch.device) -> Packing:
        at = None if self.own_at is None else send(self.own_at, device)
        return Packing(send(self.own, device), at, send(self.store, device), send(self.store_at, device))


def _located(
    rows: RowSet, own: LocalRows, store: ReceivedRows
) -> list[tuple[Literal["own", "store"], Progression, Progression]]:
    """Return [("own" or "store", indices in the set, row numbers in `own` or `store`)] for all rows of the set."""
    located, at, relayed = [], 0, remove([rows.rows], own.pieces)
    for sample in range(rows.document.samples):
        missing = len(rows.rows)
        for name, source, parts in (("own", own, [rows.rows]), ("store", store, relayed)):
            for part in parts:
                begin, stride = (part.start - rows.rows.start) // rows.rows.step, part.step // rows.rows.step
                for (first, step, n), numbers in source.find(rows.document, rows.head, part, sample):
                    located.append((name, (at + begin + stride * first, stride * step, n), numbers))
                    missing -= n
        assert missing == 0, f"{missing} rows of {rows} are not held where they are sent from"
        at += len(rows.rows)
    return located


@dataclass
class Batch:
    """Requests of one branch with the same numbers of queries and keys: one call of a backend.

    Attributes:
        queries: (G, n) rows of q, by flat number or by number in a selection; no row occurs twice.
        keys: (G, m) numbers in the store; if `distinct`, no row occurs twice.
        band: as in `RowRequest`.
    """

    branch: int
    causal: bool
    pads: int
    queries: Tensor
    keys: Tensor
    requests: list[RowRequest]
    distinct: bool = False
    band: tuple[int, int] | None = None

    def to(self, device: torch.device) -> Batch:
        return replace(self, queries=send(self.queries, device), keys=send(self.keys, device))

    def positions(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return global (sample (G,), head (G,), query position (G, n), key position (G, m)), for dropout."""
        pairs = [(x, sample) for x in self.requests for sample in range(x.document.samples)]
        sample = torch.tensor([x.document.sample + i for x, i in pairs])
        head = torch.tensor([x.head for x, _ in pairs])
        queries = expand((x.queries.start, x.queries.step, len(x.queries)) for x, _ in pairs)
        keys = expand((rows.start, rows.step, len(rows)) for x, _ in pairs for rows in x.keys)
        return sample, head, queries.view(len(pairs), -1), keys.view(len(pairs), -1)


def batches(
    problem: Problem, requests: Iterable[RowRequest], queries: LocalRows | ReceivedRows, store: ReceivedRows
) -> list[Batch]:
    """Group requests into batches, one call of a backend each."""
    groups: dict[tuple[object, ...], list[RowRequest]] = {}
    for x in requests:
        shape = (x.branch, x.slot, x.causal, x.pads, x.band, len(x.queries), sum(map(len, x.keys)))
        groups.setdefault(shape, []).append(x)
    return [_batch(problem, group, queries, store) for group in groups.values()]


def _batch(problem: Problem, group: list[RowRequest], queries: LocalRows | ReceivedRows, store: ReceivedRows) -> Batch:
    first = group[0]
    query_numbers = _numbers(queries, ((x, x.head, [x.queries]) for x in group))
    key_numbers = _numbers(store, ((x, x.head // problem.group, x.keys) for x in group))
    count = sum(x.document.samples for x in group)
    return Batch(
        branch=first.branch,
        causal=first.causal,
        pads=first.pads,
        queries=query_numbers.view(count, -1),
        keys=key_numbers.view(count, -1),
        requests=group,
        distinct=_distinct(key_numbers, store.size),
        band=first.band,
    )


def _distinct(numbers: Tensor, size: int) -> bool:
    """Return True if no number occurs twice; all numbers are below `size`."""
    named = np.zeros(size, dtype=bool)
    named[numbers.numpy()] = True
    return int(np.count_nonzero(named)) == len(numbers)


def _numbers(source: LocalRows | ReceivedRows, requested: Iterable[tuple[RowRequest, int, Iterable[range]]]) -> Tensor:
    """Return the numbers in `source` of the requested rows, in order; `source` must have each row exactly once."""
    runs: tuple[list[Progression], list[Progression]] = [], []
    single: tuple[list[np.ndarray], list[np.ndarray]] = [], []  # indices and row numbers of carried rows
    find, carried = source.find, None
    if isinstance(source, ReceivedRows):
        find, carried = source.find_received, source.carried
    base = 0
    for request, head, ranges in requested:
        for sample in range(request.document.samples):
            for rows in ranges:
                if carried is not None:
                    at, numbers = carried.find(request.document, head, rows, sample)
                    single[0].append(at + base)
                    single[1].append(numbers)
                for (start, step, n), run in find(request.document, head, rows, sample):
                    runs[0].append((base + start, step, n))
                    runs[1].append(run)
                base += len(rows)
    out = torch.full((base,), -1, dtype=torch.int64)
    parts = [torch.cat([expand(x), *map(torch.from_numpy, y)]) for x, y in zip(runs, single, strict=True)]
    out[parts[0]] = parts[1]
    assert len(parts[0]) == base and (out >= 0).all(), "a requested row was not received"
    return out


# -- moving rows -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Rows:
    """A selection of n distinct rows of a rank's (B, L, J, D) tensors, as (n,) int64 tensors.

    Attributes:
        at: sample, token and head of each row.
        flat, transposed: row numbers in memory order (B, L, J), and in order (B, J, L). Indexing by one tensor launches
            faster than indexing by three.
    """

    at: tuple[Tensor, Tensor, Tensor]
    flat: Tensor
    transposed: Tensor

    @classmethod
    def of(cls, flat: Tensor, length: int, heads: int) -> Rows:
        sample, token, head = at = flat // (heads * length), flat // heads % length, flat % heads
        return cls(at, flat, (sample * heads + head) * length + token)

    def to(self, device: torch.device) -> Rows:
        sample, token, head = (send(x, device) for x in self.at)
        return Rows((sample, token, head), send(self.flat, device), send(self.transposed, device))

    def take(self, x: Tensor) -> Tensor:
        """Return the rows (n, ...) of a (B, L, J, ...) tensor of any strides."""
        flat = self._flattened(x)
        return x[self.at] if flat is None else flat[0].index_select(0, flat[1])

    def put(self, x: Tensor, values: Tensor) -> None:
        """Write values (n, ...) to the selected rows of x, rounded to x's dtype."""
        flat, values = self._flattened(x), values.to(x.dtype)
        if flat is None:
            x[self.at] = values
        else:
            flat[0].index_copy_(0, flat[1], values)

    def _flattened(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return (x with its rows in one dimension, row numbers in it), or None if strides do not allow this view."""
        if x.is_contiguous():
            return x.flatten(0, 2), self.flat
        transposed = x.transpose(1, 2)
        return (transposed.flatten(0, 2), self.transposed) if transposed.is_contiguous() else None


def add_rows(rows: Rows | None, x: Tensor, values: Tensor) -> None:
    """Add values (n, D) to rows (None: all) of x (B, L, J, D) in the dtype of `values`; round to x's dtype once."""
    if rows is None:
        x.copy_(x.to(values.dtype) + values.view(x.shape))
    else:
        rows.put(x, rows.take(x).to(values.dtype) + values)


#: if a selection is larger than this share of a tensor's rows, all rows are used
MAX_SELECTED_SHARE = 0.25


def select_rows(numbers: Sequence[Tensor], total: int, length: int, heads: int) -> tuple[Rows | None, list[Tensor]]:
    """Return a selection of the rows `numbers`, and their numbers in the selection; (None, `numbers`) for too many rows.

    The limit is `MAX_SELECTED_SHARE`. With a selection, only these rows need an fp32 copy, not the whole tensor.
    """
    flat, inverse = torch.unique(
        torch.cat([x.flatten() for x in numbers] or [torch.empty(0, dtype=torch.int64)]), return_inverse=True
    )
    if len(flat) > MAX_SELECTED_SHARE * total:
        return None, list(numbers)
    parts = inverse.split([x.numel() for x in numbers]) if numbers else []
    return Rows.of(flat, length, heads), [part.view(x.shape) for part, x in zip(parts, numbers, strict=True)]


def take(x: Tensor, rows: Tensor) -> Tensor:
    """Return rows (..., D) of a (B, L, heads, D) tensor of any strides, by flat numbers."""
    if _use_kernel(x, rows):
        out = x.new_empty(*rows.shape, x.shape[3])
        _kernel().pick([x], rows.contiguous(), None, [out.view(-1, x.shape[3])])
        return out
    if x.is_contiguous():
        return x.view(-1, x.shape[-1])[rows]
    heads, length = x.shape[2], x.shape[1]
    return x[rows // (heads * length), rows // heads % length, rows % heads]


def take_apart(store: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and second halves, (..., D) each, of rows of an (n, 2, D) store.

    On a GPU, many rows are copied to separate memory, because causal cuDNN is a third slower if K and V interleave.
    """
    if not _use_kernel(store, rows):
        return store[rows].unbind(-2)
    out = store.new_empty(2, *rows.shape, store.shape[2])
    halves = [store[None, :, None, i] for i in range(2)]
    _kernel().pick(halves, rows, None, list(out.view(2, -1, store.shape[2])))
    return out[0], out[1]


def pair(a: Tensor, b: Tensor, rows: Tensor) -> Tensor:
    """Return rows of two tensors side by side, (n, 2, D)."""
    if not _kernel_takes_both(a, b):
        return torch.stack([take(a, rows), take(b, rows)], 1)
    buffer = a.new_empty(len(rows), 2, a.shape[3])
    pack_rows(a, b, rows, None, buffer)
    return buffer


def pack_rows(a: Tensor, b: Tensor, rows: Tensor, at: Tensor | None, buffer: Tensor) -> None:
    """Write (a[rows], b[rows]) to buffer[at], or to its first rows if `at` is None; buffer is (n, 2, D)."""
    if _kernel_takes_both(a, b):
        return _kernel().pick([a, b], rows, at, buffer.unbind(1))
    for i, x in enumerate((a, b)):
        buffer[slice(len(rows)) if at is None else at, i] = take(x, rows)


def add_at(total: Tensor, rows: Tensor, parts: Sequence[Tensor], distinct: bool = False) -> None:
    """Add one part (G, n, D) to rows of `total` (m, D), or two parts to (m, 2, D), rounded to `total`'s dtype.

    `rows` (G, n) are row numbers; `distinct`: no number occurs twice.
    """
    # the kernel adds to a repeated row in arbitrary order
    ordered = not distinct and torch.are_deterministic_algorithms_enabled()
    if not ordered and total.is_contiguous() and _use_kernel(total, rows) and all(x.stride(-1) == 1 for x in parts):
        return _kernel().add(total.unbind(1) if len(parts) == 2 else [total], rows.contiguous(), parts, distinct)
    flat = [x.flatten(0, 1).to(total.dtype) for x in parts]
    total.index_add_(0, rows.flatten(), torch.stack(flat, 1) if len(parts) == 2 else flat[0])


#: minimum number of rows that our kernels move; for fewer rows, torch's kernels are launched in less host time
MIN_KERNEL_ROWS = 2**17


def _use_kernel(x: Tensor, rows: Tensor) -> bool:
    return rows.numel() >= MIN_KERNEL_ROWS and _kernel_takes(x)


def _kernel_takes(x: Tensor) -> bool:
    return x.stride(-1) == 1 and x.dtype != torch.float64 and kernels.available(x.device)


def _kernel_takes_both(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and _kernel_takes(a) and _kernel_takes(b)


def _kernel() -> ModuleType:
    from lightning_dilated.kernels import rows

    return rows
