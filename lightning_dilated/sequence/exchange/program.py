"""A rank's part of an exchange as integers: rounds of messages, each a list of rows.

What a rank sends to a peer and what the peer receives are computed apart, by the same function of the same problem, so they
are equal without a word between the ranks.

How much a rank receives in a call, near (inside its node) and far, without listing messages.

A unit is the D numbers of one head at one position: a row of K and V is two, a query one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_dilated.sequence import requirements
from lightning_dilated.sequence.ranges import intersect, union
from lightning_dilated.sequence.requirements import Document, Problem, needed


@dataclass(frozen=True)
class Piece:
    """The rows of one head (a kv head, or a query head where queries travel) at some positions of one document, in each of
    its samples."""

    document: Document
    head: int
    rows: range

    def __len__(self) -> int:
        return self.document.samples * len(self.rows)


Message = list[Piece]


@dataclass
class Round:
    """Messages that a rank sends and receives at once: {peer: pieces}. A message to itself is a local copy."""

    sends: dict[int, Message] = field(default_factory=dict)
    receives: dict[int, Message] = field(default_factory=dict)

    def send(self, peer: int, message: Message) -> None:
        """Add a message, unless it is empty."""
        if message:
            self.sends[peer] = message

    def receive(self, peer: int, message: Message) -> None:
        """Expect a message, unless it is empty."""
        if message:
            self.receives[peer] = message


@dataclass
class Program:
    """The rounds of one rank.

    Without `returns` the rows stay for the backward, and their gradients go back through the same rounds. With `returns` a
    round's rows go once they were used, the backward moves them again, and their gradients take these ways home.
    """

    rounds: list[Round]
    returns: list[Round] | None = None

    @property
    def keep(self) -> bool:
        """Whether the rows stay for the backward."""
        return self.returns is None


def count(message: Iterable[Piece]) -> int:
    """Rows of a message."""
    return sum(map(len, message))


def rows_for(problem: Problem, readers: Iterable[int], source: int) -> Message:
    """The rows that a source rank holds and some rank of `readers` needs, none twice; the source may be a reader."""
    if requirements.serves(problem):
        return message_of(requirements.read(problem, frozenset(readers), source))
    messages = [pieces_of(problem, needed(problem, x), source) for x in readers]
    return messages[0] if len(messages) == 1 else merged(messages)


def message_of(rows: requirements.Rows) -> Message:
    """Rows of the strided layout, one by one progression."""
    return [Piece(*key, x) for key, found in rows.items() for part in found for x in part.ranges()]


def pieces_of(problem: Problem, needs: dict[tuple[Document, int], list[range]], source: int) -> Message:
    """Those of `needs` that a source rank holds."""
    held = problem.shard.ranges(source)
    found = ((key, intersect(rows, piece)) for key, pieces in needs.items() for rows in pieces for piece in held)
    return [Piece(*key, rows) for key, rows in found if rows]


def merged(messages: Iterable[Message]) -> Message:
    """One message with the rows of several, none twice."""
    found: dict[tuple[Document, int], list[range]] = {}
    for message in messages:
        for piece in message:
            found.setdefault((piece.document, piece.head), []).append(piece.rows)
    return [Piece(*key, rows) for key, pieces in found.items() for rows in union(pieces)]


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
    if requirements.serves(problem):
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
    return tuple(
        requirements.size(requirements.read(problem, readers, source)) for source in range(problem.shard.ranks)
    )


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
