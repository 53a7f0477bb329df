"""Running a switch: q, k, v rows go to the owners of their (segment, head), outputs and gradients come back.

Shape letters: B samples, L local tokens, H query heads, D head dim; an owner holds m query rows (m, D) and n key rows
(n, 2, D).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dilated.sequence.exchange.indices import Batch, Own, Packing, Store, batches
from lightning_dilated.sequence.exchange.program import Round, count
from lightning_dilated.sequence.exchange.row_ops import pair, take
from lightning_dilated.sequence.exchange.switch import Switched
from lightning_dilated.sequence.exchange.transport import Posted, Wire
from lightning_dilated.sequence.requirements import Problem


@dataclass
class Way:
    """Rows from this rank's tensors to their owners: flat numbers in the order of the messages."""

    rows: Tensor
    sends: dict[int, int]
    receives: dict[int, int]


@dataclass
class CompiledSwitch:
    """A rank's part of a switch with its indices on a device; query numbers in `batches` are those of the received rows."""

    keys: Way
    queries: Way
    batches: list[Batch]


def compile_switch(problem: Problem, rank: int, program: Switched, device: torch.device) -> CompiledSwitch:
    """The indices of a rank's switch."""
    pieces = problem.shard.ranges(rank)
    stores = Store(), Store()
    ways = []
    for step, store, heads in zip(
        (program.keys, program.queries), stores, (problem.kv_heads, problem.heads), strict=True
    ):
        ways.append(_way(step, Own(pieces, heads), device))
        for message in step.receives.values():
            store.add(message)
    found = batches(problem, program.tasks, stores[1], stores[0])
    return CompiledSwitch(*ways, [batch.to(device) for batch in found])


def _way(step: Round, own: Own, device: torch.device) -> Way:
    packing = Packing.of([p for message in step.sends.values() for p in message], own, Store())
    rows = torch.empty_like(packing.own)
    rows[slice(None) if packing.own_at is None else packing.own_at] = packing.own
    counts = ({p: count(m) for p, m in messages.items()} for messages in (step.sends, step.receives))
    return Way(rows.to(device), *counts)


class SwitchRun:
    """One call's rows under way. `kept` holds the owner's rows in the backward; they are then not moved again."""

    def __init__(self, compiled: CompiledSwitch, wire: Wire, kept: Tensor | None = None):
        self.compiled, self.wire = compiled, wire
        self.kept, self._sums = kept, "outputs" if kept is None else "gradients"
        self._posted: list[Posted] = []

    def post(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Send the rows of q, k and v to their owners."""
        keys, queries = self.compiled.keys, self.compiled.queries
        self._posted = [
            self._out(keys, pair(k, v, keys.rows), "rows"),
            self._out(queries, take(q, queries.rows), "queries"),
        ]

    def arrived(self) -> tuple[Tensor, Tensor]:
        """(query rows (m, D), key rows (n, 2, D)) that this rank owns."""
        if self.kept is None:
            rows, queries = (posted.wait() for posted in self._posted)
            self.kept = torch.cat([rows.flatten(0, 1), queries])
        n = 2 * sum(self.compiled.keys.receives.values())
        return self.kept[n:], self.kept[:n].unflatten(0, (-1, 2)) if n else self.kept.new_empty(
            0, 2, self.kept.shape[1]
        )

    def _out(self, way: Way, rows: Tensor, what: str) -> Posted:
        return self.wire.post(rows, way.sends, way.receives, what=what)

    def to_owners(self, x: Tensor, other: Tensor | None = None) -> Posted:
        """Rows of a (B, L, H, *) tensor, or of two side by side, to the owners of their queries."""
        rows = self.compiled.queries.rows
        found = take(x, rows)[:, None] if other is None else pair(x, other, rows)
        return self._out(self.compiled.queries, found, "outputs")

    def home(self, rows: Tensor, keys: bool = False) -> Posted:
        """Rows that belong to received queries (or keys), back to where those came from."""
        way = self.compiled.keys if keys else self.compiled.queries
        return self.wire.post(rows, way.receives, way.sends, what=self._sums)

    def by_peer(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(flat numbers, rows) of each peer's share of what came home; within one no number occurs twice."""
        way = self.compiled.queries
        sizes = list(way.sends.values())
        return list(zip(way.rows.split(sizes), rows.split(sizes), strict=True))
