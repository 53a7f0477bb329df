"""Runs a program: sends and receives rows, and in the backward sends their gradients to the owners.

Besides the rows of its k and v, a rank may carry rows of earlier chunks. They are the first rows of its store; requests
and messages read them there.

The attention op starts a run, computes its local blocks, and then iterates over the arrivals. An arrival contains the
batches of requests that can now be computed, and the rows that they read. This module imports no backend.

Shape letters: B samples, L local tokens, K kv heads, D head dim; a row is (2, D): K and V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from lightning_dilated._device import send
from lightning_dilated.sequence.exchange.program import Program, Round
from lightning_dilated.sequence.exchange.row_ops import (
    Batch,
    CarriedRange,
    LocalRows,
    Packing,
    ReceivedRows,
    Rows,
    add_at,
    add_rows,
    batches,
    pack_rows,
    select_rows,
)
from lightning_dilated.sequence.exchange.transport import Posted, Wire, abandon, rejoin, side_stream
from lightning_dilated.sequence.requirements import Problem, RowRequest, row_requests


@dataclass
class GradientReturn:
    """A round's gradients on the way back: `leaving` are sent; received gradients are added to rows of `packing`."""

    leaving: Tensor | slice
    sends: dict[int, int]
    receives: dict[int, int]
    packing: Packing

    def to(self, device: torch.device) -> GradientReturn:
        leaving = self.leaving if isinstance(self.leaving, slice) else send(self.leaving, device)
        return replace(self, leaving=leaving, packing=self.packing.to(device))


@dataclass
class CompiledRound:
    """One round with its indices; its rows are at [start, stop) of the store, or of the round's buffer (ring)."""

    packing: Packing
    sends: dict[int, int]
    receives: dict[int, int]
    start: int
    stop: int
    batches: list[Batch]
    gradients: GradientReturn

    def to(self, device: torch.device) -> CompiledRound:
        moved = [batch.to(device) for batch in self.batches]
        return replace(self, packing=self.packing.to(device), batches=moved, gradients=self.gradients.to(device))


@dataclass
class Compiled:
    """A program with its indices on a device.

    Attributes:
        size: rows of the store; 0 without `keep`.
        keep: whether the rows that arrive are saved for the backward.
        queries: rows of q that batches refer to; None means all rows, by flat number.
        keys: own rows of K and V that receive gradients; None means all rows, by flat number.
        carried: number of carried rows, the first rows of the store.
        ready: batches of a program without rounds; they read carried rows only.
    """

    rounds: list[CompiledRound]
    size: int
    keep: bool
    queries: Rows | None = None
    keys: Rows | None = None
    carried: int = 0
    ready: list[Batch] = field(default_factory=list)

    @property
    def batches(self) -> list[Batch]:
        return [*self.ready, *(batch for step in self.rounds for batch in step.batches)]


def compile_program(
    problem: Problem, rank: int, program: Program, device: torch.device, carried: Sequence[CarriedRange] = ()
) -> Compiled:
    """Compile a program to indices, and assign requests to rounds. `carried`: rows besides the rows of k and v."""
    pieces = problem.shard.ranges(rank)
    queries, own = LocalRows(pieces, problem.heads), LocalRows(pieces, problem.kv_heads)
    store = ReceivedRows.after(carried)
    num_carried, waiting, rounds = store.size, list(row_requests(problem, rank)), []
    first = [] if program.rounds else batches(problem, waiting, queries, store)
    for number, step in enumerate(program.rounds):
        packing = Packing.of([rows for message in step.sends.values() for rows in message], own, store)
        store = store if program.keep else ReceivedRows()
        start = store.size
        for message in step.receives.values():
            store.add(message)
        if program.keep:
            last = number == len(program.rounds) - 1
            ready = {x: None for x in waiting if last or _covered(problem, x, store)}
            waiting = [x for x in waiting if x not in ready]
            gradients = GradientReturn(slice(start, store.size), *step.counts[::-1], packing)
        else:
            ready = _from_source(problem, waiting, rank, number)
            gradients = _direct_return(program.returns[number], own, store)
        joined = batches(problem, ready, queries, store)
        rounds.append(CompiledRound(packing, *step.counts, start, store.size, joined, gradients))
    compiled = Compiled(rounds, store.size if program.keep else 0, program.keep, carried=num_carried, ready=first)
    return _renumbered(compiled, problem, queries, own, device)


