"""hashed_attention on a GPU: random calls, 16-bit tensors, and runs that agree bit by bit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ...examples import examples
from .cases import Case, cases, compare

pytestmark = pytest.mark.gpu


@given(case=cases(), dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
@settings(max_examples=examples(60), deadline=None)
def test_any_call(case, dtype):
    case = replace(case, dtype=dtype)
    compare(case.run(device="cuda"), case.by_definition(), {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 3e-2))


@pytest.mark.parametrize("soft", [False, True])
def test_equals_the_cpu_with_equal_bits(soft):
    """In this case many queries read few rows, in several parts."""
    case = Case(
        (4000, 3000), kv_heads=2, dim=16, codes=4, latest=30, probes=1 if soft else 2, soft=soft, dtype=torch.float32
    )
    got, again = case.run(device="cuda"), case.run(device="cuda")
    assert all(torch.equal(x, again[name]) for name, x in got.items())
    compare(got, case.run(), 1e-4)
