"""Wrong branches and patterns: each error names the argument, its value and the remedy."""

import pytest

from lightning_dilated.pattern import Branch, Global, Window
from lightning_dilated.pattern import DilatedPattern as Pattern

PAIR = Pattern.longnet([4, 8], [1, 2])
SPLIT = Pattern([Branch(8, 2, heads=[0, 1, 2])], offset_heads="kv")

# (call, exception, part of its message)
BRANCH = [
    (lambda: Branch(0, 1), ValueError, "segment_length.*at least 1.*got 0"),
    (lambda: Branch(-8, 1), ValueError, "segment_length.*got -8"),
    (lambda: Branch(8.0, 1), TypeError, r"segment_length.*integer.*8\.0 of type float"),
    (lambda: Branch(True, 1), TypeError, "segment_length.*integer.*bool True"),
    (lambda: Branch("8", 1), TypeError, "segment_length.*'8' of type str"),
    (lambda: Branch(8, 0), ValueError, "dilation_rate.*at least 1.*Use 1 for no dilation"),
    (lambda: Branch(8, None), TypeError, "dilation_rate.*got None.*Use 1 for no dilation"),
    (lambda: Branch(8, 2.5), TypeError, r"dilation_rate.*2\.5 of type float"),
    (lambda: Branch(8, 1, shift=8), ValueError, "shift.*segment_length=8.*shift=0 is the same"),
    (lambda: Branch(8, 1, shift=13), ValueError, "shift.*below.*got 13.*shift=5 is the same"),
    (lambda: Branch(8, 1, shift=-1), ValueError, "shift.*at least 0.*got -1"),
    (lambda: Branch(8, 1, shift=0.5), TypeError, r"shift.*integer.*0\.5"),
    (lambda: Branch(None, 1, shift=2), ValueError, "shift=2.*give segment_length"),
    (lambda: Branch(8, 1, heads=[]), ValueError, "heads is empty.*None for all"),
    (lambda: Branch(8, 1, heads=[3, 1, 3]), ValueError, r"heads.*twice.*\[1, 3, 3\]"),
    (lambda: Branch(8, 1, heads=[-1]), ValueError, "heads.*at least 0.*got -1"),
    (lambda: Branch(8, 1, heads="01"), TypeError, "heads.*list of query heads.*'01'"),
    (lambda: Branch(8, 1, heads=4), TypeError, r"heads.*range\(0, 4\).*got 4"),
    (lambda: Branch(8, 1, heads=[1.0]), TypeError, r"heads.*integer.*1\.0"),
    (lambda: Branch(8, 2, offset=2), ValueError, "offset.*below dilation_rate=2.*got 2"),
    (lambda: Branch(8, 2, offset=-1), ValueError, "offset.*at least 0"),
    (
        lambda: Branch.of({"segment_lenght": 8, "dilation_rate": 1}),
        ValueError,
        "'segment_lenght'.*Did you mean 'segment_length'.*Allowed",
    ),
    (lambda: Branch.of({"segment_length": 8}), ValueError, "lacks dilation_rate"),
    (lambda: Branch.of((8, 1, 0)), TypeError, r"Branch, Window, Global, a mapping or a .*pair.*\(8, 1, 0\)"),
]

