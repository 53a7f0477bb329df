"""A causal sequence computed chunk by chunk: which rows of a chunk later chunks read, and which chunk reads them last.

Chunk i of C tokens is rank i of a contiguous shard, so its row requests are those of that rank; rows of earlier chunks are
carried from chunk to chunk in place of being exchanged. All of it is integers.

Shape letters: N tokens, C tokens of a chunk, w segment length, r dilation rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import head_rows, segment_at
from lightning_dilated.sequence.ranges import remove
from lightning_dilated.sequence.requirements import Document, Problem, served, straddling
from lightning_dilated.sequence.shard import Shard


class CarriedRows(NamedTuple):
    """Rows of one kv head that chunks after their own read, chunk `last` as the last one."""

    document: Document
    head: int
    rows: range
    last: int

    @property
    def count(self) -> int:
        """Over the document's samples."""
        return self.document.samples * len(self.rows)


def chunk_count(seq_len: int, chunk: int) -> int:
    """Chunks of C tokens in N, the last one perhaps shorter; at least one."""
    return max(1, -(-seq_len // chunk))


def chunk_problem(
    pattern: DilatedPattern,
    num_heads: int,
    num_kv_heads: int,
    seq_len: int,
    chunk: int,
    documents: Sequence[Document],
    heads: tuple[int, int],
) -> Problem:
    """Causal attention of the query heads [first, stop) over N tokens in chunks of C, each chunk a rank."""
    count = chunk_count(seq_len, chunk)
    shard = Shard(count * chunk, count)  # the positions from N on lie in no document
    return Problem(pattern, num_heads, num_kv_heads, True, shard, straddling(documents, shard), heads)


class CarryPlan:
    """The rows that the chunks of a `chunk_problem` carry, of each chunk when it is first asked for."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.chunk = problem, problem.shard.chunk
        self._leaving: dict[int, tuple[CarriedRows, ...]] = {}

    @property
    def chunks(self) -> int:
        return self.problem.shard.ranks

    def leaving(self, chunk: int) -> tuple[CarriedRows, ...]:
        """The rows of a chunk that later chunks read, none twice."""
        if chunk not in self._leaving:
            self._leaving[chunk] = tuple(_leaving(self.problem, chunk))
        return self._leaving[chunk]

    def live(self, chunk: int) -> list[CarriedRows]:
        """The rows of earlier chunks that this chunk or a later one reads, in the order of their chunks."""
        return [rows for before in range(chunk) for rows in self.leaving(before) if rows.last >= chunk]

    def stored(self) -> int:
        """Rows that are carried at all, over all chunks."""
        return sum(rows.count for chunk in range(self.chunks) for rows in self.leaving(chunk))

    def most_live(self) -> int:
        """The most rows that are carried at a time."""
        change = [0] * (self.chunks + 2)
        for chunk in range(self.chunks):
            for rows in self.leaving(chunk):
                change[chunk + 1] += rows.count
                change[rows.last + 1] -= rows.count
        live = most = 0
        for step in change:
            live += step
            most = max(most, live)
        return most


def _leaving(problem: Problem, chunk: int) -> list[CarriedRows]:
    size = problem.shard.chunk
    start, stop = chunk * size, (chunk + 1) * size
    found: dict[tuple[Document, int], list[tuple[int, range]]] = {}
    for document in problem.documents:
        if not document.start < stop < document.stop:
            continue
        for number, branch in enumerate(problem.pattern.branches):
            # the one segment that may reach beyond the chunk
            segment = segment_at(branch, document.length, stop - 1 - document.start)
            begin, end, first = (x + document.start for x in segment)
            for head in served(problem, number):
                offset = problem.offset(number, head)
                rows = head_rows(max(begin, start), stop, first, branch.dilation_rate, offset)
                later = head_rows(stop, end, first, branch.dilation_rate, offset)
                if rows and later:
                    found.setdefault((document, head // problem.group), []).append((later[-1] // size, rows))
    return [
        CarriedRows(*key, piece, last)
        for key, progressions in found.items()
        for last, pieces in _disjoint(progressions)
        for piece in pieces
    ]


def _disjoint(progressions: list[tuple[int, range]]) -> list[tuple[int, list[range]]]:
    """(last, rows) so that each row occurs once, with the largest `last` of its progressions."""
    taken: list[range] = []
    out = []
    for last, rows in sorted(set(progressions), key=lambda x: (-x[0], x[1].step, x[1].start, x[1].stop)):
        out.append((last, remove([rows], taken)))
        taken.append(rows)
    return out
