"""Decoding with a cache equals the full sequence, row by row, and reads only the keys that a row may see."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.attention import MultiheadDilatedAttention, dilated_attention
from lightning_dilated.attention.decode import KVCache, decode_attention
from lightning_dilated.pattern import Branch, DilatedPattern

from ..pattern.strategies import head_counts, patterns

LONGEST, D = 80, 3
TOL = {"rtol": 1e-10, "atol": 1e-10}


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64)


def qkv(heads, kv_heads, length=LONGEST, batch=1):
    return rand(batch, length, heads, D), rand(batch, length, kv_heads, D), rand(batch, length, kv_heads, D)


def last(q, k, v, pattern, length, **options):
    """decode_attention of the last of `length` tokens."""
    return decode_attention(q[:, length - 1 : length], k[:, :length], v[:, :length], pattern, **options)


@st.composite
def shaped_patterns(draw):
    heads, kv = draw(head_counts(6))
    return heads, kv, draw(patterns(heads, kv))


@given(shaped_patterns())
@settings(max_examples=40)
def test_every_length(case):
    heads, kv_heads, pattern = case
    q, k, v = qkv(heads, kv_heads)
    want = dilated_attention(q, k, v, pattern, causal=True)
    got = torch.cat([last(q, k, v, pattern, n) for n in range(1, LONGEST + 1)], 1)
    torch.testing.assert_close(got, want, **TOL)


NAMED = {
    "longnet": DilatedPattern.longnet([4, 16, 64], [1, 2, 4]),
    "blocked": DilatedPattern.longnet([4, 16, 64], [1, 2, 3], offsets="blocked"),
    "kv offsets": DilatedPattern.longnet([8, 32], [1, 2], offset_heads="kv"),
    "shifted": DilatedPattern.longnet([8, 32], [1, 4]).shifted(),
    "whole sequence": DilatedPattern([(None, 1), (None, 5)]),
    "head groups, offsets": DilatedPattern.head_groups([8, 16], [2, 3], 4),
    "attended (causal: as masked)": DilatedPattern.longnet([8, 16], [1, 2], padding="attended"),
}


@pytest.mark.parametrize("name", NAMED)
def test_last_row_of_each_length(name):
    """Against a full run of that very length, where a segment of the whole sequence is shorter too."""
    q, k, v = qkv(4, 2, batch=2)
    for n in range(1, LONGEST + 1):
        want = dilated_attention(q[:, :n], k[:, :n], v[:, :n], NAMED[name], causal=True, scale=0.7)[:, -1:]
        torch.testing.assert_close(last(q, k, v, NAMED[name], n, scale=0.7), want, **TOL)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 64, 65, 80])
def test_reads_only_what_it_sees(name, length):
    """The work of a step is the sum of w / r keys: poison everywhere else must not reach the result."""
    q, k, v = qkv(4, 2)
    seen = NAMED[name].counts(length, 4, True, 2)[:, -1].unflatten(0, (2, 2)).sum(1) > 0  # (kv head, key)
    for x in (k, v):
        x[0, :length][~seen.T] = torch.nan
    assert last(q, k, v, NAMED[name], length).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dtype_and_uncovered_heads(dtype):
    pattern = DilatedPattern([Branch(8, 2, heads=[0], offset=0)])
    q, k, v = (x.to(dtype) for x in qkv(2, 1, 3))
    even, odd = last(q, k, v, pattern, 3), last(q, k, v, pattern, 2)
    assert even.dtype == dtype and (even[:, :, 0] != 0).all()
    assert (even[:, :, 1] == 0).all() and (odd == 0).all()


def test_cache_grows_by_doubling():
    cache, k, v = KVCache(), rand(2, 300, 2, D), rand(2, 300, 2, D)
    start, buffers = 0, set()
    for n in [1, 5, 1, 70, 0, *[1] * 223]:
        cache.append(k[:, start : start + n], v[:, start : start + n])
        start += n
        assert cache.length == start
        buffers.add(cache.upto(1)[0].untyped_storage().nbytes())
    assert start == 300 and len(buffers) <= 5  # copies of the whole cache: a logarithm of its length
    for length in (0, 1, 299, 300):
        got = cache.upto(length)
        assert torch.equal(got[0], k[:, :length]) and torch.equal(got[1], v[:, :length])


@pytest.mark.parametrize("held", [0, 3])
def test_cache_refuses_to_read_beyond_its_end(held):
    cache = KVCache()
    if held:
        cache.append(rand(1, held, 1, D), rand(1, held, 1, D))
    with pytest.raises(ValueError, match=f"the cache holds {held} tokens, so 4 cannot be read"):
        cache.upto(4)


LAYERS = {
    "plain": {},
    "rotary, gqa": {"position_encoding": "rotary", "num_kv_heads": 2},
    "xpos": {"position_encoding": "xpos", "xpos_scale_base": 16.0},
    "sub-norm, scale": {"sub_layernorm": True, "scale": 0.3},
}


@pytest.mark.parametrize(
    "chunks", [[1] * 40, [17] + [1] * 23, [5, 1, 20, 14], [40]], ids=["ones", "prompt", "any", "all"]
)
@pytest.mark.parametrize("name", LAYERS)
def test_layer_step_by_step(name, chunks):
    layer = MultiheadDilatedAttention(16, 4, NAMED["longnet"].shifted(0.25), dtype=torch.float64, **LAYERS[name])
    x, cache = rand(2, 40, 16), KVCache()
    want = layer(x, is_causal=True)[0]
    got = torch.cat([layer(part, is_causal=True, cache=cache)[0] for part in x.split(chunks, 1)], 1)
    torch.testing.assert_close(got, want, **TOL)
    assert cache.length == 40


REFUSED = {
    "not causal": {},
    "lengths": {"is_causal": True, "lengths": torch.tensor([3])},
    "documents": {"is_causal": True, "cu_seqlens": torch.tensor([0, 3], dtype=torch.int32)},
    "padding": {"is_causal": True, "key_padding_mask": torch.zeros(1, 3, dtype=torch.bool)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_layer_refuses(name):
    layer, cache = MultiheadDilatedAttention(16, 4, NAMED["longnet"]), KVCache()
    with pytest.raises(ValueError, match=r"cache serves causal attention .* no lengths, no cu_seqlens"):
        layer(torch.randn(1, 3, 16), cache=cache, **REFUSED[name])
    assert cache.length == 0
