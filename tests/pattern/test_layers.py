"""The patterns of a model's layers: repeated lists, shifted layers, hybrids, and plain values."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.pattern import Branch, DilatedPattern, Window
from lightning_dilated.pattern.layers import layer_patterns, plain_patterns, read_patterns
from lightning_dilated.pattern.rows import cycle_to, shortest_cycle

from ..examples import examples

A, B = DilatedPattern.longnet([4, 16], [1, 2]), DilatedPattern.dense()
PATTERN = DilatedPattern.longnet([5, 16], [1, 2])


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(1, 20))
@settings(max_examples=examples(100))
def test_shortest_cycle(values, depth):
    cycle = shortest_cycle(values)
    assert cycle_to(cycle, depth)[: len(values)] == cycle_to(values, depth)[: len(values)]
    repeats = [n for n in range(1, len(values)) if cycle_to(values[:n], len(values)) == tuple(values)]
    assert len(cycle) == min([*repeats, len(values)])


READ = {
    "one": (A, A),
    "a mapping": ({"segment_lengths": [4, 16], "dilation_rates": [1, 2]}, A),
    "a list of one": ([A], A),
    "all alike": ([A, A, A], A),
    "a cycle": ([A, B], (A, B)),
    "a cycle twice": ([A, B, A, B], (A, B)),
    "mappings": ([A.to_dict(), {"branches": [[None, 1]]}], (A, B)),
    "one a layer": ([A, A, A, A, B], (A, A, A, A, B)),
}


@pytest.mark.parametrize("name", READ)
def test_read(name):
    value, want = READ[name]
    got = read_patterns(value, 5, 4)
    assert got == want and read_patterns(plain_patterns(got), 5, 4) == want


REFUSED = {
    "longer than the model": (
        [A, B, A, A, A, A],
        ValueError,
        "lists 6 patterns for a model of 5 layers: it takes 1 to 5",
    ),
    "nothing": ([], ValueError, "lists 0 patterns"),
    "a string": ("dense", TypeError, "pattern must be a DilatedPattern, a mapping, or a list"),
    "a number": (3, TypeError, "pattern must be a DilatedPattern, a mapping, or a list"),
    "heads of a later layer": ([A, DilatedPattern([Branch(4, 1, heads=[4])])], ValueError, "serves head 4"),
    "hybrid and more": (
        {"hybrid": {}, "branches": []},
        ValueError,
        "pattern names hybrid and branches: give hybrid alone",
    ),
    "hybrid with an unknown value": ({"hybrid": {"locals": 3}}, ValueError, "no key 'locals'. Did you mean 'local'"),
    "hybrid with depth": ({"hybrid": {"depth": 3}}, ValueError, "pattern.hybrid has no key 'depth'"),
    "hybrid of a list": ({"hybrid": [1]}, TypeError, "pattern.hybrid must be a mapping"),
    "no such layer": ({"hybrid": {"global_first": 5}}, ValueError, "global_first=5 is none of the layers 0 to 4"),
    "no dense layer": ({"hybrid": {"global_every": 6}}, ValueError, "global_every=6 leaves none of 5 layers"),
    "too many dense heads": ({"hybrid": {"global_heads": 5}}, ValueError, "global_heads=5 is above the 4 kv heads"),
    "unknown dense heads": ({"hybrid": {"global_heads": "some"}}, TypeError, "global_heads must be an integer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    value, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        read_patterns(value, 5, 4)


@pytest.mark.parametrize(
    "num_heads, num_kv_heads, global_heads",
    [
        (heads, kv_heads, dense)
        for heads, kv_heads in ((8, None), (8, 4), (6, 2), (4, 1))
        for dense in (1, 2, "all")
        if dense == "all" or dense <= (kv_heads or heads)
    ],
)
@pytest.mark.parametrize("global_every, global_first", [(1, None), (3, None), (4, None), (4, 0), (2, 3), (9, 5)])
@pytest.mark.parametrize("shifted", [True, False])
def test_hybrid(num_heads, num_kv_heads, global_heads, global_every, global_first, shifted):
    """Layers global_first (default global_every - 1) + k * global_every have dense last kv groups; others are local."""
    kv_heads = num_kv_heads or num_heads
    far = DilatedPattern([(16, 2)], offsets="blocked")
    layers = DilatedPattern.hybrid(
        6, num_heads, num_kv_heads, 8, global_every, global_heads, far, shifted, global_first
    )
    assert len(layers) == 6
    dense = num_heads if global_heads == "all" else num_heads // kv_heads * global_heads
    for i, pattern in enumerate(layers):
        pattern.check_heads(num_heads, num_kv_heads)
        first = global_every - 1 if global_first is None else global_first
        is_global = i in range(first, 6, global_every)
        for head in range(num_heads):
            got = [
                (b.segment_length, b.dilation_rate, b.shift)
                for b in pattern.branches
                if b.heads is None or head in b.heads
            ]
            local = (8, 1, 4 if shifted and i % 2 else 0)
            if is_global and head >= num_heads - dense:
                assert got == [(None, 1, 0)]
            else:
                assert got == [local] if is_global else got == [local, (16, 2, 0)]
        assert pattern.offsets == "blocked"


def test_hybrid_with_windows():
    """Windows replace the segments of the same heads in the same layers, and are not shifted."""
    segments = DilatedPattern.hybrid(6, 4, 2, 8, far=DilatedPattern([(16, 2)]), shifted=False)
    for with_windows, pattern in zip(
        DilatedPattern.hybrid(6, 4, 2, 8, far=DilatedPattern([(16, 2)]), window=True), segments, strict=True
    ):
        first, *windows = pattern.branches
        assert with_windows.branches == (Window(8, heads=first.heads), *windows)
    assert read_patterns({"hybrid": {"window": True}}, 4, 2)[0] == DilatedPattern([Window(2048)])


def test_hybrid_of_yaml_takes_depth_and_heads_of_the_model():
    want = DilatedPattern.hybrid(8, 4, 2, local=16)
    assert cycle_to(read_patterns({"hybrid": {"local": 16}}, 8, 4, 2), 8) == tuple(want)
    assert read_patterns({"hybrid": None}, 8, 4) == shortest_cycle(DilatedPattern.hybrid(8, 4))


SHIFTS = {
    "none": ({}, [0, 0], [0, 0]),
    "odd": ({"shift_layers": "odd"}, [0, 0], [2, 8]),
    "odd, below 16": ({"shift_layers": "odd", "shift_below": 16}, [0, 0], [2, 0]),
}


@pytest.mark.parametrize("name", SHIFTS)
def test_shift_layers(name):
    options, even, odd = SHIFTS[name]
    shifts = [[b.shift for b in pattern.branches] for pattern in layer_patterns(PATTERN, 5, **options)]
    assert shifts == [even, odd, even, odd, even]


def test_shift_layers_of_a_list():
    other = DilatedPattern.dense(6)
    got = layer_patterns((PATTERN, PATTERN, other), 6, "odd")
    assert got == (PATTERN, PATTERN.shifted(), other, PATTERN.shifted(), PATTERN, other.shifted())


def test_whole_sequence_branches_stay_where_others_shift():
    layers = layer_patterns(DilatedPattern([(5, 1), (None, 2)]), 2, "odd")
    assert [b.shift for b in layers[1].branches] == [2, 0]


UNSHIFTABLE = {
    "unknown value": (PATTERN, ("even", None), "shift_layers must be none or odd; got 'even'"),
    "below alone": (PATTERN, ("none", 16), 'shift_below=16 needs shift_layers="odd"'),
    "attended": (DilatedPattern([(4, 1)], padding="attended"), ("odd", None), 'needs padding="masked"'),
    "shifted already": (PATTERN.shifted(), ("odd", None), "not yet shifted"),
    "one of a list shifted already": ((PATTERN, PATTERN.shifted()), ("odd", None), "not yet shifted"),
    "whole sequences": (DilatedPattern.dense(), ("odd", None), "would move no branch of .*segments of at least 2"),
    "segments of 1": (DilatedPattern.dense(1), ("odd", None), "would move no branch"),
    "none below": (PATTERN, ("odd", 4), "would move no branch .* below shift_below=4"),
    "below 0": (PATTERN, ("odd", 0), "below must be at least 1, got 0"),
}


@pytest.mark.parametrize("name", UNSHIFTABLE)
def test_shift_layers_refused(name):
    pattern, options, text = UNSHIFTABLE[name]
    with pytest.raises(ValueError, match=text):
        layer_patterns(pattern, 4, *options)
