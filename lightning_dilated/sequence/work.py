"""How much of a call is about segments that cross a cut: (query, key) pairs of each rank, and rows."""

from __future__ import annotations

from lightning_dilated.sequence import strided
from lightning_dilated.sequence.exchange.rows import FEW
from lightning_dilated.sequence.exchange.switch import owned
from lightning_dilated.sequence.problem import Problem, residues, served, wants, wide_segments
from lightning_dilated.sequence.progressions import intersect


def pairs(problem: Problem, exchange: str, rank: int) -> int:
    """The pairs of a rank; those of narrower segments are the same with every exchange, and left out."""
    if exchange == "switch":
        if strided.serves(problem):
            return strided.pairs(problem, rank, owner=True)
        return sum(task.pairs for owner, task in owned(problem, rank) if owner == rank)
    return joint_pairs(problem, rank) + _own(problem, rank)


def joint_pairs(problem: Problem, rank: int) -> int:
    """The pairs of a rank's wants: those with rows beyond one run of its own consecutive positions."""
    if strided.serves(problem):
        return strided.pairs(problem, rank)
    return sum(want.pairs for want in wants(problem, rank))


def _own(problem: Problem, rank: int) -> int:
    """Pairs of a rank's own rows with each other, where they follow one another; else wants hold them."""
    found = 0
    for piece in problem.shard.ranges(rank):
        for segment in wide_segments(problem, piece) if piece.step == 1 else ():
            for head in served(problem, segment.branch):
                n = len(intersect(residues(problem, segment, head), piece))
                found += segment.document.samples * (n * (n + 1) // 2 if problem.causal else n * n)
    return found


def few(problem: Problem) -> bool:
    """Whether at most `FEW` of a rank's rows belong to such segments (of all branches together)."""
    length, heads = problem.shard.longest, range(*problem.heads)
    wide = [b for b in problem.pattern.branches if b.segment_length is None or b.segment_length > length or b.shift]
    rows = sum(len([h for h in heads if b.heads is None or h in b.heads]) / b.dilation_rate for b in wide)
    return rows <= FEW * len(heads)
