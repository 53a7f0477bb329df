"""From ranges to index tensors: where the rows of messages lie, and which rows each batch of equal wants reads.

Rows are numbered as in a contiguous (B, L, heads) tensor ("flat"). B samples, L local tokens.

Rows of (B, L, heads, D) tensors by their flat numbers, one by one or two side by side.

Shape letters: B samples, L local tokens, D head dim.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch
from torch import Tensor

from lightning_dilated import kernels
from lightning_dilated.sequence.exchange.program import Message, Piece
from lightning_dilated.sequence.ranges import intersect, remove
from lightning_dilated.sequence.requirements import Document, Problem, Want

#: start, step, count of one run of numbers
Run = tuple[int, int, int]


def expand(runs: Iterable[Run]) -> Tensor:
    """All numbers of the runs, one after another, int64."""
    start, step, count = torch.tensor(list(runs), dtype=torch.int64).view(-1, 3).unbind(1)
    before = torch.repeat_interleave(count.cumsum(0) - count, count)
    within = torch.arange(int(count.sum())) - before
    return torch.repeat_interleave(start, count) + torch.repeat_interleave(step, count) * within


def _overlap(rows: range, other: range) -> tuple[Run, Run] | None:
    """Where the elements of both lie in `rows` and in `other`."""
    both = intersect(rows, other)
    if not both:
        return None
    at = lambda x: ((both.start - x.start) // x.step, both.step // x.step, len(both))  # noqa: E731
    return at(rows), at(other)


@dataclass
class Own:
    """The rows of a rank's own (B, L, heads, D) tensor, of the heads [first, stop)."""

    pieces: tuple[range, ...]
    heads: tuple[int, int]

    @property
    def length(self) -> int:
        """L."""
        return sum(map(len, self.pieces))

    def find(self, document: Document, head: int, rows: range, sample: int) -> Iterator[tuple[Run, Run]]:
        """(where in `rows`, flat number) of those of `rows` that the rank holds."""
        count, start = self.heads[1] - self.heads[0], 0
        for piece in self.pieces:
            found = _overlap(rows, piece)
            if found:
                inside, (first, step, n) = found
                row = (document.sample + sample) * self.length + start + first
                yield inside, (row * count + head - self.heads[0], step * count, n)
            start += len(piece)


class Places:
    """Disjoint ranges of rows, each with the number of its first row in a store; by steps and residues, so that those which
    share rows with another range are found without looking at all."""

    def __init__(self) -> None:
        self._of_step: dict[int, dict[int, list[tuple[range, int]]]] = {}
        self._sorted = True

    def add(self, rows: range, number: int) -> None:
        """Note a range that is not empty."""
        residues = self._of_step.setdefault(rows.step, {})
        residues.setdefault(rows.start % rows.step, []).append((rows, number))
        self._sorted = False

    def sharing(self, rows: range) -> Iterator[tuple[range, int]]:
        """Those that may share elements with `rows`."""
        if not self._sorted:
            for residues in self._of_step.values():
                for places in residues.values():
                    places.sort(key=_start)
            self._sorted = True
        for step, residues in self._of_step.items():
            common = math.gcd(step, rows.step)
            if step // common < len(residues):
                lanes = (residues.get(x, ()) for x in range(rows.start % common, step, common))
            else:
                lanes = (places for x, places in residues.items() if (x - rows.start) % common == 0)
            for places in lanes:
                # disjoint ranges of one step and residue do not interleave
                at = max(0, bisect.bisect_right(places, rows.start, key=_start) - 1)
                while at < len(places) and places[at][0].start < rows.stop:
                    yield places[at]
                    at += 1


def _start(place: tuple[range, int]) -> int:
    return place[0].start


@dataclass
class Store:
    """Received rows, piece after piece; a piece holds its samples one after another."""

    size: int = 0
    places: dict[tuple[Document, int], Places] = field(default_factory=dict)

    def add(self, message: Message) -> None:
        """Make room for a message behind what there is."""
        for piece in message:
            self.places.setdefault((piece.document, piece.head), Places()).add(piece.rows, self.size)
            self.size += len(piece)

    def find(self, document: Document, head: int, rows: range, sample: int) -> Iterator[tuple[Run, Run]]:
        """(where in `rows`, number in the store) of those of `rows` that were received."""
        places = self.places.get((document, head))
        for piece, start in places.sharing(rows) if places else ():
            found = _overlap(rows, piece)
            if found:
                inside, (first, step, n) = found
                yield inside, (start + sample * len(piece) + first, step, n)


