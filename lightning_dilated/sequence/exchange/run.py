"""Running a program: rows leave, arrive, are used, and their gradients go home the same way.

The attention op drives it: it starts a run, computes what needs no other rank, then takes arrivals as they come. An arrival
holds the batches of wants that have become computable and the rows they read; no engine is imported here.
Shape letters: B samples, L local tokens, K kv heads, D head dim; a row is (2, D): K and V.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from lightning_dilated.sequence.exchange.program import Program, Round, count
from lightning_dilated.sequence.exchange.row_ops import (
    Batch,
    Own,
    Packing,
    Rows,
    Store,
    add_at,
    add_rows,
    batches,
    numbered,
    pack_rows,
)
from lightning_dilated.sequence.exchange.transport import Posted, Wire, abandon, beside, rejoin
from lightning_dilated.sequence.ranges import intersect
from lightning_dilated.sequence.requirements import Problem, Want, wants


@dataclass
class Step:
    """One round with its indices: its rows lie at [start, stop) of the store, or of the round's own buffer (ring)."""

    packing: Packing
    sends: dict[int, int]
    receives: dict[int, int]
    start: int
    stop: int
    batches: list[Batch]
    home: Home

    def to(self, device: torch.device) -> Step:
        """The same on a device."""
        found = [batch.to(device) for batch in self.batches]
        return replace(self, packing=self.packing.to(device), batches=found, home=self.home.to(device))


@dataclass
class Home:
    """How the gradients of a round's rows go home: those of the rows `leaving`, added at the places of `packing`."""

    leaving: Tensor | slice
    sends: dict[int, int]
    receives: dict[int, int]
    packing: Packing

    def to(self, device: torch.device) -> Home:
        """The same on a device."""
        leaving = self.leaving if isinstance(self.leaving, slice) else self.leaving.to(device)
        return replace(self, leaving=leaving, packing=self.packing.to(device))


@dataclass
class Compiled:
    """A program with its indices on a device; `size` rows are kept for the backward.

    Attributes:
        queries: the rows of q that batches number; None: all, by their flat numbers.
        keys: the rank's own rows of K and V whose gradients come home, likewise.
    """

    steps: list[Step]
    size: int
    keep: bool
    queries: Rows | None = None
    keys: Rows | None = None


def compile_program(problem: Problem, rank: int, program: Program, device: torch.device) -> Compiled:
    """The indices of a rank's program, and its wants dealt to the rounds after which they can be computed."""
    pieces = problem.shard.ranges(rank)
    queries, own, store = Own(pieces, problem.heads), Own(pieces, problem.kv_heads), Store()
    waiting = list(wants(problem, rank))
    steps = []
    for number, step in enumerate(program.rounds):
        packing = Packing.of([p for message in step.sends.values() for p in message], own, store)
        store = store if program.keep else Store()
        start = store.size
        for message in step.receives.values():
            store.add(message)
        if program.keep:
            ready = {w: None for w in waiting if _covered(problem, w, store)}
            waiting = [w for w in waiting if w not in ready]
            home = Home(slice(start, store.size), *_counts(step)[::-1], packing)
        else:
            ready = _of_source(problem, waiting, rank, number)
            home = _home(program.returns[number], own, store)
        found = batches(problem, ready, queries, store)
        steps.append(Step(packing, *_counts(step), start, store.size, found, home))
    assert not program.keep or not waiting, f"rank {rank} never received the rows of {waiting[0]}"
    compiled = Compiled(steps, store.size if program.keep else 0, program.keep)
    return _renumbered(compiled, problem, queries, own, device)


def _renumbered(compiled: Compiled, problem: Problem, queries: Own, own: Own, device: torch.device) -> Compiled:
    """The same on a device, with rows numbered among those that anything is done with, where these are few."""
    samples = max((d.sample + d.samples for d in problem.documents), default=0)
    sizes = lambda x: (samples * x.length * (x.heads[1] - x.heads[0]), x.length, x.heads[1] - x.heads[0])  # noqa: E731
    some, at = numbered([b.queries for step in compiled.steps for b in step.batches], *sizes(queries))
    keys, home_at = numbered([step.home.packing.own for step in compiled.steps], *sizes(own))
    at, steps = iter(at), []
    for step, mine in zip(compiled.steps, home_at, strict=True):
        found = [replace(batch, queries=next(at)) for batch in step.batches]
        home = replace(step.home, packing=replace(step.home.packing, own=mine))
        steps.append(replace(step, batches=found, home=home).to(device))
    moved = [None if x is None else x.to(device) for x in (some, keys)]
    return replace(compiled, steps=steps, queries=moved[0], keys=moved[1])


