"""A rank's part of an exchange as integers: rounds of messages, each a list of rows.

What a rank sends to a peer and what the peer receives are computed apart, by the same function of the same problem, so they
are equal without a word between the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_dilated.sequence import strided
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
    if strided.serves(problem):
        return message_of(strided.read(problem, frozenset(readers), source))
    messages = [pieces_of(problem, needed(problem, x), source) for x in readers]
    return messages[0] if len(messages) == 1 else merged(messages)


def message_of(rows: strided.Rows) -> Message:
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
