"""Random cases of sharded attention, and their pairs and rows computed from the definition in plain Python sets.

A pair is (document, branch, head, query position, key position). A row is (document, kv head, position). All positions
are global.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby, pairwise

from hypothesis import assume
from hypothesis import strategies as st

from lightning_dilated.pattern import Branch, DilatedPattern, Window
from lightning_dilated.pattern.rows import check_padding
from lightning_dilated.sequence.exchange.all_to_all import windows
from lightning_dilated.sequence.requirements import Document, Problem, straddling
from lightning_dilated.sequence.shard import LAYOUTS, Shard

from ..pattern import naive
from ..pattern.strategies import patterns

HEADS = [(1, 1), (2, 2), (3, 3), (4, 2), (6, 2), (6, 3), (5, 1)]


@dataclass(frozen=True)
class Case:
    """A call on the ranks of a sequence. A failing test prints the repr."""

    pattern: DilatedPattern
    heads: int
    kv_heads: int
    causal: bool
    shard: Shard
    documents: tuple[Document, ...]

    def problem(self, window: tuple[int, int] | None = None) -> Problem:
        """Return the problem for one window of heads, or for all heads if it is None."""
        across = straddling(self.documents, self.shard)
        heads = window or (0, self.heads)
        return Problem(self.pattern, self.heads, self.kv_heads, self.causal, self.shard, across, heads)

    def problems(self) -> list[Problem]:
        """Return one problem for each member of a head-parallel group."""
        return [self.problem(window) for window in windows(self.heads, self.kv_heads, self.shard.members)]

    @functools.cached_property
    def pairs(self) -> set[tuple]:
        """Return all pairs of the definition."""
        return {
            (document, branch, head, p, j)
            for document, branch, head, positions in self._together
            for p in positions
            for j in positions
            if (j <= p or not self.causal) and abs(p - j) < reach(self.pattern.branches[branch])
            if naive.global_pair(self.pattern.branches[branch], p - document.start, j - document.start)
        }

    @property
    def _together(self):
        """Yield (document, branch, head, positions) for each segment and each head in it."""
        for d in self.documents:
            n = d.stop - d.start
            for i, branch in enumerate(self.pattern.branches):
                for head in range(self.heads):
                    segments = defaultdict(list)
                    for p in range(n):
                        segment = naive.segment_of(self.pattern, branch, head, p, n, self.heads, self.kv_heads)
                        if segment is not None:
                            segments[segment].append(d.start + p)
                    yield from ((d, i, head, positions) for positions in segments.values())

    def held(self) -> list[set[int]]:
        """Return the positions that each rank has."""
        out = [set() for _ in range(self.shard.ranks)]
        for position in range(self.shard.seq_len):
            out[member_of(self.shard, position) // self.shard.members].add(position)
        return out

    def rows_seen(self, problem: Problem) -> list[set[tuple]]:
        """Return the rows that the queries of each rank see, including the rank's own rows."""
        held = self.held()
        owner = {p: rank for rank, positions in enumerate(held) for p in positions}
        out = [set() for _ in held]
        for document, _, head, p, j in self.pairs:
            if document in problem.documents and problem.heads[0] <= head < problem.heads[1]:
                out[owner[p]].add((document, head // (self.heads // self.kv_heads), j))
        return out


def member_of(shard: Shard, position: int) -> int:
    """Return the member that has the position, as the docstring of `Shard` defines it."""
    total = shard.ranks * shard.members
    if shard.layout == "strided":
        return position % total
    if shard.layout == "contiguous":
        return position // ((shard.seq_len + total - 1) // total)
    if shard.layout == "chunked":
        start = position - position % shard.stream
        tokens = min(shard.stream, shard.seq_len - start)
        return (position - start) // ((tokens + total - 1) // total)
    chunk = position // ((shard.seq_len + 2 * total - 1) // (2 * total))
    return chunk if chunk < total else 2 * total - 1 - chunk


def runs_of(shard: Shard) -> list[tuple[int, int]]:
    """Return (first, last) of maximal runs of consecutive positions that are also consecutive in a rank's tensor."""
    owners = [shard.owner(p) for p in range(shard.seq_len)]
    out = []
    for p, (rank, index) in enumerate(owners):
        if out and owners[p - 1] == (rank, index - 1):
            out[-1] = out[-1][0], p
        else:
            out.append((p, p))
    return out


def interleaved(shard: Shard) -> bool:
    """Return whether adjacent positions are always on different members, in which case local blocks have no pairs."""
    return shard.layout == "strided" and shard.ranks * shard.members > 1


def reach(branch: Branch | Window) -> float:
    """Return the smallest distance at which a query of a window sees nothing; segments have no such limit."""
    return math.inf if branch.width is None else branch.width * branch.dilation_rate


@st.composite
def shards(draw, longest: int = 40, ranks: int = 6, members: int = 3, layouts=LAYOUTS, fewest: int = 1):
    """Draw any shard, including empty ranks, a short last shard, or one rank."""
    # hypothesis prefers small numbers, and a short sequence crosses few cuts
    n = draw(st.one_of(st.integers(longest // 2, longest), st.integers(0, longest)))
    r, m = draw(st.integers(fewest, ranks)), draw(st.integers(1, members))
    layout = draw(st.sampled_from(layouts))
    return Shard(n, r, layout, m, draw(st.integers(1, longest + 5)) if layout == "chunked" else None)


@st.composite
def calls_of(draw, seq_len: int):
    """Draw the documents of a call: packed documents, or samples of different lengths. None of them is empty."""
    if draw(st.booleans()):
        bounds = (0, *sorted(draw(st.lists(st.integers(0, seq_len), max_size=6))), seq_len)
        return tuple(Document(0, 1, a, b) for a, b in pairwise(bounds) if b > a)
    lengths = draw(st.lists(st.sampled_from([seq_len, draw(st.integers(0, seq_len))]), min_size=1, max_size=3))
    out = []
    for length, same in groupby(enumerate(lengths), key=lambda x: x[1]):
        samples = [i for i, _ in same]
        if length:
            out.append(Document(samples[0], len(samples), 0, length))
    return tuple(out)


@st.composite
def cases(
    draw, longest: int = 40, ranks: int = 6, members: int = 3, layouts=LAYOUTS, fewest: int = 1, padding: str = "masked"
):
    """Draw any case. With padding="attended", the definition allows the case."""
    heads, kv_heads = draw(st.sampled_from(HEADS))
    shard = draw(shards(longest, ranks, members, layouts, fewest))
    windows = shard.layout != "strided"  # the strided layout refuses windows
    pattern = draw(patterns(heads, kv_heads, padding=padding, widest=longest + longest // 2, windows=windows))
    documents = draw(calls_of(shard.seq_len))
    try:
        for d in documents:
            check_padding(pattern, d.stop - d.start)
    except ValueError:
        assume(False)
    return Case(pattern, heads, kv_heads, draw(st.booleans()), shard, documents)
