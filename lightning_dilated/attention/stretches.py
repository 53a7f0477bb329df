"""How a span is cut into stretches that no narrow segment crosses, so that few parts are held at a time; integers only.

Shape letters: H query heads, w segment length, r dilation rate.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import Block, blocks

Part = TypeVar("Part")


@dataclass(frozen=True)
class Stretch:
    """Positions [start, stop) of a span.

    Its blocks are computed when it begins, and held to its end; `inner` are its pieces, with the blocks of narrower or
    denser branches. What has no pieces is where parts are combined.
    """

    start: int
    stop: int
    blocks: tuple[Block, ...]
    inner: tuple[Stretch, ...] = ()


@functools.lru_cache(maxsize=1024)
def layout(call_key: tuple, part: tuple[int, int], limits: tuple[int, int], own: int | None = None) -> Stretch:
    """The stretches of positions `part` of a document.

    Args:
        call_key: (pattern, tokens of the document, H, kv heads, heads, whole), as `blocks` takes them.
        part: (start, stop) in the document.
        limits: most positions of a stretch for dense branches, and for thin ones, whose parts have half the rows or fewer.
        own: a branch that is computed at once for all positions, since its part is no more than the result itself.
    """
    pattern, document, num_heads, num_kv_heads, heads, whole = call_key
    length, every = part[1] - part[0], frozenset(range(len(pattern.branches)))
    short = length <= limits[0 if own is None else 1]
    levels = [(length, every)] if short else _levels(pattern, num_heads, limits, every - {own}, length)

    def found(start: int, stop: int, names: frozenset[int]) -> tuple[Block, ...]:
        where = part[0] + start, part[0] + stop
        made = blocks(pattern, document, num_heads, num_kv_heads, where, heads, whole) if names else ()
        return tuple(replace(b, first=b.first + start) for b in made if b.branch in names)

    def grow(start: int, stop: int, depth: int) -> Stretch:
        inner: tuple[Stretch, ...] = ()
        if depth + 1 < len(levels):
            step = levels[depth + 1][0]
            cuts = [start, *range(start + step - (part[0] + start) % step, stop, step), stop]
            inner = tuple(grow(a, b, depth + 1) for a, b in itertools.pairwise(cuts))
        return Stretch(start, stop, found(start, stop, levels[depth][1]), inner)

    return grow(0, length, 0)


def _levels(
    pattern: DilatedPattern, num_heads: int, limits: tuple[int, int], names: frozenset[int], length: int
) -> list[tuple[int, frozenset[int]]]:
    """(positions of a stretch, its branches) from the whole span inwards; the span has what fits into no shorter stretch."""
    branches = pattern.branches
    dense = {i for i in names if 2 * len(branches[i].heads or range(num_heads)) > num_heads * branches[i].dilation_rate}
    fine, inner = _fitting(pattern, dense, limits[0], 1)
    coarse, middle = _fitting(pattern, names - inner, limits[1], fine)
    # a multiple of all segments, as long as the limit allows
    found = [(coarse * (limits[1] // coarse), middle), (fine * (limits[0] // fine), inner)]
    found = [(step, taken) for step, taken in found if taken and step < length]
    return [(length, frozenset(range(len(branches))).difference(*(taken for _, taken in found))), *found]


def _fitting(pattern: DilatedPattern, among: Iterable[int], limit: int, step: int) -> tuple[int, frozenset[int]]:
    """(a multiple of `step` of at most `limit` positions, the branches whose segments all end at its multiples)."""
    taken = set()
    for i in sorted(among, key=lambda i: pattern.branches[i].segment_length or math.inf):
        branch = pattern.branches[i]
        if branch.segment_length is None or branch.shift or math.lcm(step, branch.segment_length) > limit:
            continue
        step = math.lcm(step, branch.segment_length)
        taken.add(i)
    return step, frozenset(taken)


def walk(
    stretch: Stretch,
    make: Callable[[Block], Part],
    combine: Callable[[Stretch, tuple[Block, ...], list[Part]], None],
    found: tuple[Block, ...] = (),
    parts: Sequence[Part] = (),
) -> None:
    """Make every block's part, and combine them where no stretch is inside; a stretch's parts are let go when it is done."""
    held = [*parts, *map(make, stretch.blocks)]
    found += stretch.blocks
    if not stretch.inner:
        combine(stretch, found, held)
    for inner in stretch.inner:
        walk(inner, make, combine, found, held)


def every_block(stretch: Stretch) -> list[Block]:
    """Its blocks and those of all stretches inside."""
    return [*stretch.blocks, *(b for inner in stretch.inner for b in every_block(inner))]