PATTERN = [
    (lambda: Pattern([]), ValueError, "branches is empty.*at least one"),
    (lambda: Pattern(Branch(8, 1)), TypeError, r"branches must be a list.*Branch\(8, 1\)"),
    (lambda: Pattern("dense"), TypeError, "branches must be a list.*'dense'"),
    (lambda: Pattern({"branches": [(8, 1)]}), TypeError, "branches must be a list"),
    (lambda: Pattern([(4, 1), 8]), TypeError, r"branches\[1\].*pair.*got 8"),
    (lambda: Pattern([(4, 1), (8, 0)]), ValueError, r"branches\[1\].*dilation_rate"),
    (
        lambda: Pattern([{"segment_length": 4, "dilation": 1}]),
        ValueError,
        r"branches\[0\].*'dilation'.*Did you mean 'dilation_rate'",
    ),
    (lambda: Pattern([(8, 1)], offsets="block"), ValueError, "offsets.*blocked.*'block'"),
    (lambda: Pattern([(8, 1)], offset_heads="key"), ValueError, "offset_heads.*kv.*'key'"),
    (lambda: Pattern([(8, 1)], padding=True), ValueError, "padding.*masked, attended.*True"),
    (
        lambda: Pattern([(8, 1), Branch(8, 1, shift=2)], padding="attended"),
        ValueError,
        r"branches\[1\].*attended.*shift=2.*padding='masked'",
    ),
    (
        lambda: Pattern([(8, 1), Window(4)], padding="attended"),
        ValueError,
        r"branches\[1\].*not defined for Window\(4\).*padding='masked'",
    ),
    (lambda: Pattern([{"width": 0}]), ValueError, r"(?=.*branches\[0\])(?=.*0)(?=.*width must be)"),
    (lambda: Pattern([{"width": 4, "segment_length": 8}]), ValueError, r"branches\[0\].*'segment_length'"),
    (lambda: Pattern([Window(4, 5000)]), ValueError, "dilation_rate of a Window must be at most 1024, got 5000"),
    (
        lambda: Pattern([(8, 1), Global(4)], padding="attended"),
        ValueError,
        r"branches\[1\].*not defined for Global\(4\).*padding='masked'",
    ),
    (lambda: Global(0), ValueError, "tokens must be at least 1, got 0"),
    (lambda: Global(4, heads=[0, 0]), ValueError, "heads names a head twice"),
    (lambda: Pattern([{"tokens": 4, "shift": 2}]), ValueError, r"branches\[0\].*'shift'.*tokens"),
    (lambda: Window(4, 2, offset=2), ValueError, "offset must be below dilation_rate=2"),
    (lambda: Window(4, heads=[]), ValueError, "heads is empty"),
    (lambda: Pattern([(8, 1)], padding="attended").shifted(), ValueError, "attended.*shift=4.*padding='masked'"),
    (lambda: Pattern.longnet([4, 8], [1]), ValueError, "segment_lengths has 2.*dilation_rates 1.*equally long"),
    (lambda: Pattern.longnet(8, [1]), TypeError, "segment_lengths.*list.*got 8"),
    (lambda: Pattern.longnet([], []), ValueError, "empty.*at least one"),
    (lambda: Pattern.geometric(4, 31), ValueError, "last.*power of ratio.*got 31.*16 and 32"),
    (lambda: Pattern.geometric(8, 4), ValueError, "^(?!.*8 and 8).*last.*got 4"),
    (lambda: Pattern.geometric(8, 16, 1), ValueError, "ratio.*at least 2"),
    (lambda: Pattern.head_groups([4, 8, 16], [1, 2, 4], 2), ValueError, "3 branches.*num_heads=2"),
    (lambda: Pattern.head_groups([4, 8], [1, 0], 4), ValueError, "dilation_rate.*at least 1"),
    (lambda: Pattern.head_groups([], [], 4), ValueError, "empty"),
    (
        lambda: Pattern([(4, 1), Branch(8, 1, heads=[0, 4])]).counts(8, 4, False),
        ValueError,
        r"branches\[1\].*head 4.*only 4 query heads.*Change",
    ),
    (
        lambda: SPLIT.counts(8, 4, False, num_kv_heads=2),
        ValueError,
        r"branches\[0\]\.heads=\[0, 1, 2\].*splits a group of 2.*offset_heads='query'",
    ),
    (lambda: PAIR.shifted(1.0), ValueError, r"fraction.*\[0, 1\).*1\.0"),
    (lambda: PAIR.shifted(float("nan")), ValueError, "fraction.*nan"),
    (lambda: PAIR.shifted(True), TypeError, "fraction.*True"),
    (lambda: PAIR.shifted(below=0), ValueError, "below.*at least 1"),
    (lambda: Pattern.from_dict([(8, 1)]), TypeError, r"mapping.*branches.*\[\(8, 1\)\]"),
    (lambda: Pattern.from_dict({}), ValueError, "either branches, or.*got nothing"),
    (
        lambda: Pattern.from_dict({"branches": [(8, 1)], "segment_lengths": [8], "dilation_rates": [1]}),
        ValueError,
        "either branches, or.*got branches, segment_lengths",
    ),
    (lambda: Pattern.from_dict({"segment_lengths": [8]}), ValueError, "both segment_lengths and dilation_rates"),
    (
        lambda: Pattern.from_dict({"branches": [(8, 1)], "offset": "blocked"}),
        ValueError,
        "'offset'.*Did you mean 'offsets'",
    ),
    (lambda: PAIR.counts(-1, 2, False), ValueError, "seq_len.*at least 0"),
    (lambda: PAIR.counts(8, 0, False), ValueError, "num_heads.*at least 1"),
    (lambda: PAIR.counts(8, 3, False, num_kv_heads=2), ValueError, "num_kv_heads=2.*divide.*num_heads=3"),
    (lambda: PAIR.counts(8, 2, False, cu_seqlens=[0, 9]), ValueError, "cu_seqlens.*8"),
    (lambda: PAIR.counts(8, 2, False, cu_seqlens=[0, 4]), ValueError, "cu_seqlens.*8"),
]


@pytest.mark.parametrize("call, error, message", [*BRANCH, *PATTERN], ids=lambda x: x if isinstance(x, str) else "")
def test_misuse(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert type(caught.value) is error
