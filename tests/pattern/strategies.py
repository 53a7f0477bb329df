"""Random branches and patterns with every feature that a pattern can have."""

from hypothesis import strategies as st

from lightning_dilated.pattern import Branch, DilatedPattern


@st.composite
def head_counts(draw, largest: int = 13):
    """(query heads, kv heads): primes too, and every grouping."""
    kv = draw(st.integers(1, largest))
    return draw(st.integers(1, largest // kv)) * kv, kv


@st.composite
def branches(draw, heads: int, group: int, whole_groups: bool, shifts: bool = True, widest: int = 70):
    """One branch; `whole_groups` where a kv head's query heads must stay together."""
    w = draw(st.one_of(st.integers(1, widest), st.none()))
    r = draw(st.integers(1, 9))
    shift = draw(st.one_of(st.just(0), st.integers(0, w - 1))) if w and shifts else 0
    served = None
    if draw(st.booleans()):
        size = group if whole_groups else 1
        lots = draw(st.sets(st.integers(0, heads // size - 1), min_size=1))
        served = [lot * size + i for lot in lots for i in range(size)]
    offset = draw(st.one_of(st.none(), st.integers(0, r - 1)))
    return Branch(w, r, shift=shift, heads=served, offset=offset)


@st.composite
def patterns(draw, heads: int, kv_heads: int, padding: str = "masked", widest: int = 70):
    """A pattern for these heads."""
    offset_heads = draw(st.sampled_from(["query", "kv"]))
    one = branches(heads, heads // kv_heads, offset_heads == "kv", shifts=padding == "masked", widest=widest)
    return DilatedPattern(
        draw(st.lists(one, min_size=1, max_size=4)),
        offsets=draw(st.sampled_from(["interleaved", "blocked"])),
        offset_heads=offset_heads,
        padding=padding,
    )


@st.composite
def documents(draw, seq_len: int):
    """Bounds of packed documents, empty ones too."""
    return (0, *sorted(draw(st.lists(st.integers(0, seq_len), max_size=3))), seq_len)
