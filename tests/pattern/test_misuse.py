"""Wrong branches and patterns: each error names the argument, its value and the remedy."""

import re

import pytest

from lightning_dilated.pattern import Branch, DilatedPattern, Global, Window

PAIR = DilatedPattern.longnet([4, 8], [1, 2])
SPLIT = DilatedPattern([Branch(8, 2, heads=[0, 1, 2])], offset_heads="kv")

# name: (call, exception, what its message must hold)
BRANCH = {
    "segment_length 0": (lambda: Branch(0, 1), ValueError, ["segment_length", "at least 1", "got 0"]),
    "segment_length negative": (lambda: Branch(-8, 1), ValueError, ["segment_length", "got -8"]),
    "segment_length float": (lambda: Branch(8.0, 1), TypeError, ["segment_length", "integer", r"8\.0 of type float"]),
    "segment_length bool": (lambda: Branch(True, 1), TypeError, ["segment_length", "integer", "bool True"]),
    "segment_length str": (lambda: Branch("8", 1), TypeError, ["segment_length", "'8' of type str"]),
    "dilation_rate 0": (lambda: Branch(8, 0), ValueError, ["dilation_rate", "at least 1", "Use 1 for no dilation"]),
    "dilation_rate None": (lambda: Branch(8, None), TypeError, ["dilation_rate", "got None", "Use 1 for no dilation"]),
    "dilation_rate float": (lambda: Branch(8, 2.5), TypeError, ["dilation_rate", r"2\.5 of type float"]),
    "shift = w": (lambda: Branch(8, 1, shift=8), ValueError, ["shift", "segment_length=8", "shift=0 is the same"]),
    "shift > w": (lambda: Branch(8, 1, shift=13), ValueError, ["shift", "below", "got 13", "shift=5 is the same"]),
    "shift negative": (lambda: Branch(8, 1, shift=-1), ValueError, ["shift", "at least 0", "got -1"]),
    "shift float": (lambda: Branch(8, 1, shift=0.5), TypeError, ["shift", "integer", r"0\.5"]),
    "shift without segments": (lambda: Branch(None, 1, shift=2), ValueError, ["shift=2", "give segment_length"]),
    "heads empty": (lambda: Branch(8, 1, heads=[]), ValueError, ["heads is empty", "None for all"]),
    "heads twice": (lambda: Branch(8, 1, heads=[3, 1, 3]), ValueError, ["heads", "twice", r"\[1, 3, 3\]"]),
    "heads negative": (lambda: Branch(8, 1, heads=[-1]), ValueError, ["heads", "at least 0", "got -1"]),
    "heads str": (lambda: Branch(8, 1, heads="01"), TypeError, ["heads", "list of query heads", "'01'"]),
    "heads int": (lambda: Branch(8, 1, heads=4), TypeError, ["heads", r"range\(0, 4\)", "got 4"]),
    "heads of floats": (lambda: Branch(8, 1, heads=[1.0]), TypeError, ["heads", "integer", r"1\.0"]),
    "offset = r": (lambda: Branch(8, 2, offset=2), ValueError, ["offset", "below dilation_rate=2", "got 2"]),
    "offset negative": (lambda: Branch(8, 2, offset=-1), ValueError, ["offset", "at least 0"]),
    "mistyped key": (
        lambda: Branch.of({"segment_lenght": 8, "dilation_rate": 1}),
        ValueError,
        ["'segment_lenght'", "Did you mean 'segment_length'", "Allowed"],
    ),
    "missing key": (lambda: Branch.of({"segment_length": 8}), ValueError, ["lacks dilation_rate"]),
    "triple": (
        lambda: Branch.of((8, 1, 0)),
        TypeError,
        ["Branch, Window, Global, a mapping or a .*pair", r"\(8, 1, 0\)"],
    ),
}

