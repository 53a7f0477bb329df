"""The kernels compute calls of several ranks, and chunks of streams, in Triton's interpreter."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from lightning_dilated.ext.hashed import ranks

from ...examples import examples
from . import test_ranks
from . import test_shared_streams as streams
from .cases import Case, cases, compare
from .test_kernels import TOLERANCES, forced
from .test_ranks import attend, check_bytes, joined


def on_ranks(rank, group, case, layout):
    with forced((4, 16), 4):
        return attend(rank, group, case, {"layout": layout})


def of_another_kind(rank, group, case):
    """Return the error of a call that one rank would compute by torch."""
    with mock.patch.object(ranks, "why_not", lambda *unused: "this rank has no compiler" if rank else None):
        with pytest.raises(ValueError) as raised:
            on_ranks(rank, group, case, "contiguous")
        with pytest.raises(ValueError) as in_a_chunk:
            in_chunks(rank, group, case, 4, 1)
    return [str(x.value) for x in (raised, in_a_chunk)]


def test_ranks_that_compute_differently_are_refused(interpreter):
    for messages in interpreter.run(2, of_another_kind, Case((9,), dtype=torch.float32)):
        for message in messages:
            assert "computed by" in message and "kernels" in message and "torch" in message


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


def with_old_memory(rank, group, case):
    """Return the results; and again, with NaN in all new memory and in padding."""
    answers, own, lengths = [on_ranks(rank, group, case, "zigzag")], test_ranks.own_tensors, case.documents

    def filled(case, at):
        tensors = own(case, at)
        with torch.no_grad():
            for x in tensors[:5]:
                for sample, length in enumerate(lengths):
                    x[sample, torch.as_tensor(at) >= length] = torch.nan
        return tensors

    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN
    try:
        with mock.patch.object(test_ranks, "own_tensors", filled):
            answers.append(on_ranks(rank, group, case, "zigzag"))
    finally:
        torch.use_deterministic_algorithms(False)
    return answers


def test_old_memory_and_padding_are_not_read(interpreter):
    case = Case((17, 6), padding=2, group=2, groups=2, codes=3, latest=3, probes=2, dtype=torch.float32)
    for (_, first, *_), (_, again, *_) in interpreter.run(2, with_old_memory, case):
        for name, x in first.items():
            assert torch.equal(x, again[name]), name


def test_16_bits(interpreter):
    case = Case((40,), dim=16, kv_heads=2, groups=2, codes=4, latest=9, probes=2, dtype=torch.float16)
    answers = interpreter.run(2, on_ranks, case, "contiguous")
    compare(joined(answers), case.by_definition(), TOLERANCES[torch.float16])


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
