"""Row numbers, computed from ranges: each number, decoded to (sample, position, head), equals the request."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.exchange.all_to_all import windows
from lightning_dilated.sequence.exchange.program import RowSet
from lightning_dilated.sequence.exchange.row_ops import LocalRows, Packing, ReceivedRows, batches, expand
from lightning_dilated.sequence.requirements import Document, Problem, row_requests

from ..examples import examples
from .cases import Case, cases
from .play import all_programs, geometric, nested_cases, rows_in

CPU = torch.device("cpu")


def own_rows(case: Case, rank: int, heads: tuple[int, int]) -> list[tuple]:
    """Return (sample, position, head) of every row in a rank's contiguous (B, L, heads) tensor."""
    samples = max((d.sample + d.samples for d in case.documents), default=0)
    positions = [p for piece in case.shard.ranges(rank) for p in piece]
    return [(b, p, h) for b in range(samples) for p in positions for h in range(*heads)]


def named(rows: list[tuple]) -> list[tuple]:
    """Convert rows (document, sample within the document, head, position) to (sample, position, head)."""
    return [(document.sample + sample, p, head) for document, sample, head, p in rows]


def requested_rows(document: Document, sample: int, head: int, rows) -> list[tuple]:
    """Return (sample, position, head) of the requested rows."""
    return [(document.sample + sample, p, head) for p in rows]


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(-9, 9), st.integers(0, 7)), max_size=8))
def test_expand(runs):
    got = expand(iter(runs))
    assert got.dtype == torch.int64
    assert got.tolist() == [start + i * step for start, step, count in runs for i in range(count)]


def test_expand_large_numbers():
    # row numbers exceed 2^31 in long sequences with several heads
    assert expand([(1 << 40, 1 << 35, 3)]).tolist() == [1 << 40, (1 << 40) + (1 << 35), (1 << 40) + (1 << 36)]


def check_overlaps(overlaps, rows: range, have: list[tuple], expected: list[tuple]) -> None:
    """Check that `overlaps` lists each of `rows` that is in `have` once, with its index in both."""
    places: dict[int, int] = {}
    for inside, there in overlaps:
        assert inside[2] == there[2] > 0
        for i, n in zip(expand([inside]).tolist(), expand([there]).tolist(), strict=True):
            assert i not in places
            places[i] = n
    assert {i: have[n] for i, n in places.items()} == {i: row for i, row in enumerate(expected) if row in set(have)}


@st.composite
def asks(draw, case: Case, heads: tuple[int, int]):
    """Draw (document, head, rows, sample), where `rows` are any rows of the document."""
    document = draw(st.sampled_from(case.documents))
    start = draw(st.integers(document.start, document.stop - 1))
    rows = range(start, draw(st.integers(start, document.stop)), draw(st.integers(1, 5)))
    return document, draw(st.integers(heads[0], heads[1] - 1)), rows, draw(st.integers(0, document.samples - 1))


SOME = cases(longest=30, ranks=4, members=2).filter(lambda case: case.documents)


@given(SOME, st.data())
@settings(max_examples=examples(50))
def test_own(case, data):
    rank = data.draw(st.integers(0, case.shard.ranks - 1))
    heads = data.draw(st.sampled_from([(0, case.heads), (case.heads - 1, case.heads)]))
    own = LocalRows(case.shard.ranges(rank), heads)
    assert own.length == case.shard.length(rank)
    document, head, rows, sample = data.draw(asks(case, heads))
    expected = requested_rows(document, sample, head, rows)
    check_overlaps(own.find(document, head, rows, sample), rows, own_rows(case, rank, heads), expected)


@given(SOME, st.data())
@settings(max_examples=examples(50))
def test_store(case, data):
    # pieces of all documents and heads, without some of the positions, in two messages
    store, message = ReceivedRows(), []
    for document in case.documents:
        for head in range(case.kv_heads):
            cut = data.draw(st.integers(document.start, document.stop))
            step = data.draw(st.integers(1, 3))
            pieces = [range(document.start, cut, step), range(cut, document.stop)]
            message += [RowSet(document, head, rows) for rows in pieces if rows and data.draw(st.booleans())]
    half = len(message) // 2
    store.add(message[:half])
    store.add(message[half:])
    have = rows_in([message])
    assert store.size == len(have)
    document, head, rows, sample = data.draw(asks(case, (0, case.kv_heads)))
    there = [row if row[0] == document else None for row in have]  # documents share no rows
    expected = [(document, sample, head, p) for p in rows]
    check_overlaps(store.find(document, head, rows, sample), rows, there, expected)


def check_packing(packing: Packing, own: list[tuple], store: list[tuple], sent: list[tuple]) -> None:
    """Check that the buffer filled by `packing` has the rows of the messages, in their order."""
    own_at = torch.arange(len(packing.own)) if packing.own_at is None else packing.own_at
    assert len(packing.own) == len(own_at) and len(packing.store) == len(packing.store_at)
    buffer: dict[int, tuple] = {}
    for at, numbers, rows in ((own_at, packing.own, own), (packing.store_at, packing.store, store)):
        for i, n in zip(at.tolist(), numbers.tolist(), strict=True):
            assert i not in buffer
            buffer[i] = rows[n]
    assert buffer == dict(enumerate(named(sent)))


def check_packings(case: Case, problem: Problem, exchange: str, per_node: int = 1) -> None:
    """Check the send buffer of every round on every rank, filled as `run` does."""
    for rank, program in enumerate(all_programs(problem, EXCHANGES[exchange].program, per_node)):
        own, store, arrived = LocalRows(case.shard.ranges(rank), problem.kv_heads), ReceivedRows(), []
        held = own_rows(case, rank, problem.kv_heads)
        for step in program.rounds:
            pieces = [piece for message in step.sends.values() for piece in message]
            check_packing(Packing.of(pieces, own, store), held, arrived, rows_in(step.sends.values()))
            if not program.keep:
                store, arrived = ReceivedRows(), []
            for message in step.receives.values():
                store.add(message)
            arrived = arrived + named(rows_in(step.receives.values()))


