"""The definition's tensors against plain Python loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.pattern import Branch, DilatedPattern, Global, Window
from lightning_dilated.pattern.rows import counts, pads

from ..examples import examples
from . import naive
from .strategies import documents, head_counts, patterns

# (pattern, seq_len, heads, kv_heads) of corner cases that random patterns rarely cover
CORNERS = {
    "no tokens": (DilatedPattern.dense(), 0, 2, 2),
    "one token, rate beyond it": (DilatedPattern([(1, 9)]), 1, 3, 3),
    "rate beyond the segment": (DilatedPattern([(3, 5)]), 11, 7, 7),
    "rate does not divide the segment": (DilatedPattern([(7, 3)]), 16, 4, 4),
    "last segment of one token": (DilatedPattern([(5, 2)]), 11, 2, 2),
    "first segment of one token": (DilatedPattern([Branch(5, 2, shift=4)]), 11, 2, 2),
    "shift beyond the sequence": (DilatedPattern([Branch(64, 2, shift=20)]), 9, 2, 2),
    "shifted segment ends inside": (DilatedPattern([Branch(12, 3, shift=8)]), 9, 3, 3),
    "blocked, rate does not divide the heads": (DilatedPattern([(8, 4)], offsets="blocked"), 8, 6, 6),
    "blocked kv offsets": (DilatedPattern([(8, 3)], offsets="blocked", offset_heads="kv"), 9, 8, 4),
    "kv offsets": (DilatedPattern([(6, 2)], offset_heads="kv"), 9, 6, 3),
    "the same branch twice counts twice": (DilatedPattern([(4, 2), (4, 2)]), 9, 2, 2),
    "global tokens": (DilatedPattern([(4, 1), Global(2)]), 9, 2, 2),
    "global tokens of one head": (DilatedPattern([Global(3, heads=[1])]), 7, 4, 2),
    "more global tokens than tokens": (DilatedPattern([Global(9)]), 5, 2, 2),
    "window": (DilatedPattern([Window(3)]), 9, 2, 2),
    "window of one": (DilatedPattern([Window(1, 3)]), 5, 2, 2),
    "dilated window": (DilatedPattern([Window(2, 3, heads=[1])]), 11, 2, 2),
    "window longer than the sequence": (DilatedPattern([Window(9, 2)]), 7, 2, 2),
    "window of one residue": (DilatedPattern([Window(2, 3, offset=2)]), 11, 2, 2),
    "fixed offset": (DilatedPattern([Branch(6, 3, heads=[1], offset=2)]), 9, 3, 3),
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("width, rate", [(1, 1), (4, 1), (3, 2), (2, 5), (30, 3)])
def test_a_window_says_what_its_docstring_does(width, rate, causal):
    c = DilatedPattern([Window(width, rate, heads=[1])]).counts(17, 2, causal)
    for p in range(17):
        visible = {j for j in range(17) if (p - j) % rate == 0 and abs(p - j) < width * rate and (j <= p or not causal)}
        assert c[1, p].tolist() == [int(j in visible) for j in range(17)] and p in visible
    assert not c[0].any()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("corner", CORNERS)
def test_corner(corner, causal):
    pattern, n, heads, kv = CORNERS[corner]
    got = pattern.counts(n, heads, causal, num_kv_heads=kv)
    assert got.dtype == torch.int64 and got.shape == (heads, n, n)
    assert got.tolist() == naive.counts(pattern, [0, n], heads, kv, causal)


@given(st.data())
@settings(max_examples=examples(80))
def test_counts(data):
    heads, kv = data.draw(head_counts(8))
    pattern = data.draw(patterns(heads, kv, widest=14))
    n, causal = data.draw(st.integers(0, 12)), data.draw(st.booleans())
    bounds = data.draw(documents(n))
    want = naive.counts(pattern, bounds, heads, kv, causal)
    assert pattern.counts(n, heads, causal, kv, cu_seqlens=bounds).tolist() == want
    assert counts(pattern, n, heads, causal, kv, torch.tensor(bounds, dtype=torch.int32)).tolist() == want


@given(st.data())
@settings(max_examples=examples(60))
def test_pads(data):
    heads, kv = data.draw(head_counts(6))
    pattern = data.draw(patterns(heads, kv, padding="attended", widest=14))
    n = data.draw(st.integers(0, 14))
    assert pads(pattern, n, heads, False, kv).tolist() == naive.pads(pattern, n, heads, kv)


@pytest.mark.parametrize(
    "padding, causal", [("attended", True), ("masked", False), ("masked", True)], ids=["causal", "masked", "both"]
)
def test_pads_are_zero_elsewhere(padding, causal):
    pattern = DilatedPattern([(8, 3)], padding=padding)
    assert not pads(pattern, 5, 4, causal).any()
    assert pads(DilatedPattern([(8, 3)], padding="attended"), 5, 4, False).any()


def test_a_query_in_no_branch_has_no_key():
    # head 1 uses only odd indices, and no branch covers head 2
    c = DilatedPattern([Branch(4, 2, heads=[0, 1])]).counts(6, 3, False)
    assert c.sum(-1).tolist() == [[2, 0, 2, 0, 1, 0], [0, 2, 0, 2, 0, 1], [0] * 6]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_a_document_sees_itself_alone(causal):
    pattern = DilatedPattern.longnet([4, 8], [1, 2])
    packed = pattern.counts(13, 3, causal, cu_seqlens=[0, 5, 5, 13])
    assert torch.equal(packed[:, :5, :5], pattern.counts(5, 3, causal))
    assert torch.equal(packed[:, 5:, 5:], pattern.counts(8, 3, causal))
    assert not packed[:, :5, 5:].any() and not packed[:, 5:, :5].any()
