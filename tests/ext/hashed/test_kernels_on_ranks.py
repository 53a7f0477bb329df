"""The kernels compute calls of several ranks, and chunks of streams, in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ...examples import examples
from . import test_shared_streams as streams
from .cases import Case, cases, compare
from .test_kernels import forced
from .test_ranks import attend, check_bytes, joined


def on_ranks(rank, group, case, layout):
    with forced((4, 16), 4):
        return attend(rank, group, case, {"layout": layout})


def in_chunks(rank, group, case, chunk, samples):
    with forced((4, 16), 4):
        return streams.attend(rank, group, case, chunk, samples)


@given(case=cases(), layout=st.sampled_from(["contiguous", "zigzag"]))
@settings(max_examples=examples(8), deadline=None)
def test_any_call(interpreter, case, layout):
    """The results are the oracle's, and ranks send the planned bytes."""
    case = replace(case, dtype=torch.float32)
    answers = interpreter.run(2, on_ranks, case, layout)
    compare(joined(answers), case.by_definition(), 2e-5)
    if not case.soft:
        check_bytes(case, 2, layout, answers, kernels=True)


@pytest.mark.parametrize("size", [1, 2])
@given(case=cases(5), chunk=st.integers(2, 6), samples=st.sampled_from([1, 4096]))
@example(case=Case((14, 9), latest=3), chunk=5, samples=1)
@settings(max_examples=examples(2), deadline=None)
def test_any_chunks(interpreter, size, case, chunk, samples):
    """A chunk reads rows of earlier chunks; some ranks have no tokens of a chunk."""
    assume(case.seq_len)
    streams.check(interpreter, size, replace(case, dtype=torch.float32), chunk, samples, in_chunks)


def test_bytes_of_chunks_are_planned(interpreter):
    streams.check_traffic(interpreter, 2, Case((30, 21), latest=5, kv_heads=2, dtype=torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_chunks(interpreter, size):
    case = Case((40, 33), padding=3, latest=6, kv_heads=2, probes=2, dtype=torch.float32)
    streams.check(interpreter, size, case, 16, run=in_chunks)
