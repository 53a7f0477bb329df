"""Footprint: what a step holds for any depth and length, from steps of two depths and two lengths under fake tensors.

All blocks hold alike, so what is held at an operation of the first or the last block is linear in depth; sizes are linear in
tokens. What the op needs beside its results is reckoned for the length itself, see `planning.counting.workspace`.
Shape letters: L tokens of a rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models import DilatedModule
from lightning_dilated.planning.counting import dry_run
from lightning_dilated.planning.counting.inductor import Graphs
from lightning_dilated.planning.counting.trace import Piece, Tape
from lightning_dilated.planning.counting.workspace import OpCall, workspace

#: tokens of the steps that are counted
SIZES = (1 << 17, 1 << 18)
#: parts of a step that each block of the first stack has, and the groups of blocks that stand for all
BLOCKS, ENDS = ("forward", "behind", "backward"), ("first", "last")


@dataclass(frozen=True)
class Decoder:
    """A second stack of blocks, behind the one whose depth is counted for; the parts of its pieces begin with its name.

    Attributes:
        name: the model's attribute.
        depth: its blocks.
        call: an op's call of it on one rank.
        parameters: numbers of one of its blocks.
    """

    name: str
    depth: int
    call: OpCall
    parameters: int


@dataclass(frozen=True)
class Subject:
    """A model to count.

    Attributes:
        make: the model of a given depth, not yet built.
        batch: its batch of so many tokens, to be made under fake tensors.
        precision: the Trainer's.
        memory: settings.
        compile_blocks: whether blocks run compiled.
        call: an op's call of it on one rank.
        grain: `batch` takes multiples of so many tokens, a power of two.
        decoder: its second stack, if it has one.
    """

    make: Callable[[int], DilatedModule]
    batch: Callable[[int], Any]
    precision: str
    memory: MemorySettings
    compile_blocks: bool
    call: OpCall
    grain: int = 1
    decoder: Decoder | None = None

    @property
    def period(self) -> int:
        """Blocks that are recomputed together."""
        return self.memory.every


@dataclass(frozen=True)
class Moment:
    """What a piece of a step holds: `held` by (depth, tokens) of the steps counted, `static` (parameters and gradients)."""

    part: tuple
    piece: Piece
    held: tuple[tuple[int, int], tuple[int, int]]
    static: tuple[int, int]

    @property
    def decoding(self) -> bool:
        """Whether it lies in the second stack."""
        return len(self.part) > 1 and self.part[0] not in BLOCKS

    @property
    def phase(self) -> str:
        """What is done, in either stack."""
        return self.part[1 if self.decoding else 0]


@dataclass(frozen=True)
class Footprint:
    """The moments of a step.

    Attributes:
        depths, sizes: of the steps counted.
        hidden, inner: bytes a token of the hidden states between blocks, and between those of the second stack.
    """

    subject: Subject
    depths: tuple[int, int]
    sizes: tuple[int, int]
    hidden: int
    moments: tuple[Moment, ...]
    inner: int = 0

    def held(self, moment: Moment, depth: int, tokens: int) -> int:
        """Bytes beside parameters and gradients."""
        low, high = (_line(self.sizes, x, tokens) for x in moment.held)
        return round(_line(self.depths, (low, high), depth))

    def kept(self, moment: Moment, tokens: int) -> int:
        """Bytes of `held` that each block more adds: what it keeps for the backward."""
        low, high = (_line(self.sizes, x, tokens) for x in moment.held)
        return round((high - low) / (self.depths[1] - self.depths[0]))

    def static(self, moment: Moment, depth: int) -> int:
        """Bytes of parameters and gradients when the moment began."""
        return round(_line(self.depths, moment.static, depth))

    def parameters(self, depth: int) -> int:
        """Bytes of all parameters."""
        head = next(m for m in self.moments if m.part == ("head",))  # gradients were let go, and none is there yet
        return self.static(head, depth)

    def trained(self, depth: int) -> int:
        """Bytes of those that are trained, and of their gradients."""
        begun = next(m for m in self.moments if m.part[0] == "forward")  # with the gradients of the step before
        return self.static(begun, depth) - self.parameters(depth)

    @property
    def first_kept(self) -> int:
        """Inputs of blocks that never leave for the host: the first, where nothing before it is trained."""
        return 0 if any(m.part == ("first",) for m in self.moments) else 1

    @property
    def parameter_size(self) -> int:
        """Bytes of a parameter."""
        return dry_run.PRECISIONS[self.subject.precision][0].itemsize

    def room(self, moment: Moment, call: OpCall) -> int:
        """Bytes that the op needs beside its results; where layers differ, the most."""
        piece = moment.piece
        if not piece.op:
            return 0
        call = replace(call, dtype=piece.dtype)
        if piece.heads != call.heads:
            call = replace(call, window=(0, piece.heads))
        return max(workspace(one)[piece.op == "backward"] for one, _ in call.layers(len(call.cycle)))


def _line(at: tuple[int, int], values: tuple[float, float], x: float) -> float:
    """The line through two points; of integers that lie on one, exact."""
    rise = (values[1] - values[0]) * (x - at[0])
    run = at[1] - at[0]
    return values[0] + (rise // run if isinstance(rise, int) and rise % run == 0 else rise / run)


def footprint(subject: Subject, sizes: tuple[int, int] | None = None, graphs: Graphs | None = None) -> Footprint:
    """Count four steps; of three and four tiles where the settings have them, after which each holds as much.

    Args:
        sizes: tokens of the steps.
        graphs: of this model with other settings, kept for those that follow.

    Raises:
        RuntimeError: where steps of two lengths or depths are not the same work.
    """
    depths, settings = (2 * subject.period, 3 * subject.period), subject.memory
    tile = settings.narrow_tile if settings.head_chunks > 1 else settings.tile
    part = None if tile is None else math.lcm(tile, subject.grain)
    sizes = sizes or (SIZES if part is None else (3 * part, 4 * part))
    graphs = (graphs or Graphs(Tape())) if subject.compile_blocks else None
    tapes = [[_run(subject, depth, tokens, graphs) for tokens in sizes] for depth in depths]
    rows = [
        [list(_named(t.pieces, depth, subject.period)) for t in row] for depth, row in zip(depths, tapes, strict=True)
    ]
    shapes = {tuple((key, p.op, p.heads) for key, p in found) for row in rows for found in row}
    if len(shapes) > 1:
        raise RuntimeError(
            "steps of two lengths or depths took different ways, so that no third can be told from them."
        )
    moments = []
    for (key, one), (_, two), (_, three), (_, four) in zip(*rows[0], *rows[1], strict=True):
        held = tuple((x.peak - x.static, y.peak - y.static) for x, y in ((one, two), (three, four)))
        moments.append(Moment(key, one, held, (one.static, three.static)))
    hidden = tapes[0][0].hidden
    inner = hidden[subject.decoder.name] // sizes[0] if subject.decoder else 0
    return Footprint(subject, depths, sizes, hidden[dry_run.MAIN] // sizes[0], tuple(moments), inner)


def _run(subject: Subject, depth: int, tokens: int, graphs: Graphs | None) -> Tape:
    make, batch = (lambda: subject.make(depth)), (lambda: subject.batch(tokens))
    return dry_run.step(make, batch, subject.precision, subject.memory, graphs)


def _named(found: list[Piece], depth: int, period: int) -> Iterator[tuple[tuple, Piece]]:
    """Pieces by names that fit every depth, without those of blocks in the middle."""
    for piece in found:
        if len(piece.part) == 1 or piece.part[0] not in BLOCKS:
            yield piece.part, piece
            continue
        group, within = divmod(piece.part[1], period)
        if group in (0, depth // period - 1):
            yield (piece.part[0], ENDS[group > 0], within), piece
