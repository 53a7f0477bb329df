"""`explain` against brute force over the counts of the definition: walls, reach, dead residues, cost, hints."""

import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_dilated.ext.explain import explanation as explain_module
from lightning_dilated.ext.explain.explanation import sight_hints
from lightning_dilated.pattern import Branch, DilatedPattern, Window

from ...examples import examples
from ...pattern import naive
from ...pattern.strategies import head_counts, patterns

GEOMETRIC = DilatedPattern.geometric(4, 16)


def sees(pattern, n, heads, causal, kv_heads=None):
    """Return a bool tensor (N, N) that is true at (p, j) if any head of query p sees key j."""
    return (pattern.counts(n, heads, causal, kv_heads) > 0).any(0)


def crossing(pairs):
    """Return the walls by definition: positions with no pair of a later query and an earlier key."""
    return tuple(x for x in range(1, len(pairs)) if not pairs[x:, :x].any())


def brute_reach(layers, depth):
    """Return (share of positions that the last one reaches in `depth` layers, layers until it reaches all or None).

    `layers`: pairs of the alternating layers. Positions are traced back from the last layer. Each layer keeps its input.
    """
    n = len(layers[0])
    steps = [(pairs | torch.eye(n, dtype=torch.bool)).double() for pairs in layers]
    reached, shares = torch.zeros(1, n, dtype=torch.float64), []
    reached[0, -1] = 1
    for i in range(2 * n + 1):
        shares.append(reached.mean().item())
        reached = ((reached @ steps[(depth - 1 - i) % len(steps)]) > 0).double()
    return shares[min(depth, 2 * n)], next((i for i, x in enumerate(shares) if x == 1), None)


@st.composite
def cases(draw, **options):
    heads, kv = draw(head_counts(6))
    n, causal = draw(st.integers(1, 40)), draw(st.booleans())
    return draw(patterns(heads, kv, widest=24, **options)), n, heads, kv, causal


@given(cases(), st.integers(1, 4))
@settings(max_examples=examples(75))
def test_equals_brute_force(case, depth):
    pattern, n, heads, kv, causal = case
    counts, pairs = pattern.counts(n, heads, causal, kv), sees(pattern, n, heads, causal, kv)
    got = pattern.explain(n, heads, depth, causal, kv)
    reach, full = brute_reach([pairs], depth)
    assert got.reach == pytest.approx(reach, rel=1e-6) and got.layers_to_full_reach == full
    assert got.pairs == counts.sum() and got.flops(5) == 4 * 5 * counts.sum()
    assert got.flops(5, backward=True) == 14 * 5 * counts.sum()
    assert got.keys_per_row == pytest.approx(counts.sum().item() / (heads * n))
    assert got.uncovered == pytest.approx((counts.sum(-1) == 0).double().mean().item())
    assert set(got.walls) <= set(crossing(pairs))
    assert (got.patterns, got.seq_len, got.num_heads, got.depth, got.causal) == ((pattern,), n, heads, depth, causal)


@given(cases())
@example((DilatedPattern([(4, 1), (8, 8)]), 8, 8, 8, False))  # all residues are used, by one position per segment
@settings(max_examples=examples(75))
def test_hints_speak_where_something_is_lost(case):
    """There is a hint if the last token never sees all positions, and no hint if nothing is wrong."""
    pattern, n, heads, kv, causal = case
    got = pattern.explain(n, heads, 1, causal, kv)
    if got.layers_to_full_reach is None or got.uncovered:
        assert got.hints
    blind = any(octave.share < 0.5 for octave in got.sight)
    if not (got.walls or got.dead_residues or got.uncovered or blind) and got.layers_to_full_reach is not None:
        assert not got.hints


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 11)), min_size=1, max_size=3), st.integers(1, 40))
def test_walls_of_undilated_branches(sizes, n):
    """If all rates are 1, the walls are all positions that no pair crosses, not only some of them."""
    pattern = DilatedPattern([Branch(w, 1, shift=t % w) for w, t in sizes])
    assert pattern.explain(n, 2, 1, True).walls == crossing(sees(pattern, n, 2, True))


WALLS = {
    "geometric": (GEOMETRIC, 40, (16, 32)),
    "one segment": (GEOMETRIC, 16, ()),
    "whole sequence": (DilatedPattern([(4, 1), (None, 2)]), 40, ()),
    "shifted": (DilatedPattern([Branch(8, 1, shift=3)]), 25, (5, 13, 21)),
    "window": (DilatedPattern([Window(2), (4, 1)]), 25, ()),
    "window that sees the query only": (DilatedPattern([Window(1), (8, 1)]), 25, (8, 16, 24)),
    "nothing else": (DilatedPattern([Window(1)]), 4, (1, 2, 3)),
    "walls of both": (DilatedPattern([(6, 1), (4, 1)]), 30, (12, 24)),
}


