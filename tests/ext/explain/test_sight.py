"""Sight against brute force over the counts of the definition, and for known patterns."""

import pytest
import torch
from hypothesis import given, settings

from lightning_dilated.ext.explain import explanation as explain
from lightning_dilated.ext.explain.explanation import sight, sight_hints, sight_table
from lightning_dilated.pattern import DilatedPattern

from ...examples import examples
from .test_explain import cases

PAPER = DilatedPattern.longnet([2048, 4096, 8192, 16384, 32768, 65536], [1, 2, 4, 8, 8, 8])


def brute(patterns, n, heads, kv):
    """Return [(first, share, heads)] computed over all pairs."""
    visible = torch.stack([(p.counts(n, heads, False, kv) > 0).sum(0) for p in patterns]).sum(0)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    octaves, first = [], 1
    while first < n:
        octave = visible[(distance >= first) & (distance < 2 * first)].double()
        octaves.append((first, (octave > 0).double().mean().item(), octave.mean().item()))
        first *= 2
    return octaves


@given(cases())
@settings(max_examples=examples(75))
def test_equals_brute_force(case):
    """An octave of up to `SAMPLES` pairs is counted completely, as are all octaves of 40 tokens."""
    pattern, n, heads, kv, _ = case
    layers = [pattern, pattern.shifted(0.5, 16), pattern]
    for got, want in zip(sight(layers, n, heads, kv), brute(layers, n, heads, kv), strict=True):
        assert (got.first, got.share, got.heads) == (want[0], pytest.approx(want[1]), pytest.approx(want[2]))


def test_drawn_pairs_come_near_all_pairs(monkeypatch):
    pattern = DilatedPattern.longnet([32, 128], [1, 4])
    whole = sight([pattern], 300, 4, 4)
    monkeypatch.setattr(explain, "SAMPLES", 4000)
    drawn = sight([pattern], 300, 4, 4)
    assert drawn != whole and drawn == sight([pattern], 300, 4, 4)
    for x, y in zip(drawn, whole, strict=True):
        assert x.share == pytest.approx(y.share, abs=0.03) and x.heads == pytest.approx(y.heads, abs=0.1)


def test_the_papers_pattern_sees_one_distance_in_eight():
    octaves = sight([PAPER] * 8, 65536, 8, 8)
    far = [x for x in octaves if x.first >= 8192]
    assert all(x.share == pytest.approx(1 / 8, abs=0.02) and x.heads == pytest.approx(1, abs=0.15) for x in far)
    (hint,) = sight_hints(octaves)
    assert hint.startswith("from a distance of 2,048 tokens on, one layer shows a query only 1") and "hybrid" in hint
    assert "8,192 to 65,535 tokens back" in sight_table(octaves)[-1]


def test_the_hybrid_sees_all():
    octaves = sight(DilatedPattern.hybrid(8, 8), 65536, 8, 8)
    assert all(x.share == 1 for x in octaves) and sight_hints(octaves) == ()
    assert octaves[-1].heads == 2


def test_segments_see_nothing_beyond():
    (hint,) = sight_hints(sight([DilatedPattern.dense(64)], 1024, 2, 2))
    assert "one layer shows a query none of the tokens there" in hint
