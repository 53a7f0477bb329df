"""hashed_attention on a GPU: random calls, 16-bit tensors, and runs that agree bit by bit."""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings

from lightning_dilated.attention import hashed_attention
from lightning_dilated.ext.hashed import lookup

from ...examples import examples
from .cases import NAMES, Case, cases, compare
from .test_streams import check_chunks

pytestmark = pytest.mark.gpu


@given(case=cases())
@settings(max_examples=examples(60), deadline=None)
def test_any_call_without_kernels(case):
    """Compute in float64, which kernels do not take, because kernels are compiled for each head dim, group and probe."""
    compare(case.run(device="cuda"), case.by_definition())


@pytest.mark.parametrize("soft", [False, True])
def test_equals_the_cpu_with_equal_bits(soft):
    """In this case many queries read few rows, in several parts."""
    case = Case(
        (4000, 3000), kv_heads=2, dim=16, codes=4, latest=30, probes=1 if soft else 2, soft=soft, dtype=torch.float32
    )
    got, again = case.run(device="cuda"), case.run(device="cuda")
    assert all(torch.equal(x, again[name]) for name, x in got.items())
    compare(got, case.run(), 1e-4)


#: calls with several tiles, and with several programs for a tile of rows
CALLS = {
    "as in a model": Case((3000, 1777), padding=3, group=1, dim=64, groups=4, codes=16, latest=64, probes=2),
    "wide heads": Case((700, 64), packed=True, kv_heads=2, group=1, dim=128, groups=2, codes=16, latest=30),
    "odd sizes": Case((333, 1, 400), kv_heads=2, group=3, dim=20, groups=3, codes=5, latest=9, probes=3),
    "soft": Case((600, 333), group=2, dim=64, groups=7, codes=16, soft=True),
    "soft without codes": Case((600,), group=2, dim=32, groups=1, codes=64, soft=True, code_scores=False),
    "few codes": Case((20000,), group=1, dim=16, groups=1, codes=2, latest=5, probes=2),
}
#: largest error relative to the largest value of a result
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@contextmanager
def in_float64():
    """Compute calls in float64 by torch, from the rounded tensors."""
    yield lambda *tensors, **settings: hashed_attention(*(x.double() for x in tensors), **settings)


@contextmanager
def by_kernels():
    with mock.patch.object(lookup, "parts", None):
        yield hashed_attention


def computed(case, way):
    with way() as call:
        return case.run(call, "cuda")


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_kernels_equal_float64_with_equal_bits(name, dtype):
    case = replace(CALLS[name], dtype=dtype)
    got, again = (computed(case, by_kernels) for _ in range(2))
    assert all(torch.equal(x, again[name]) for name, x in got.items())
    compare(got, computed(case, in_float64), TOLERANCES[dtype])


#: short, since the oracle runs on the CPU
CHUNKED = {
    **{name: CALLS[name] for name in ("wide heads", "odd sizes", "soft")},
    "heads of 64": Case((700, 333), padding=3, group=1, dim=64, groups=2, codes=4, latest=64, probes=2),
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CHUNKED)
def test_chunks_equal_the_oracle(name, dtype):
    """Chunks except the last have equal bits in both passes of a stream."""
    with by_kernels():
        check_chunks(replace(CHUNKED[name], dtype=dtype), 200, TOLERANCES[dtype], "cuda")


@pytest.mark.parametrize("equal", [False, True])
def test_262144_tokens(equal):
    """With equal codes, all queries look up the code of a few rows, which many programs sum over."""
    case = Case((262144,), group=1, dim=64, groups=4, codes=16, latest=64, probes=2, dtype=torch.bfloat16)
    tensors = [x.detach() for x in case.tensors()]
    if equal:
        tensors[3][..., 0] = 9
        tensors[4][:, ::5000, :, :, 0] = 9
    with mock.patch.object(Case, "tensors", lambda *unused: tensors):
        got, again = (computed(case, by_kernels) for _ in range(2))
        want = computed(case, in_float64)
    assert all(torch.equal(x, again[name]) for name, x in got.items())
    compare(got, want, 2e-2)


@pytest.mark.parametrize("dim", [20, 64])
def test_foreign_memory_is_not_used(dim):
    """Rows are parts of tensors that contain NaN elsewhere. A short test, which can run under compute-sanitizer."""
    case = Case((333,), group=2, dim=dim, groups=3, codes=5, latest=9, probes=2, dtype=torch.bfloat16)
    results = []
    for around in (0, 4):
        tensors = []
        for name, x in zip(NAMES, case.tensors(), strict=True):
            joint = x.new_full([n + 2 * around for n in x.shape], torch.nan).cuda()
            place = joint[tuple(slice(around, around + n) for n in x.shape)] if name in "qkv" else x.detach().cuda()
            tensors.append(place.copy_(x.detach()).detach().requires_grad_())
        with by_kernels() as call:
            out, losses = call(*tensors, **case.settings())
            results.append([out, *torch.autograd.grad(out.float().square().sum() + losses.contrast.sum(), tensors)])
    for x, y in zip(*results, strict=True):
        assert x.isfinite().all() and torch.equal(x, y)
