"""Where the positions of one sequence lie: global position <-> (rank, local index), as ranges of integers.

Shape letters: N tokens of the sequence, R ranks, L the most tokens a rank holds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from lightning_dilated.pattern.branch import integer
from lightning_dilated.sequence.ranges import join

LAYOUTS = ("contiguous", "zigzag", "strided")


@dataclass(frozen=True)
class Shard:
    """How `seq_len` positions are dealt to `ranks` ranks.

    Args:
        seq_len: N; it need not be a multiple of anything, and ranks may be left empty (N = 9 on 4 ranks: 3, 3, 3, 0).
        ranks: R.
        layout: "contiguous": rank s holds [s L, (s + 1) L), L = ceil(N / R);
            "zigzag": of 2 R chunks of C = ceil(N / 2R), rank s holds the chunks s and 2 R - 1 - s;
            "strided": rank s holds the positions p with p mod R = s.
        members: with head-parallel groups, `members` neighbouring ranks hold their positions together; `ranks` then counts
            the groups, and a group's positions are those of its members one after another.

    Raises:
        ValueError, TypeError: naming the argument.
    """

    seq_len: int
    ranks: int
    layout: str = "contiguous"
    members: int = 1

    def __post_init__(self) -> None:
        integer(self.seq_len, "seq_len", 0)
        integer(self.ranks, "ranks", 1)
        integer(self.members, "members", 1)
        check_layout(self.layout)

    @property
    def chunk(self) -> int:
        """Tokens of a full chunk of one member: ceil(N / R), or ceil(N / 2R) in zigzag."""
        return -(-self.seq_len // (self.ranks * self.members * (2 if self.layout == "zigzag" else 1)))

    @functools.lru_cache(maxsize=65536)  # noqa: B019 - shards are small values, equal ones share their entries
    def ranges(self, rank: int) -> tuple[range, ...]:
        """The positions of a rank, in local order; empty ranges are left out."""
        if not 0 <= rank < self.ranks:
            raise IndexError(f"rank {rank} lies outside the {self.ranks} ranks of the sequence.")
        return join(x for member in range(rank * self.members, (rank + 1) * self.members) for x in self._held(member))

    def _held(self, member: int) -> list[range]:
        total = self.ranks * self.members
        if self.layout == "strided":
            return [range(member, self.seq_len, total)]
        if self.layout == "contiguous":
            return [self._chunk(member)]
        return [self._chunk(member), self._chunk(2 * total - 1 - member)]

    def _chunk(self, index: int) -> range:
        return range(min(index * self.chunk, self.seq_len), min((index + 1) * self.chunk, self.seq_len))

    def _member(self, position: int) -> int:
        total = self.ranks * self.members
        if self.layout == "strided":
            return position % total
        chunk = position // self.chunk
        return min(chunk, 2 * total - 1 - chunk)

    def length(self, rank: int) -> int:
        """Tokens that a rank holds."""
        return sum(map(len, self.ranges(rank)))

    @property
    def longest(self) -> int:
        """L, the most tokens a rank holds: rank 0, or in zigzag, where rank 0 has the short last chunk, rank R - 1."""
        return max(self.length(0), self.length(self.ranks - 1))

    def owner(self, position: int) -> tuple[int, int]:
        """(rank, local index) of a global position.

        Raises:
            IndexError: for a position outside the sequence.
        """
        if not 0 <= position < self.seq_len:
            raise IndexError(f"position {position} lies outside the sequence of {self.seq_len} tokens.")
        rank, before = self._member(position) // self.members, 0
        for held in self.ranges(rank):
            if position in held:
                return rank, before + held.index(position)
            before += len(held)
        raise AssertionError(f"{self} lost position {position}")

    def local(self, rank: int, position: int) -> int:
        """The local index of a position on the rank that holds it.

        Raises:
            IndexError: if that rank does not hold it.
        """
        owner, index = self.owner(position)
        if owner != rank:
            raise IndexError(f"position {position} lies on rank {owner}, not on rank {rank}.")
        return index

    def holders(self, start: int, stop: int) -> list[int]:
        """The ranks that hold some position of [start, stop), rising."""
        start, stop = max(start, 0), min(stop, self.seq_len)
        if self.layout == "strided":
            total = self.ranks * self.members
            if stop - start >= total:
                return list(range(self.ranks))
            return sorted({p % total // self.members for p in range(start, stop)})
        # one position of every chunk stands for it
        seen = {self._member(p) // self.members for p in range(start, stop, max(self.chunk, 1))}
        return sorted(seen | {self._member(stop - 1) // self.members} if start < stop else seen)


def check_layout(layout: str) -> str:
    """`layout`, or an error that lists the three."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}.")
    return layout