@pytest.mark.parametrize("name", WALLS)
def test_walls(name):
    pattern, n, want = WALLS[name]
    got = pattern.explain(n, 4, 3, causal=True)
    assert got.walls == want
    assert any("wall" in hint for hint in got.hints) == bool(want)


@pytest.mark.parametrize("rate", [1, 3])
def test_windows(rate):
    """In each layer, information moves by the window's reach. No residue is dead, and every row is covered."""
    got = DilatedPattern([Window(5, rate)]).explain(1 + 12 * rate, 2, 2, causal=True)
    assert not got.dead_residues and not got.uncovered and got.keys_per_row <= 5
    assert got.reach == pytest.approx(9 / (1 + 12 * rate))  # one residue, 4 rows per layer
    assert got.layers_to_full_reach == (3 if rate == 1 else None)
    assert "Window(5" in str(got)


@pytest.mark.parametrize(
    "pattern", [GEOMETRIC, DilatedPattern.dense(8), DilatedPattern([(4, 1), (6, 2), (8, 4)])], ids=str
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both directions"])
def test_shifted_layers_have_no_wall(pattern, causal):
    """If every other layer is shifted, as the hint recommends, no wall is left."""
    even, odd = (sees(p, 40, 4, causal) for p in (pattern, pattern.shifted()))
    assert crossing(even) and crossing(even | odd) == ()
    assert not set(pattern.explain(40, 4, 2, causal).walls) & set(pattern.shifted().explain(40, 4, 2, causal).walls)


@given(st.integers(1, 5), cases())
@settings(max_examples=examples(50))
def test_layers_take_turns(depth, case):
    """With alternating layers, both patterns determine reach, walls, cost and coverage."""
    pattern, n, heads, kv, causal = case
    odd = pattern.shifted(0.5, 16)
    got = explain_module.explain([pattern, odd], n, heads, depth, causal, kv)
    turns = [pattern, odd] if depth > 1 else [pattern]
    counts = [turns[i % len(turns)].counts(n, heads, causal, kv) for i in range(depth)]
    pairs = [(c > 0).any(0) for c in counts[:2]]
    reach, full = brute_reach(pairs, depth)
    assert got.reach == pytest.approx(reach, rel=1e-6) and got.layers_to_full_reach == full
    assert set(got.walls) <= set(crossing(torch.stack(pairs).any(0)))
    assert got.pairs == round(sum(int(c.sum()) for c in counts) / depth)
    bare = sum((c.sum(-1) == 0).double().mean().item() for c in counts) / depth
    assert got.uncovered == pytest.approx(bare)
    assert got.patterns == ((pattern, odd) if depth > 1 and odd != pattern else (pattern,))


def test_prints_layers_and_no_wall():
    turns = [GEOMETRIC], [GEOMETRIC, GEOMETRIC.shifted()]
    plain, text = (str(explain_module.explain(patterns, 64, 4, 4, True)) for patterns in turns)
    assert "wall(s)" in plain and 'shift_layers="odd"' in plain
    assert f"layers 1, 3: {GEOMETRIC.shifted()}" in text and "wall(s)" not in text


DEAD = {
    "enough heads": (DilatedPattern([(16, 4)]), 4, 4, {}),
    "too few heads": (DilatedPattern([(16, 1), (16, 8)]), 4, 4, {(0, 1): (4, 5, 6, 7)}),
    "blocked": (DilatedPattern([(16, 4)], offsets="blocked"), 6, 6, {(0, 0): (3,)}),
    "blocked, divides": (DilatedPattern([(16, 4)], offsets="blocked"), 8, 8, {}),
    "kv offsets": (DilatedPattern([(16, 4)], offset_heads="kv"), 8, 2, {(0, 0): (2, 3)}),
    "one offset": (DilatedPattern([Branch(16, 3, offset=1)]), 8, 8, {(0, 0): (0, 2)}),
    "some heads": (DilatedPattern([Branch(16, 4, heads=[0, 1, 4])]), 8, 8, {(0, 0): (2, 3)}),
    "rate above the segment": (DilatedPattern([(3, 5)]), 2, 2, {(0, 0): (2,)}),
}


@pytest.mark.parametrize("name", DEAD)
def test_dead_residues(name):
    pattern, heads, kv, want = DEAD[name]
    got = pattern.explain(64, heads, 1, False, kv)
    assert got.dead_residues == want
    for (_, i), residues in want.items():
        assert any(hint.startswith(f"branches[{i}] leaves {len(residues)} of") for hint in got.hints)
        assert "divides it" in " ".join(got.hints) or pattern.offsets != "blocked"
        used = {
            naive.offset(pattern, pattern.branches[i], h, heads, kv) for h in pattern.branches[i].heads or range(heads)
        }
        assert not used & set(residues)


REMEDIES = {
    "a wider branch": (DilatedPattern([(8, 1)]), lambda n: DilatedPattern([(8, 1), (n, 1)])),
    "rate of at most the heads": (DilatedPattern([(16, 1), (64, 8)]), lambda n: DilatedPattern([(16, 1), (64, 4)])),
    "a rate that divides": (
        DilatedPattern([(64, 1), (64, 3)], offsets="blocked"),
        lambda n: DilatedPattern([(64, 1), (64, 2)], offsets="blocked"),
    ),
    "a branch of rate 1": (DilatedPattern([(64, 4)]), lambda n: DilatedPattern([(64, 4), (64, 1)])),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_hints_name_a_remedy_that_works(name):
    pattern, remedy = REMEDIES[name]
    before, after = (p.explain(64, 4, 2, causal=False) for p in (pattern, remedy(64)))
    lost = lambda explained: [hint for hint in explained.hints if hint not in sight_hints(explained.sight)]  # noqa: E731
    assert lost(before) and not lost(after)
    assert re.search(r"Add a branch|Use a dilation rate|a branch of rate 1", before.hints[0])


def test_prints():
    text = str(DilatedPattern([(4, 1), (8, 8)]).explain(32, 4, 3, causal=True))
    assert "DilatedPattern([(4, 1), (8, 8)])" in text and "32 tokens, 4 heads, 3 layers, causal" in text
    said = "keys a row", "FLOPs", "last token", "never", "3 wall(s)", "position 8, 16, ...", "branches[1] leaves 4"
    assert all(words in text for words in said)
    calm = str(DilatedPattern.dense().explain(32, 4, 3, causal=False))
    said = "both directions", "no walls, no dead residues", "dense attention costs 1.0 times as much"
    assert all(words in calm for words in said)


def test_a_million_tokens():
    pattern, n = DilatedPattern.geometric(2048, 2048 * 16), 1 << 20
    got = pattern.explain(n, 12, 4, causal=False)
    assert got.walls == tuple(range(32768, n, 32768)) and got.dead_residues == {(0, 4): (12, 13, 14, 15)}
    assert got.reach == 1 / 32 and got.layers_to_full_reach is None and got.uncovered == 0
    assert got.pairs == 12 * n * (2048 + 1024 + 512 + 256 + 128)


def test_beyond_the_searched_length(monkeypatch):
    monkeypatch.setattr(explain_module, "REACH_LIMIT", 30)
    got = GEOMETRIC.explain(31, 4, 2, causal=True)
    assert got.reach is None and "last token" not in str(got) and got.walls == (16,)


REFUSED = {
    "no tokens": (lambda: GEOMETRIC.explain(0, 4, 1, True), "seq_len must be at least 1, got 0"),
    "no layers": (lambda: GEOMETRIC.explain(8, 4, 0, True), "depth must be at least 1, got 0"),
    "heads": (lambda: GEOMETRIC.explain(8, 4, 1, True, 3), "num_kv_heads=3 must divide num_heads=4"),
    "head dim": (lambda: GEOMETRIC.explain(8, 4, 1, True).flops(0), "head_dim must be at least 1, got 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        call()


def test_messages_name_branches_as_they_were_listed():
    """Messages refer to a dilated window as one list entry, although it becomes several branches."""
    pattern = DilatedPattern([Window(4, 3), Branch(16, 8, heads=[0, 1, 2, 3])])
    assert [pattern.listed(i) for i in (0, 2, 3)] == [(0, Window(4, 3)), (0, Window(4, 3)), (1, pattern.branches[3])]
    with pytest.raises(ValueError, match=r"^branches\[1\] serves head 3"):
        pattern.check_heads(2)
    assert any("branches[1] leaves 4 of 8 residues" in hint for hint in pattern.explain(64, 4, 4, causal=True).hints)


def test_advice_for_windows():
    """For windows, hints mention neither segments nor shifts, and describe correctly how far a window sees."""
    (walls, *_) = DilatedPattern([Window(1)]).explain(16, 2, 2, causal=True).hints
    assert "or a wider window" in walls and "shifted" not in walls
    explained = DilatedPattern([Window(4, 3)]).explain(64, 4, 4, causal=True)
    (reach, sight) = explained.hints
    assert "no branch joins their residues. Use a lower dilation rate." in reach
    assert "from a distance of 1 tokens on, one layer shows a query at most 50%" in sight
    shares = [line.split("%")[0].split()[-1] for line in str(explained).splitlines() if "tokens back" in line]
    assert shares[:3] == ["0", "50", "25"]
