"""Wrong calls of recurrent_attention: each error names the argument, its value and the allowed values."""

import pytest
import torch

from lightning_dilated import recurrent_attention

from .cases import Case

GATED, LINEAR, DELTA = (Case(kind, (6, 6)) for kind in ("gated_delta", "linear", "delta"))


def after(case):
    return recurrent_attention(*(x.detach() for x in case.tensors()), **case.settings(), return_state=True)[1]


@pytest.mark.parametrize(
    "case, change, error, words",
    [
        (GATED, {"kind": "retention"}, ValueError, "kind must be one of gated_delta, linear, delta; got 'retention'"),
        (GATED, {"q": [1.0]}, TypeError, "q must be a torch.Tensor"),
        (GATED, {"k": torch.zeros(2, 6, 2)}, ValueError, "k must have 4 dimensions"),
        (GATED, {"v": torch.zeros(2, 6, 2, 2, dtype=torch.int64)}, TypeError, "v must be floating point"),
        (GATED, {"v": torch.zeros(2, 6, 2, 2)}, TypeError, "must share one dtype"),
        (GATED, {"v": torch.zeros(2, 5, 2, 2).double()}, ValueError, "k and v must have the same B, N and heads"),
        (GATED, {"v": torch.zeros(2, 6, 1, 2).double()}, ValueError, "k and v must have the same B, N and heads"),
        (GATED, {"q": torch.zeros(2, 6, 3, 3).double()}, ValueError, "2 kv heads must divide the 3 query heads"),
        (GATED, {"beta": None}, TypeError, "needs beta"),
        (GATED, {"beta": torch.zeros(2, 6, 4).double()}, ValueError, r"beta must be a floating tensor \(2, 6, 2\)"),
        (GATED, {"beta": torch.full((2, 6, 2), 2.5)}, ValueError, "beta must be between 0 and 2, got .* 2.5"),
        (GATED, {"log_decay": torch.full((2, 6, 2), 0.5)}, ValueError, "log_decay must be finite and at most 0"),
        (GATED, {"log_decay": torch.full((2, 6, 2), -torch.inf)}, ValueError, "log_decay must be finite"),
        (GATED, {"segment": 4}, ValueError, "segment=4 belongs to kinds linear, delta"),
        (LINEAR, {"beta": torch.zeros(2, 6, 2)}, ValueError, "beta belongs to kind='gated_delta'"),
        (LINEAR, {"segment": None}, ValueError, "kind='linear' needs segment"),
        (LINEAR, {"segment": 0}, ValueError, "segment must be at least 1, got 0"),
        (DELTA, {"causal": False}, ValueError, "causal=False goes with kind='linear' alone"),
        (LINEAR, {"causal": False, "return_state": True}, ValueError, "without state and return_state"),
        (LINEAR, {"causal": 1}, TypeError, "causal must be True or False"),
        (LINEAR, {"lengths": [3, 7]}, ValueError, r"lengths must lie in 0\.\.6"),
        (LINEAR, {"lengths": [3]}, ValueError, "one entry a sample, 2; got 1"),
        (LINEAR, {"lengths": [3, 4.5]}, TypeError, "lengths must hold integers only"),
        (LINEAR, {"lengths": torch.ones(2)}, TypeError, "lengths must hold integers"),
        (LINEAR, {"lengths": [3, 4], "cu_seqlens": [0, 6]}, ValueError, "not both"),
        (LINEAR, {"cu_seqlens": [0, 6]}, ValueError, "cu_seqlens takes a batch of 1"),
        (LINEAR, {"state": torch.zeros(2)}, TypeError, "state must be a RecurrentState"),
        (LINEAR, {"state": after(DELTA)}, ValueError, "state has tensors of shapes"),
        (LINEAR, {"state": after(Case("linear", (6,)))}, ValueError, "state has tensors of shapes"),
        (DELTA, {"state": after(DELTA), "segment": 5}, ValueError, "state has tensors of shapes"),
        (LINEAR, {"sequence": "world"}, TypeError, "sequence must be a SequenceGroup"),
    ],
)
def test_refused(case, change, error, words):
    names = ("q", "k", "v", "log_decay", "beta")
    arguments = dict(zip(names, (x.detach() for x in case.tensors()), strict=False))
    with pytest.raises(error, match=words):
        recurrent_attention(**{**arguments, **case.settings(), **change})


def test_bounds_rise():
    case = Case("linear", (6,))
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0"):
        recurrent_attention(*(x.detach() for x in case.tensors()), **case.settings(), cu_seqlens=[0, 4, 3, 6])
