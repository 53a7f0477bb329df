"""A causal sequence computed chunk by chunk: which rows of a chunk later chunks read, and up to which position.

A chunk requests rows as a rank of a sharded sequence does; those of earlier chunks are carried from chunk to chunk in place
of being exchanged. All of it is integers.

Shape letters: N tokens, C tokens of a chunk, w segment length, r dilation rate.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import head_rows, segment_at
from lightning_dilated.sequence.ranges import remove, size, union
from lightning_dilated.sequence.requirements import Document, Problem, served
from lightning_dilated.sequence.shard import Shard

#: where a document ends whose end is not known yet
ENDLESS = 1 << 60


class CarriedRows(NamedTuple):
    """Rows of one kv head that later chunks read; `last` is the last position that does."""

    document: Document
    head: int
    rows: range
    last: int

    @property
    def count(self) -> int:
        """Over the document's samples."""
        return self.document.samples * len(self.rows)


def chunk_bounds(seq_len: int, chunk: int, start: int = 0) -> tuple[int, ...]:
    """The positions at which chunks of C tokens begin in N tokens from `start` on, and where the last one ends."""
    return (*range(start, start + seq_len, chunk), start + seq_len)


def chunk_count(seq_len: int, chunk: int) -> int:
    """Chunks of C tokens in N, the last one perhaps shorter."""
    return -(-seq_len // chunk)


def chunk_problem(
    pattern: DilatedPattern,
    num_heads: int,
    num_kv_heads: int,
    documents: Sequence[Document],
    bounds: Sequence[int],
    heads: tuple[int, int],
) -> Problem:
    """Causal attention of the query heads [first, stop) over documents in chunks with these bounds.

    Of the documents those are kept that some bound cuts; the first bound counts, since earlier calls may lie before it.
    """
    cut = tuple(d for d in documents if bisect.bisect_right(bounds, d.start) < bisect.bisect_left(bounds, d.stop))
    return Problem(pattern, num_heads, num_kv_heads, True, Shard(0, 1), cut, heads)


class CarryPlan:
    """The rows that the chunks of a `chunk_problem` carry, of each chunk when it is first asked for.

    Args:
        bounds: see `chunk_bounds`.
        before: rows of earlier chunks, for documents of this problem.
    """

    def __init__(self, problem: Problem, bounds: Sequence[int], before: Sequence[CarriedRows] = ()) -> None:
        self.problem, self.bounds = problem, tuple(bounds)
        self._before = tuple(before)
        self._leaving: dict[int, tuple[CarriedRows, ...]] = {}
        self._live: tuple[int, list[CarriedRows]] = (0, list(before))

    @property
    def chunks(self) -> int:
        return len(self.bounds) - 1

    def positions(self, chunk: int) -> range:
        """Of a chunk."""
        return range(self.bounds[chunk], self.bounds[chunk + 1])

    def leaving(self, chunk: int) -> tuple[CarriedRows, ...]:
        """The rows of a chunk that later chunks read, none twice."""
        if chunk not in self._leaving:
            self._leaving[chunk] = tuple(leaving_rows(self.problem, self.positions(chunk)))
        return self._leaving[chunk]

    def live(self, chunk: int) -> list[CarriedRows]:
        """The rows of earlier chunks that this chunk or a later one reads, in the order of their chunks."""
        rows: Iterable[CarriedRows]
        at, rows = self._live
        if chunk < at:  # in falling order
            at, rows = 0, list(self._before)
        if chunk > at:
            rows = itertools.chain(rows, *(self.leaving(before) for before in range(at, chunk)))
        live = [x for x in rows if x.last >= self.bounds[chunk]]
        self._live = chunk, live
        return live

    def stored(self) -> int:
        """Rows that are carried at all, over all chunks."""
        return sum(rows.count for chunk in range(self.chunks) for rows in self.leaving(chunk))

    def most_live(self) -> int:
        """The most rows that are carried at a time."""
        change = [0] * (self.chunks + 2)
        for chunk in range(self.chunks):
            for rows in self.leaving(chunk):
                change[chunk + 1] += rows.count
                change[bisect.bisect_right(self.bounds, rows.last)] -= rows.count
        live = most = 0
        for step in change:
            live += step
            most = max(most, live)
        return most


def leaving_rows(problem: Problem, piece: range) -> list[CarriedRows]:
    """The rows at these positions that later ones read, none twice."""
    return [
        CarriedRows(*key, rows, last)
        for key, progressions in _read_later(problem, piece).items()
        for last, pieces in _disjoint(progressions)
        for rows in pieces
    ]


def live_count(problem: Problem, bound: int) -> int:
    """How many rows before a bound are read from there on."""
    read = _read_later(problem, range(0, bound))
    return sum(document.samples * size(union(rows for _, rows in x)) for (document, _), x in read.items())


def _read_later(problem: Problem, piece: range) -> dict[tuple[Document, int], list[tuple[int, range]]]:
    """(document, kv head) -> (last position that reads them, rows at these positions) of each branch and query head."""
    start, stop = piece.start, piece.stop
    read: dict[tuple[Document, int], list[tuple[int, range]]] = {}
    for document in problem.documents:
        if not document.start < stop < document.stop:
            continue
        for number, branch in enumerate(problem.pattern.branches):
            # the one segment that may reach beyond the piece
            segment = segment_at(branch, document.length, stop - 1 - document.start)
            begin, end, first = (x + document.start for x in segment)
            for head in served(problem, number):
                offset = problem.offset(number, head)
                rows = head_rows(max(begin, start), stop, first, branch.dilation_rate, offset)
                later = head_rows(stop, end, first, branch.dilation_rate, offset)
                if rows and later:
                    read.setdefault((document, head // problem.group), []).append((later[-1], rows))
    return read


def _disjoint(progressions: list[tuple[int, range]]) -> list[tuple[int, list[range]]]:
    """(last, rows) so that each row occurs once, with the largest `last` of its progressions."""
    taken: list[range] = []
    out = []
    for last, rows in sorted(set(progressions), key=lambda x: (-x[0], x[1].step, x[1].start, x[1].stop)):
        out.append((last, remove([rows], taken)))
        taken = union([*taken, rows])  # where rows nest, the densest alone: removing it leaves one range
    return out
