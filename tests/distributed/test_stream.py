"""Ranks that share each chunk of a stream give the results of one pass on one rank, and transfer the planned bytes."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, seed, settings
from hypothesis import strategies as st

from ..attention.strategies import cases
from ..examples import examples
from .calls import SEED, alone, close_rounded, compare, compare_rounded, together
from .calls import attend as attend_at_once
from .strategies import DTYPES, ROUNDED, Sharded
from .stream_calls import NAMES, attend

TOL = {"rtol": 1e-10, "atol": 1e-10}
dropouts = st.sampled_from([0.0, 0.0, 0.3])


def check(pool, ranks, case, chunk, dropout, windows=((0, None),), dtype=torch.float64):
    """Assert that the ranks give the results of one pass on one rank. Return the bytes that all ranks sent."""
    results, planned, flops = zip(*pool.run(ranks, attend, case, chunk, dropout, windows, dtype), strict=True)
    tensors = [x.detach() for x in case.tensors(dtype)]
    expected, one = (at_once(case, [x.to(t) for x in tensors], dropout) for t in (torch.float64, dtype))
    got = together(results, expected)
    for name, want in expected.items():
        if dtype in ROUNDED:
            close_rounded(f"{name} of {case}, {chunk} in {dtype}", got[name], one[name], want)
            continue
        torch.testing.assert_close(got[name], want, **TOL, msg=lambda m, name=name: f"{name} of {case}, {chunk}: {m}")
    last = case.seq_len - (case.seq_len - 1) // chunk * chunk  # tokens of the last chunk; only its forward runs once
    forward, whole = (4 * case.head_dim * int(x.sum()) for x in (case.counts()[0][:, :, :-last], case.counts()[0]))
    assert sum(flops) == forward + whole + 10 * whole // 4
    for result, plan in zip(results, planned, strict=True):
        assert (result.sent, result.received) == plan, f"other bytes than planned: {case}, {chunk}"
    return sum(sum(x.sent) for x in results)


def at_once(case, tensors, dropout):
    """Return the results of one pass on one rank by name. `tensors` are q, k, v and the gradient of the output."""
    *inputs, grad = tensors
    inputs = [x.requires_grad_() for x in inputs]
    torch.manual_seed(SEED)
    out = case.run(*inputs, dropout=dropout)
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, inputs, grad)), strict=True))


def random_cases(ranks, number, count):
    """Draw any pattern, shift, documents, lengths and grouped heads, with chunks shorter and longer than segments."""

    def decorate(function):
        chunks = st.one_of(st.integers(1, 16), st.integers(1, 50))
        drawn = given(cases(longest=48), chunks, dropouts, DTYPES)(function)
        return seed(ranks + number)(
            settings(max_examples=examples(count), suppress_health_check=list(HealthCheck))(drawn)
        )

    return decorate


@pytest.mark.parametrize("count", [10, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_equals_one_pass_of_one_rank(pool, ranks, count):
    counts = Counter()

    @random_cases(ranks, count, count)
    def random(case, chunk, dropout, dtype):
        assume(case.seq_len and case.batch)
        case = replace(case, causal=True, layout="contiguous")
        sent = check(pool, ranks, case, chunk, dropout, dtype=dtype)
        counts["moved"] += sent > 0
        counts["empty pieces"] += -(-min(chunk, case.seq_len) // ranks) * (ranks - 1) >= min(chunk, case.seq_len)
        counts["short last chunk"] += case.seq_len % chunk > 0
        counts["fewer heads"] += case.heads < ranks
        counts["documents"] += case.documents is not None and sent > 0
        counts["several chunks"] += case.seq_len > 2 * chunk

    random()
    needed = {"moved", "several chunks"} | ({"short last chunk", "documents", "fewer heads"} if count > 100 else set())
    needed |= {"empty pieces"} if ranks > 2 else set()
    assert all(counts[x] for x in needed), counts


@pytest.mark.parametrize("count", [3, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_windows_of_heads(pool, ranks, count):
    """Each chunk of heads carries and exchanges only its own rows."""

    @random_cases(ranks, 1000, count)
    def random(case, chunk, dropout, dtype):
        assume(case.seq_len and case.batch and case.kv_heads > 1)
        group = case.heads // case.kv_heads
        windows = tuple((h, h + group) for h in range(0, case.heads, group))
        check(pool, ranks, replace(case, causal=True, layout="contiguous"), chunk, 0.0, windows, dtype)

    random()


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_a_whole_call_in_the_layout_of_chunks(pool, count):
    """Without a stream, the pieces of the chunked layout are shards, as in the other layouts."""

    @settings(max_examples=examples(count), suppress_health_check=list(HealthCheck))
    @given(cases(longest=48), st.integers(1, 50), DTYPES)
    def random(case, chunk, dtype):
        assume(case.seq_len and case.batch and not case.refused())
        call = Sharded(case, 3, "chunked", stream=chunk)
        results = pool.run(3, attend_at_once, call, dtype)
        compare_rounded(call, results, dtype) if dtype in ROUNDED else compare(call, results, alone(call), 1e-10)

    random()
