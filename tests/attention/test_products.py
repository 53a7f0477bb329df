"""Products of normalized rows with a weight, and their gradients, against autograd."""

import pytest
import torch
from torch import nn

from lightning_dilated.memory.token_chunks import products, products_backward, products_dtype


def normed(dtype):
    return lambda x: nn.functional.rms_norm(x, x.shape[-1:]).to(dtype)


@pytest.mark.parametrize("step", [1, 4, 5, 11, 100])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("batch, tokens", [(1, 11), (3, 11), (2, 0), (0, 11)])
def test_products(batch, tokens, biased, step):
    torch.manual_seed(0)
    x = torch.randn(batch, 2 * tokens, 8, dtype=torch.float64)[:, ::2]  # a slice, so rows are not adjacent in memory
    weights = [torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (6, 3)]
    biases = [torch.randn(len(w), dtype=torch.float64) if biased else None for w in weights]
    rows = normed(torch.float64)(x).detach().requires_grad_()
    want = [nn.functional.linear(rows, w, b) for w, b in zip(weights, biases, strict=True)]
    with torch.no_grad():
        outputs = products(normed(torch.float64), x, weights, biases, step)
    torch.testing.assert_close(outputs, want)
    grads = [torch.randn_like(y) for y in want]
    *dw, drows = torch.autograd.grad(want, [*weights, rows], grads)
    for add in (False, True):
        into = torch.full(x.shape, 1.0 if add else torch.nan, dtype=torch.float64)
        with torch.no_grad():
            got_grads = products_backward(normed(torch.float64), x, weights, grads, into, step, add)
        torch.testing.assert_close(got_grads, dw)
        torch.testing.assert_close(into, drows + 1 if add else drows)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_low_precision(kept):
    """The gradients of weights are summed in fp32. The gradients of rows have the dtype of the hidden states."""
    torch.manual_seed(0)
    x, weight = torch.randn(1, 4096, 8, dtype=kept), torch.randn(6, 8).bfloat16()
    rows, grad = normed(torch.bfloat16)(x), torch.randn(1, 4096, 6).bfloat16()
    into = torch.zeros_like(x)
    (got_grad,) = products_backward(normed(torch.bfloat16), x, [weight], [grad], into, 16, True)
    want = grad[0].double().t() @ rows[0].double()
    assert got_grad.dtype == torch.float32 and into.dtype == kept
    assert (got_grad - want).norm() < 5e-3 * want.norm()  # summing 256 times in bf16 would have a far larger error
    torch.testing.assert_close(into.double(), grad.double() @ weight.double(), rtol=1e-2, atol=5e-2)


def test_dtype():
    x, weight = torch.ones(1, 2, 4), torch.ones(3, 4)
    assert products_dtype(x, weight) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        for y in (weight, weight.double()):
            like = nn.functional.linear(x.to(y.dtype), y).dtype
            assert products_dtype(x.to(y.dtype), y) == like
    assert products_dtype(x.bfloat16(), weight.double()) == torch.float64
