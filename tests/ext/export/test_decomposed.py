"""The op as plain torch operations equals the oracle for any pattern, at any length up to the largest."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.attention.spec import CallSpec
from lightning_dilated.ext.export import decomposed as module
from lightning_dilated.ext.export.decomposed import decomposed
from lightning_dilated.pattern import DilatedPattern

from ...attention.reference import close, close_lse
from ...attention.strategies import Case, cases
from ...examples import examples


def run(case, longest, dtype=torch.float64):
    q, k, v, _ = case.tensors(dtype)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    return decomposed(q, k, v, CallSpec(case.pattern, case.causal, float(scale)), longest)


def compare(case, longest, tol=1e-11):
    out, lse = run(case, longest)
    want, want_lse = case.oracle(*case.tensors()[:3])
    close(str(case), out, want, tol)
    close_lse(str(case), lse, want_lse, tol)


@pytest.mark.parametrize("padding", ["masked", "attended"])
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_equals_oracle(padding, data):
    case = data.draw(cases(padding=padding)).but(lengths=None, documents=None)
    case = case.but(seq_len=max(case.seq_len, 1), batch=max(case.batch, 1))
    longest = case.seq_len + data.draw(st.sampled_from([0, 1, 7, 64]))
    if case.but(seq_len=longest).refused():
        with pytest.raises(ValueError, match="attended"):
            run(case, longest)
        return
    compare(case, longest)


def test_heads_in_parts(monkeypatch):
    """If the scores of all heads exceed the budget, a branch is computed in groups of heads."""
    monkeypatch.setattr(module, "SCORES", 1)
    compare(Case(DilatedPattern([(4, 1), (8, 3)]), 2, 21, 4, 2, 8, causal=True), 30)


def test_large_scores():
    case = Case(DilatedPattern([(4, 2), (32, 4)], padding="attended", offsets="blocked"), 1, 21, 4, 4, 8, scale=60.0)
    compare(case, 21)


def test_half_precision():
    case = Case(DilatedPattern([(4, 1), (8, 2)]), 1, 21, 4, 4, 8)
    q, k, v, _ = case.tensors(torch.bfloat16)
    out, lse = decomposed(q, k, v, CallSpec(case.pattern, False, 0.3), 21)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32


@pytest.mark.parametrize(
    "options, word",
    [
        ({"dropout": 0.1}, "dropout"),
        ({"sequence": "x"}, "shared by ranks"),
        ({"context": "x"}, "stream"),
        ({"window": (0, 1, 1)}, "heads"),
    ],
)
def test_refusals(options, word):
    q = torch.zeros(1, 4, 1, 8)
    with pytest.raises(ValueError, match=word):
        decomposed(q, q, q, CallSpec(DilatedPattern([(4, 1)]), False, 1.0, **options), 4)
