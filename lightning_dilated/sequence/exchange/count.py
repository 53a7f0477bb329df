"""How much a rank receives in a call, near (inside its node) and far, without listing messages.

A unit is the D numbers of one head at one position: a row of K and V is two, a query one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lightning_dilated.sequence.problem import Document, Problem
from lightning_dilated.sequence.progressions import intersect

Needs = Mapping[tuple[Document, int], list[range]]


@dataclass
class Units:
    """Units received: in the tensors' own dtype, in fp32 (gradients, partial outputs), and single fp32 numbers (lse)."""

    own: float = 0
    wide: float = 0
    numbers: float = 0

    def bytes(self, head_dim: int, element_size: int) -> float:
        """Bytes for a head dim and the size of an element."""
        wide = max(4, element_size)
        return head_dim * (self.own * element_size + self.wide * wide) + self.numbers * wide


@dataclass
class Count:
    """What one rank receives: {(pass, "near" | "far"): units}; rounds and messages of both passes; units kept in between."""

    rounds: int
    messages: int
    kept: float = 0
    units: dict[tuple[str, str], Units] = field(default_factory=dict)

    def add(self, run: str, far: bool, own: float = 0, wide: float = 0, numbers: float = 0) -> None:
        """Add units to a pass."""
        at = self.units.setdefault((run, "far" if far else "near"), Units())
        at.own, at.wide, at.numbers = at.own + own, at.wide + wide, at.numbers + numbers

    def add_rows(self, far: bool, rows: float) -> None:
        """Rows of K and V that come in the forward, are kept, and whose gradients come home in fp32."""
        self.add("forward", far, own=2 * rows)
        self.add("backward", far, wide=2 * rows)
        self.kept += 2 * rows


def held(problem: Problem, needs: Needs, ranks: Iterable[int]) -> int:
    """How many rows of `needs` the given ranks hold."""
    pieces = [piece for rank in ranks for piece in problem.shard.ranges(rank)]
    return sum(
        document.samples * len(intersect(rows, piece))
        for (document, _), found in needs.items()
        for rows in found
        for piece in pieces
    )


def total(needs: Needs) -> int:
    """How many rows `needs` are."""
    return sum(document.samples * sum(map(len, found)) for (document, _), found in needs.items())


def sources(problem: Problem, needs: Needs) -> set[int]:
    """The ranks that hold rows of `needs`; where rows lie closer than shards are long, all ranks between the ends."""
    shard, found = problem.shard, set()
    for pieces in needs.values():
        for rows in pieces:
            if rows.step <= shard.chunk or shard.layout == "strided":
                found.update(shard.holders(rows[0], rows[-1] + 1))
            else:
                found.update(shard.owner(p)[0] for p in rows)
    return found


def node_of(rank: int, per_node: int, ranks: int) -> range:
    """The ranks of a rank's node."""
    first = rank // per_node * per_node
    return range(first, min(first + per_node, ranks))
