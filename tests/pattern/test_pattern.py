"""Branch and DilatedPattern as values: equality, round trips, and the patterns that constructors return."""

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lightning_dilated.pattern import Branch, DilatedPattern, Global, Window

from .strategies import branches, head_counts, patterns


@st.composite
def any_pattern(draw):
    heads, kv = draw(head_counts())
    return draw(patterns(heads, kv, padding=draw(st.sampled_from(["masked", "attended"]))))


def plain(value) -> bool:
    """Return whether YAML and JSON can represent the value without tags."""
    if type(value) is dict:
        return all(type(k) is str and plain(v) for k, v in value.items())
    if type(value) is list:
        return all(map(plain, value))
    return value is None or type(value) in (int, str)


ROUND_TRIPS = {
    "code": lambda p: DilatedPattern.decode(p.code),
    "to_dict": lambda p: DilatedPattern.from_dict(p.to_dict()),
    "json": lambda p: DilatedPattern.from_dict(json.loads(json.dumps(p.to_dict()))),
    "yaml": lambda p: DilatedPattern.from_dict(yaml.safe_load(yaml.safe_dump(p.to_dict()))),
    "repr": lambda p: eval(repr(p), {x.__name__: x for x in (Branch, Global, Window, DilatedPattern)}),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "deepcopy": copy.deepcopy,
    "replace": lambda p: dataclasses.replace(p, branches=list(p.branches)),
}


@pytest.mark.parametrize("way", ROUND_TRIPS)
def test_round_trip(way):
    @given(any_pattern())
    def check(pattern):
        again = ROUND_TRIPS[way](pattern)
        assert again == pattern and hash(again) == hash(pattern)
        assert again.code == pattern.code and repr(again) == repr(pattern)

    check()


@given(any_pattern())
def test_to_dict_is_plain(pattern):
    assert plain(pattern.to_dict())


@given(branches(8, 1, False))
def test_branch_round_trip(branch):
    assert (
        Branch.of(branch.to_dict()) == branch == eval(repr(branch), {x.__name__: x for x in (Branch, Global, Window)})
    )


