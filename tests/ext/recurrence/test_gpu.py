"""Kernels of the gated delta rule on a GPU: results, states and all gradients equal torch in float64."""

from unittest import mock

import pytest
import torch

from lightning_dilated import recurrent_attention
from lightning_dilated.ext.recurrence import op, triton_chunks

from .cases import NAMES

pytestmark = pytest.mark.gpu
#: largest error relative to the largest value of a result
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def drawn(seq_len, heads, kv_heads, dim, values, dtype):
    """Draw q, k, v, log_decay, beta, and gradients of the output and of the state."""
    generator = torch.Generator("cuda").manual_seed(seq_len)
    draw = lambda *shape: torch.randn(*shape, device="cuda", generator=generator)  # noqa: E731
    q, k, v = (draw(1, seq_len, *x).to(dtype) for x in ((heads, dim), (kv_heads, dim), (kv_heads, values)))
    gates = -0.1 * draw(1, seq_len, kv_heads).exp(), draw(1, seq_len, kv_heads).sigmoid()
    return q, k, v, *gates, draw(1, seq_len, heads, values).to(dtype), draw(1, kv_heads, dim, values)


def results(tensors, cu_seqlens=None):
    """Return the output, the last state of the last document, and the gradients by name, in float64."""
    *inputs, grad, grad_state = (x.detach().clone() for x in tensors)
    for x in inputs:
        x.requires_grad_()
    out, state = recurrent_attention(*inputs, cu_seqlens=cu_seqlens, return_state=True)
    last = state.matrix[-1:]
    grads = torch.autograd.grad((out, last), inputs, (grad, grad_state.to(last.dtype)))
    got = {"out": out.detach(), "state": last.detach(), **{f"d {n}": x for n, x in zip(NAMES, grads, strict=True)}}
    return {name: x.double() for name, x in got.items()}


def compare(got, want, tolerance):
    """Assert equality up to a tolerance. The gradient of log_decay may be 0, so its scale includes beta's scale."""
    for name, x in want.items():
        scale = max(float(want[y].abs().max()) for y in {name, "d beta" if name == "d log_decay" else name})
        off = float((got[name] - x).abs().max()) / scale
        assert off <= tolerance, f"{name} is {off:.1e} off"


CASES = [
    (1, 4, 4, 64, 64, None),
    (65, 4, 2, 64, 64, None),
    (1000, 6, 2, 64, 64, (0, 1, 70, 70, 999, 1000)),
    (777, 4, 4, 128, 128, None),
    (500, 3, 1, 48, 80, (0, 64, 192, 500)),
    (20000, 12, 12, 64, 64, None),  # in groups of chunks
    (9000, 2, 2, 128, 64, (0, 8500, 9000)),
]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_torch_in_float64(case, dtype):
    *sizes, cuts = case
    cu_seqlens = None if cuts is None else torch.tensor(cuts, dtype=torch.int32)
    tensors = drawn(*sizes, dtype)
    assert triton_chunks.serves("gated_delta", *tensors[:3])
    got = results(tensors, cu_seqlens)
    compare(got, results([x.double() for x in tensors], cu_seqlens), TOLERANCES[dtype])
    again = results(tensors, cu_seqlens)
    assert all(torch.equal(again[name], x) for name, x in got.items())


@pytest.mark.parametrize("kind", ["equal keys", "far decay", "reflections"])
def test_edges(kind):
    tensors = drawn(300, 2, 2, 64, 64, torch.float32)
    _, k, _, log_decay, beta = tensors[:5]
    if kind == "equal keys":
        k[:], log_decay[:], beta[:] = k[:, :1].clone(), 0, 1
    elif kind == "far decay":
        log_decay[:] = -30
    else:
        log_decay[:, ::3], beta[:] = 0, 2
    got = results(tensors)
    assert all(x.isfinite().all() for x in got.values())
    compare(got, results([x.double() for x in tensors]), 2e-4)


def test_windows_of_the_op():
    """Compute window by window, with and without the kernels."""
    tensors = drawn(5000, 4, 4, 64, 64, torch.bfloat16)

    def run():
        inputs = [x.detach().clone().requires_grad_() for x in tensors[:5]]
        out = op.RECURRENCE(*inputs, None, None, op.encode("gated_delta", None, True))
        return [out.detach(), *torch.autograd.grad(out, inputs, tensors[5])]

    with mock.patch.object(triton_chunks, "window", lambda *unused: 1024):
        got = run()
    with mock.patch.object(triton_chunks, "why_not", lambda *unused: "left out"):
        want = run()
    for x, y in zip(got, want, strict=True):
        assert float((x - y).abs().max() / y.abs().max()) <= 2e-2


#: D and E in the sweep; values of E that share kernels are consecutive
DIMS = (8, 16, 24, 32, 48, 64, 96, 128)
#: (tokens, bounds of documents, whether the call has resets)
CALLS = [
    (1, None, False),
    (5, None, False),
    (64, None, False),
    (65, None, False),
    (300, None, False),
    (300, (0, 1, 64, 64, 130, 300), True),
]


def every_call(dim, values, dtype, calls=CALLS):
    """Compare the forward (with and without gradients) and the backward of each call with torch in float64."""
    for seq_len, cuts, resets in calls:
        tensors = drawn(seq_len, 4, 2, dim, values, dtype)
        if resets:
            decay = tensors[3]
            decay[:, 20:30], decay[:, 70], decay[:, 150:152], decay[:, 260:270, 0] = -80, -1e6, -1e9, -3e38
        cu_seqlens = None if cuts is None else torch.tensor(cuts, dtype=torch.int32)
        got = results(tensors, cu_seqlens)
        compare(got, results([x.double() for x in tensors], cu_seqlens), TOLERANCES[dtype])
        with torch.no_grad():
            out = recurrent_attention(*tensors[:5], cu_seqlens=cu_seqlens)
        assert torch.equal(out.double(), got["out"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_every_head_dim(dim, dtype):
    """Head dims without a tested kernel use torch."""
    for values in DIMS:
        rows = [torch.empty(1, 1, 1, n, dtype=dtype, device="cuda") for n in (dim, dim, values)]
        assert triton_chunks.serves("gated_delta", *rows) == triton_chunks.proven(dtype, dim, values)
        every_call(dim, values, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("dims", [(8, 8), (16, 16), (16, 64), (24, 24), (64, 16), (96, 16), (128, 17)], ids=str)
def test_small_heads(dims, dtype):
    """A short test, which can run under compute-sanitizer."""
    every_call(*dims, dtype, CALLS[1::4])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_groups_of_chunks_with_resets(dtype):
    with mock.patch.object(triton_chunks, "GROUPED_FROM", 2):
        triton_chunks.layout.cache_clear()
        every_call(32, 24, dtype, CALLS[-1:])
    triton_chunks.layout.cache_clear()
