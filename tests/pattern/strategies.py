"""Random branches and patterns that use every feature of a pattern."""

from hypothesis import strategies as st

from lightning_dilated.pattern import Branch, DilatedPattern, Global, Window


@st.composite
def head_counts(draw, largest: int = 13):
    """Draw (query heads, kv heads), including primes and every grouping."""
    kv = draw(st.integers(1, largest))
    return draw(st.integers(1, largest // kv)) * kv, kv


@st.composite
def subsets(draw, heads: int, group: int, whole_groups: bool):
    """Draw the heads of a branch; None means all heads."""
    if not draw(st.booleans()):
        return None
    size = group if whole_groups else 1
    lots = draw(st.sets(st.integers(0, heads // size - 1), min_size=1))
    return [lot * size + i for lot in lots for i in range(size)]


@st.composite
def branches(
    draw,
    heads: int,
    group: int,
    whole_groups: bool,
    shifts: bool = True,
    widest: int = 70,
    windows: bool = True,
    global_tokens: bool | None = None,
):
    """Draw a branch, a window or global tokens. With `whole_groups`, a kv head's query heads are all in or all out."""
    kinds = (
        ["segments"] * 3 + ["window"] * 2 * windows + ["global"] * (windows if global_tokens is None else global_tokens)
    )
    kind = draw(st.sampled_from(kinds))
    if kind == "global":
        return Global(draw(st.integers(1, widest)), heads=draw(subsets(heads, group, whole_groups)))
    if kind == "window":
        served, r = draw(subsets(heads, group, whole_groups)), draw(st.sampled_from([1, 1, 2, 3]))
        offset = draw(st.one_of(st.none(), st.none(), st.integers(0, r - 1)))
        return Window(draw(st.integers(1, max(1, widest // 2))), r, heads=served, offset=offset)
    w = draw(st.one_of(st.integers(1, widest), st.none()))
    r = draw(st.integers(1, 9))
    shift = draw(st.one_of(st.just(0), st.integers(0, w - 1))) if w and shifts else 0
    served = draw(subsets(heads, group, whole_groups))
    offset = draw(st.one_of(st.none(), st.integers(0, r - 1)))
    return Branch(w, r, shift=shift, heads=served, offset=offset)


@st.composite
def patterns(
    draw,
    heads: int,
    kv_heads: int,
    padding: str = "masked",
    widest: int = 70,
    windows: bool = True,
    global_tokens: bool | None = None,
):
    """Draw a pattern for these numbers of heads."""
    offset_heads = draw(st.sampled_from(["query", "kv"]))
    masked = padding == "masked"
    kinds = {"windows": masked and windows, "global_tokens": global_tokens if masked else False}
    one = branches(heads, heads // kv_heads, offset_heads == "kv", shifts=masked, widest=widest, **kinds)
    return DilatedPattern(
        draw(st.lists(one, min_size=1, max_size=4)),
        offsets=draw(st.sampled_from(["interleaved", "blocked"])),
        offset_heads=offset_heads,
        padding=padding,
    )


@st.composite
def documents(draw, seq_len: int):
    """Draw the bounds of packed documents, which may be empty."""
    return (0, *sorted(draw(st.lists(st.integers(0, seq_len), max_size=3))), seq_len)
