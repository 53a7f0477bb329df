"""The picture of a pattern shows its counts, averaged over heads, and over bins if the sequence exceeds the panel."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.image import imread

from lightning_dilated.ext.explain.explanation import LONGEST, PIXELS, picture
from lightning_dilated.pattern import Branch, DilatedPattern

from ...examples import examples
from ...pattern.strategies import patterns

PATTERN = DilatedPattern.longnet([8, 32], [1, 2])
DIRECTIONS = pytest.mark.parametrize("causal", [True, False], ids=["causal", "both directions"])


@given(patterns(4, 4), st.integers(1, 60), st.booleans(), st.sets(st.integers(0, 3), min_size=1))
@settings(max_examples=examples(60))
def test_short_ones_are_the_counts(pattern, n, causal, heads):
    want = pattern.counts(n, 4, causal)[sorted(heads)].float().mean(0)
    torch.testing.assert_close(picture(pattern, n, 4, causal, sorted(heads)), want)


@DIRECTIONS
@pytest.mark.parametrize("n", [PIXELS - 1, PIXELS, PIXELS + 1, 700])
def test_longer_ones_are_binned(n, causal):
    """A pixel averages the shares of its queries, so it is between the smallest and the largest share."""
    image, side = picture(PATTERN, n, 2, causal, [0, 1]), min(n, PIXELS)
    counts = PATTERN.counts(n, 2, causal).float().mean(0)
    edges = [i * n // side for i in range(side + 1)]
    shares = torch.stack([counts[:, a:b].mean(1) for a, b in pairwise(edges)], 1)
    rows = [shares[a:b] for a, b in pairwise(edges)]
    low, high = (torch.stack([f(r, 0) for r in rows]) for f in (torch.amin, torch.amax))
    assert image.shape == (side, side) and (image >= low - 1e-6).all() and (image <= high + 1e-6).all()
    assert (high.sum() > low.sum()) == (n > side)


@DIRECTIONS
@pytest.mark.parametrize("heads, head, panels", [(1, None, 2), (4, None, 4), (8, None, 4), (4, 3, 1)])
def test_writes_a_png(tmp_path, heads, head, panels, causal):
    figure = PATTERN.plot(64, heads, causal, path=str(tmp_path / "p.png"), head=head)
    pixels = imread(tmp_path / "p.png")
    assert (
        (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
        and pixels.shape[0] > 300
        and pixels[..., :3].std() > 0.1
    )
    assert len(figure.axes) == panels
    assert (
        "causal" if causal else "both directions"
    ) in figure.get_suptitle() and "(8, 1), (32, 2)" in figure.get_suptitle()
    assert figure.axes[0].get_title() == ("all heads" if head is None else f"head {head}")


SHOWN = {
    "all alike": (PATTERN, 8, [0, 1, 2]),
    "fewer than three": (PATTERN, 2, [0, 1]),
    "the last one differs": (DilatedPattern([Branch(8, 1, heads=range(7)), Branch(None, 1, heads=[7])]), 8, [0, 1, 7]),
    "four sets": (DilatedPattern([Branch(8, 1), *(Branch(4, 1, heads=[h]) for h in (2, 4, 6))]), 8, [0, 2, 4]),
}


@pytest.mark.parametrize("name", SHOWN)
def test_heads_with_branches_of_their_own_are_shown(name):
    pattern, num_heads, want = SHOWN[name]
    titles = [axes.get_title() for axes in pattern.plot(16, num_heads, causal=True).axes]
    assert titles == ["all heads", *(f"head {h}" for h in want)]


def test_the_longest_sequence():
    image = picture(DilatedPattern.dense(LONGEST // 2), LONGEST, 1, False, [0])
    half = PIXELS // 2
    assert (image[:half, :half] == 1).all() and (image[half:, half:] == 1).all() and image[:half, half:].sum() == 0


def test_grouped_offsets():
    """If offsets follow the kv heads, `picture` needs the number of kv heads, as `counts` and `explain` do."""
    pattern = DilatedPattern([(16, 2)], offset_heads="kv")
    figure = pattern.plot(16, 4, causal=False, num_kv_heads=2, head=1)
    drawn = torch.as_tensor(figure.axes[0].images[0].get_array())
    assert torch.equal(drawn > 0, pattern.counts(16, 4, False, num_kv_heads=2)[1] > 0)


REFUSED = {
    "too long": ((LONGEST + 1, 4), {}, f"up to {LONGEST} tokens, got seq_len={LONGEST + 1}; .* draw fewer"),
    "no tokens": ((0, 4), {}, "seq_len must be at least 1, got 0"),
    "head too high": ((16, 4), {"head": 4}, r"head must lie in 0\.\.3, got 4"),
    "head below 0": ((16, 4), {"head": -1}, r"head must lie in 0\.\.3, got -1"),
    "no heads": ((16, 0), {}, "num_heads must be at least 1, got 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    sizes, options, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        PATTERN.plot(*sizes, causal=True, **options)
