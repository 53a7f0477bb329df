"""Wrong calls of hashed_attention: each error names the argument, its value and the allowed values."""

import pytest
import torch

from lightning_dilated.attention import hashed_attention
from lightning_dilated.ext.hashed import functional

from .cases import NAMES, Case

CASE = Case((6, 6), kv_heads=2, groups=2, codes=3)


def zeros(*shape, dtype=torch.float64):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"q": [1.0]}, TypeError, "q must be a torch.Tensor"),
        ({"k": zeros(2, 6, 2)}, ValueError, "k must have 4 dimensions"),
        ({"v": zeros(2, 6, 2, 3, dtype=torch.int64)}, TypeError, "v must be floating point"),
        ({"v": zeros(2, 6, 2, 3, dtype=torch.float32)}, TypeError, "must share one dtype"),
        ({"q": zeros(2, 5, 4, 3)}, ValueError, "q and k must have the same B and N"),
        ({"v": zeros(2, 6, 2, 4)}, ValueError, "k and v must have one shape"),
        ({"q": zeros(2, 6, 3, 3)}, ValueError, "2 kv heads must divide the 3 query heads"),
        ({"z_q": None}, TypeError, "z_q must be a torch.Tensor .B, N, K, G, M., got NoneType"),
        (
            {"z_k": zeros(2, 6, 4, 2, 3)},
            ValueError,
            r"z_k must be .* begins with \(2, 6, 2\); got .* \(2, 6, 4, 2, 3\)",
        ),
        ({"z_k": zeros(2, 6, 2, 3)}, ValueError, r"z_k must be a floating tensor \(B, N, K, G, M\)"),
        ({"z_q": zeros(2, 6, 2, 2, 3, dtype=torch.int64)}, ValueError, "z_q must be a floating tensor"),
        (
            {"z_q": zeros(2, 6, 2, 2, 4)},
            ValueError,
            r"equal G and M, at least 1, got \(2, 6, 2, 2, 4\), \(2, 6, 2, 2, 3\)",
        ),
        ({"z_q": zeros(2, 6, 2, 0, 3), "z_k": zeros(2, 6, 2, 0, 3)}, ValueError, "equal G and M, at least 1"),
        (
            {"z_q": zeros(2, 6, 2, 9, 16), "z_k": zeros(2, 6, 2, 9, 16)},
            ValueError,
            "at most 2..31, got 16 .. 9: take fewer",
        ),
        ({"null": zeros(2)}, ValueError, r"null must be a floating tensor \(H,\) .* begins with \(4,\)"),
        ({"null": 0.0}, TypeError, "null must be a torch.Tensor"),
        ({"null": torch.zeros(4, device="meta")}, ValueError, "null must be a floating tensor .H,. on cpu"),
        ({"latest": 0}, ValueError, "latest must be at least 1, got 0"),
        ({"latest": 2.5}, TypeError, "latest must be an integer, got 2.5"),
        ({"probes": 0}, ValueError, "probes must be at least 1, got 0"),
        ({"probes": 4}, ValueError, "probes must be at most 3, got 4. There are 2 groups of 3 codes"),
        (
            {"z_q": zeros(2, 6, 2, 2, 1), "z_k": zeros(2, 6, 2, 2, 1), "probes": 2},
            ValueError,
            "probes must be at most 1",
        ),
        ({"scale": float("inf")}, ValueError, "scale must be a finite number or None"),
        ({"scale": "1"}, ValueError, "scale must be a finite number or None"),
        ({"soft": 1}, TypeError, "soft must be True or False, got 1"),
        ({"code_scores": None}, TypeError, "code_scores must be True or False"),
        ({"code_scores": None, "soft": True}, TypeError, "code_scores must be True or False"),
        ({"code_scores": False}, ValueError, "code_scores=False goes with soft=True"),
        ({"lengths": [3, 7]}, ValueError, r"lengths must lie in 0\.\.6 .* got \[3, 7\]"),
        ({"lengths": [-1, 6]}, ValueError, r"lengths must lie in 0\.\.6"),
        ({"lengths": [3]}, ValueError, "one entry a sample"),
        ({"lengths": [3, 4.5]}, TypeError, "lengths must hold integers only"),
        ({"lengths": [3, 4], "cu_seqlens": [0, 6]}, ValueError, "not both"),
        ({"cu_seqlens": [0, 6]}, ValueError, "take a batch of 1, got B=2"),
        ({"sequence": 2}, TypeError, "sequence must be a SequenceGroup, or None for the active one; got 2"),
    ],
)
def test_refused(change, error, words):
    arguments = dict(zip(NAMES, (x.detach() for x in CASE.tensors()), strict=True))
    hashed_attention(**arguments)
    with pytest.raises(error, match=words):
        hashed_attention(**{**arguments, **change})


def test_bounds_rise():
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0"):
        hashed_attention(*(x.detach() for x in Case((6,)).tensors()), cu_seqlens=[0, 4, 3, 6])


def test_soft_is_for_short_documents(monkeypatch):
    long, short = (torch.zeros(1, n, 1, 1) for n in (8193, 30))
    with pytest.raises(ValueError, match="at most 8,192 tokens a document, got 8,193: set soft=False"):
        hashed_attention(*[long] * 3, *[long[..., None]] * 2, torch.zeros(1), soft=True)
    monkeypatch.setattr(functional, "SOFT_TOKENS", 20)
    tensors = [short] * 3 + [short[..., None]] * 2 + [torch.zeros(1)]
    losses = hashed_attention(*tensors, soft=True, cu_seqlens=[0, 20, 30])[1]
    assert losses.rows.max() == 20
    with pytest.raises(ValueError, match="got 21"):
        hashed_attention(*tensors, soft=True, cu_seqlens=[0, 21, 30])
