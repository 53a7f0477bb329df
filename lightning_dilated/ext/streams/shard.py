"""Cut the chunks of a stream into a piece for each rank. Exchanges treat the pieces as ranks.

Shape letters: C positions of a chunk, K chunks, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dilated.sequence.ranges import join
from lightning_dilated.sequence.shard import cut


@dataclass(frozen=True)
class ChunkShard:
    """Chunks of C positions, each cut into R pieces. Rank r computes piece u = i R + r of chunk i.

    An exchange treats the K R pieces as ranks. A piece has the rows that rank r computed in chunk i and the rows of
    earlier chunks that rank r carries. Only pieces of the same chunk exchange rows.

    Attributes:
        start, stop: the first position of all chunks, and one past the last.
        stream: C.
        each: R.
    """

    start: int
    stop: int
    stream: int
    each: int = 1
    layout = "chunked"
    interleaved = False

    @property
    def chunks(self) -> int:
        """The number of chunks, K; the last one may be shorter."""
        return -(-(self.stop - self.start) // self.stream)

    @property
    def ranks(self) -> int:
        """The number of pieces, K R."""
        return self.chunks * self.each

    def begin(self, chunk: int) -> int:
        """Return the first position of a chunk; for chunk K, return the end of the last chunk."""
        return min(self.start + chunk * self.stream, self.stop)

    def positions(self, chunk: int) -> range:
        """Return the positions of a chunk."""
        return range(self.begin(chunk), self.begin(chunk + 1))

    def piece(self, number: int) -> range:
        """Return the positions of a piece; the range may be empty."""
        chunk, rank = divmod(number, self.each)
        at = self.positions(chunk)
        return cut(at.start, at.stop, rank, self.each)

    def ranges(self, number: int) -> tuple[range, ...]:
        """Return the positions of a piece as ranges, like `Shard.ranges`."""
        return join([self.piece(number)])

    def held(self, number: int) -> tuple[range, ...]:
        """Return all positions of the piece's rank up to and including this piece, in rising order."""
        return tuple(x for u in range(number % self.each, number + 1, self.each) if (x := self.piece(u)))

    def peers(self, number: int) -> range:
        """Return the indices of all pieces in the chunk of a piece."""
        first = number // self.each * self.each
        return range(first, first + self.each)

    def number(self, position: int) -> int:
        """Return the index of the piece that contains a position; -1 before the first position, K R after the last."""
        if not self.start <= position < self.stop:
            return -1 if position < self.start else self.ranks
        chunk = (position - self.start) // self.stream
        at = self.positions(chunk)
        return chunk * self.each + (position - at.start) // len(cut(at.start, at.stop, 0, self.each))

    def local(self, number: int) -> slice:
        """Return the slice of a piece among all positions of its rank."""
        chunk, rank = divmod(number, self.each)
        before = chunk * len(cut(0, self.stream, rank, self.each))  # chunks before the last one are full
        return slice(before, before + len(self.piece(number)))

    def carrier(self, reader: int, position: int) -> tuple[int, int]:
        """Return (piece of the reader's chunk on the rank that has a position, index of the position).

        The position is in the reader's chunk or in an earlier one. The index counts from the start of the returned
        piece, so positions of earlier chunks have negative indices."""
        owner = self.number(position)
        peer = self.peers(reader)[owner % self.each]
        return peer, self.local(owner).start + self.piece(owner).index(position) - self.local(peer).start
