"""The string form of a call's spec, and the cache of resolved calls on one rank."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dilated.attention import dilated_attention, resolve
from lightning_dilated.attention.spec import CallSpec, decode, encode
from lightning_dilated.pattern import DilatedPattern

from ..pattern.strategies import patterns
from .strategies import Case

PATTERN = DilatedPattern.longnet([8, 32], [1, 2])


@given(
    patterns(4, 4),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(["auto", "sdpa", "math"]),
    st.sampled_from(["", "sequence-3"]),
    st.booleans(),
    st.sampled_from([(), (2, 8, 4)]),
)
def test_code(pattern, causal, scale, dropout, engine, sequence, needs_grad, window):
    spec = CallSpec(pattern, causal, scale, dropout, engine, sequence, needs_grad, window)
    assert decode(spec.code) == spec and decode(spec.code).code == spec.code


def resolved(q, lengths=None, cu_seqlens=None, causal=True, backward=False):
    code = encode(PATTERN, causal, 0.3, needs_grad=True)
    return resolve.resolve(code, q, q, lengths, cu_seqlens, None, backward=backward)


def test_both_passes_share_one():
    q = torch.randn(2, 40, 4, 8)
    one = resolved(q)
    assert resolved(torch.randn(2, 40, 4, 8), backward=True) is one
    assert resolved(q.double()) is not one
    other_calls = [resolved(q[:1]), resolved(q, causal=False), resolved(q, torch.tensor([40, 3]))]
    assert all(x.executor != one.executor for x in other_calls)


def test_what_is_resolved_follows_the_values_of_documents():
    """A loader that reuses its memory passes the same tensor with other bounds, so the cache must compare values."""
    bounds = torch.tensor([0, 10, 40], dtype=torch.int32)
    case = Case(PATTERN, 1, 40, 4, 4, 8, causal=True)
    q, k, v, _ = case.tensors()
    for middle in (10, 25):
        bounds[1] = middle
        out = dilated_attention(q, k, v, PATTERN, causal=True, cu_seqlens=bounds)
        parts = [
            dilated_attention(*(x[:, a:b] for x in (q, k, v)), PATTERN, causal=True)
            for a, b in ((0, middle), (middle, 40))
        ]
        torch.testing.assert_close(out, torch.cat(parts, 1))


def test_errors_are_not_remembered():
    q = torch.randn(2, 40, 4, 8)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"0\.\.40"):
            resolved(q, torch.tensor([41, 3]))
    with pytest.raises(ValueError, match="has no attention dropout"):
        resolve.resolve(encode(PATTERN, True, 0.3, 0.1, "cpu_flash"), q, q, None, None, torch.tensor(3))


def test_a_setting_of_torch_is_seen():
    """Deterministic algorithms exclude cuDNN and flash attention, so changing the setting resolves a call again."""
    q = torch.randn(2, 40, 4, 8)
    one = resolved(q)
    torch.use_deterministic_algorithms(True)
    try:
        assert resolved(q) is not one
    finally:
        torch.use_deterministic_algorithms(False)
    assert resolved(q) is one


def test_what_a_graph_records_is_not_remembered(monkeypatch):
    """A call is not cached while a CUDA graph records, because its tables may be missing from the recording."""
    q = torch.randn(2, 40, 4, 8)
    monkeypatch.setattr(resolve, "captured", lambda device: True)
    assert resolved(q) is not resolved(q)
    monkeypatch.setattr(resolve, "captured", lambda device: False)
    assert resolved(q) is resolved(q)


def test_a_graph_does_not_record_a_dropout_mask(monkeypatch):
    """Dropout while a graph is recorded is refused, because each replay would drop the same pairs."""
    q = torch.randn(1, 40, 2, 8, requires_grad=True)
    out = dilated_attention(q, q, q, PATTERN, dropout=0.1)
    monkeypatch.setattr(resolve, "captured", lambda device: True)
    dilated_attention(q, q, q, PATTERN)
    for call in (lambda: dilated_attention(q, q, q, PATTERN, dropout=0.1), out.sum().backward):
        with pytest.raises(ValueError, match=r"cannot record dropout of attention.*Set dropout=0\.0"):
            call()
