"""Random calls on several ranks: any pattern, documents, layout, exchange and head-parallel group.

Shape letters: N tokens of the sequence, R ranks, L tokens of a rank, H query heads, K kv heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from lightning_dilated.pattern import Branch, DilatedPattern
from lightning_dilated.pattern.rows import global_tokens, windowed
from lightning_dilated.sequence.shard import EXCHANGE_NAMES

from ..attention.strategies import LAYOUTS as STRIDES
from ..attention.strategies import Case
from ..pattern.strategies import branches, documents

LAYOUTS = ("contiguous", "zigzag", "strided")
#: exchanges that support every call, and all exchanges
ANY = ("auto", *(x for x in EXCHANGE_NAMES if x not in ("butterfly", "hierarchical_gather", "hierarchical_butterfly")))
EXCHANGES = ("auto", *EXCHANGE_NAMES)
#: dtypes of q, k and v; half of the draws are float64, which allows the strictest comparison
ROUNDED = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = st.sampled_from([torch.float64] * len(ROUNDED) + [*ROUNDED])
#: (query heads, kv heads)
HEADS = ((1, 1), (4, 2), (3, 1), (5, 5), (2, 2), (6, 3), (3, 3), (4, 1), (6, 2), (2, 1), (5, 1), (4, 4))
#: the segments of GigaPath divided by 128 and by 256, with GigaPath's rates
LADDERS = ((8, 45, 256, 1448, 8192), (4, 22, 128, 724, 4096))
RATES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Sharded:
    """A call and the ranks that share it. A failing test prints the repr, which is enough to repeat the call.

    `nested`: the call has a form that a butterfly must accept.
    """

    call: Case
    ranks: int
    layout: str = "contiguous"
    exchange: str = "auto"
    head_size: int = 1
    ranks_per_node: int | None = None
    engine: str = "auto"
    nested: bool = False
    stream: int | None = None

    def settings(self) -> dict[str, Any]:
        """Return the arguments of `SequenceGroup`."""
        names = ("layout", "exchange", "head_size", "ranks_per_node", "stream")
        return {name: getattr(self, name) for name in names}

    @property
    def may_refuse(self) -> bool:
        """Return whether the exchange is allowed to refuse the call."""
        return not self.nested and "butterfly" in self.exchange

    def features(self) -> set[str]:
        """Return the names of the case's features. A sample of cases has to cover every feature."""
        call, pattern = self.call, self.call.pattern
        longest = max((b - a for _, a, b in call.spans()), default=0)
        per_rank = -(-call.seq_len // self.ranks)
        reach = lambda b: longest if b.segment_length is None else min(b.segment_length, longest)  # noqa: E731
        gqa = call.kv_heads < call.heads
        having = {
            self.layout: True,
            "causal": call.causal,
            "not causal": not call.causal,
            "wide": any(reach(b) > per_rank for b in pattern.branches),
            "wide and dilated": any(reach(b) > per_rank and b.dilation_rate > 1 for b in pattern.branches),
            "rate does not divide": any(reach(b) > per_rank and reach(b) % b.dilation_rate for b in pattern.branches),
            "empty rank": per_rank * (self.ranks - 1) >= call.seq_len > 0,
            "no tokens": call.seq_len == 0,
            "uneven": call.seq_len % self.ranks > 0,
            "gqa, query offsets": gqa and pattern.offset_heads == "query",
            "gqa, kv offsets": gqa and pattern.offset_heads == "kv",
            "odd heads": call.heads % 2 == 1 and call.heads > 1,
            "blocked": pattern.offsets == "blocked",
            "attended": pattern.padding == "attended" and not call.causal,
            "documents": call.documents is not None and len(call.documents) > 2,
            "lengths": call.lengths is not None,
            "batch": call.batch > 1,
            "shift": any(b.shift for b in pattern.branches),
            "window": bool(windowed(pattern)) and call.seq_len > per_rank,
            "dilated window": any(b.dilation_rate > 1 for b in windowed(pattern)),
            "window beyond a shard": any(b.width * b.dilation_rate > per_rank + 1 for b in windowed(pattern)),
            "global tokens": bool(global_tokens(pattern)) and call.seq_len > per_rank,
            "global tokens on several ranks": any(b.tokens > per_rank for b in global_tokens(pattern)),
            "subsets": any(b.heads for b in pattern.branches),
            "offsets": any(b.offset is not None for b in pattern.branches),
            "uneven windows": call.heads % self.head_size > 0,
            "kv head on several": gqa and call.kv_heads < self.head_size,
            "head groups": self.head_size > 1,
            "rank without a head": self.head_size > call.heads and call.seq_len > 0,
            "empty rank of head groups": self.head_size > 1 and per_rank * (self.ranks - 1) >= call.seq_len > 0,
            "head groups and wider": self.head_size > 1
            and any(reach(b) > per_rank * self.head_size for b in pattern.branches),
            "gigapath": [b.segment_length for b in pattern.branches] in map(list, LADDERS),
            "strides": call.layout != "contiguous",
            "math": self.engine == "math",
        }
        return {name for name, has in having.items() if has}


@st.composite
def powers(draw) -> Branch:
    """Draw a branch with a width and a rate that are powers of two."""
    w = 1 << draw(st.integers(0, 6))
    shift = draw(st.sampled_from([0, 0, w // 2]))
    return Branch(w, 1 << draw(st.integers(0, 3)), shift=shift if shift < w else 0)


@st.composite
def families(draw, heads: int, rules: dict[str, str]) -> DilatedPattern:
    """Draw a named family of patterns."""
    kind = draw(st.sampled_from(["geometric", "head_groups", "dense", "powers"]))
    if kind == "geometric":
        first = 1 << draw(st.integers(0, 4))
        return DilatedPattern.geometric(first, first << draw(st.integers(0, 4)), **rules)
    if kind == "head_groups" and heads > 1:
        n = draw(st.integers(1, min(heads, 3)))
        widths = [draw(st.integers(1, 90)) for _ in range(n)]
        rules = {**rules, "offset_heads": "query"}  # head groups may split a group of query heads, which "kv" refuses
        return DilatedPattern.head_groups(widths, [draw(st.integers(1, 6)) for _ in widths], heads, **rules)
    if kind == "dense":
        return DilatedPattern.dense(draw(st.one_of(st.none(), st.integers(1, 90))), **rules)
    return DilatedPattern(draw(st.lists(powers(), min_size=1, max_size=4)), **rules)


@st.composite
def sharded_patterns(draw, heads: int, kv_heads: int) -> DilatedPattern:
    """Draw a pattern: random branches, a named family, or a pattern with attended pads."""
    rules = {
        "offsets": draw(st.sampled_from(["interleaved", "blocked"])),
        "offset_heads": draw(st.sampled_from(["query", "kv"])),
    }
    kind = draw(st.sampled_from(["random", "random", "family", "attended"]))
    if kind == "family":
        return draw(families(heads, rules))
    shifts = kind == "random"
    if kind == "attended":
        rules["padding"] = "attended"
    one = branches(heads, heads // kv_heads, rules["offset_heads"] == "kv", shifts=shifts, widest=90, windows=shifts)
    return DilatedPattern(draw(st.lists(one, min_size=1, max_size=4)), **rules)


@st.composite
def sharded(draw, ranks: int, exchange: str) -> Sharded:
    """Draw any call on R ranks. The op may refuse the call (`Case.refused`), and so may a butterfly (`may_refuse`)."""
    if draw(st.integers(0, 7)) < (7 if "butterfly" in exchange else 1):
        return draw(nested(ranks, exchange))
    heads, kv = draw(st.sampled_from(HEADS))
    n = draw(st.one_of(st.integers(0, 100), st.sampled_from([0, 9, ranks - 1, ranks + 1, 16 * ranks])))
    pattern = draw(sharded_patterns(heads, kv))
    if draw(st.integers(0, 7)) == 0:
        n = draw(st.integers(100, 200))
        padding = draw(st.sampled_from(["attended", "masked"]))
        pattern = DilatedPattern.longnet(draw(st.sampled_from(LADDERS)), RATES, offsets="blocked", padding=padding)
    kind = draw(st.sampled_from(["whole", "lengths", "documents"]))
    batch = 1 if kind == "documents" else draw(st.integers(1, 3))
    call = Case(
        pattern=pattern,
        batch=batch,
        seq_len=n,
        heads=heads,
        kv_heads=kv,
        head_dim=draw(st.sampled_from([4, 1, 5])),
        causal=draw(st.booleans()),
        lengths=tuple(draw(st.integers(0, n)) for _ in range(batch)) if kind == "lengths" else None,
        documents=draw(documents(n)) if kind == "documents" else None,
        layout=draw(st.sampled_from(["contiguous", *STRIDES])),
    )
    layout = layout_for(call.pattern, draw(st.sampled_from(LAYOUTS)))
    return Sharded(call, ranks, layout, exchange, **draw(groups(ranks, heads, exchange)))


def layout_for(pattern: DilatedPattern, layout: str) -> str:
    """Return `layout`, or "zigzag" if windows or global tokens exclude the strided layout."""
    return "zigzag" if layout == "strided" and (windowed(pattern) or global_tokens(pattern)) else layout


@st.composite
def groups(draw, ranks: int, heads: int, exchange: str) -> dict[str, Any]:
    """Draw the head size, the ranks per node, and the engine."""
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0 and n <= heads]
    head_size, per_node = draw(st.sampled_from([*reversed(sizes), 1])), draw(st.sampled_from([None, 1, 2, ranks]))
    if exchange.startswith("hierarchical"):
        head_size, per_node = 1, 2  # four ranks can form no other nodes
    engine = draw(st.sampled_from(["auto", "auto", "math"]))
    return {"head_size": head_size, "ranks_per_node": per_node, "engine": engine}


@st.composite
def larger_groups(draw, ranks: int, exchange: str) -> Sharded:
    """Draw a call in which head groups may have more ranks than heads, and ranks may have no token."""
    case = draw(sharded(ranks, exchange))
    heads, kv = draw(st.sampled_from([(1, 1), (3, 1), (2, 2), (3, 3)]))
    n = draw(st.integers(0, 3 * ranks))
    call = replace(
        case.call,
        pattern=draw(sharded_patterns(heads, kv)),
        seq_len=n,
        heads=heads,
        kv_heads=kv,
        lengths=case.call.lengths and tuple(min(x, n) for x in case.call.lengths),
        documents=None,
    )
    sizes = [size for size in range(2, ranks + 1) if ranks % size == 0]
    layout = layout_for(call.pattern, case.layout)
    return replace(
        case, call=call, layout=layout, head_size=draw(st.sampled_from(sizes)), ranks_per_node=None, nested=False
    )


@st.composite
def subsets(draw, heads: int, kv_heads: int, rules: dict[str, str]) -> tuple[int, ...] | None:
    """Draw the query heads of a branch. If offsets follow kv heads, all query heads of a kv head are drawn together."""
    size = heads // kv_heads if rules["offset_heads"] == "kv" else 1
    lots = draw(st.one_of(st.none(), st.sets(st.integers(0, heads // size - 1), min_size=1)))
    return lots and tuple(lot * size + i for lot in lots for i in range(size))


@st.composite
def nested(draw, ranks: int, exchange: str) -> Sharded:
    """Draw a call that every exchange supports: equal contiguous shards of 2^i tokens, and doubling branches."""
    heads, kv = draw(st.sampled_from(HEADS))
    local = 1 << draw(st.integers(1, 4))
    rules = {"offset_heads": draw(st.sampled_from(["query", "kv"]))}
    first = 1 << draw(st.integers(0, 4))
    pattern = DilatedPattern.geometric(first, first << draw(st.integers(0, 6)), **rules)
    if draw(st.booleans()):  # some of the wide branches, each for some heads, and any branch within a shard
        inside = Branch(
            draw(st.sampled_from([w for w in range(1, local + 1) if local % w == 0])), draw(st.integers(1, 5))
        )
        wide = [replace(b, heads=draw(subsets(heads, kv, rules))) for b in pattern.branches if draw(st.booleans())]
        pattern = DilatedPattern([*wide, inside], **rules)
    call = Case(
        pattern=pattern,
        batch=draw(st.integers(1, 3)),
        seq_len=local * ranks,
        heads=heads,
        kv_heads=kv,
        head_dim=draw(st.sampled_from([4, 3])),
        causal=draw(st.booleans()),
        layout=draw(st.sampled_from(["contiguous", *STRIDES])),
    )
    return Sharded(call, ranks, "contiguous", exchange, **draw(groups(ranks, heads, exchange)), nested=True)
