"""recurrent_attention gives one rank's output, states and gradients on ranks, for any documents and segments."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated import recurrent_attention
from lightning_dilated.ext.recurrence import compute, scan
from lightning_dilated.recurrence.description import KINDS

from ..examples import examples
from ..ext.recurrence.cases import NAMES, Case, cases, compare
from .calls import positions, sequence
from .strategies import DTYPES

#: allowed difference, relative to the largest number or 1; results differ because sums over ranks are rounded
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 4e-2, torch.float16: 2e-2}
PROGRAMS = {"auto": scan.choose, "all": lambda owners: scan.all_to_later(len(owners))}
PROGRAMS["doubling"] = lambda owners: scan.doubling(len(owners))


def attend(rank, group, case, layout, program, options):
    """Return (positions, out, states, gradients, traffic) of this rank. Gradients of earlier tokens are parts of sums."""
    with (
        sequence(group, layout=layout, **options) as ours,
        mock.patch.object(compute, "CHUNK", case.chunk),
        mock.patch.object(scan, "choose", PROGRAMS[program]),
    ):
        at = positions(ours, case.seq_len)
        tensors = [x.detach()[:, at].requires_grad_() for x in case.tensors()]
        past = case.past()
        settings = {**case.settings(), **case.limits(), "sequence": ours}
        states = ()
        if case.causal:
            out, state = recurrent_attention(*tensors, **settings, state=case.state(past), return_state=True)
            states = case.summary(state)
        else:
            out = recurrent_attention(*tensors, **settings)
        whole = case.weights(case.batch, case.seq_len, *out.shape[2:])
        loss = (out * whole[:, at]).sum()  # losses of the ranks sum to the whole loss; rank 0 adds the states' loss
        for i, x in enumerate(states):
            loss = loss + (x * case.weights(*x.shape, seed=3 + i)).sum() * (rank == 0)
        grads = torch.autograd.grad(loss, (*tensors, *past), allow_unused=True, materialize_grads=True)
        moved = [(t.sent, t.received, t.messages) for t in (ours.forward_traffic, ours.backward_traffic)]
        return at, out.detach(), [x.detach() for x in states], grads, moved


def check(pool, ranks, case, layout="contiguous", program="auto", **options):
    """Check that the ranks together give one rank's results. Return the bytes that each rank transferred."""
    with mock.patch.object(compute, "CHUNK", case.chunk):
        want = case.run()
    answers = pool.run(ranks, attend, case, layout, program, options)
    at = [p for answer in answers for p in answer[0]]
    assert sorted(at) == list(range(case.seq_len))
    order = torch.argsort(torch.tensor(at, dtype=torch.int64))
    whole = lambda parts: torch.cat(parts, 1)[:, order]  # noqa: E731
    joined = {"out": whole([answer[1] for answer in answers])}
    for i, state in enumerate(answers[0][2]):
        joined[f"state {i}"] = state
        assert all(torch.equal(answer[2][i], state) for answer in answers)
    number = len(case.tensors())
    for i, name in enumerate(NAMES[:number]):
        joined[f"d {name}"] = whole([answer[3][i] for answer in answers])
        joined[f"d earlier {name}"] = sum(answer[3][number + i] for answer in answers)
    compare(joined, want, TOLERANCES[case.dtype])
    return [answer[4] for answer in answers]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@given(
    case=cases(),
    layout=st.sampled_from(["contiguous", "zigzag"]),
    program=st.sampled_from(list(PROGRAMS)),
    dtype=DTYPES,
)
@settings(max_examples=examples(25), deadline=None)
def test_any_call(pool, ranks, case, layout, program, dtype):
    check(pool, ranks, replace(case, dtype=dtype), layout, program)


SEQUENCES = [
    ((9,), False, None),  # with 4 ranks: 3, 3, 3, 0 tokens
    ((1,), False, (5,)),
    ((0,), False, (5,)),
    ((37, 20), False, (3, 6)),
    ((10, 0, 23, 1), True, (2, 3, 0, 5)),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layout, documents, packed, earlier",
    [
        *(("zigzag", *x) for x in SEQUENCES),
        *(("contiguous", *x) for x in (SEQUENCES[0], SEQUENCES[-1])),
        *(pytest.param("contiguous", *x, marks=pytest.mark.slow) for x in SEQUENCES[1:-1]),
    ],
)
def test_four_ranks(pool, kind, layout, documents, packed, earlier):
    for program in PROGRAMS:
        check(pool, 4, Case(kind, documents, packed, earlier, segment=7), layout, program)