SAME = {
    "pair and Branch": (DilatedPattern([(4, 2)]), DilatedPattern([Branch(4, 2)])),
    "list and tuple": (DilatedPattern([[4, 2]]), DilatedPattern(((4, 2),))),
    "mapping": (DilatedPattern([{"dilation_rate": 2, "segment_length": 4}]), DilatedPattern([(4, 2)])),
    "generator": (DilatedPattern((w, 1) for w in (4, 8)), DilatedPattern([(4, 1), (8, 1)])),
    "order of heads": (DilatedPattern([Branch(4, 1, heads=[2, 0])]), DilatedPattern([Branch(4, 1, heads=(0, 2))])),
    "range of heads": (DilatedPattern([Branch(4, 1, heads=range(3))]), DilatedPattern([Branch(4, 1, heads=[0, 1, 2])])),
    "numpy integers": (
        DilatedPattern([Branch(np.int64(4), np.int32(2), np.uint8(1), np.arange(2), np.int16(1))]),
        DilatedPattern([Branch(4, 2, 1, (0, 1), 1)]),
    ),
    "longnet": (DilatedPattern.longnet([4, 8], [1, 2]), DilatedPattern([(4, 1), (8, 2)])),
    "longnet, numpy": (DilatedPattern.longnet(np.array([4, 8]), np.array([1, 2])), DilatedPattern([(4, 1), (8, 2)])),
    "longnet, rules": (
        DilatedPattern.longnet([4], [2], offsets="blocked", offset_heads="kv", padding="attended"),
        DilatedPattern([(4, 2)], "blocked", "kv", "attended"),
    ),
    "lists of from_dict": (
        DilatedPattern.from_dict({"segment_lengths": [4, 8], "dilation_rates": [1, 2], "offsets": "blocked"}),
        DilatedPattern([(4, 1), (8, 2)], offsets="blocked"),
    ),
    "from_dict of a pattern": (DilatedPattern.from_dict(DilatedPattern.dense(4)), DilatedPattern([(4, 1)])),
    "geometric": (DilatedPattern.geometric(4, 16), DilatedPattern([(4, 1), (8, 2), (16, 4)])),
    "geometric, ratio": (DilatedPattern.geometric(2, 18, ratio=3), DilatedPattern([(2, 1), (6, 3), (18, 9)])),
    "geometric, one": (DilatedPattern.geometric(4, 4, offsets="blocked"), DilatedPattern([(4, 1)], offsets="blocked")),
    "dense": (DilatedPattern.dense(), DilatedPattern([(None, 1)])),
    "dense segments": (DilatedPattern.dense(8), DilatedPattern([Branch(8, 1)])),
    "head groups, more heads first": (
        DilatedPattern.head_groups([4, 8, 16], [1, 2, 2], 5),
        DilatedPattern(
            [
                Branch(4, 1, heads=[0, 1], offset=0),
                Branch(8, 2, heads=[2, 3], offset=1),
                Branch(16, 2, heads=[4], offset=0),
            ]
        ),
    ),
    "head groups, offset i mod r": (
        DilatedPattern.head_groups([4, 8], [3, 4], 2),
        DilatedPattern([Branch(4, 3, heads=[0], offset=0), Branch(8, 4, heads=[1], offset=1)]),
    ),
    "shifted, half": (
        DilatedPattern([(4, 1), (7, 2)]).shifted(),
        DilatedPattern([Branch(4, 1, shift=2), Branch(7, 2, shift=3)]),
    ),
    "shifted, a segment of one": (DilatedPattern([(1, 1)]).shifted(0.99), DilatedPattern([(1, 1)])),
    "shifted, fraction": (DilatedPattern([(8, 1)]).shifted(0.25), DilatedPattern([Branch(8, 1, shift=2)])),
    "shifted, 0 undoes": (DilatedPattern([Branch(8, 1, shift=3)]).shifted(0), DilatedPattern([(8, 1)])),
    "shifted, below": (
        DilatedPattern([(4, 1), (8, 1), (16, 2)]).shifted(below=8),
        DilatedPattern([Branch(4, 1, shift=2), (8, 1), (16, 2)]),
    ),
    "shifted, no segments": (DilatedPattern.dense().shifted(), DilatedPattern.dense()),
    "shifted keeps the rest": (
        DilatedPattern([Branch(8, 2, heads=[1], offset=1)], offsets="blocked", offset_heads="kv").shifted(),
        DilatedPattern([Branch(8, 2, 4, [1], 1)], offsets="blocked", offset_heads="kv"),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_equal(name):
    got, want = SAME[name]
    assert got == want and hash(got) == hash(want) and got.code == want.code and repr(got) == repr(want)
    assert plain(got.to_dict())


BASE = DilatedPattern([Branch(8, 2, shift=1, heads=[0, 1], offset=0)])
DIFFERENT = {
    "segment_length": DilatedPattern([Branch(9, 2, 1, [0, 1], 0)]),
    "no segment_length": DilatedPattern([Branch(None, 2, 0, [0, 1], 0)]),
    "dilation_rate": DilatedPattern([Branch(8, 3, 1, [0, 1], 0)]),
    "shift": DilatedPattern([Branch(8, 2, 0, [0, 1], 0)]),
    "heads": DilatedPattern([Branch(8, 2, 1, [0, 2], 0)]),
    "all heads": DilatedPattern([Branch(8, 2, 1, None, 0)]),
    "offset": DilatedPattern([Branch(8, 2, 1, [0, 1], 1)]),
    "offset left to the rule": DilatedPattern([Branch(8, 2, 1, [0, 1], None)]),
    "twice": DilatedPattern([Branch(8, 2, 1, [0, 1], 0)] * 2),
    "offsets": dataclasses.replace(BASE, offsets="blocked"),
    "offset_heads": dataclasses.replace(BASE, offset_heads="kv"),
    "padding": DilatedPattern([Branch(8, 2, 0, [0, 1], 0)], padding="attended"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_not_equal(name):
    # unequal patterns must differ in `code`, the key of the compiled op, and in `repr`, which messages contain
    other = DIFFERENT[name]
    assert other != BASE and other.code != BASE.code and repr(other) != repr(BASE)


@pytest.mark.parametrize("value, field", [(BASE, "offsets"), (BASE, "branches"), (BASE.branches[0], "shift")])
def test_frozen(value, field):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, 1)


def test_decode_is_cached():
    # the op decodes the pattern in every call
    assert DilatedPattern.decode(BASE.code) is DilatedPattern.decode(BASE.code)


@pytest.mark.parametrize(
    "pattern, heads, kv, want",
    [
        (DilatedPattern([(8, 3)]), 7, 7, [0, 1, 2, 0, 1, 2, 0]),
        (DilatedPattern([(8, 3)], offsets="blocked"), 7, 7, [0, 0, 0, 1, 1, 1, 2]),
        (DilatedPattern([(8, 4)], offsets="blocked"), 6, 6, [0, 0, 1, 1, 2, 2]),
        (DilatedPattern([(8, 4)], offsets="blocked"), 2, 2, [0, 1]),
        (DilatedPattern([(8, 2)]), 6, 3, [0, 1, 0, 1, 0, 1]),
        (DilatedPattern([(8, 2)], offset_heads="kv"), 6, 3, [0, 0, 1, 1, 0, 0]),
        (DilatedPattern([(8, 2)], offset_heads="kv", offsets="blocked"), 6, 3, [0, 0, 0, 0, 1, 1]),
        (DilatedPattern([Branch(8, 5, offset=4)], offset_heads="kv", offsets="blocked"), 4, 2, [4, 4, 4, 4]),
    ],
    ids=[
        "interleaved",
        "blocked",
        "blocked, r does not divide H",
        "blocked, r > H",
        "query",
        "kv",
        "kv, blocked",
        "fixed",
    ],
)
def test_offsets(pattern, heads, kv, want):
    assert [pattern.offset(pattern.branches[0], h, heads, kv) for h in range(heads)] == want
