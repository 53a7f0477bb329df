"""recurrent_attention equals the definition token by token: outputs, final states and all gradients."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated import recurrent_attention
from lightning_dilated.ext.recurrence import chunks, compute
from lightning_dilated.ext.recurrence.rules import oracle
from lightning_dilated.recurrence.description import KINDS

from ...examples import examples
from .cases import RESETS, Case, cases, compare


@given(case=cases(), grouped_from=st.integers(2, 40))
@settings(max_examples=examples(40), deadline=None)
def test_any_call(case, grouped_from):
    with mock.patch.object(compute, "CHUNK", case.chunk), mock.patch.object(chunks, "GROUPED_FROM", grouped_from):
        compare(case.run(), case.by_definition())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [24, 61])
def test_chunks_passed_in_groups(kind, tokens, monkeypatch):
    monkeypatch.setattr(compute, "CHUNK", 3)
    monkeypatch.setattr(chunks, "GROUPED_FROM", 4)
    steps = record(monkeypatch, "_pass_groups")
    case = Case(kind, (tokens, tokens), segment=3, kv_heads=2, group=2, dim=4)
    compare(case.run(), case.by_definition())
    assert steps


def record(monkeypatch, name):
    """Record the calls of a function in the module `chunks`."""
    calls, real = [], getattr(chunks, name)
    monkeypatch.setattr(chunks, name, lambda *args: calls.append(args) or real(*args))
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_several_full_chunks(kind):
    case = Case(kind, (90, 64, 0, 31), packed=True, earlier=(0, 7, 5, 64), segment=40, kv_heads=1, group=3, dim=5)
    compare(case.run(), case.by_definition())


@pytest.mark.parametrize("kind", KINDS)
def test_later_tokens_change_nothing(kind):
    case = Case(kind, (41,), segment=8)
    tensors = [x.detach() for x in case.tensors()]
    out = recurrent_attention(*tensors, **case.settings())
    for cut in (1, 8, 20, 40):
        other = [torch.cat([x[:, :cut], x[:, cut:] * 0.5], 1) for x in tensors]
        assert torch.equal(recurrent_attention(*other, **case.settings())[:, :cut], out[:, :cut])


@pytest.mark.parametrize("kind", KINDS)
def test_padding_may_hold_anything(kind):
    case = Case(kind, (5, 9), padding=4)
    tensors = case.tensors()
    dirty = [x.detach().clone() for x in tensors]
    for x in dirty[:3]:
        x[0, 5:], x[1, 9:] = torch.nan, torch.inf
    dirty = [x.requires_grad_() for x in dirty]
    out = recurrent_attention(*dirty, **case.settings(), **case.limits())
    clean = recurrent_attention(*tensors, **case.settings(), **case.limits())
    assert torch.equal(out, clean) and not out[0, 5:].any() and not out[1, 9:].any()
    for x, y in zip(torch.autograd.grad(out.sum(), dirty), torch.autograd.grad(clean.sum(), tensors), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype, tol", [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_other_dtypes_and_autocast(kind, dtype, tol):
    case = Case(kind, (130,), segment=32, dim=16, values=16)
    tensors = [x.detach().to(dtype) for x in case.tensors()]
    rounded = [x[0].double() for x in tensors]
    want = oracle(*rounded, kind=kind, segment=32)
    out, state = recurrent_attention(*tensors, **case.settings(), return_state=True)
    assert out.dtype == dtype and state.matrix.dtype == torch.float32
    torch.testing.assert_close(out[0].double(), want.out, rtol=tol, atol=tol)
    torch.testing.assert_close(
        state.matrix[0].double(), want.matrix, rtol=1e-4, atol=1e-4 * float(want.matrix.abs().max())
    )
    with torch.autocast("cpu", torch.bfloat16):
        again = recurrent_attention(*tensors, **case.settings())
    assert torch.equal(again, out)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind):
    case = Case(kind, (7,), segment=3, kv_heads=1, group=2, dim=2)
    call = lambda *x: recurrent_attention(*x, **case.settings())  # noqa: E731
    assert torch.autograd.gradcheck(call, case.tensors())


@pytest.mark.parametrize("dtype, tol", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("reset", RESETS)
def test_resets(reset, dtype, tol):
    """Tokens after a complete reset are as exact as other tokens."""
    case = Case("gated_delta", (150, 65), packed=True, earlier=(70, 3), kv_heads=1, dim=16, values=8, reset=reset)
    want = case.by_definition()
    tensors, past = (tuple(x.detach().to(dtype).requires_grad_() for x in y) for y in (case.tensors(), case.past()))
    settings = {**case.settings(), **case.limits(), "state": case.state(past)}
    out, state = recurrent_attention(*tensors, **settings, return_state=True)
    got = case.results(out, case.summary(state), tensors, past)
    compare({name: x.double() for name, x in got.items()}, want, tol)


def test_a_reset_begins_a_document():
    tensors = [x.detach().float() for x in Case("gated_delta", (150,), packed=True).tensors()]
    documents = recurrent_attention(*tensors, cu_seqlens=[0, 70, 150])
    tensors[3][:, 70] = -1e9
    torch.testing.assert_close(recurrent_attention(*tensors), documents, rtol=0, atol=2e-6)


def test_many_moderate_decays_before_others():
    """The decays of the chunk's first tokens sum to -2560, where fp32 has a resolution of 2e-4."""
    case = Case("gated_delta", (64,), kv_heads=1, group=1, dim=16, values=8)
    tensors = [x.detach() for x in case.tensors()]
    tensors[3][:, :32], tensors[3][:, 32:] = -80, -0.01
    out = recurrent_attention(*(x.float() for x in tensors))
    want = oracle(*(x[0] for x in tensors), kind="gated_delta").out
    torch.testing.assert_close(out[0].double(), want, rtol=0, atol=3e-6 * float(want.abs().max()))


def test_far_decay_and_long_sequences_stay_finite():
    case = Case("gated_delta", (400,), dim=4)
    q, k, v, log_decay, beta = (x.detach().float().requires_grad_() for x in case.tensors())
    out = recurrent_attention(q, k, v, log_decay * 0 - 100, beta * 0 + 2)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(x.isfinite().all() for x in (out, *grads))
