"""Footprint: what a step holds for any depth and length, from steps of two depths and two lengths under fake tensors.

All blocks save the same, so what is held at an operation of the first or the last block is linear in depth; sizes are linear
in tokens. The workspace of the op is computed for each length, see `planning.counting.workspace`.

Shape letters: L tokens of a rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models import DilatedModule
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import in_turns, segment_width
from lightning_dilated.planning.counting import dry_run
from lightning_dilated.planning.counting.compiled import Graphs
from lightning_dilated.planning.counting.memory_tracker import Meter, Piece, Tape
from lightning_dilated.planning.counting.workspace import NAMES, OpCall, recurrence_workspace, workspace
from lightning_dilated.planning.simulating.rounds import EXACT, Moves
from lightning_dilated.planning.simulating.simulation import moves_of
from lightning_dilated.recurrence.op import RECURRENCE
from lightning_dilated.sequence.exchange.row_ops import FEW
from lightning_dilated.sequence.planner import DEFAULTS, Links, Plan, make_problem, plan, price

#: tokens of the steps that are counted
SIZES = (1 << 17, 1 << 18)
#: counted lengths are multiples of this many tokens: images come in rows of patches
GRAIN = 2048
#: parts of a step that each block of the first stack has, and the groups of blocks that stand for all
BLOCKS, ENDS = ("forward", "behind", "backward"), ("first", "last")


@dataclass(frozen=True)
class Decoder:
    """A second stack of blocks, after the one whose depth varies; the parts of its pieces begin with its name.

    Attributes:
        name: the model's attribute.
        depth: its blocks.
        call: a call of the op on one rank.
        parameters: of one of its blocks.
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
        batch: its batch of so many tokens, made under fake tensors.
        precision: the Trainer's.
        memory: settings.
        compile_blocks: whether blocks are counted compiled.
        call: a call of the op on one rank.
        decoder: its second stack, if it has one.
        bare: where only some layers have positions, the model without any; `make` then gives them to all layers.
        share: the part of the layers that have none.
        by_operator: whether the kernels of its blocks are those of its operators: layers of another library, not compiled.
    """

    make: Callable[[int], DilatedModule]
    batch: Callable[[int], Any]
    precision: str
    memory: MemorySettings
    compile_blocks: bool
    call: OpCall
    decoder: Decoder | None = None
    bare: Callable[[int], DilatedModule] | None = None
    share: Fraction = Fraction(0)
    by_operator: bool = False

    @property
    def period(self) -> int:
        """Blocks of a group, which is recomputed together."""
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
        """Whether it is in the second stack."""
        return len(self.part) > 1 and self.part[0] not in BLOCKS

    @property
    def phase(self) -> str:
        """Its kind of work, in either stack."""
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
        """Bytes without parameters and gradients."""
        low, high = (_line(self.sizes, x, tokens) for x in moment.held)
        return round(_line(self.depths, (low, high), depth))

    def kept(self, moment: Moment, tokens: int) -> int:
        """Bytes of `held` for each further block: what it saves for the backward."""
        low, high = (_line(self.sizes, x, tokens) for x in moment.held)
        return round((high - low) / (self.depths[1] - self.depths[0]))

    def static(self, moment: Moment, depth: int) -> int:
        """Bytes of parameters and gradients when the moment began."""
        return round(_line(self.depths, moment.static, depth))

    def parameters(self, depth: int) -> int:
        """Bytes of all parameters."""
        # the old gradients are freed then, and there is no new one yet
        head = next(m for m in self.moments if m.part == ("head",))
        return self.static(head, depth)

    def trained(self, depth: int) -> int:
        """Bytes of those that are trained, and of their gradients."""
        begun = next(m for m in self.moments if m.part[0] == "forward")  # with the gradients of the step before
        return self.static(begun, depth) - self.parameters(depth)

    @property
    def first_kept(self) -> int:
        """Inputs of blocks that are never offloaded: the first, where nothing before it is trained."""
        return 0 if any(m.part == ("first",) for m in self.moments) else 1

    @property
    def parameter_size(self) -> int:
        return dry_run.PRECISIONS[self.subject.precision][0].itemsize

    def room(self, moment: Moment, call: OpCall) -> int:
        """Bytes that the op needs in addition to its results; where layers differ, the most."""
        piece = moment.piece
        if not piece.op:
            return 0
        call = replace(call, dtype=piece.dtype)
        if piece.spec:
            return recurrence_workspace(piece.op == NAMES[RECURRENCE], call, piece.spec, Meter)
        if piece.heads != call.heads:
            call = replace(call, window=(0, piece.heads))
        return max(workspace(one)[piece.op == "backward"] for one, _ in call.layers(len(call.cycle)))


def _line(at: tuple[int, int], values: tuple[float, float], x: float) -> float:
    """The line through two points; of integers that lie on one, exact."""
    rise = (values[1] - values[0]) * (x - at[0])
    run = at[1] - at[0]
    return values[0] + (rise // run if isinstance(rise, int) and rise % run == 0 else rise / run)


def footprint(subject: Subject, sizes: tuple[int, int] | None = None, graphs: Graphs | None = None) -> Footprint:
    """Count four steps; with tiles, of three and four tiles, from which on each tile holds the same.

    Args:
        sizes: tokens of the steps.
        graphs: cache of this model's compiled blocks.

    Raises:
        RuntimeError: where steps of two lengths or depths differ in more than sizes.
    """
    depths = 2 * subject.period, 3 * subject.period
    sizes = sizes or _lengths(subject.memory)
    graphs = (graphs or Graphs(Tape())) if subject.compile_blocks else None
    moments, hidden = _counted(subject, depths, sizes, graphs)
    if subject.bare is not None:
        bare, _ = _counted(replace(subject, make=subject.bare), depths, sizes, graphs)
        moments = [_mixed(x, y, subject.share, depths) for x, y in zip(moments, bare, strict=True)]
    inner = hidden[subject.decoder.name] // sizes[0] if subject.decoder else 0
    return Footprint(subject, depths, sizes, hidden[dry_run.MAIN] // sizes[0], tuple(moments), inner)


def _lengths(settings: MemorySettings) -> tuple[int, int]:
    """The tokens of the steps to count."""
    tile = settings.narrow_tile if settings.head_chunks > 1 else settings.tile
    part = None if tile is None else math.lcm(tile, GRAIN)
    return SIZES if part is None else (3 * part, 4 * part)


def _counted(
    subject: Subject, depths: tuple[int, int], sizes: tuple[int, int], graphs: Graphs | None
) -> tuple[list[Moment], dict[str, int]]:
    """The moments of four steps, and bytes of the hidden states that go into each stack at the first length."""
    tapes = [[_run(subject, depth, tokens, graphs) for tokens in sizes] for depth in depths]
    rows = [
        [list(_named(t.pieces, depth, subject.period)) for t in row] for depth, row in zip(depths, tapes, strict=True)
    ]
    shapes = {tuple((key, p.op, p.heads) for key, p in pieces) for row in rows for pieces in row}
    if len(shapes) > 1:
        raise RuntimeError(
            "steps of two lengths or depths were not the same sequence of work, so the memory of others cannot be derived."
        )
    moments = []
    for (key, one), (_, two), (_, three), (_, four) in zip(*rows[0], *rows[1], strict=True):
        held = tuple((x.peak - x.static, y.peak - y.static) for x, y in ((one, two), (three, four)))
        moments.append(Moment(key, one, held, (one.static, three.static)))
    return moments, tapes[0][0].hidden


def _mixed(moment: Moment, bare: Moment, share: Fraction, depths: tuple[int, int]) -> Moment:
    """A moment of a model of which a share of the layers saves what layers without positions save.

    The layer that runs is counted with positions, in whose backward it holds more.
    """
    run = depths[1] - depths[0]
    saved, less = ([(high - low) / run for low, high in zip(*m.held, strict=True)] for m in (moment, bare))
    off = [float(share) * (x - y) for x, y in zip(saved, less, strict=True)]
    held = tuple(tuple(round(n - depth * x) for n, x in zip(row, off, strict=True))
                 for depth, row in zip(depths, moment.held, strict=True))  # fmt: skip
    return replace(moment, held=held)


def _run(subject: Subject, depth: int, tokens: int, graphs: Graphs | None) -> Tape:
    make, batch = (lambda: subject.make(depth)), (lambda: subject.batch(tokens))
    return dry_run.step(make, batch, subject.precision, subject.memory, graphs)


def _named(pieces: list[Piece], depth: int, period: int) -> Iterator[tuple[tuple, Piece]]:
    """Pieces by names that are valid for every depth, without those of blocks in the middle."""
    for piece in pieces:
        if len(piece.part) == 1 or piece.part[0] not in BLOCKS:
            yield piece.part, piece
            continue
        group, within = divmod(piece.part[1], period)
        if group in (0, depth // period - 1):
            yield (piece.part[0], ENDS[group > 0], within), piece


#: most heads that are counted on many ranks, see `lighter`
HEADS = 16
#: exchanges that are counted for few ranks only
FEW_RANKS = ("switch", "ring")


@dataclass(frozen=True)
class Exchanged:
    """Bytes on the rank with most of each.

    Attributes:
        plan: of the exchange; None on one rank.
        name: of the exchange; None where no segment crosses a shard. Where "auto" chooses one that is counted for few
            ranks only, the cheapest of the others.
        kept: rows saved for the backward, a layer.
        forward, backward: all that a call holds temporarily.
        queries: rows of q that other ranks' keys reach, over heads.
        decoder: of a second stack's call.
        others: of the calls of layers 1, 2, ..., where patterns differ; layers cycle through this one and them.
    """

    plan: Plan | None = None
    name: str | None = None
    kept: int = 0
    forward: int = 0
    backward: int = 0
    queries: int = 0
    decoder: Exchanged | None = None
    others: tuple[Exchanged, ...] = ()

    @property
    def cycle(self) -> tuple[Exchanged, ...]:
        """Of each layer of the cycle."""
        return self, *self.others

    def most(self, name: str) -> int:
        """The largest number of any layer."""
        return max(getattr(x, name) for x in self.cycle)

    def kept_by(self, layers: int) -> int:
        """Bytes of rows that the first `layers` layers save."""
        return sum(x.kept for x in in_turns(self.cycle, layers))


@functools.lru_cache(maxsize=4096)
def exchanged(
    pattern: DilatedPattern,
    tokens: int,
    heads: tuple[int, int, int],
    causal: bool,
    ranks: int,
    per_node: int,
    element_size: int,
    exchange: str = "auto",
    links: Links = DEFAULTS,
    exchange_memory: int | None = None,
) -> Exchanged:
    """Of N tokens on R ranks; `heads` = (H, K, D).

    Raises:
        ValueError: for an exchange that cannot run this pattern, and with many ranks for one that is not simulated; where
            `exchange_memory` does not suffice.
    """
    if ranks == 1:
        return Exchanged()
    problem = make_problem(pattern, tokens, *heads[:2], ranks=ranks, causal=causal)
    chosen = plan(
        problem, exchange, ranks_per_node=per_node, head_dim=heads[2], element_size=element_size, links=links,
        exchange_memory=exchange_memory,
    )  # fmt: skip
    if chosen.exchange is None:
        return Exchanged(chosen)
    name = chosen.exchange
    if exchange == "auto" and ranks > EXACT and name in FEW_RANKS:
        bound = math.inf if exchange_memory is None else exchange_memory
        others = [p for p in chosen.prices if p.exchange not in FEW_RANKS and (p.held or 0) <= bound]
        name = min(others, key=lambda p: p.seconds + p.waiting).exchange if others else "gather"
    if ranks > EXACT:
        return _priced(chosen, name, per_node, heads[2], element_size, links)
    return _of(chosen, name, moves_of(problem, name, per_node), heads[2], element_size)


def _priced(chosen: Plan, name: str, per_node: int, dim: int, size: int, links: Links) -> Exchanged:
    """With many ranks: a rank is assumed to send as much as the one that receives most, and keys of other ranks to reach as
    many queries as the densest branch wider than a rank has."""
    problem = chosen.problem
    prices = chosen.prices or (price(problem, name, per_node, dim, size, links),)
    kept = next(p for p in prices if p.exchange == name).kept
    own, wide = problem.shard.longest, max(4, size)
    served = lambda b: problem.num_heads if b.heads is None else len(b.heads)  # noqa: E731
    # of a window only the queries near the ends of a rank's tokens see other ranks' keys
    reach = lambda b: own if b.width is None else min(own, (2 - problem.causal) * (b.width - 1) * b.dilation_rate)  # noqa: E731
    rows = [
        reach(b) * served(b) // b.dilation_rate
        for b in problem.pattern.branches
        if segment_width(b, problem.shard.seq_len) > own
    ]
    queries = max(rows, default=0)
    few = queries * dim * (2 * size + wide), queries * dim * (3 * size + wide)
    return Exchanged(chosen, name, kept, 2 * kept + few[0], 3 * kept * wide // size + few[1], queries)


def _of(chosen: Plan, name: str, moves: Moves, dim: int, size: int) -> Exchanged:
    wide = max(4, size)
    landed, packed = (sum(getattr(r, side) for r in moves.rounds) for side in ("landed", "packed"))
    row, wide_row = 2 * dim * size, 2 * dim * wide
    queries = moves.queries
    # a row of q, of out and of the running sum in the forward; of grad, q and out, and of the sum of dq in the backward
    few = queries * dim * (2 * size + wide), queries * dim * (3 * size + wide)
    if moves.style == "kept":
        forward = landed * row + packed * row + few[0]
        backward = landed * wide_row + packed * wide_row * 2 + few[1]
        kept = landed * row
    else:  # a ring holds two rounds at a time, a switch all of it
        most = lambda rounds, x: max((getattr(r, x) for r in rounds), key=lambda y: float(y.max()))  # noqa: E731
        ring = moves.style == "ring"
        rounds = 2 * (most(moves.rounds, "landed") + most(moves.rounds, "packed")) if ring else landed + packed
        forward, backward = rounds * row + few[0], rounds * (row + wide_row) + few[1]
        kept = 0 * landed if ring else landed * row
    top = lambda x: round(float(x.max()))  # noqa: E731
    return Exchanged(chosen, name, top(kept), top(forward), top(backward), top(queries))


def of_call(
    call: OpCall,
    tokens: int,
    ranks: int,
    per_node: int,
    exchange: str = "auto",
    links: Links = DEFAULTS,
    exchange_memory: int | None = None,
) -> Exchanged:
    """`exchanged` of a model's calls over N tokens."""
    call = lighter(call, ranks)
    heads = call.heads, call.kv_heads, call.head_dim
    settings = call.dtype.itemsize, exchange, links, exchange_memory
    first, *others = (
        exchanged(pattern, tokens, heads, call.causal, ranks, per_node, *settings) for pattern in call.cycle
    )
    return replace(first, others=tuple(others))


