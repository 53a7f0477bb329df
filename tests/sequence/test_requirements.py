"""Local blocks and row requests of all ranks contain the pairs and pads of the definition, each of them once."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.pattern import Branch, DilatedPattern, Window
from lightning_dilated.sequence.ranges import size
from lightning_dilated.sequence.requirements import Document, crosses, needed_rows, row_requests, straddling
from lightning_dilated.sequence.shard import Shard

from ..examples import examples
from .cases import Case, cases, interleaved, runs_of
from .sums import check_pads, check_pairs, triangle


@given(cases())
@settings(max_examples=examples(100))
def test_every_pair_once(case):
    assert not any(check_pairs(case).values())  # padding="masked"


@given(cases(layouts=("strided",), members=2))
@settings(max_examples=examples(50))
def test_every_pair_once_strided(case):
    check_pairs(case)


@given(cases(longest=24, padding="attended"))
@settings(max_examples=examples(40))
def test_pads(case):
    check_pads(case)


def test_pads_of_a_short_last_segment():
    # 22 tokens, segments of 8, rate 4: the last segment has 6 tokens, so some heads see one zero key there
    pattern = DilatedPattern([(8, 4), (22, 3)], padding="attended")
    for layout in ("contiguous", "zigzag", "strided"):
        for ranks in (2, 3, 4):
            check_pads(Case(pattern, 4, 2, False, Shard(22, ranks, layout), (Document(0, 1, 0, 22),)))


@given(cases())
@settings(max_examples=examples(40))
def test_row_requests(case):
    for problem in case.problems():
        for rank, held in enumerate(case.held()):
            requested_rows_ = set()
            for request in row_requests(problem, rank):
                assert request.document in problem.documents and problem.heads[0] <= request.head < problem.heads[1]
                assert request.queries and request.keys and all(request.keys)
                assert set(request.queries) <= held
                keys = [j for piece in request.keys for j in piece]
                assert request.pairs == request.document.samples * len(
                    triangle(list(request.queries), keys, request.causal, request.band)
                )
                # a backend call joins requests of equal sizes by (branch, slot), so a row must not occur twice
                rows = {(request.branch, request.slot, request.document, request.head, p) for p in request.queries}
                assert not rows & requested_rows_
                requested_rows_ |= rows


@given(cases())
@settings(max_examples=examples(40))
def test_needed_rows(case):
    for problem in case.problems():
        rows_seen = case.rows_seen(problem)
        for rank, held in enumerate(case.held()):
            rows = needed_rows(problem, rank)
            got = {(*key, p) for key, pieces in rows.items() for piece in pieces for p in piece}
            assert sum(size(pieces) for pieces in rows.values()) == len(got)  # no row twice
            assert all(problem.kv_heads[0] <= kv_head < problem.kv_heads[1] for _, kv_head in rows)
            # own rows may be included if they are interleaved with the queries
            remote = {row for row in rows_seen[rank] if row[2] not in held}
            assert {row for row in got if row[2] not in held} == remote
            assert got <= rows_seen[rank]


@given(cases())
@settings(max_examples=examples(50))
def test_straddling(case):
    runs = runs_of(case.shard)
    inside = lambda d: any(a <= d.start and d.stop - 1 <= b for a, b in runs)  # noqa: E731
    want = [d for d in case.documents if interleaved(case.shard) or not inside(d)]
    assert list(straddling(case.documents, case.shard)) == want


@given(cases())
@settings(max_examples=examples(50))
def test_crosses(case):
    problem = case.problem()
    cuts = [start for start, _ in runs_of(case.shard)][1:]
    joined = False
    for d in problem.documents:
        for branch in case.pattern.branches:
            w = branch.segment_length or d.stop - d.start
            index = [(p - d.start + branch.shift) // w for p in range(d.start, d.stop)]
            inside = [cut - d.start for cut in cuts if d.start < cut < d.stop]
            joined |= any(index[i - 1] == index[i] for i in inside)
    assert crosses(problem) == (bool(case.documents) if interleaved(case.shard) else joined)
    if not crosses(problem):
        assert not any(list(row_requests(p, rank)) for p in case.problems() for rank in range(case.shard.ranks))


CORNERS = {
    "N = 9 on 4 ranks": (DilatedPattern([(4, 2), (9, 3)]), 3, 3, Shard(9, 4), [9]),
    "more ranks than tokens": (DilatedPattern([(4, 2), (None, 1)]), 2, 1, Shard(5, 8), [5]),
    "rate does not divide the shard": (DilatedPattern([(12, 3), (24, 6)]), 6, 2, Shard(24, 3), [24]),
    "rate beyond the shard": (DilatedPattern([(64, 16)]), 5, 5, Shard(64, 8), [64]),
    "shifted walls": (DilatedPattern([Branch(8, 2, shift=4), Branch(32, 4, shift=16)]), 4, 4, Shard(40, 4), [40]),
    "documents at every cut": (DilatedPattern([(8, 2)]), 2, 2, Shard(24, 3), [8, 8, 8]),
    "documents over every cut": (DilatedPattern([(8, 2), (4, 1)]), 2, 2, Shard(24, 3), [4, 8, 8, 4]),
    "one document over all ranks between small ones": (DilatedPattern([(20, 3)]), 3, 3, Shard(24, 4), [1, 22, 1]),
    "middle of a zigzag": (DilatedPattern([(6, 2)]), 2, 2, Shard(24, 2, "zigzag"), [24]),
    "one rank, strided over members": (DilatedPattern([(6, 2), (24, 5)]), 5, 1, Shard(24, 1, "strided", 3), [24]),
    "segments narrower than the stride": (DilatedPattern([(3, 2), (1, 1)]), 2, 2, Shard(24, 5, "strided"), [24]),
    "windows": (DilatedPattern([Window(3), Window(2, 3)]), 2, 2, Shard(24, 5), [20, 4]),
    "window over several shards": (DilatedPattern([Window(9)]), 2, 1, Shard(24, 7), [24]),
    "window in a zigzag": (DilatedPattern([Window(5, 2)]), 2, 1, Shard(25, 3, "zigzag"), [25]),
    "heads that see nothing": (DilatedPattern([Branch(8, 4, heads=[1])]), 4, 4, Shard(8, 2), [8]),
}


def test_corners():
    for pattern, heads, kv_heads, shard, lengths in CORNERS.values():
        bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        documents = tuple(Document(0, 1, a, b) for a, b in pairwise(bounds))
        for causal in (False, True):
            check_pairs(Case(pattern, heads, kv_heads, causal, shard, documents))


@given(st.integers(1, 60), st.integers(1, 8), st.sampled_from(["contiguous", "zigzag", "strided"]))
@settings(max_examples=examples(25))
def test_one_segment_over_everything(n, ranks, layout):
    # dense attention must not lose a pair at any cut
    for causal in (False, True):
        check_pairs(Case(DilatedPattern.dense(), 1, 1, causal, Shard(n, ranks, layout), (Document(0, 2, 0, n),)))