def _renumbered(
    compiled: Compiled, problem: Problem, queries: LocalRows, own: LocalRows, device: torch.device
) -> Compiled:
    """Copy indices to a device. If few rows are used, replace row numbers by numbers within the used rows."""
    samples = max((d.sample + d.samples for d in problem.documents), default=0)
    sizes = lambda x: (samples * x.length * (x.heads[1] - x.heads[0]), x.length, x.heads[1] - x.heads[0])  # noqa: E731
    query_rows, numbers = select_rows([b.queries for b in compiled.batches], *sizes(queries))
    key_rows, key_numbers = select_rows([x.gradients.packing.own for x in compiled.rounds], *sizes(own))
    query_numbers, rounds = iter(numbers), []
    ready = [replace(batch, queries=next(query_numbers)).to(device) for batch in compiled.ready]
    for step, keys in zip(compiled.rounds, key_numbers, strict=True):
        moved = [replace(batch, queries=next(query_numbers)) for batch in step.batches]
        gradients = replace(step.gradients, packing=replace(step.gradients.packing, own=keys))
        rounds.append(replace(step, batches=moved, gradients=gradients).to(device))
    selected = [None if x is None else x.to(device) for x in (query_rows, key_rows)]
    return replace(compiled, rounds=rounds, ready=ready, queries=selected[0], keys=selected[1])


def _direct_return(step: Round, own: LocalRows, store: ReceivedRows) -> GradientReturn:
    """Compile one backward round: send gradients of rows that this rank used, receive gradients of its own rows."""
    leaving = Packing.of([x for message in step.sends.values() for x in message], LocalRows((), own.heads), store)
    arriving = Packing.of([x for message in step.receives.values() for x in message], own, ReceivedRows())
    rows = torch.empty_like(leaving.store)
    rows[leaving.store_at] = leaving.store
    return GradientReturn(rows, *step.counts, arriving)


def _covered(problem: Problem, request: RowRequest, store: ReceivedRows) -> bool:
    kv_head = request.head // problem.group
    runs = (x for rows in request.keys for x in store.find(request.document, kv_head, rows, 0))
    return sum(numbers[2] for _, numbers in runs) == sum(map(len, request.keys))


def _from_source(problem: Problem, requests: list[RowRequest], rank: int, hops: int) -> list[RowRequest]:
    """Limit requests to keys of the rank `hops` places before this rank. Keep zero pads only for own keys."""
    held = problem.shard.ranges((rank - hops) % problem.shard.ranks)
    return [replace(part, pads=0 if hops else part.pads) for request in requests for part in request.cut(held)]


@dataclass
class Arrival:
    """Batches that can be computed now, the rows (n, 2, D) that they read and, in the backward, sums for gradients."""

    batches: list[Batch]
    rows: Tensor | None
    grads: Tensor | None = None

    def free(self) -> None:
        """Release the tensors even if a caller still refers to the arrival."""
        self.rows = self.grads = None


