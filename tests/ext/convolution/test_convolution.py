"""ShortConvolution, and layers that contain it, equal a loop over tokens: packed, in decoding, and compiled."""

from itertools import pairwise

import pytest
import torch

from lightning_dilated import DilatedPattern, LongNetLM, MultiheadDilatedAttention
from lightning_dilated.ext.convolution.convolution import ShortConvolution
from lightning_dilated.memory.settings import MemorySettings

from ...models import tiny

PATTERN = DilatedPattern.longnet([8, 32], [1, 2])


def looped(x, weight, causal, documents):
    """Compute y_p = x_p + sum of weight_i x_(p - left + i), over neighbours in the document of p, one number at a time.

    `documents`: (sample, first, stop) of each document.
    """
    taps, y = len(weight), x.clone()
    left = taps - 1 if causal else (taps - 1) // 2
    for sample, first, stop in documents:
        for p in range(first, stop):
            for i in range(taps):
                if first <= p - left + i < stop:
                    y[sample, p] = y[sample, p] + weight[i] * x[sample, p - left + i]
    return y


def convolution_of(taps, causal, channels=3):
    convolution = ShortConvolution(channels, taps, causal, dtype=torch.float64)
    torch.nn.init.normal_(convolution.weight)
    return convolution


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("taps", [2, 3, 4, 7])
@pytest.mark.parametrize("bounds", [None, [0, 5], [0, 1, 3, 5], [0, 2, 2, 5]], ids=str)
def test_equals_a_loop(taps, causal, bounds):
    torch.manual_seed(taps)
    convolution = convolution_of(taps, causal)
    x = torch.randn(1 if bounds else 2, 5, 3, dtype=torch.float64, requires_grad=True)
    documents = [(0, *cut) for cut in pairwise(bounds)] if bounds else [(0, 0, 5), (1, 0, 5)]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32) if bounds else None
    got, want = convolution(x, cu_seqlens=cu_seqlens), looped(x, convolution.weight, causal, documents)
    torch.testing.assert_close(got, want)
    grad, leaves = torch.randn_like(got), (x, convolution.weight)
    torch.testing.assert_close(torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, leaves, grad))


@pytest.mark.parametrize("causal", [True, False])
def test_padding_is_not_seen(causal):
    torch.manual_seed(0)
    convolution, x, lengths = convolution_of(4, causal), torch.randn(3, 6, 3, dtype=torch.float64), [6, 2, 0]
    y = convolution(x, lengths=torch.tensor(lengths))
    want = looped(x, convolution.weight, causal, [(b, 0, n) for b, n in enumerate(lengths)])
    for b, n in enumerate(lengths):
        torch.testing.assert_close(y[b, :n], want[b, :n])


def test_starts_as_the_identity():
    x = torch.randn(2, 5, 3)
    assert torch.equal(ShortConvolution(3, 4, True)(x), x)
    model = tiny(pattern=PATTERN, kv_conv=4)
    assert all(not p.any() for name, p in model.named_parameters() if "kv_conv" in name)
    without = tiny(pattern=PATTERN)
    without.load_state_dict({k: v for k, v in model.state_dict().items() if "kv_conv" not in k})
    tokens = torch.arange(20)[None] % 11
    torch.testing.assert_close(model(tokens), without(tokens))


def layer(kv_heads=2, causal=True, position_encoding="rotary", taps=3):
    torch.manual_seed(1)
    module = MultiheadDilatedAttention(
        32, 4, PATTERN, num_kv_heads=kv_heads, causal=causal, position_encoding=position_encoding, kv_conv=taps,
        dtype=torch.float64,
    )  # fmt: skip
    torch.nn.init.normal_(module.kv_conv.weight, std=0.5)
    return module


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("position_encoding", ["none", "rotary"])
def test_layer_convolves_keys_and_values_before_the_rotation(causal, position_encoding):
    module = layer(causal=causal, position_encoding=position_encoding)
    x, documents = torch.randn(1, 21, 32, dtype=torch.float64), [0, 4, 21]
    got, _ = module(x, cu_seqlens=torch.tensor(documents, dtype=torch.int32))
    q, k, v = (x @ module.in_proj_weight.T).split([32, 16, 16], -1)
    cuts = [(0, *cut) for cut in pairwise(documents)]
    k, v = looped(torch.cat([k, v], -1), module.kv_conv.weight, causal, cuts).split([16, 16], -1)
    q, k, v = (y.unflatten(-1, (-1, 8)) for y in (q, k, v))
    if position_encoding == "rotary":
        q, k = module.rotary.table(x, x.dtype).rotate(q, k)
    out = module.attention(q, k, v, cu_seqlens=torch.tensor(documents, dtype=torch.int32))
    torch.testing.assert_close(got, module.join(out))


