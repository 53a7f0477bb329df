"""The op for a layer's recurrence under tracing and torch.func, and recurrent_attention of tensors without values."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_dilated import recurrent_attention
from lightning_dilated.ext.recurrence.op import RECURRENCE, RECURRENCE_BACKWARD, encode
from lightning_dilated.ext.recurrence.runs import tables
from lightning_dilated.recurrence.description import KINDS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_results_lie_as_traced(kind, kv_heads):
    """Results have the strides that tracing predicts, because compiled code relies on these strides."""
    q = torch.randn(2, 70, 4, 8)
    k, v = torch.randn(2, 2, 70, kv_heads, 8)
    gates = (-torch.rand(2, 70, kv_heads), torch.rand(2, 70, kv_heads)) if kind == "gated_delta" else (None, None)
    arguments = (None, None, encode(kind, None if kind == "gated_delta" else 16, True))
    torch.library.opcheck(RECURRENCE, (q, k, v, *gates, *arguments), test_utils="test_faketensor")
    grad = torch.randn_like(q)
    torch.library.opcheck(RECURRENCE_BACKWARD, (grad, q, k, v, *gates, *arguments), test_utils="test_faketensor")


def arguments(kind, device="cpu"):
    draw = lambda *shape: torch.randn(*shape, device=device)  # noqa: E731
    rows = draw(2, 70, 4, 8), draw(2, 70, 2, 8), draw(2, 70, 2, 6)
    gates = (-draw(2, 70, 2).abs(), draw(2, 70, 2).sigmoid()) if kind == "gated_delta" else ()
    return [x.requires_grad_() for x in (*rows, *gates)]


def summary(kind, tensors, lengths):
    """Return shapes, dtypes and devices of two calls (the second continues the first), and of the gradients."""
    settings = {"kind": kind, "segment": None if kind == "gated_delta" else 16, "return_state": True}
    _, state = recurrent_attention(*tensors, **settings)
    out, state = recurrent_attention(*tensors, **settings, state=state, lengths=lengths)
    every = [out, *state.floating(), state.tokens, *torch.autograd.grad(out.sum(), tensors)]
    return [(x.shape, x.dtype) for x in every], {x.device.type for x in (out, *state.floating())}


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_without_values(kind):
    """Tensors with and without values give the same shapes, and later calls are not affected."""
    tables.cache_clear()
    with FakeTensorMode():
        fake = summary(kind, arguments(kind), torch.tensor([70, 3]))
    real = summary(kind, arguments(kind), torch.tensor([70, 3]))
    assert fake == real == (summary(kind, arguments(kind, "meta"), [70, 3])[0], {"cpu"})
    assert summary(kind, arguments(kind, "meta"), torch.tensor([70, 3], device="meta"))[1] == {"meta"}
    with pytest.raises(ValueError, match=r"lengths has no values .* on meta.*give a list"):
        summary(kind, arguments(kind), torch.tensor([70, 3], device="meta"))


@pytest.mark.parametrize("kind", KINDS)
def test_traced_with_values(kind):
    tables.cache_clear()
    settings = {"kind": kind, "segment": None if kind == "gated_delta" else 16}
    real = arguments(kind)
    call = lambda *x: recurrent_attention(*x, **settings)  # noqa: E731
    graph = make_fx(call)(*real)
    torch.testing.assert_close(graph(*real), call(*real))


@pytest.mark.parametrize("kind", KINDS)
def test_transforms_of_torch_func(kind):
    """The op raises under transforms that it does not support. recurrent_attention itself supports all transforms."""
    q, k, v, *gates = (x.detach() for x in arguments(kind))
    settings = {"kind": kind, "segment": None if kind == "gated_delta" else 16}
    spec = encode(*settings.values(), True)
    by_op = lambda q: RECURRENCE(q, k, v, *(gates or (None, None)), None, None, spec)  # noqa: E731
    itself = lambda q: recurrent_attention(q, k, v, *gates, **settings)  # noqa: E731
    total = lambda call: lambda q: call(q).square().sum()  # noqa: E731
    many = torch.stack([q, -q])
    for transform in (
        lambda call: torch.func.grad(total(call))(q),
        lambda call: torch.func.vjp(call, q)[1](torch.ones_like(call(q)))[0],
        lambda call: torch.func.jvp(total(call), (q,), (k.repeat(1, 1, 2, 1),))[1],
        lambda call: torch.func.vmap(torch.func.grad(total(call)))(many),
    ):
        with pytest.raises(RuntimeError, match=r"no derivative by torch.func .*loss.backward\(\)"):
            transform(by_op)
        assert transform(itself).abs().sum() > 0
    (want,) = torch.autograd.grad(total(itself)(leaf := q.clone().requires_grad_()), leaf)
    torch.testing.assert_close(torch.func.grad(total(itself))(q), want)
    torch.testing.assert_close(torch.func.vmap(by_op)(many)[1], by_op(-q))