class Run:
    """Rows of one call in transit. Create a run before the local work, and iterate over its arrivals afterwards.

    On a GPU, a program that saves rows posts all rounds at once, on a separate stream that overlaps with local work.

    Args:
        wire: None for a program without rounds.
        k, v: (B, L, K, D), the rows of this rank.
        kept: for the backward, the rows that the forward saved; they are not moved again.
        carried: (n, 2, D), the rows that the store begins with.
    """

    def __init__(
        self,
        compiled: Compiled,
        wire: Wire | None,
        k: Tensor,
        v: Tensor,
        kept: Tensor | None = None,
        carried: Tensor | None = None,
    ):
        self.compiled, self.wire, self.k, self.v = compiled, wire, k, v
        arrived = None if kept is None else kept.view(-1, 2, k.shape[3])
        self.rows = self._store(k.new_empty, carried, arrived)
        self._posted: list[Posted | None] = []
        self._ahead = compiled.keep and k.device.type == "cuda"
        if kept is None and compiled.rounds:
            self._begin()

    def _store(self, make: Callable[..., Tensor], carried: Tensor | None, arrived: Tensor | None = None) -> Tensor:
        """Return (size, 2, D): carried rows, then arrived rows or memory for them; copy only if both parts have rows."""
        if carried is None:
            return make((self.compiled.size, 2, self.k.shape[3])) if arrived is None else arrived
        if self.compiled.size == len(carried):
            return carried
        store = make((self.compiled.size, 2, self.k.shape[3]))
        store[: len(carried)] = carried
        if arrived is not None:
            store[len(carried) :] = arrived
        return store

    @property
    def received(self) -> Tensor | None:
        """The rows that arrived, (n, D), for the backward; None without rounds."""
        if not self.compiled.rounds:
            return None
        rows = self.rows[self.compiled.carried :]
        return (rows.clone() if self.compiled.carried else rows).flatten(0, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *about: object) -> None:
        if kind is not None and self.compiled.rounds:
            abandon(self.k.device, self._in_flight())

    def _in_flight(self) -> list[Posted]:
        return [posted for posted in self._posted if posted is not None]

    def _begin(self) -> None:
        """Post all rounds if `_ahead`; else the first, or two if the first only copies the rank's own rows (ring)."""
        rounds = self.compiled.rounds
        copied = (
            len(rounds) > 1 and not (rounds[0].receives.keys() - {self.wire.rank}) and not len(rounds[1].packing.store)
        )
        numbers = range(len(rounds) if self._ahead else 1 + copied)
        buffers = [self._send_buffer(number) for number in numbers]
        with side_stream(self.k.device):
            for number in numbers:
                if number and self._ahead:
                    self._posted[-1].follow()
                self._post(number, self.rows, buffers[number])

    def _send_buffer(self, number: int) -> Tensor:
        return self.k.new_empty(sum(self.compiled.rounds[number].sends.values()), 2, self.k.shape[3])

    def _post(self, number: int, before: Tensor, buffer: Tensor) -> None:
        """Send the rows of a round; `before` holds the rows of earlier rounds."""
        step = self.compiled.rounds[number]
        pack = step.packing
        pack_rows(self.k, self.v, pack.own, pack.own_at, buffer)
        if len(pack.store):
            buffer[pack.store_at] = before[pack.store]
        into = self.rows[step.start : step.stop] if self.compiled.keep else None
        self._posted.append(self.wire.post(buffer, step.sends, step.receives, into))

    def arrivals(self) -> Iterator[Arrival]:
        """Yield batches that need no arrival, then the rounds in order; the next round is in transit meanwhile."""
        if self.compiled.ready:
            yield Arrival(self.compiled.ready, self.rows)
        for number, step in enumerate(self.compiled.rounds):
            arrived = self._posted[number].wait()
            rows = self.rows if self.compiled.keep else arrived
            if number + 1 == len(self._posted) < len(self.compiled.rounds):
                self._post(number + 1, rows, self._send_buffer(number + 1))
            arrival = Arrival(step.batches, rows)
            if not self.compiled.keep:  # a later round reuses the memory of these rows
                self._posted[number] = arrived = rows = None
            yield arrival
            if not self.compiled.keep:
                arrival.free()