@given(cases(longest=30, ranks=6, members=2), st.sampled_from(["gather", "ring"]))
@settings(max_examples=examples(35))
def test_packing(case, exchange):
    for problem in case.problems():
        check_packings(case, problem, exchange)


@given(cases(longest=30, ranks=6, fewest=6, members=1), st.sampled_from([2, 3]))
@settings(max_examples=examples(25))
def test_packing_of_rows_passed_on(case, per_node):
    check_packings(case, case.problem(), "hierarchical_gather", per_node)


@given(nested_cases(ranks=(4, 8)), st.booleans())
@settings(max_examples=examples(25))
def test_packing_of_halves(case, nodes):
    for problem in case.problems():
        check_packings(case, problem, "hierarchical_butterfly" if nodes else "butterfly", 2)


def test_packing_of_a_row_that_is_not_there():
    document = Document(0, 2, 0, 8)
    own = LocalRows((range(0, 4),), (0, 1))
    Packing.of([RowSet(document, 0, range(0, 4, 2))], own, ReceivedRows())
    with pytest.raises(AssertionError, match="not held"):
        Packing.of([RowSet(document, 0, range(3, 5))], own, ReceivedRows())


def check_batches(problem: Problem, joined, requests: list, query_rows: list[tuple], key_rows: list[tuple]) -> None:
    """Check that each request is in one batch, and that the batch has the request's row numbers and positions."""
    assert sorted(map(repr, (x for batch in joined for x in batch.requests))) == sorted(map(repr, requests))
    for batch in joined:
        each = [(want, sample) for want in batch.requests for sample in range(want.document.samples)]
        assert {(w.branch, w.causal, w.pads) for w, _ in each} == {(batch.branch, batch.causal, batch.pads)}
        assert len({w.slot for w, _ in each}) == 1
        sample, head, queries, keys = batch.positions()
        assert batch.queries.shape == queries.shape and batch.keys.shape == keys.shape
        assert batch.queries.unique().numel() == batch.queries.numel()  # unique, because rows are written in place
        for i, (want, s) in enumerate(each):
            expected = [p for rows in want.keys for p in rows]
            kv_head = want.head // problem.group
            assert [query_rows[n] for n in batch.queries[i].tolist()] == requested_rows(
                want.document, s, want.head, want.queries
            )
            assert [key_rows[n] for n in batch.keys[i].tolist()] == requested_rows(want.document, s, kv_head, expected)
            assert (int(sample[i]), int(head[i])) == (want.document.sample + s, want.head)
            assert queries[i].tolist() == list(want.queries) and keys[i].tolist() == expected


def store_of(messages) -> tuple[ReceivedRows, list[tuple]]:
    """Return a store that has these messages, and its rows."""
    store = ReceivedRows()
    for message in messages:
        store.add(message)
    return store, named(rows_in(messages))


@given(cases(longest=30, ranks=5, members=2))
@settings(max_examples=examples(40))
def test_batches(case):
    for problem in case.problems():
        for rank, program in enumerate(all_programs(problem, EXCHANGES["gather"].program)):
            store, key_rows = store_of(program.rounds[0].receives.values())
            own, requests = LocalRows(case.shard.ranges(rank), problem.heads), list(row_requests(problem, rank))
            joined = batches(problem, requests, own, store)
            check_batches(problem, joined, requests, own_rows(case, rank, problem.heads), key_rows)


@given(cases(longest=24, ranks=5, padding="attended"))
@settings(max_examples=examples(25))
def test_batches_with_pads(case):
    problem = replace(case.problem(), causal=False)
    for rank, program in enumerate(all_programs(problem, EXCHANGES["gather"].program)):
        store, key_rows = store_of(program.rounds[0].receives.values())
        own, requests = LocalRows(case.shard.ranges(rank), problem.heads), list(row_requests(problem, rank))
        check_batches(
            problem, batches(problem, requests, own, store), requests, own_rows(case, rank, problem.heads), key_rows
        )


@given(cases(longest=30, ranks=5, members=2))
@settings(max_examples=examples(25))
def test_batches_of_received_queries(case):
    for problem in case.problems():
        for program in all_programs(problem, EXCHANGES["switch"].program):
            store, key_rows = store_of(program.keys.receives.values())
            queries, query_rows = store_of(program.queries.receives.values())
            joined = batches(problem, program.tasks, queries, store)
            check_batches(problem, joined, program.tasks, query_rows, key_rows)


def test_a_request_whose_rows_were_not_received():
    problem = geometric(4, 4, 4, 1)
    requests = list(row_requests(problem, 1))
    (step,) = EXCHANGES["gather"].program(problem, 1, 1).rounds
    store, _ = store_of(list(step.receives.values())[1:])
    with pytest.raises(AssertionError, match="not received"):
        batches(problem, requests, LocalRows(problem.shard.ranges(1), (0, 1)), store)


@given(st.integers(1, 40), st.data())
def test_windows(kv_heads, data):
    group, members = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 50))
    heads = kv_heads * group
    cuts = windows(heads, kv_heads, members)
    assert len(cuts) == members
    assert [h for a, b in cuts for h in range(a, b)] == list(range(heads))
    assert all(a <= b for a, b in cuts)
    unit = group if kv_heads >= members else 1
    sizes = [b - a for a, b in cuts]
    assert max(sizes) - min(sizes) <= unit
    if kv_heads >= members:  # in this case no kv head is split between ranks
        assert all(a % group == b % group == 0 for a, b in cuts)