def of_subject(
    subject: Subject,
    tokens: int,
    ranks: int,
    per_node: int,
    exchange: str = "auto",
    links: Links = DEFAULTS,
    exchange_memory: int | None = None,
) -> Exchanged:
    """`exchanged` of the calls of both stacks of a model."""
    settings = tokens, ranks, per_node, exchange, links, exchange_memory
    of = lambda call: of_call(call, *settings)  # noqa: E731
    main = of(subject.call)
    return main if subject.decoder is None else replace(main, decoder=of(subject.decoder.call))


def lighter(call: OpCall, ranks: int) -> OpCall:
    """The call with fewer and wider heads on many ranks, where counting each head takes long: the same bytes, FLOPs and
    query heads for each kv head."""
    group = call.heads // call.kv_heads
    if ranks <= EXACT or call.heads <= HEADS or any(b.heads is not None for x in call.cycle for b in x.branches):
        return call
    kv = max((d for d in range(1, call.kv_heads + 1) if call.kv_heads % d == 0 and d * group <= HEADS), default=1)
    return replace(call, heads=kv * group, kv_heads=kv, head_dim=call.head_dim * call.kv_heads // kv)


def sharded(call: OpCall, tokens: int, ranks: int, rows: Exchanged) -> OpCall:
    """A call of one rank as the rank in the middle of a sequence of N tokens makes it."""
    tokens_here = -(-tokens // ranks)
    if ranks == 1:
        return replace(call, tokens=tokens)
    rank = ranks // 2
    tokens_here = min(tokens_here, tokens - rank * tokens_here) if tokens > rank * tokens_here else tokens_here
    final = rows.most("queries") <= FEW * tokens_here * call.heads
    return replace(call, tokens=tokens_here, whole=tokens, offset=rank * tokens_here, final=final)
