"""Planning a new batch of packed documents costs integer arithmetic only, a few milliseconds of a core.

Every training step has new documents, so nothing can be cached.
"""

import itertools
import random
import sys

import pytest

from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence import ranges, requirements
from lightning_dilated.sequence.exchange import gather
from lightning_dilated.sequence.requirements import Document, Problem, crosses, needed_rows, straddling
from lightning_dilated.sequence.shard import Shard

N, HEADS = 1 << 20, 12
PATTERN = DilatedPattern.longnet([2048 << i for i in range(5)], [1 << i for i in range(5)])
#: calls of Python and C functions: 10 % above the largest case, which takes 9 ms of a core at 3 GHz
LIMIT = 66_000


def packed(count: int) -> list[Document]:
    """Return `count` documents that together have N tokens."""
    bounds = [0, *sorted(random.Random(0).sample(range(1, N), count - 1)), N]
    return [Document(0, 1, a, b) for a, b in itertools.pairwise(bounds)]


def forget() -> None:
    """Clear all caches of the planner."""
    for cached in (needed_rows, crosses, requirements._cuts, Shard.ranges, ranges._inverse):
        cached.cache_clear()


def calls(call) -> int:
    """Count the functions that a call enters with empty caches. Unlike time, this count does not depend on the load."""
    entered = 0

    def count(frame, event, function):
        nonlocal entered
        entered += event in ("call", "c_call")

    forget()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [8, 64])
def test_ten_thousand_documents(ranks, layout, causal):
    documents, rank = packed(10_000), ranks // 2

    def prepare():
        shard = Shard(N, ranks, layout)
        problem = Problem(PATTERN, HEADS, HEADS, causal, shard, straddling(documents, shard), (0, HEADS))
        assert crosses(problem)
        assert needed_rows(problem, rank)
        return gather.program(problem, rank, 8)

    assert calls(prepare) < LIMIT


@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_only_documents_at_cuts_are_left(ranks):
    # the work grows with the number of documents that straddle a cut, at most one per cut
    assert len(straddling(packed(10_000), Shard(N, ranks))) < ranks
    assert len(straddling(packed(10_000), Shard(N, ranks, "zigzag"))) < 2 * ranks