PATTERN = {
    "no branches": (lambda: DilatedPattern([]), ValueError, ["branches is empty", "at least one"]),
    "a bare Branch": (lambda: DilatedPattern(Branch(8, 1)), TypeError, ["branches must be a list", r"Branch\(8, 1\)"]),
    "a str": (lambda: DilatedPattern("dense"), TypeError, ["branches must be a list", "'dense'"]),
    "a mapping": (lambda: DilatedPattern({"branches": [(8, 1)]}), TypeError, ["branches must be a list"]),
    "an int for a branch": (lambda: DilatedPattern([(4, 1), 8]), TypeError, [r"branches\[1\]", "pair", "got 8"]),
    "second branch wrong": (lambda: DilatedPattern([(4, 1), (8, 0)]), ValueError, [r"branches\[1\]", "dilation_rate"]),
    "mistyped key": (
        lambda: DilatedPattern([{"segment_length": 4, "dilation": 1}]),
        ValueError,
        [r"branches\[0\]", "'dilation'", "Did you mean 'dilation_rate'"],
    ),
    "offsets": (lambda: DilatedPattern([(8, 1)], offsets="block"), ValueError, ["offsets", "blocked", "'block'"]),
    "offset_heads": (lambda: DilatedPattern([(8, 1)], offset_heads="key"), ValueError, ["offset_heads", "kv", "'key'"]),
    "padding": (lambda: DilatedPattern([(8, 1)], padding=True), ValueError, ["padding", "masked, attended", "True"]),
    "attended and shift": (
        lambda: DilatedPattern([(8, 1), Branch(8, 1, shift=2)], padding="attended"),
        ValueError,
        [r"branches\[1\]", "attended", "shift=2", "padding='masked'"],
    ),
    "attended and window": (
        lambda: DilatedPattern([(8, 1), Window(4)], padding="attended"),
        ValueError,
        [r"branches\[1\]", r"not defined for Window\(4\)", "padding='masked'"],
    ),
    "window of nothing": (lambda: DilatedPattern([{"width": 0}]), ValueError, [r"branches\[0\]", "width must be", "0"]),
    "window with a segment": (
        lambda: DilatedPattern([{"width": 4, "segment_length": 8}]),
        ValueError,
        [r"branches\[0\]", "'segment_length'"],
    ),
    "window of many residues": (
        lambda: DilatedPattern([Window(4, 5000)]),
        ValueError,
        ["dilation_rate of a Window must be at most 1024, got 5000"],
    ),
    "global tokens with padding": (
        lambda: DilatedPattern([(8, 1), Global(4)], padding="attended"),
        ValueError,
        [r"branches\[1\]", r"not defined for Global\(4\)", "padding='masked'"],
    ),
    "no global token": (lambda: Global(0), ValueError, ["tokens must be at least 1, got 0"]),
    "heads of global tokens": (lambda: Global(4, heads=[0, 0]), ValueError, ["heads names a head twice"]),
    "shift of global tokens": (
        lambda: DilatedPattern([{"tokens": 4, "shift": 2}]),
        ValueError,
        [r"branches\[0\]", "'shift'", "tokens"],
    ),
    "offset of a window": (lambda: Window(4, 2, offset=2), ValueError, ["offset must be below dilation_rate=2"]),
    "heads of a window": (lambda: Window(4, heads=[]), ValueError, ["heads is empty"]),
    "attended shifted": (
        lambda: DilatedPattern([(8, 1)], padding="attended").shifted(),
        ValueError,
        ["attended", "shift=4", "padding='masked'"],
    ),
    "unequal lists": (
        lambda: DilatedPattern.longnet([4, 8], [1]),
        ValueError,
        ["segment_lengths has 2", "dilation_rates 1", "equally long"],
    ),
    "an int for a list": (lambda: DilatedPattern.longnet(8, [1]), TypeError, ["segment_lengths", "list", "got 8"]),
    "empty lists": (lambda: DilatedPattern.longnet([], []), ValueError, ["empty", "at least one"]),
    "geometric between": (
        lambda: DilatedPattern.geometric(4, 31),
        ValueError,
        ["last", "power of ratio", "got 31", "16 and 32"],
    ),
    "geometric falling": (
        lambda: DilatedPattern.geometric(8, 4),
        ValueError,
        ["last", "got 4", r"^(?!.*8 and 8)"],
    ),
    "geometric ratio 1": (lambda: DilatedPattern.geometric(8, 16, 1), ValueError, ["ratio", "at least 2"]),
    "head groups, few heads": (
        lambda: DilatedPattern.head_groups([4, 8, 16], [1, 2, 4], 2),
        ValueError,
        ["3 branches", "num_heads=2"],
    ),
    "head groups, rate 0": (
        lambda: DilatedPattern.head_groups([4, 8], [1, 0], 4),
        ValueError,
        ["dilation_rate", "at least 1"],
    ),
    "head groups, nothing": (lambda: DilatedPattern.head_groups([], [], 4), ValueError, ["empty"]),
    "heads beyond H": (
        lambda: DilatedPattern([(4, 1), Branch(8, 1, heads=[0, 4])]).counts(8, 4, False),
        ValueError,
        [r"branches\[1\]", "head 4", "only 4 query heads", "Change"],
    ),
    "split kv group": (
        lambda: SPLIT.counts(8, 4, False, num_kv_heads=2),
        ValueError,
        [r"branches\[0\]\.heads=\[0, 1, 2\]", "splits a group of 2", "offset_heads='query'"],
    ),
    "fraction 1": (lambda: PAIR.shifted(1.0), ValueError, ["fraction", r"\[0, 1\)", r"1\.0"]),
    "fraction nan": (lambda: PAIR.shifted(float("nan")), ValueError, ["fraction", "nan"]),
    "fraction bool": (lambda: PAIR.shifted(True), TypeError, ["fraction", "True"]),
    "below 0": (lambda: PAIR.shifted(below=0), ValueError, ["below", "at least 1"]),
    "from_dict of a list": (
        lambda: DilatedPattern.from_dict([(8, 1)]),
        TypeError,
        ["mapping", "branches", r"\[\(8, 1\)\]"],
    ),
    "from_dict of nothing": (lambda: DilatedPattern.from_dict({}), ValueError, ["either branches, or", "got nothing"]),
    "from_dict of both": (
        lambda: DilatedPattern.from_dict({"branches": [(8, 1)], "segment_lengths": [8], "dilation_rates": [1]}),
        ValueError,
        ["either branches, or", "got branches, segment_lengths"],
    ),
    "from_dict of one list": (
        lambda: DilatedPattern.from_dict({"segment_lengths": [8]}),
        ValueError,
        ["both segment_lengths and dilation_rates"],
    ),
    "from_dict, mistyped": (
        lambda: DilatedPattern.from_dict({"branches": [(8, 1)], "offset": "blocked"}),
        ValueError,
        ["'offset'", "Did you mean 'offsets'"],
    ),
    "seq_len negative": (lambda: PAIR.counts(-1, 2, False), ValueError, ["seq_len", "at least 0"]),
    "zero heads": (lambda: PAIR.counts(8, 0, False), ValueError, ["num_heads", "at least 1"]),
    "kv heads do not divide": (
        lambda: PAIR.counts(8, 3, False, num_kv_heads=2),
        ValueError,
        ["num_kv_heads=2", "divide", "num_heads=3"],
    ),
    "documents beyond the sequence": (
        lambda: PAIR.counts(8, 2, False, cu_seqlens=[0, 9]),
        ValueError,
        ["cu_seqlens", "8"],
    ),
    "documents that end early": (lambda: PAIR.counts(8, 2, False, cu_seqlens=[0, 4]), ValueError, ["cu_seqlens", "8"]),
}


def _raises(call, error, texts):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    missing = [text for text in texts if not re.search(text, message)]
    assert type(caught.value) is error and not missing, f"{message!r} does not say {missing}"


@pytest.mark.parametrize("name", BRANCH)
def test_branch(name):
    _raises(*BRANCH[name])


@pytest.mark.parametrize("name", PATTERN)
def test_pattern(name):
    _raises(*PATTERN[name])