@pytest.mark.parametrize("reset", [-80.0, -1e9])
def test_resets(pool, reset):
    case = Case("gated_delta", (10, 0, 93, 1), True, (2, 3, 0, 5), reset=reset)
    for program in PROGRAMS:
        check(pool, 4, case, "zigzag", program)
    check(pool, 3, Case("gated_delta", (91,), reset=reset), "chunked", stream=12)
    compare(case.run(), case.by_definition())


@pytest.mark.parametrize("segment", [4, 7])
def test_both_sides(pool, segment):
    for documents, packed in (((37, 20), False), ((10, 0, 23, 1), True), ((3,), False)):
        check(pool, 4, Case("linear", documents, packed, segment=segment, causal=False), "zigzag")


@pytest.mark.parametrize("kind", KINDS)
def test_chunked_layout(pool, kind):
    check(pool, 3, Case(kind, (31,), segment=5), "chunked", stream=12)


def test_bytes(pool):
    """Each rank has whole segments, so only maps are sent. The backward sends the same number of bytes in return."""
    case = Case("gated_delta", (64,), kv_heads=3, dim=4, values=2)
    size = 3 * 4 * (4 + 2) * 8
    moved = check(pool, 4, case, program="all")
    assert [forward[:2] for forward, _ in moved] == [((3 - r) * size, r * size) for r in range(4)]
    assert [backward[:2] for _, backward in moved] == [(r * size, (3 - r) * size) for r in range(4)]
    moved = check(pool, 4, case, program="doubling")
    assert [forward[1] for forward, _ in moved] == [n * size for n in (0, 1, 2, 3)]
    sums = 3 * 4 * (2 + 1 + 1) * 8  # "linear" sends the matrix, the normalizer, and whether the state continues
    moved = check(pool, 4, Case("linear", (64,), segment=16, kv_heads=3, dim=4, values=2), program="all")
    assert [forward[1] for forward, _ in moved] == [r * sums for r in range(4)]


def test_programs_move_what_they_say():
    for pieces in (1, 2, 3, 4, 5, 8, 64, 100):
        for rounds in (scan.all_to_later(pieces), scan.doubling(pieces)):
            sums = [set() for _ in range(pieces)]
            for number, pairs in enumerate(rounds):
                before = [set(s) for s in sums]
                for source, target in pairs:
                    taken = {source} if number == 0 else before[source]
                    assert not taken & sums[target]
                    sums[target] |= taken
            assert sums == [set(range(p)) for p in range(pieces)]
    for pieces, maps in ((4, 3), (8, 4), (64, 7), (4096, 13)):
        owners = tuple(range(pieces))
        assert scan.received(scan.choose(owners), owners) == maps
    assert scan.choose((0, 1, 2)) == scan.all_to_later(3)


def refused(rank, group):
    case = Case("linear", (8,))
    messages = []
    for layout, change in (
        ("strided", {}),
        ("contiguous", {"segment": 3 + rank}),
        ("contiguous", {"segment": 0 if rank else 4}),
        ("contiguous", {"lengths": [9]}),
        ("contiguous", {"kind": "linear" if rank else "delta"}),
    ):
        with sequence(group, layout=layout) as ours:
            tensors = [x.detach()[:, positions(ours, 8)] for x in case.tensors()]
            try:
                recurrent_attention(*tensors, **{**case.settings(), **change}, sequence=ours)
                messages.append("")
            except ValueError as error:
                messages.append(str(error))
    return messages


def test_refusals_reach_every_rank(pool):
    for strided, differs, wrong, lengths, kinds in pool.run(2, refused):
        assert "layout='strided' has no recurrent attention" in strided and "'zigzag'" in strided
        assert "segment" in differs and "segment must be at least 1" in wrong
        assert "lengths must lie in 0..8" in lengths and "kind" in kinds


def reads_nothing(rank, group):
    """Take a loss on the first rank's output only, then on the state only. The backward must not hang on any rank."""
    with sequence(group) as ours, ours.active():
        case = Case("delta", (5,), segment=4)
        tensors = [x.detach()[:, positions(ours, 5)].requires_grad_() for x in case.tensors()]
        out, state = recurrent_attention(*tensors, **case.settings(), return_state=True)
        first = torch.autograd.grad(out.sum() * (rank == 0), tensors, retain_graph=True, allow_unused=True)
        last = torch.autograd.grad(state.matrix.sum(), tensors, allow_unused=True)
        return [0 if g is None else g.shape[1] for g in (*first, *last)]


def test_every_backward_takes_part(pool):
    pool.run(4, reads_nothing)
