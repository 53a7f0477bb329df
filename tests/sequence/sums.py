"""The pairs and pads that the ranks compute, summed over ranks, equal the definition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from lightning_dilated.attention.resolve import local_spans
from lightning_dilated.pattern.rows import blocks, window_band
from lightning_dilated.sequence.requirements import Document, Problem, RowRequest, row_requests

from ..pattern import naive
from .cases import Case

Requests = Callable[[Problem, int], Iterable[RowRequest]]


def local_cells(case: Case, problem: Problem, rank: int, whole: bool = False):
    """Yield (document, branch, head, positions, key positions, pads) of every segment within the rank's own tokens."""
    for span in local_spans(list(case.documents), problem.shard.ranges(rank)):
        start = span.origin + span.start - span.offset
        document = Document(span.batch, span.batches, start, start + span.document)
        assert document in case.documents
        for i in range(span.length):  # check that these tokens are at these indices of the rank's tensor
            assert problem.shard.owner(start + span.offset + i) == (rank, span.start + i)
        arguments = (case.pattern, span.document, case.heads, case.kv_heads, span.part, problem.heads, whole)
        for block in blocks(*arguments):
            for s in range(block.segments):
                for j in range(block.heads):
                    first = start + span.offset + block.first + s * block.segment_stride + j * block.position_step
                    rows = keys = [first + i * block.row_stride for i in range(block.rows)]
                    if block.keys is not None:
                        keys = [start + span.offset + block.keys[0] + i for i in range(block.keys[1])]
                    head = problem.heads[0] + block.head + j * block.head_step
                    kv_head = problem.kv_heads[0] + block.kv_head + j * block.kv_head_step
                    assert kv_head == head // (case.heads // case.kv_heads)
                    yield document, block.branch, head, rows, keys, 0 if case.causal else block.pads


def triangle(queries: list[int], keys: list[int], causal: bool, band: tuple[int, int] | None = None):
    """Return (query, key) pairs as backends define them. Causal: query i sees keys up to i. In a band: keys i + lower
    to i + upper.
    """
    if band is not None:
        lower, upper = band
        visible = [keys[max(0, n + lower) : max(0, n + upper + 1)] for n in range(len(queries))]
        assert all(visible)
        return [(p, j) for p, some in zip(queries, visible, strict=True) for j in some]
    assert not causal or len(queries) == len(keys)
    return [(p, j) for n, p in enumerate(queries) for j in (keys[: n + 1] if causal else keys)]


def computed(case: Case, requests: Requests, whole: bool) -> tuple[Counter, Counter]:
    """Return counts over all ranks: of each pair, and of the pads of each (document, branch, head, query)."""
    pairs, pads = Counter(), Counter()
    for problem in case.problems():
        for rank in range(case.shard.ranks):
            for document, branch, head, rows, keys, pad in local_cells(case, problem, rank, whole):
                band = window_band(case.pattern.branches[branch], case.causal)
                if case.causal and keys[0] > rows[0]:
                    continue
                causal = case.causal and keys is rows
                pairs.update((document, branch, head, p, j) for p, j in triangle(rows, keys, causal, band))
                pads.update({(document, branch, head, p): pad for p in rows})
            for request in requests(problem, rank):
                keys = [j for piece in request.keys for j in piece]
                which = request.document, request.branch, request.head
                arguments = list(request.queries), keys, request.causal, request.band
                pairs.update((*which, p, j) for p, j in triangle(*arguments))
                pads.update({(*which, p): request.pads for p in request.queries})
    return pairs, pads


def check_pairs(case: Case, requests: Requests = row_requests, whole: bool = False) -> Counter:
    """Check that in each branch, every pair of the definition and no other pair is computed once. Return the pads."""
    pairs, pads = computed(case, requests, whole)
    assert set(pairs) == case.pairs
    assert all(n == 1 for n in pairs.values())
    return pads


def check_pads(case: Case, requests: Requests = row_requests, whole: bool = False) -> None:
    """Run `check_pairs`, and check that pads of each (branch, head, query) equal the definition, counted once."""
    pads = check_pairs(case, requests, whole)
    for document in case.documents:
        n = document.stop - document.start
        for branch in range(len(case.pattern.branches)):
            want = naive.pads(case.pattern, n, case.heads, case.kv_heads, branch)
            for head in range(case.heads):
                got = [pads[document, branch, head, document.start + p] for p in range(n)]
                assert got == ([0] * n if case.causal else want[head])
