"""Find the rows of a chunk that later chunks read, and the last position that reads each row, for causal attention.

A chunk requests rows as a rank of a sharded sequence does; rows of earlier chunks are carried from chunk to chunk. If R
ranks share the sequence, each rank computes a piece of every chunk and carries the rows that it computed. The exchange
between ranks sends these rows together with rows of the same chunk. This module computes only integers.

Shape letters: N tokens, C tokens of a chunk, R ranks, w segment length, r dilation rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lightning_dilated.ext.streams.shard import ChunkShard
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import head_rows, segment_at
from lightning_dilated.sequence.ranges import clip, common, remove, size, union
from lightning_dilated.sequence.requirements import Document, Problem, needed_rows, served

#: `stop` of a document with an unknown end
ENDLESS = 1 << 60


class CarriedRows(NamedTuple):
    """Rows of one kv head that later chunks read; `last`: the last position that reads them."""

    document: Document
    head: int
    rows: range
    last: int

    @property
    def count(self) -> int:
        """Number of rows, summed over the document's samples."""
        return self.document.samples * len(self.rows)


def chunk_count(seq_len: int, chunk: int) -> int:
    """Return the number of chunks of C tokens in N tokens; the last chunk may be shorter."""
    return -(-seq_len // chunk)


def chunk_problem(
    pattern: DilatedPattern,
    num_heads: int,
    num_kv_heads: int,
    documents: Sequence[Document],
    shard: ChunkShard,
    heads: tuple[int, int],
) -> Problem:
    """Return the problem of causal attention over documents in chunks; `heads`: (first, stop) of the query heads.

    Documents that fit into one piece are left out. A document may begin before the first chunk, in an earlier call.
    """
    cut = tuple(d for d in documents if d.start < d.stop and shard.number(d.start) != shard.number(d.stop - 1))
    return Problem(pattern, num_heads, num_kv_heads, True, shard, cut, heads)


def exchanged(problem: Problem, number: int) -> bool:
    """Return whether ranks exchange rows in the chunk that contains piece `number`."""
    return problem.shard.each > 1 and any(needed_rows(problem, peer) for peer in problem.shard.peers(number))


class CarryPlan:
    """The rows that one rank carries through the chunks of a `chunk_problem`, computed for each chunk on first use.

    Args:
        rank: index among the R ranks of each chunk.
        before: rows that earlier calls carried, for documents of this problem.
    """

    def __init__(self, problem: Problem, rank: int = 0, before: Sequence[CarriedRows] = ()) -> None:
        self.problem, self.shard, self.rank = problem, problem.shard, rank
        self._leaving: dict[int, tuple[CarriedRows, ...]] = {}
        # entries of earlier calls and chunks, their `last`, and the number of entries before each chunk
        self._left, self._lasts, self._counts = (
            list(before),
            np.array([x.last for x in before], np.int64),
            [len(before)],
        )

    @property
    def chunks(self) -> int:
        return self.shard.chunks

    def piece(self, chunk: int) -> int:
        """Return the index of this rank's piece of a chunk."""
        return chunk * self.shard.each + self.rank

    def leaving(self, chunk: int) -> tuple[CarriedRows, ...]:
        """Return the rows of this rank's piece of a chunk that later chunks read, without duplicates."""
        if chunk not in self._leaving:
            piece, later = self.shard.piece(self.piece(chunk)), self.shard.positions(chunk).stop
            self._leaving[chunk] = tuple(leaving_rows(self.problem, piece, later))
        return self._leaving[chunk]

    def live(self, chunk: int) -> list[CarriedRows]:
        """Return the rows of earlier chunks that this chunk or a later one reads, in the order of their chunks."""
        while len(self._counts) <= chunk:
            leaving = self.leaving(len(self._counts) - 1)
            self._left += leaving
            self._lasts = np.concatenate([self._lasts, np.array([x.last for x in leaving], np.int64)])
            self._counts.append(len(self._left))
        # search in an array: there may be thousands of entries, and callers may pass chunks in falling order
        lasts = self._lasts[: self._counts[chunk]]
        return [self._left[i] for i in np.flatnonzero(lasts >= self.shard.begin(chunk)).tolist()]

    def stored(self) -> int:
        """Return the number of rows that chunks leave for later chunks, summed over chunks."""
        return sum(rows.count for chunk in range(self.chunks) for rows in self.leaving(chunk))


def leaving_rows(problem: Problem, piece: range, later: int) -> list[CarriedRows]:
    """Return the rows at the positions `piece` that positions from `later` on read, without duplicates."""
    return [
        CarriedRows(*key, rows, last)
        for key, progressions in _read_later(problem, piece, later).items()
        for last, pieces in _disjoint(progressions)
        for rows in pieces
    ]


def live_count(problem: Problem, bound: int, held: Sequence[range] | None = None) -> int:
    """Count rows before `bound` that positions from `bound` on read; `held`: count only rows at these positions."""
    count = 0
    for (document, _), x in _read_later(problem, range(0, bound), bound).items():
        rows = union(rows for _, rows in x)
        count += document.samples * (size(rows) if held is None else common(rows, held))
    return count


def received_count(problem: Problem, number: int) -> int:
    """Return the number of rows that a piece of a chunk reads from other ranks."""
    held = problem.shard.held(number)
    read = needed_rows(problem, number).items()
    return sum(document.samples * (size(rows) - common(rows, held)) for (document, _), rows in read)


def _read_later(problem: Problem, piece: range, later: int) -> dict[tuple[Document, int], list[tuple[int, range]]]:
    """Map (document, kv head) to a list of (last reader's position, rows) from all branches and query heads."""
    read: dict[tuple[Document, int], list[tuple[int, range]]] = {}
    for document in problem.documents:
        if not (document.start < later < document.stop and document.start < piece.stop):
            continue
        for number, branch in enumerate(problem.pattern.branches):
            # only the segment that contains the position before `later` may also contain `later`
            segment = segment_at(branch, document.length, later - 1 - document.start)
            begin, end, first = (x + document.start for x in segment)
            if begin >= piece.stop:
                continue
            for head in served(problem, number):
                offset = problem.offset(number, head)
                rows = head_rows(max(begin, piece.start), piece.stop, first, branch.dilation_rate, offset)
                after = head_rows(later, end, first, branch.dilation_rate, offset)
                if branch.tokens is not None:
                    rows = clip(rows, rows.start, begin + branch.tokens)
                if not rows or not after:
                    continue
                parts = [(after[-1], rows)]
                if branch.width is not None:
                    reach = (branch.width - 1) * branch.dilation_rate
                    rows = rows[max(0, -((rows.start + reach - after[0]) // rows.step)) :]
                    parts = list(_by_last(problem.shard, rows, reach, after[-1]))
                read.setdefault((document, head // problem.group), []).extend(parts)
    return read


def _by_last(shard: ChunkShard, rows: range, reach: int, final: int) -> Iterator[tuple[int, range]]:
    """Yield (last reader's position, rows). A row's last reader is `reach` positions later, at most at `final`.
    Rows with last readers in the same chunk are yielded together, with the largest position of these readers."""
    while rows:
        last = min(rows[0] + reach, final)
        end = shard.begin(min(max(0, last - shard.start) // shard.stream + 1, shard.chunks))
        joined = rows
        if last < end <= final:  # otherwise all rows have their last reader in the same chunk
            joined = rows[: -(-(end - reach - rows.start) // rows.step)]
        yield min(joined[-1] + reach, final), joined
        rows = rows[len(joined) :]


def _disjoint(progressions: list[tuple[int, range]]) -> list[tuple[int, list[range]]]:
    """Return [(last, rows)] with each row once, at the largest `last` of the progressions that contain the row."""
    taken: list[range] = []
    out = []
    for last, rows in sorted(set(progressions), key=lambda x: (-x[0], x[1].step, x[1].start, x[1].stop)):
        out.append((last, remove([rows], taken)))
        taken = union([*taken, rows])  # the union keeps the densest of nested ranges; removing it leaves one range
    return out