@pytest.mark.parametrize("prompt", [0, 1, 2, 9])
def test_decoding_equals_the_whole(prompt):
    module, x = layer(taps=4), torch.randn(2, 20, 32, dtype=torch.float64)
    with torch.no_grad():
        want, cache = module(x)[0], module.new_cache()
        cuts = ([prompt] if prompt else []) + [1] * 3 + [2] + [1] * (20 - prompt - 5)
        parts = [module(part, cache=cache)[0] for part in x.split(cuts, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), want)
    assert cache.mixer_states["kv_conv"].shape == (2, 3, 32) and cache.nbytes > cache.mixer_states["kv_conv"].nbytes


def test_a_refused_call_leaves_the_cache():
    module, cache = layer(), None
    cache = module.new_cache()
    with torch.no_grad(), pytest.raises(ValueError, match="a cache serves causal attention"):
        module(torch.randn(1, 4, 32, dtype=torch.float64), cache=cache, lengths=torch.tensor([4]))
    assert not cache.mixer_states and cache.length == 0


@pytest.mark.parametrize("policy", ["none", "attention-kept", "block"])
def test_recomputed_model_has_the_same_gradients(policy):
    torch.manual_seed(3)
    model = tiny(pattern=PATTERN, kv_conv=4)
    for name, p in model.named_parameters():
        if "kv_conv" in name:
            torch.nn.init.normal_(p, std=0.3)
    tokens = torch.randint(11, (2, 30))

    def gradients():
        total, _ = model.loss_terms({"tokens": tokens, "labels": tokens})
        return torch.autograd.grad(total, list(model.parameters()))

    want = gradients()
    model.transformer.memory = MemorySettings(policy, tile=7 if policy != "none" else None)
    torch.testing.assert_close(gradients(), want)


def test_refusals():
    with pytest.raises(ValueError, match="kv_conv must be at least 2, got 1"):
        tiny(pattern=PATTERN, kv_conv=1)
    with pytest.raises(TypeError, match="kv_conv must be an integer"):
        tiny(pattern=PATTERN, kv_conv="4")
    with pytest.raises(ValueError, match="head_chunks=2 is not offered with kv_conv"):
        tiny(pattern=PATTERN, kv_conv=4).transformer.memory = MemorySettings("block", head_chunks=2)
    module = layer(causal=False)
    with pytest.raises(ValueError, match="is_causal=True cannot make this layer causal"):
        module(torch.randn(1, 4, 32, dtype=torch.float64), is_causal=True)
    with pytest.raises(ValueError, match="cu_seqlens must be an int32 tensor on the CPU"):
        module(torch.randn(1, 4, 32, dtype=torch.float64), cu_seqlens=torch.tensor([0, 4]))
    for wrong in ([0, 3], [1, 4], [0, 9]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            module(torch.randn(1, 4, 32, dtype=torch.float64), cu_seqlens=torch.tensor(wrong, dtype=torch.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_hybrid_on_a_gpu(compiled):
    """In a hybrid, loss and gradients in float32 equal the CPU's in float64. Layers mix local and dense heads."""
    tokens = torch.randint(64, (2, 1000), generator=torch.Generator().manual_seed(1))

    def loss_and_gradients(device, dtype, compiled):
        torch.manual_seed(0)
        hybrid = {"hybrid": {"local": 128, "global_every": 2}}
        model = LongNetLM(hybrid, 64, 256, 4, 4, num_kv_heads=2, max_seq_len=4096, kv_conv=4, compile_blocks=compiled)
        model.configure_model()
        for name, p in model.named_parameters():
            if "kv_conv" in name:
                torch.nn.init.normal_(p, std=0.3)
        model.to(device, dtype)
        there = tokens.to(device)
        total, _ = model.loss_terms({"tokens": there, "labels": there})
        return [x.detach().cpu().double() for x in (total, *torch.autograd.grad(total, list(model.parameters())))]

    want = loss_and_gradients("cpu", torch.float64, False)
    for got, expected in zip(loss_and_gradients("cuda", torch.float32, compiled), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
