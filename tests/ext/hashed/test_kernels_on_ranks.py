"""The kernels compute lookups of several ranks, in Triton's interpreter."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ...examples import examples
from .cases import cases, compare
from .test_kernels import forced
from .test_ranks import attend, joined


def on_ranks(rank, group, case, layout):
    with forced((4, 16), 4):
        return attend(rank, group, case, {"layout": layout})


@given(case=cases(), layout=st.sampled_from(["contiguous", "zigzag"]))
@settings(max_examples=examples(12), deadline=None)
def test_any_call(interpreter, case, layout):
    case = replace(case, dtype=torch.float32)
    compare(joined(interpreter.run(2, on_ranks, case, layout)), case.by_definition(), 2e-5)
