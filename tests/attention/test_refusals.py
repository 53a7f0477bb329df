"""Calls that would be silently wrong are refused: forward-mode gradients, scales beyond float32, caches in training."""

import numpy as np
import pytest
import torch

import lightning_dilated as ld
from lightning_dilated.attention.backends import Request, choose
from lightning_dilated.attention.oracle import oracle

PATTERN = ld.DilatedPattern.longnet([4, 8], [1, 2])


def qkv(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 16, 2, 8, dtype=dtype) for _ in "qkv"]


def test_forward_mode():
    q, k, v = qkv()
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: ld.dilated_attention(q, k, v, PATTERN), (q,), (torch.ones_like(q),))


def test_transforms_of_torch_func():
    q, k, v = qkv()
    call = lambda q: ld.dilated_attention(q, k, v, PATTERN).sum()  # noqa: E731
    many = torch.func.vmap(torch.func.grad(call))
    for gradient in (torch.func.grad(call), lambda q: torch.func.vjp(call, q), lambda q: many(q[None])):
        with pytest.raises(
            RuntimeError, match=r"dilated_attention has no derivative by torch.func .*loss.backward\(\)"
        ):
            gradient(q)


@pytest.mark.parametrize("scale", [1e-46, 1e-44, np.float32(0.3)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_small_scales_are_right(scale, causal):
    q, k, v = qkv()
    want, _ = oracle(q, k, v, PATTERN, causal=causal, scale=float(scale))
    got = ld.dilated_attention(q, k, v, PATTERN, causal=causal, scale=scale)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)


def test_a_scale_that_is_zero_in_float32_goes_to_the_math_engine():
    cpu = torch.device("cpu")
    assert choose("auto", Request(cpu, torch.float32, 8, scale=1e-46)).name == "math"
    assert choose("auto", Request(cpu, torch.float32, 8, scale=1e-40)).name == "cpu_flash"


def test_scale_beyond_float32():
    with pytest.raises(ValueError, match="scale must be finite in float32"):
        ld.dilated_attention(*qkv(), PATTERN, scale=1e39)
    assert ld.dilated_attention(*qkv(torch.float64), PATTERN, scale=1e39).isfinite().all()


def test_cache_with_dropout_in_training():
    layer = ld.MultiheadDilatedAttention(16, 2, PATTERN, causal=True, dropout=0.1)
    with pytest.raises(ValueError, match=r"without dropout: call \.eval\(\)"):
        layer(torch.randn(1, 4, 16), cache=layer.new_cache())
    with torch.no_grad():
        layer.eval()(torch.randn(1, 4, 16), cache=layer.new_cache())


def test_cache_with_gradients():
    layer = ld.MultiheadDilatedAttention(16, 2, PATTERN, causal=True)
    with pytest.raises(ValueError, match=r"without gradients: call under torch\.no_grad\(\)"):
        layer(torch.randn(1, 4, 16), cache=layer.new_cache())


@torch.no_grad()
def test_decoding_refuses_where_the_full_sequence_does():
    pattern = ld.DilatedPattern([(6, 4)], padding="attended")
    layer = ld.MultiheadDilatedAttention(16, 2, pattern, causal=True)
    cache = layer.new_cache()
    layer(torch.randn(1, 6, 16), cache=cache)
    with pytest.raises(ValueError, match="not a multiple of dilation_rate=4"):
        layer(torch.randn(1, 1, 16), cache=cache)


def test_engine_choice_follows_autocast():
    layer, q = ld.DilatedAttention(PATTERN, engine="cpu_flash"), torch.randn(1, 4, 2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(q, q, q).dtype == torch.bfloat16 and layer.engine_choice(q).name == "cpu_flash"


@pytest.mark.parametrize("name, bits", [("segment_length", 62), ("dilation_rate", 40)])
def test_sizes_beyond_64_bits(name, bits):
    with pytest.raises(ValueError, match=rf"{name} must be at most 2\^{bits}"):
        ld.Branch(**{"segment_length": 8, "dilation_rate": 1, name: 2**bits + 1})
    q = torch.randn(1, 9, 2, 8)
    far = ld.DilatedPattern([(8, 1), ld.Branch(**{"segment_length": 8, "dilation_rate": 2, name: 2**bits})])
    torch.testing.assert_close(ld.dilated_attention(q, q, q, far).double(), oracle(q, q, q, far)[0], atol=1e-5, rtol=0)
    assert far.explain(9, 2, 2, True).pairs == far.counts(9, 2, True).sum()