class BackwardRun(Run):
    """The backward of a call: arrivals include sums of gradients, and `finish` adds gradients of own rows to dk and dv.

    Args:
        wide: the dtype of gradients in transit and of their sums.
        carried: the rows that the store begins with, and their gradients, to which `finish` adds.
    """

    def __init__(
        self,
        compiled: Compiled,
        wire: Wire | None,
        k: Tensor,
        v: Tensor,
        kept: Tensor | None,
        wide: torch.dtype,
        carried: tuple[Tensor, Tensor] | None = None,
    ):
        rows, self._carried = (None, None) if carried is None else carried
        super().__init__(compiled, wire, k, v, kept if compiled.keep and compiled.rounds else None, rows)
        self._wide = wide
        self._returning: list[tuple[int, Posted]] = []
        self._grads: Tensor | None = None
        rows = k.shape[:3].numel() if compiled.keys is None else len(compiled.keys.at[0])
        self._sum = torch.zeros(rows, 2, k.shape[3], dtype=wide, device=k.device)

    def arrivals(self) -> Iterator[Arrival]:
        """Yield one arrival with all batches if the rows were saved; otherwise (ring) one arrival for each round."""
        if self.compiled.keep:
            self._grads = self._store(self._sum.new_zeros, self._carried)
            yield Arrival(self.compiled.batches, self.rows, self._grads)
            if self.compiled.rounds:
                self._return_all()
            return
        for number, arrival in enumerate(super().arrivals()):
            arrival.grads = self._zeros(arrival.rows)
            yield arrival
            self._return(number, arrival.grads, self._receive_buffer(number))
            self._collect(leave=1)

    def _in_flight(self) -> list[Posted]:
        return [*super()._in_flight(), *(posted for _, posted in self._returning)]

    def _zeros(self, rows: Tensor) -> Tensor:
        return torch.zeros(rows.shape, dtype=self._wide, device=rows.device)

    def _receive_buffer(self, number: int) -> Tensor:
        """Allocate memory for the gradients that arrive in a round."""
        return self._sum.new_empty(sum(self.compiled.rounds[number].gradients.receives.values()), *self._sum.shape[1:])

    def _return_all(self) -> None:
        """Send back the gradients of all rounds, last first; on a GPU this overlaps with later computation."""
        rounds = range(len(self.compiled.rounds))
        self._buffers = [self._receive_buffer(number) for number in (rounds if self._ahead else rounds[-1:])]
        with side_stream(self.k.device):
            self._return(rounds[-1], self._grads, self._buffers[-1])
            if self._ahead:
                self._collect()

    def _return(self, number: int, grads: Tensor, buffer: Tensor) -> None:
        gradients = self.compiled.rounds[number].gradients
        posted = self.wire.post(grads[gradients.leaving], gradients.sends, gradients.receives, buffer, "gradients")
        self._returning.append((number, posted))

    def _collect(self, leave: int = 0) -> None:
        """Add gradients of all returning rounds except the last `leave`; pass gradients of relayed rows on."""
        while len(self._returning) > leave:
            number, posted = self._returning.pop(0)
            arrived = (posted.follow if self._ahead else posted.wait)()
            pack = self.compiled.rounds[number].gradients.packing
            own = arrived if pack.own_at is None else arrived[pack.own_at]
            add_at(self._sum, pack.own[None], _halves(own))
            if len(pack.store):
                add_at(self._grads, pack.store[None], _halves(arrived[pack.store_at]))
            if self.compiled.keep and number:
                buffer = self._buffers[number - 1] if self._ahead else self._receive_buffer(number - 1)
                self._return(number - 1, self._grads, buffer)

    def finish(self, dk: Tensor, dv: Tensor) -> None:
        """Add the gradients of this rank's rows to dk and dv, and gradients of carried rows to their sum."""
        if not self.compiled.rounds:  # only carried rows were read
            return
        self._collect()
        rejoin(self.k.device, self.wire.traffic, "gradients")
        add_rows(self.compiled.keys, dk, self._sum[:, 0])
        add_rows(self.compiled.keys, dv, self._sum[:, 1])
        if self._carried is not None:
            self._carried.copy_(self._grads[: len(self._carried)])


def _halves(rows: Tensor) -> tuple[Tensor, ...]:
    """Split rows (n, 2, D) into halves (1, n, D)."""
    return rows[None].unbind(2)
