"""Decoding equals the full sequence row by row, reads visible keys only, and soon discards keys that are not needed."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.attention import MultiheadDilatedAttention, dilated_attention
from lightning_dilated.ext.decoding import kv_cache as decode
from lightning_dilated.ext.decoding.cache_slots import Clock
from lightning_dilated.ext.decoding.kv_cache import KVCache
from lightning_dilated.ext.decoding.new_tokens import decode_attention
from lightning_dilated.pattern import Branch, DilatedPattern

from ...attention.recorder import record
from ...examples import examples
from ...pattern.strategies import head_counts, patterns

LONGEST, D = 80, 3
TOL = {"rtol": 1e-10, "atol": 1e-10}


def rand(*shape):
    return torch.randn(shape, dtype=torch.float64)


def qkv(heads, kv_heads, length=LONGEST, batch=1):
    return rand(batch, length, heads, D), rand(batch, length, kv_heads, D), rand(batch, length, kv_heads, D)


def run(q, k, v, pattern, chunks, check=None, **options):
    """Return the outputs of decoding in chunks, with a call of `check(cache)` after each chunk."""
    cache, out = KVCache(pattern, q.shape[2], k.shape[2]), []
    for parts in zip(*(x.split(chunks, 1) for x in (q, k, v)), strict=True):
        out.append(decode_attention(*parts, cache, **options))
        if check:
            check(cache)
    assert cache.length == q.shape[1]
    return torch.cat(out, 1)


def last(q, k, v, pattern, length, **options):
    """Return decode_attention for the last of `length` tokens, after one call with all earlier tokens."""
    q, k, v = (x[:, :length] for x in (q, k, v))
    return run(q, k, v, pattern, [length - 1, 1], **options)[:, -1:]


def bounded(pattern, heads, kv_heads, row):
    """Return a check of caches: a branch has at most ceil(w / r) rows for each residue of a kv head.

    Buffers have the same limit (`row` bytes per row), or twice that for a segment of the whole sequence.
    """
    held = []
    for branch in pattern.branches:
        row_counts = {}
        for h in range(heads) if branch.heads is None else branch.heads:
            row_counts.setdefault(h // (heads // kv_heads), set()).add(pattern.offset(branch, h, heads, kv_heads))
        held.append({kv: len(residues) for kv, residues in row_counts.items()})
    sizes = [(b.segment_length, b.dilation_rate) for b in pattern.branches]

    def check(cache):
        for branch, residues, rows in zip(pattern.branches, held, cache.rows(), strict=True):
            reach = cache.length if branch.segment_length is None else min(branch.segment_length, cache.length)
            most = -(-reach // branch.dilation_rate)
            assert rows.keys() == residues.keys()
            assert all(rows[kv] <= most * count for kv, count in residues.items()), (branch, cache.length, rows)
        assert cache.nbytes <= row * sum(
            sum(residues.values()) * (max(64, 2 * -(-cache.length // r)) if w is None else -(-w // r))
            for (w, r), residues in zip(sizes, held, strict=True)
        )

    return check


@st.composite
def shaped_patterns(draw):
    heads, kv = draw(head_counts(6))
    return heads, kv, draw(patterns(heads, kv))


@st.composite
def chunkings(draw):
    """Draw chunk sizes: each stretch between random cuts is one chunk, or is decoded token by token."""
    cuts = draw(st.sets(st.integers(1, LONGEST - 1), max_size=4))
    bounds = [0, *sorted(cuts), LONGEST]
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    return [x for size in sizes for x in ([size] if draw(st.booleans()) else [1] * size)]


@given(shaped_patterns(), chunkings())
@settings(max_examples=examples(100))
def test_every_row_and_the_bound(case, chunks):
    """With any chunks, outputs equal the outputs of the full sequence, and the cache has at most the rows of `bounded`."""
    heads, kv_heads, pattern = case
    q, k, v = qkv(heads, kv_heads)
    want = dilated_attention(q, k, v, pattern, causal=True)
    got = run(q, k, v, pattern, chunks, bounded(pattern, heads, kv_heads, 2 * D * 8))
    torch.testing.assert_close(got, want, **TOL)


@given(shaped_patterns(), st.integers(1, LONGEST))
@settings(max_examples=examples(40))
def test_prompt_then_one_by_one_in_float32(case, prompt):
    heads, kv_heads, pattern = case
    q, k, v = (x.float() for x in qkv(heads, kv_heads, batch=2))
    check = bounded(pattern, heads, kv_heads, 2 * 2 * D * 4)
    got = run(q, k, v, pattern, [prompt] + [1] * (LONGEST - prompt), check)
    torch.testing.assert_close(got, dilated_attention(q, k, v, pattern, causal=True), rtol=1e-5, atol=1e-5)


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
    """Compare with a full run of each length, because segments of the whole sequence grow with the length."""
    q, k, v = qkv(4, 2, batch=2)
    for n in range(1, LONGEST + 1):
        want = dilated_attention(q[:, :n], k[:, :n], v[:, :n], NAMED[name], causal=True, scale=0.7)[:, -1:]
        torch.testing.assert_close(last(q, k, v, NAMED[name], n, scale=0.7), want, **TOL)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 64, 65, 80])
def test_reads_only_what_it_sees(name, length):
    """A step reads w / r keys of each branch. All other keys are NaN, and must not affect the result."""
    q, k, v = qkv(4, 2)
    visible = NAMED[name].counts(length, 4, True, 2)[:, -1].unflatten(0, (2, 2)).sum(1) > 0  # axes (kv head, key)
    for x in (k, v):
        x[0, :length][~visible.T] = torch.nan
    assert last(q, k, v, NAMED[name], length).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dtype_and_uncovered_heads(dtype):
    pattern = DilatedPattern([Branch(8, 2, heads=[0], offset=0)])
    q, k, v = (x.to(dtype) for x in qkv(2, 1, 3))
    even, odd = last(q, k, v, pattern, 3), last(q, k, v, pattern, 2)
    assert even.dtype == dtype and (even[:, :, 0] != 0).all()
    assert (even[:, :, 1] == 0).all() and (odd == 0).all()


def test_rows_of_a_cache_by_hand():
    """Heads 0..3 use kv heads 0, 0, 1, 1 and offsets 0, 1, 2, 0 at rate 3, so kv head 0 keeps two of three residues."""
    pattern = DilatedPattern([(9, 3), Branch(4, 1, shift=3, heads=[2]), Branch(None, 2, offset=1)])
    q, k, v = qkv(4, 2, 11)
    cache, held = KVCache(pattern, 4, 2), []
    assert cache.rows() == [{0: 0, 1: 0}, {1: 0}, {0: 0, 1: 0}] and cache.nbytes == 0
    for i in range(11):
        decode_attention(*(x[:, i : i + 1] for x in (q, k, v)), cache)
        held.append([rows.get(1, 0) for rows in cache.rows()])
    assert cache.rows()[0] == {0: 2, 1: 1}  # indices 0 and 1 of the second segment; kv head 1 needs residue 0 only
    assert [row[1] for row in held] == [1, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert [row[2] for row in held] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert [row[0] for row in held] == [1, 1, 2, 3, 3, 4, 5, 5, 6, 1, 1]


def test_buffers_stop_growing():
    """Buffers double until they have ceil(w / r) rows, and do not grow further with the length."""
    pattern, n = DilatedPattern.longnet([32, 600], [1, 4]), 3000
    q, k, v = qkv(4, 2, n, batch=2)
    sizes = []
    cache = KVCache(pattern, 4, 2)
    for start in range(0, n, 10):
        decode_attention(*(x[:, start : start + 10] for x in (q, k, v)), cache)
        sizes.append(cache.nbytes)
    row = 2 * 2 * D * 8  # k and v, two samples, 8 bytes each
    assert sizes[-1] == row * (2 * 32 + 4 * 150) and len(set(sizes)) == 3


@pytest.mark.parametrize("budget", [1, 100])
def test_cached_scores_in_tiles(budget, monkeypatch):
    monkeypatch.setattr(decode, "SCORES", budget)
    q, k, v = qkv(4, 2, batch=2)
    for pattern in NAMED.values():
        got = run(q, k, v, pattern, [17, 30, 1, 32], engine="math")
        torch.testing.assert_close(got, dilated_attention(q, k, v, pattern, causal=True), **TOL)


@pytest.mark.parametrize("dtype, tol", [(torch.float64, 1e-10), (torch.bfloat16, 2e-2)])
def test_later_pieces_of_a_prompt_attend_to_the_cache_by_the_engine(dtype, tol, monkeypatch):
    calls = record(monkeypatch, "cpu_flash")
    q, k, v = (x.to(dtype) for x in qkv(4, 2, batch=2))
    pattern = DilatedPattern([(None, 1)])
    got = run(q, k, v, pattern, [50, 30])
    assert [tuple(k.shape) for _, k, _ in calls.forward if k.shape[2] == 50][-1] == (2, 2, 50, D)
    want = dilated_attention(q.double(), k.double(), v.double(), pattern, causal=True)
    torch.testing.assert_close(got.double(), want, rtol=tol, atol=tol)


def test_no_tokens_change_nothing():
    q, k, v = qkv(4, 2)
    want = run(q, k, v, NAMED["longnet"], [LONGEST])
    torch.testing.assert_close(run(q, k, v, NAMED["longnet"], [0, 20, 0, 60, 0]), want, **TOL)


def test_attended_padding_is_checked_at_each_length():
    """The release has no correct result if r does not divide w and a second segment begins, so this is refused."""
    pattern, (q, k, v) = DilatedPattern([(8, 3)], padding="attended"), qkv(4, 4, 9)
    with pytest.raises(ValueError, match="not a multiple of"):
        run(q, k, v, pattern, [8, 1])


@given(shaped_patterns(), st.lists(st.integers(1, LONGEST - 10), min_size=2, max_size=3), st.integers(1, LONGEST))
@settings(max_examples=examples(40))
def test_prompts_of_different_lengths(case, lengths, chunk):
    """Prompts are padded on the right and given in chunks. Then each sample continues as it would alone."""
    heads, kv_heads, pattern = case
    longest, rows = max(lengths), torch.arange(len(lengths))
    q, k, v = qkv(heads, kv_heads, batch=len(lengths))
    want = dilated_attention(q, k, v, pattern, causal=True)
    cache = KVCache(pattern, heads, kv_heads, clock=Clock(lengths))
    padding = torch.arange(longest) >= torch.tensor(lengths)[:, None]
    prompt = [x[:, :longest].masked_fill(padding[:, :, None, None], 9.0).split(chunk, 1) for x in (q, k, v)]
    got = torch.cat([decode_attention(*parts, cache) for parts in zip(*prompt, strict=True)], 1)
    for b, length in enumerate(lengths):
        torch.testing.assert_close(got[b, :length], want[b, :length], **TOL)
    for step in range(10):
        at = torch.tensor(lengths) + step
        got = decode_attention(*(x[rows, at][:, None] for x in (q, k, v)), cache)
        torch.testing.assert_close(got[:, 0], want[rows, at], **TOL)
        assert cache.positions(len(lengths), q.device).tolist() == (at + 1).tolist()


def test_buffers_of_a_fixed_length_stay():
    """With `max_length`, segments need at most ceil(max_length / r) rows, and buffers have their full size at once."""
    pattern = DilatedPattern([(32, 1), (600, 4), (None, 2)])
    q, k, v = qkv(4, 2, 100)
    cache = KVCache(pattern, 4, 2, max_length=100)
    got = []
    for parts in zip(*(x.split([40] + [1] * 60, 1) for x in (q, k, v)), strict=True):
        got.append(decode_attention(*parts, cache))
        assert cache.nbytes == 2 * D * 8 * (2 * 32 + 4 * 25 + 4 * 50)
    torch.testing.assert_close(torch.cat(got, 1), dilated_attention(q, k, v, pattern, causal=True), **TOL)
    with pytest.raises(ValueError, match="made for max_length=100 tokens, but this call adds a token at position 100"):
        decode_attention(*(x[:, :1] for x in (q, k, v)), cache)


def test_a_cache_begins_anew():
    q, k, v = qkv(4, 2, batch=2)
    for pattern in NAMED.values():
        cache = KVCache(pattern, 4, 2, max_length=LONGEST)
        for length in (50, LONGEST):
            cache.reset()
            got = [decode_attention(*(x[:, i : i + 1] for x in (q, k, v)), cache) for i in range(length)]
            want = dilated_attention(q[:, :length], k[:, :length], v[:, :length], pattern, causal=True)
            torch.testing.assert_close(torch.cat(got, 1), want, **TOL)


#: (lengths of prompts or None, earlier chunks, the call, part of the message)
WRONG = {
    "a batch of other lengths": ([3, 4, 5], [], qkv(4, 2, 5, 2), "made for 3 samples .lengths., got a batch of 2"),
    "across the prompts' end": ([3, 5], [4], qkv(4, 2, 2, 2), "longest prompt has 5 tokens, and this call adds"),
    "several after prompts": ([3, 5], [5], qkv(4, 2, 2, 2), "after prompts of different lengths a call adds one token"),
    "another batch": (None, [5], qkv(4, 2, 1, batch=2), r"\(B, kv heads, D\) = \(1, 2, 3\)"),
    "other kv heads": (None, [5], qkv(4, 4, 1), r"\(B, kv heads, D\) = \(1, 2, 3\)"),
    "a gradient": (None, [5], tuple(x.requires_grad_() for x in qkv(4, 2, 1)), "call under torch.no_grad"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    lengths, before, tensors, text = WRONG[name]
    cache = KVCache(NAMED["longnet"], 4, 2, clock=Clock(lengths))
    for chunk in before:
        decode_attention(*qkv(4, 2, chunk, batch=1 if lengths is None else 2), cache)
    with pytest.raises(ValueError, match=text):
        decode_attention(*tensors, cache)
    assert cache.length == sum(before)


LAYERS = {
    "plain": {},
    "rotary, gqa": {"position_encoding": "rotary", "num_kv_heads": 2},
    "xpos": {"position_encoding": "xpos", "xpos_scale_base": 16.0},
    "sub-norm, scale": {"sub_layernorm": True, "scale": 0.3},
}


@pytest.mark.parametrize(
    "chunks", [[1] * 40, [17] + [1] * 23, [5, 1, 20, 14], [40]], ids=["ones", "prompt", "any", "all"]
)
@torch.no_grad()
@pytest.mark.parametrize("name", LAYERS)
def test_layer_step_by_step(name, chunks):
    layer = MultiheadDilatedAttention(16, 4, NAMED["longnet"].shifted(0.25), dtype=torch.float64, **LAYERS[name])
    x, cache = rand(2, 40, 16), layer.new_cache()
    want = layer(x, is_causal=True)[0]
    got = torch.cat([layer(part, is_causal=True, cache=cache)[0] for part in x.split(chunks, 1)], 1)
    torch.testing.assert_close(got, want, **TOL)
    assert cache.length == 40


LAYER = MultiheadDilatedAttention(16, 4, NAMED["longnet"])
WHOLE = r"cache serves causal attention .* no lengths, no cu_seqlens"
NO_CACHE = r"cache must be what new_cache\(\) of the layer returns, got"
REFUSED = {
    "not causal": ({"is_causal": False}, WHOLE),
    "lengths": ({"lengths": torch.tensor([3])}, WHOLE),
    "documents": ({"cu_seqlens": torch.tensor([0, 3], dtype=torch.int32)}, WHOLE),
    "padding": ({"key_padding_mask": torch.zeros(1, 3, dtype=torch.bool)}, WHOLE),
    "another pattern": ({"cache": KVCache(NAMED["shifted"], 4)}, "this cache was made for DilatedPattern"),
    "other kv heads": ({"cache": KVCache(NAMED["longnet"], 4, 2)}, r"kv heads\) \(4, 2\), but .* \(4, 4\)"),
    "text": ({"cache": "x"}, NO_CACHE),
    "a list": ({"cache": []}, NO_CACHE),
    "a layer": ({"cache": LAYER}, NO_CACHE),
}


@torch.no_grad()
@pytest.mark.parametrize("name", REFUSED)
def test_layer_refuses(name):
    """A layer with shifted segments must not read the cache of an unshifted layer."""
    options, text = REFUSED[name]
    call = {"is_causal": True, "cache": LAYER.new_cache(), **options}
    with pytest.raises(TypeError if text is NO_CACHE else ValueError, match=text):
        LAYER(torch.randn(1, 3, 16), **call)
    assert getattr(call["cache"], "length", 0) == 0