def _counts(step: Round) -> tuple[dict[int, int], dict[int, int]]:
    return {p: count(m) for p, m in step.sends.items()}, {p: count(m) for p, m in step.receives.items()}


def _home(step: Round, own: Own, store: Store) -> Home:
    """A way back of its own: the rows that this rank used, and its own rows that others did."""
    leaving = Packing.of([p for message in step.sends.values() for p in message], Own((), own.heads), store)
    arriving = Packing.of([p for message in step.receives.values() for p in message], own, Store())
    rows = torch.empty_like(leaving.store)
    rows[leaving.store_at] = leaving.store
    return Home(rows, *_counts(step), arriving)


def _covered(problem: Problem, want: Want, store: Store) -> bool:
    found = (x for rows in want.keys for x in store.find(want.document, want.head // problem.group, rows, 0))
    return sum(there[2] for _, there in found) == sum(map(len, want.keys))


def _of_source(problem: Problem, waiting: list[Want], rank: int, hops: int) -> list[Want]:
    """The wants cut down to the rows of the rank `hops` back; zero pads are attended once, beside the rank's own rows."""
    held = problem.shard.ranges((rank - hops) % problem.shard.ranks)
    cut = (
        replace(
            want,
            keys=tuple(x for x in (intersect(rows, piece) for rows in want.keys for piece in held) if x),
            pads=0 if hops else want.pads,
        )
        for want in waiting
    )
    return [want for want in cut if want.keys]


@dataclass
class Arrival:
    """Batches that can be computed now, the rows (n, 2, D) they read, and (backward) where their gradients go, fp32."""

    batches: list[Batch]
    rows: Tensor
    grads: Tensor | None = None


class Run:
    """One call's rows under way, forward or backward: made before the local work, asked for arrivals after it.

    On a GPU all rounds of rows that stay are asked for at once, on a stream of their own, so that those of later rounds fly
    beside the local work, too.

    Args:
        k, v: (B, L, K, D), whose rows the other ranks need.
        kept: the rows that the forward kept, in the backward of a program that keeps them; nothing is then moved again.
    """

    def __init__(self, compiled: Compiled, wire: Wire, k: Tensor, v: Tensor, kept: Tensor | None = None):
        self.compiled, self.wire, self.k, self.v = compiled, wire, k, v
        self.rows = k.new_empty(compiled.size, 2, k.shape[3]) if kept is None else kept.view(-1, 2, k.shape[3])
        self._posted: list[Posted] = []
        self._ahead = compiled.keep and k.device.type == "cuda"
        if kept is None and compiled.steps:
            self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *about: object) -> None:
        if kind is not None:
            abandon(self.k.device, self._flying())

    def _flying(self) -> list[Posted]:
        return [posted for posted in self._posted if posted is not None]

    def _begin(self) -> None:
        """Post the first round, or all; also the second where the first is a copy of own rows (of a ring), or empty."""
        steps = self.compiled.steps
        copied = (
            len(steps) > 1 and not (steps[0].receives.keys() - {self.wire.rank}) and not len(steps[1].packing.store)
        )
        rounds = range(len(steps) if self._ahead else 1 + copied)
        buffers = [self._buffer(number) for number in rounds]
        with beside(self.k.device):
            for number in rounds:
                if number and self._ahead:
                    self._posted[-1].follow()
                self._post(number, self.rows, buffers[number])

    def _buffer(self, number: int) -> Tensor:
        """Room for what a round sends."""
        return self.k.new_empty(sum(self.compiled.steps[number].sends.values()), 2, self.k.shape[3])

    def _post(self, number: int, before: Tensor, buffer: Tensor) -> None:
        """Send the rows of a round; `before` holds the rows of earlier ones."""
        step = self.compiled.steps[number]
        pack = step.packing
        pack_rows(self.k, self.v, pack.own, pack.own_at, buffer)
        if len(pack.store):
            buffer[pack.store_at] = before[pack.store]
        into = self.rows[step.start : step.stop] if self.compiled.keep else None
        self._posted.append(self.wire.post(buffer, step.sends, step.receives, into))

    def arrivals(self) -> Iterator[Arrival]:
        """The rounds in order; while the caller computes with one, the next is under way."""
        for number, step in enumerate(self.compiled.steps):
            arrived = self._posted[number].wait()
            rows = self.rows if self.compiled.keep else arrived
            if number + 1 == len(self._posted) < len(self.compiled.steps):
                self._post(number + 1, rows, self._buffer(number + 1))
            if not self.compiled.keep:
                self._posted[number] = None  # its memory serves a later round
            yield Arrival(step.batches, rows)


class BackwardRun(Run):
    """The backward: arrivals with room for gradients, then `finish` adds what came home to dk and dv.

    Args:
        wide: the dtype of gradients that travel and of their sums.
    """

    def __init__(self, compiled: Compiled, wire: Wire, k: Tensor, v: Tensor, kept: Tensor, wide: torch.dtype):
        super().__init__(compiled, wire, k, v, kept if compiled.keep else None)
        self._wide = wide
        self._coming: list[tuple[int, Posted]] = []
        self._grads: Tensor | None = None
        rows = k.shape[:3].numel() if compiled.keys is None else len(compiled.keys.at[0])
        self._sum = torch.zeros(rows, 2, k.shape[3], dtype=wide, device=k.device)

    def arrivals(self) -> Iterator[Arrival]:
        """All batches at once where the rows were kept; else (ring) round by round as the rows pass again."""
        if self.compiled.keep:
            self._grads = self._zeros(self.rows)
            yield Arrival([batch for step in self.compiled.steps for batch in step.batches], self.rows, self._grads)
            self._send_home()
            return
        for number, arrival in enumerate(super().arrivals()):
            arrival.grads = self._zeros(arrival.rows)
            yield arrival
            self._return(number, arrival.grads, self._room(number))

    def _flying(self) -> list[Posted]:
        return [*super()._flying(), *(posted for _, posted in self._coming)]

    def _zeros(self, rows: Tensor) -> Tensor:
        return torch.zeros(rows.shape, dtype=self._wide, device=rows.device)

    def _room(self, number: int) -> Tensor:
        """Room for the gradients that come home in a round."""
        return self._sum.new_empty(sum(self.compiled.steps[number].home.receives.values()), *self._sum.shape[1:])

    def _send_home(self) -> None:
        """Return the gradients of all rounds, last first: on a GPU beside what is computed from now on."""
        rounds = range(len(self.compiled.steps))
        self._rooms = [self._room(number) for number in (rounds if self._ahead else rounds[-1:])]
        with beside(self.k.device):
            if rounds:
                self._return(rounds[-1], self._grads, self._rooms[-1])
            if self._ahead:
                self._bring_home()

    def _return(self, number: int, grads: Tensor, room: Tensor) -> None:
        """Send the gradients of a round's rows on their way home."""
        home = self.compiled.steps[number].home
        self._coming.append((number, self.wire.post(grads[home.leaving], home.sends, home.receives, room, "gradients")))

    def _bring_home(self) -> None:
        """Sum what comes home; the gradients of relayed rows go on to where the rows came from."""
        while self._coming:
            number, posted = self._coming.pop(0)
            back, pack = (posted.follow if self._ahead else posted.wait)(), self.compiled.steps[number].home.packing
            add_at(self._sum, pack.own[None], _halves(back if pack.own_at is None else back[pack.own_at]))
            if len(pack.store):
                add_at(self._grads, pack.store[None], _halves(back[pack.store_at]))
            if self.compiled.keep and number:
                self._return(
                    number - 1, self._grads, self._rooms[number - 1] if self._ahead else self._room(number - 1)
                )

    def finish(self, dk: Tensor, dv: Tensor) -> None:
        """Add the gradients that came home to dk and dv."""
        self._bring_home()
        rejoin(self.k.device, self.wire.traffic, "gradients")
        add_rows(self.compiled.keys, dk, self._sum[:, 0])
        add_rows(self.compiled.keys, dv, self._sum[:, 1])


def _halves(rows: Tensor) -> tuple[Tensor, ...]:
    """(1, n, D) each of (n, 2, D) rows."""
    return rows[None].unbind(2)
