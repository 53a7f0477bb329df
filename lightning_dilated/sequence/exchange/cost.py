"""How much a rank receives in a call, near (inside its node) and far, without listing messages.

A unit is the D numbers of one head at one position: a row of K and V is two, a query one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_dilated.sequence import strided
from lightning_dilated.sequence.ranges import intersect, union
from lightning_dilated.sequence.requirements import Document, Problem, needed

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


@dataclass(frozen=True)
class Origins:
    """How many rows some ranks need, by the ranks that hold them.

    Attributes:
        total: of all ranks.
        ranks: those that hold any.
        of: how many of them the given ranks hold together.
    """

    total: int
    ranks: set[int]
    of: Callable[[Iterable[int]], int]

    @classmethod
    def counted(cls, rows: Sequence[int]) -> Origins:
        """From the number of rows that each rank holds."""
        return cls(sum(rows), {rank for rank, n in enumerate(rows) if n}, lambda ranks: sum(rows[r] for r in ranks))

    @classmethod
    def listed(cls, problem: Problem, needs: Needs) -> Origins:
        """From the rows."""
        total = sum(document.samples * sum(map(len, found)) for (document, _), found in needs.items())
        return cls(total, _sources(problem, needs), functools.partial(_held, problem, needs))


def origins(problem: Problem, readers: Sequence[int]) -> Origins:
    """Of the rows that any of the readers needs, rows of their own among them."""
    if strided.serves(problem):
        return Origins.counted(_strided_origins(problem, frozenset(readers)))
    if len(readers) == 1:
        return Origins.listed(problem, needed(problem, readers[0]))
    joint: dict[tuple[Document, int], list[range]] = {}
    for reader in readers:
        for key, pieces in needed(problem, reader).items():
            joint.setdefault(key, []).extend(pieces)
    return Origins.listed(problem, {key: union(pieces) for key, pieces in joint.items()})


@functools.lru_cache(maxsize=1024)
def _strided_origins(problem: Problem, readers: frozenset[int]) -> tuple[int, ...]:
    return tuple(strided.size(strided.read(problem, readers, source)) for source in range(problem.shard.ranks))


def _held(problem: Problem, needs: Needs, ranks: Iterable[int]) -> int:
    """How many rows of `needs` the given ranks hold."""
    pieces = [piece for rank in ranks for piece in problem.shard.ranges(rank)]
    return sum(
        document.samples * len(intersect(rows, piece))
        for (document, _), found in needs.items()
        for rows in found
        for piece in pieces
    )


def _sources(problem: Problem, needs: Needs) -> set[int]:
    """The ranks that hold rows of `needs`; where rows lie closer than shards are long, all ranks between the ends."""
    shard, found = problem.shard, set()
    for pieces in needs.values():
        for rows in pieces:
            if rows.step <= shard.chunk:
                found.update(shard.holders(rows[0], rows[-1] + 1))
            else:
                found.update(shard.owner(p)[0] for p in rows)
    return found


def node_of(rank: int, per_node: int, ranks: int) -> range:
    """The ranks of a rank's node."""
    first = rank // per_node * per_node
    return range(first, min(first + per_node, ranks))