@dataclass
class Packing:
    """How a send buffer is filled: buffer[own_at] = own rows [own], buffer[store_at] = received rows [store].

    Without `own_at` it is filled row after row.
    """

    own: Tensor
    own_at: Tensor | None
    store: Tensor
    store_at: Tensor

    @classmethod
    def of(cls, pieces: Iterable[Piece], own: Own, store: Store) -> Packing:
        """For the pieces of all messages of a round, in the order of the peers."""
        runs: dict[str, list[Run]] = {"own": [], "own_at": [], "store": [], "store_at": []}
        base = 0
        for piece in pieces:
            relayed = remove([piece.rows], own.pieces)
            for sample in range(piece.document.samples):
                missing = len(piece.rows)
                for name, source, rows in (("own", own, [piece.rows]), ("store", store, relayed)):
                    for part in rows:
                        begin, stride = (part.start - piece.rows.start) // piece.rows.step, part.step // piece.rows.step
                        for (first, step, n), there in source.find(piece.document, piece.head, part, sample):
                            runs[f"{name}_at"].append((base + begin + stride * first, stride * step, n))
                            runs[name].append(there)
                            missing -= n
                assert missing == 0, f"{missing} rows of {piece} are not held where they are sent from"
                base += len(piece.rows)
        found = {name: expand(x) for name, x in runs.items()}
        if torch.equal(found["own_at"], torch.arange(base)):
            found["own_at"] = None
        return cls(**found)

    def to(self, device: torch.device) -> Packing:
        """The same on a device."""
        at = None if self.own_at is None else self.own_at.to(device)
        return Packing(self.own.to(device), at, self.store.to(device), self.store_at.to(device))


@dataclass
class Batch:
    """Wants of one branch with as many queries and keys each: one engine call.

    queries (G, n) are numbers in the queries' tensor (flat, or among some of its rows), keys (G, m) numbers in the store; no
    query row occurs twice, and no row of the store where the keys are `distinct`.
    """

    branch: int
    causal: bool
    pads: int
    queries: Tensor
    keys: Tensor
    wants: list[Want]
    distinct: bool = False

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return replace(self, queries=self.queries.to(device), keys=self.keys.to(device))

    def positions(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(sample (G,), head (G,), query position (G, n), key position (G, m)), global, for dropout."""
        each = [(want, sample) for want in self.wants for sample in range(want.document.samples)]
        sample = torch.tensor([want.document.sample + i for want, i in each])
        head = torch.tensor([want.head for want, _ in each])
        queries = expand((w.queries.start, w.queries.step, len(w.queries)) for w, _ in each)
        keys = expand((x.start, x.step, len(x)) for w, _ in each for x in w.keys)
        return sample, head, queries.view(len(each), -1), keys.view(len(each), -1)


def batches(problem: Problem, wants: Iterable[Want], queries: Own | Store, store: Store) -> list[Batch]:
    """The wants, joined where one engine call serves several."""
    groups: dict[tuple[int, ...], list[Want]] = {}
    for want in wants:
        shape = (want.branch, want.slot, want.causal, want.pads, len(want.queries), sum(map(len, want.keys)))
        groups.setdefault(shape, []).append(want)
    return [_batch(problem, group, queries, store) for group in groups.values()]


def _batch(problem: Problem, group: list[Want], queries: Own | Store, store: Store) -> Batch:
    first = group[0]
    query_at: list[Run] = []
    rows: list[Run] = []
    key_at: list[Run] = []
    keys: list[Run] = []
    q_base = k_base = 0
    for want in group:
        for sample in range(want.document.samples):
            for (start, step, n), there in queries.find(want.document, want.head, want.queries, sample):
                query_at.append((q_base + start, step, n))
                rows.append(there)
            q_base += len(want.queries)
            for wanted in want.keys:
                for (start, step, n), there in store.find(want.document, want.head // problem.group, wanted, sample):
                    key_at.append((k_base + start, step, n))
                    keys.append(there)
                k_base += len(wanted)
    count = sum(want.document.samples for want in group)
    read = _placed(key_at, keys, k_base)
    return Batch(
        branch=first.branch,
        causal=first.causal,
        pads=first.pads,
        queries=_placed(query_at, rows, q_base).view(count, -1),
        keys=read.view(count, -1),
        wants=group,
        distinct=int(torch.zeros(store.size, dtype=torch.bool).index_fill_(0, read, True).sum()) == len(read),
    )


def _placed(at: list[Run], values: list[Run], total: int) -> Tensor:
    """`values` at the places `at`; every one of `total` places is taken exactly once."""
    out = torch.full((total,), -1, dtype=torch.int64)
    places = expand(at)
    out[places] = expand(values)
    assert len(places) == total and (out >= 0).all(), "a row is wanted that was not received"
    return out


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
