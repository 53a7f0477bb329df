"""Running a program: rows leave, arrive, are used, and their gradients go home the same way.

The attention op drives it: it starts a run, computes what needs no other rank, then takes arrivals as they come. An arrival
holds the batches of wants that have become computable and the rows they read; no engine is imported here.
Shape letters: B samples, L local tokens, K kv heads, D head dim; a row is (2, D): K and V.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_dilated.sequence.exchange.indices import Batch, Own, Packing, Store, batches
from lightning_dilated.sequence.exchange.program import Program, Round, count
from lightning_dilated.sequence.exchange.rows import pack_rows
from lightning_dilated.sequence.exchange.wire import Posted, Wire
from lightning_dilated.sequence.problem import Problem, Want, wants
from lightning_dilated.sequence.progressions import intersect


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


@dataclass
class Home:
    """How the gradients of a round's rows go home: those of the rows `leaving`, added at the places of `packing`."""

    leaving: Tensor | slice
    sends: dict[int, int]
    receives: dict[int, int]
    packing: Packing


@dataclass
class Compiled:
    """A program with its indices on a device; `size` rows are kept for the backward."""

    steps: list[Step]
    size: int
    keep: bool


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
            home = Home(slice(start, store.size), *_counts(step)[::-1], packing.to(device))
        else:
            ready = _of_source(problem, waiting, rank, number)
            home = _home(program.returns[number], own, store, device)
        found = batches(problem, ready, queries, store, device)
        steps.append(Step(packing.to(device), *_counts(step), start, store.size, found, home))
    assert not program.keep or not waiting, f"rank {rank} never received the rows of {waiting[0]}"
    return Compiled(steps, store.size if program.keep else 0, program.keep)


def _counts(step: Round) -> tuple[dict[int, int], dict[int, int]]:
    return {p: count(m) for p, m in step.sends.items()}, {p: count(m) for p, m in step.receives.items()}


def _home(step: Round, own: Own, store: Store, device: torch.device) -> Home:
    """A way back of its own: the rows that this rank used, and its own rows that others did."""
    leaving = Packing.of([p for message in step.sends.values() for p in message], Own((), own.heads), store)
    arriving = Packing.of([p for message in step.receives.values() for p in message], own, Store())
    rows = torch.empty_like(leaving.store)
    rows[leaving.store_at] = leaving.store
    return Home(rows.to(device), *_counts(step), arriving.to(device))


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

    Args:
        k, v: (B, L, K, D), whose rows the other ranks need.
        kept: the rows that the forward kept, in the backward of a program that keeps them; nothing is then moved again.
    """

    def __init__(self, compiled: Compiled, wire: Wire, k: Tensor, v: Tensor, kept: Tensor | None = None):
        self.compiled, self.wire, self.k, self.v = compiled, wire, k, v
        self.rows = k.new_empty(compiled.size, 2, k.shape[3]) if kept is None else kept.view(-1, 2, k.shape[3])
        self._pending = None if kept is not None or not compiled.steps else self._post(0, None)

    def _post(self, number: int, before: Tensor | None) -> Posted:
        """Send the rows of a round; `before` holds the rows of earlier ones."""
        step = self.compiled.steps[number]
        pack = step.packing
        buffer = self.k.new_empty(sum(step.sends.values()), 2, self.k.shape[3])
        pack_rows(self.k, self.v, pack.own, pack.own_at, buffer)
        if len(pack.store):
            buffer[pack.store_at] = before[pack.store]
        into = self.rows[step.start : step.stop] if self.compiled.keep else None
        return self.wire.post(buffer, step.sends, step.receives, into)

    def arrivals(self) -> Iterator[Arrival]:
        """The rounds in order; while the caller computes with one, the next is under way."""
        for number, step in enumerate(self.compiled.steps):
            arrived = self._pending.wait()
            rows = self.rows if self.compiled.keep else arrived
            self._pending = self._post(number + 1, rows) if number + 1 < len(self.compiled.steps) else None
            yield Arrival(step.batches, rows)


class BackwardRun(Run):
    """The backward: arrivals with room for gradients, then `finish` adds what came home to dk and dv."""

    def __init__(self, compiled: Compiled, wire: Wire, k: Tensor, v: Tensor, kept: Tensor, dk: Tensor, dv: Tensor):
        super().__init__(compiled, wire, k, v, kept if compiled.keep else None)
        self.totals = (dk, dv)
        self._coming: list[tuple[int, Posted]] = []
        self._grads: Tensor | None = None

    def arrivals(self) -> Iterator[Arrival]:
        """All batches at once where the rows were kept; else (ring) round by round as the rows pass again."""
        if self.compiled.keep:
            self._grads = self._zeros(self.rows)
            yield Arrival([batch for step in self.compiled.steps for batch in step.batches], self.rows, self._grads)
            if self.compiled.steps:
                self._return(len(self.compiled.steps) - 1, self._grads)
            return
        for number, arrival in enumerate(super().arrivals()):
            arrival.grads = self._zeros(arrival.rows)
            yield arrival
            self._return(number, arrival.grads)

    def _zeros(self, rows: Tensor) -> Tensor:
        return torch.zeros(rows.shape, dtype=self.totals[0].dtype, device=rows.device)

    def _return(self, number: int, grads: Tensor) -> None:
        """Send the gradients of a round's rows on their way home."""
        home = self.compiled.steps[number].home
        self._coming.append((number, self.wire.post(grads[home.leaving], home.sends, home.receives)))

    def finish(self) -> None:
        """Add the gradients that come home; those of relayed rows go on to where the rows came from."""
        while self._coming:
            number, posted = self._coming.pop(0)
            back, pack = posted.wait(), self.compiled.steps[number].home.packing
            for i, total in enumerate(self.totals):
                total.view(-1, total.shape[-1]).index_add_(0, pack.own, back[pack.own_at, i])
            if len(pack.store):
                self._grads.index_add_(0, pack.store, back[pack.store_at])
            if self.compiled.keep and number:
                self._return(number - 1, self._grads)
