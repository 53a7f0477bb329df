"""Programs: a rank's part of an exchange, as rounds of messages that list rows by integers, and the volume received.

Sender and receiver compute each message with the same function of the same problem, so they need no control message to
agree on its rows. Volumes are counted without listing messages; `near` is inside a rank's node, `far` outside.

Shape letters: D head dim. A unit is the D numbers of one head at one position; a row of K and V consists of two units.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lightning_dilated.sequence import strided
from lightning_dilated.sequence.ranges import intersect, union
from lightning_dilated.sequence.requirements import Document, Problem, RowsByHead, needed_rows


@dataclass(frozen=True)
class RowSet:
    """Rows of a kv head (or query head, if queries travel) at some positions of a document, in each of its samples."""

    document: Document
    head: int
    rows: range

    def __len__(self) -> int:
        return self.document.samples * len(self.rows)


Message = list[RowSet]


@dataclass
class Round:
    """Messages that a rank sends and receives in one collective, by peer. A rank's message to itself is a local copy."""

    sends: dict[int, Message] = field(default_factory=dict)
    receives: dict[int, Message] = field(default_factory=dict)

    def send(self, peer: int, message: Message) -> None:
        if message:
            self.sends[peer] = message

    def receive(self, peer: int, message: Message) -> None:
        if message:
            self.receives[peer] = message

    @property
    def counts(self) -> tuple[dict[int, int], dict[int, int]]:
        """The numbers of rows: ({peer: rows sent}, {peer: rows received})."""
        return {p: count(m) for p, m in self.sends.items()}, {p: count(m) for p, m in self.receives.items()}


@dataclass
class Program:
    """The rounds of one rank.

    Without `returns`, rows are saved for the backward, and their gradients travel back through the same rounds. With
    `returns`, a round's rows are freed after use, the backward moves them again, and `returns` sends the gradients to
    the owners.
    """

    rounds: list[Round]
    returns: list[Round] | None = None

    @property
    def keep(self) -> bool:
        return self.returns is None


def count(message: Iterable[RowSet]) -> int:
    return sum(map(len, message))


def rows_for(problem: Problem, readers: Iterable[int], source: int) -> Message:
    """Return the rows that rank `source` holds and any reader needs, each row once; `source` may be a reader."""
    if problem.shard.interleaved:
        return strided_message(strided.rows_read(problem, frozenset(readers), source))
    messages = [rows_held_by(problem, needed_rows(problem, x), source) for x in readers]
    return messages[0] if len(messages) == 1 else merge(messages)


def strided_message(rows: strided.RowsByDocumentHead) -> Message:
    """Return rows of the strided layout as a message."""
    return [RowSet(*key, x) for key, parts in rows.items() for part in parts for x in part.ranges()]


def rows_held_by(problem: Problem, needs: RowsByHead, source: int) -> Message:
    """Return the rows of `needs` that rank `source` holds."""
    held = problem.shard.held(source)
    parts = ((key, intersect(rows, piece)) for key, pieces in needs.items() for rows in pieces for piece in held)
    return [RowSet(*key, rows) for key, rows in parts if rows]


def merge(messages: Iterable[Message]) -> Message:
    """Merge messages into one message that has each row once."""
    rows: RowsByHead = {}
    for message in messages:
        for part in message:
            rows.setdefault((part.document, part.head), []).append(part.rows)
    return [RowSet(*key, x) for key, pieces in rows.items() for x in union(pieces)]


# -- volume ------------------------------------------------------------------------------------------------------------
@dataclass
class Units:
    """Number of units in the tensors' dtype (`own`) and in fp32 (`wide`), and of fp32 numbers (`numbers`, for lse)."""

    own: float = 0
    wide: float = 0
    numbers: float = 0

    def bytes(self, head_dim: int, element_size: int) -> float:
        wide = max(4, element_size)
        return head_dim * (self.own * element_size + self.wide * wide) + self.numbers * wide


@dataclass
class Volume:
    """The traffic that a rank receives: rounds, messages, units saved, and units by (pass, "near" or "far")."""

    rounds: int
    messages: int
    kept: float = 0
    units: dict[tuple[str, str], Units] = field(default_factory=dict)

    def add(self, run: str, far: bool, own: float = 0, wide: float = 0, numbers: float = 0) -> None:
        units = self.units.setdefault((run, "far" if far else "near"), Units())
        units.own, units.wide, units.numbers = units.own + own, units.wide + wide, units.numbers + numbers

    def add_rows(self, far: bool, rows: float) -> None:
        """Add rows of K and V that arrive in the forward and are saved; their gradients arrive in fp32."""
        self.add("forward", far, own=2 * rows)
        self.add("backward", far, wide=2 * rows)
        self.kept += 2 * rows


@dataclass(frozen=True)
class Origins:
    """Counts of the rows that some ranks need, by the ranks that hold the rows.

    Attributes:
        total: number of rows.
        ranks: ranks that hold any of the rows.
        held_by: a function that takes ranks and returns the number of rows that they hold together.
    """

    total: int
    ranks: set[int]
    held_by: Callable[[Iterable[int]], int]

    @classmethod
    def counted(cls, rows: Sequence[int]) -> Origins:
        """Make the counts from the number of rows that each rank holds."""
        return cls(sum(rows), {rank for rank, n in enumerate(rows) if n}, lambda ranks: sum(rows[r] for r in ranks))

    @classmethod
    def listed(cls, problem: Problem, needs: RowsByHead) -> Origins:
        total = sum(document.samples * sum(map(len, rows)) for (document, _), rows in needs.items())
        return cls(total, _sources(problem, needs), functools.partial(_held_count, problem, needs))


def origins(problem: Problem, readers: Sequence[int]) -> Origins:
    """Count the rows that any of the readers needs, including rows that the readers hold."""
    if problem.shard.interleaved:
        return Origins.counted(_strided_origins(problem, frozenset(readers)))
    if len(readers) == 1:
        return Origins.listed(problem, needed_rows(problem, readers[0]))
    joint: RowsByHead = {}
    for reader in readers:
        for key, pieces in needed_rows(problem, reader).items():
            joint.setdefault(key, []).extend(pieces)
    return Origins.listed(problem, {key: union(pieces) for key, pieces in joint.items()})


@functools.lru_cache(maxsize=1024)
def _strided_origins(problem: Problem, readers: frozenset[int]) -> tuple[int, ...]:
    ranks = range(problem.shard.ranks)
    return tuple(strided.row_count(strided.rows_read(problem, readers, source)) for source in ranks)


def _held_count(problem: Problem, needs: RowsByHead, ranks: Iterable[int]) -> int:
    """Return the number of rows of `needs` that the ranks hold."""
    held = [piece for rank in ranks for piece in problem.shard.held(rank)]
    return sum(
        document.samples * len(intersect(rows, piece))
        for (document, _), pieces in needs.items()
        for rows in pieces
        for piece in held
    )


def _sources(problem: Problem, needs: RowsByHead) -> set[int]:
    """Return the ranks that hold rows of `needs`. A step of at most a chunk skips no rank between a range's ends."""
    shard, ranks = problem.shard, set()
    for pieces in needs.values():
        for rows in pieces:
            if rows.step <= shard.chunk:
                ranks.update(shard.holders(rows[0], rows[-1] + 1))
            else:
                ranks.update(shard.owner(p)[0] for p in rows)
    return ranks


def node_of(rank: int, per_node: int, ranks: int) -> range:
    first = rank // per_node * per_node
    return range(first, min(first + per_node, ranks))
