"""Count a model with many identical layers by running three units and repeating the pieces of the middle unit.

A unit is a group of blocks that are recomputed together, or several groups that repeat. In a stretch of equal units,
only the first one follows a different layer, and only the last one precedes a different layer. All units between them
do the same work on tensors of the same sizes. One of these is run, and its pieces are repeated.

Shape letters: P bytes of a unit's parameters, G bytes of their gradients.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from lightning_dilated.ext.planning.counting.memory_tracker import Piece, Tape

#: number of units of a stretch that are run: the first, one of the middle, and the last
RUN = 3
#: parts of a step in each block of the first stack
BLOCKS = ("forward", "behind", "backward")
#: attributes of a layer that do not change its memory
NUMBERS = ("layer_idx", "terms")


class Repeat(NamedTuple):
    """Blocks `first` to `end` - 1, the unit that represents the `times` equal units after it."""

    first: int
    end: int
    times: int

    def lengthen(self, tape: Tape) -> None:
        """Add the memory of the `times` further units to the tape of a step that ran without them."""
        unit = tape.blocks[self.first : self.end]
        size, trained = (sum(x) for x in zip(*unit, strict=True))
        tape.pieces = list(lengthened(tape.pieces, self, size, trained))
        tape.blocks[self.end : self.end] = self.times * unit
        tape.whole = tape.whole[0] + self.times * size, tape.whole[1] + self.times * trained


def shorten(stack: Any, every: int) -> list[Repeat]:
    """Remove equal groups of `every` blocks from a stack; return the repeats that restore them, in removal order."""
    if getattr(stack, "drop_path", 0):  # one call draws the factors of all blocks, so memory depends on their number
        return []
    signatures: list[Any] = []
    for block in stack.blocks:
        signature = _signature(block)
        signatures.append(next((x for x in signatures if x == signature), signature))
    removed = find_repeats([id(x) for x in signatures], every)
    for repeat in removed:
        gone = slice(repeat.end, repeat.end + repeat.times * (repeat.end - repeat.first))
        del stack.blocks[gone]
        if hasattr(stack, "rotaries"):
            del stack.rotaries[gone]
    return removed


def _signature(block: nn.Module) -> list[Any]:
    """List everything in which two blocks can differ, except the values of their weights."""
    return [
        (
            name,
            type(module),
            {x: y for x, y in vars(module).items() if not x.startswith("_") and x not in NUMBERS},
            [(x, p.shape, p.dtype, p.requires_grad) for x, p in module.named_parameters(recurse=False)],
        )
        for name, module in block.named_modules()
    ]


def find_repeats(kinds: Sequence[Hashable], every: int = 1) -> list[Repeat]:
    """Find repeats of blocks by their kinds. A repeat's indices refer to the list that earlier repeats shortened."""
    groups = [tuple(kinds[i : i + every]) for i in range(0, len(kinds), every)]
    repeats, period = [], 1
    while (RUN + 1) * period <= len(groups):
        start = 0
        while start + period <= len(groups):
            unit, units = groups[start : start + period], 1
            while groups[start + units * period : start + (units + 1) * period] == unit:
                units += 1
            if units > RUN:
                del groups[start + 2 * period : start + (units - 1) * period]
                repeats.append(Repeat((start + period) * every, (start + 2 * period) * every, units - RUN))
                start += (RUN - 1) * period
            start += 1
        period += 1
    return repeats


def lengthened(pieces: Sequence[Piece], repeat: Repeat, size: int, trained: int) -> Iterator[Piece]:
    """Yield the pieces of a step that contains the further units of a repeat.

    Args:
        pieces: pieces of the step without the further units.
        repeat: the repeat.
        size: P.
        trained: G; the gradients of the previous step are freed after the forward.
    """
    first, end, times = repeat
    index: dict[tuple, int] = {}
    for i, piece in enumerate(pieces):
        index.setdefault(piece.part, i)
    begun, after, head = index["forward", first], index["forward", end], index["head",]
    between, returning = index["between",], index.get(("backward", end - 1), len(pieces))
    returned = index.get(("backward", first - 1), len(pieces))
    saved, casts = pieces[after].begin - pieces[begun].begin, pieces[after].casts - pieces[begun].casts
    # autocast keeps copies of weights until a loop over tiles or the end of the forward; layers may save them
    cleared = next((i for i in range(after, between) if pieces[i].casts < pieces[after].casts), between)
    saved_casts = casts if pieces[between].casts >= pieces[after].casts else 0
    freed, gradients = saved - casts + saved_casts, 0
    if returning < returned < len(pieces):
        gradients = pieces[returned].static - pieces[returning].static

    def moved(part: slice, units: int, static: int, activations: int, copies: int = 0) -> Iterator[Piece]:
        """Yield pieces with added bytes, and with block indices that are `units` units higher."""
        for x in pieces[part]:
            of_block = units and x.part[0] in BLOCKS
            number = (x.part[0], x.part[1] + units * (end - first)) if of_block else x.part
            live = static + activations
            sizes = {"peak": x.peak + live, "begin": x.begin + live, "static": x.static + static}
            yield replace(x, part=number, **sizes, casts=x.casts + copies)

    full, bare = times * (size + trained), times * size
    yield from moved(slice(after), 0, full, 0)
    for unit in range(1, times + 1):
        yield from moved(slice(begun, after), unit, full, unit * saved, unit * casts)
    yield from moved(slice(after, cleared), times, full, times * saved, times * casts)
    yield from moved(slice(cleared, head), times, full, times * freed, times * saved_casts)
    yield from moved(slice(head, returned), times, bare, times * freed, times * saved_casts)
    for unit in range(1, times + 1):
        held = bare + unit * gradients
        left = times - unit
        yield from moved(slice(returning, returned), left, held, left * freed, left * saved_casts)
    yield from moved(slice(returned, None), 0, bare + times * gradients, 0)
