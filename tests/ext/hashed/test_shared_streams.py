"""Hashed heads in streams that ranks share: results, losses, gradients, carried rows and bytes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_dilated.ext.hashed import ranks

from ...distributed.calls import sequence
from ...examples import examples
from .cases import Case, cases, compare, weights
from .test_streams import Chunks, by_definition

TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def attend(rank, group, case, chunk, samples=ranks.SAMPLES):
    """Return the positions of this rank's tokens, and their results."""
    with sequence(group, layout="chunked", stream=chunk) as ours, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "SAMPLES", samples)
        chunks = Chunks(case, chunk, group=ours if ours.ranks > 1 else None)
        tensors = case.tensors()
        return chunks.positions, chunks.run(tensors, weights(tensors[0].shape, 0))


def check(pool, size, case, chunk, samples=ranks.SAMPLES):
    """Check that the ranks together give the results of the oracle."""
    case = replace(case, code_scores=not case.soft)
    tensors, labelled = case.tensors(), Chunks(case, chunk).labelled
    want = by_definition(case, tensors, weights(tensors[0].shape, 0), labelled)
    parts = pool.run(size, attend, case, chunk, samples)
    order = torch.tensor([p for at, _ in parts for p in at]).argsort()
    got = {name: torch.cat([x[name].double() for _, x in parts], 1)[:, order] for name in want if name != "d null"}
    compare(got | {"d null": sum(x["d null"] for _, x in parts)}, want, TOLERANCES[case.dtype])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@given(case=cases(), chunk=st.integers(1, 12), samples=st.sampled_from([1, ranks.SAMPLES]))
@settings(max_examples=examples(40), deadline=None)
def test_any_call(pool, size, case, chunk, samples):
    """Documents and padding, several kv heads, ties, soft lookups; some ranks have no tokens of a chunk."""
    assume(case.seq_len)
    check(pool, size, case, chunk, samples)
