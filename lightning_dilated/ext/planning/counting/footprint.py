"""Footprint: what a step holds for any depth and length, from steps of two depths and two lengths under fake tensors.

Where all blocks save the same, what is held at an operation of the first or the last block is linear in depth; sizes are
linear in tokens. Where layers differ (some have no positions, or a recurrence), a model of each kind of layer alone is
counted, and a block holds what its kind does beside what the layers before it save. The workspace of the op is computed for
each length, see `planning.counting.workspace`.

Shape letters: L tokens of a rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lightning_dilated.ext.planning.counting import dry_run
from lightning_dilated.ext.planning.counting.compiled import Graphs
from lightning_dilated.ext.planning.counting.memory_tracker import Meter, Piece, Tape
from lightning_dilated.ext.planning.counting.workspace import NAMES, OpCall, recurrence_workspace, workspace
from lightning_dilated.ext.planning.simulating.rounds import EXACT, Moves
from lightning_dilated.ext.planning.simulating.simulation import moves_of
from lightning_dilated.ext.recurrence.op import RECURRENCE
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models import DilatedModule
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import in_turns, segment_width
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
        kinds: `make` with layers of one kind, for each kind of layer that the model has.
        layers: the numbers of the kinds of layers 0, 1, ..., which repeat.
        decoder: its second stack, if it has one.
        by_operator: whether the kernels of its blocks are those of its operators: layers of another library, not compiled.
    """

    make: Callable[[int], DilatedModule]
    batch: Callable[[int], Any]
    precision: str
    memory: MemorySettings
    compile_blocks: bool
    call: OpCall
    kinds: tuple[Callable[[int], DilatedModule], ...]
    layers: tuple[int, ...] = (0,)
    decoder: Decoder | None = None
    by_operator: bool = False

    @property
    def period(self) -> int:
        """Blocks of a group, which is recomputed together."""
        return self.memory.every


@dataclass(frozen=True)
class Moment:
    """What a piece of a step holds: `held` by (depth, tokens) of the steps counted, `static` (parameters and gradients).

    Of steps whose layers are of one kind, number `kind` of the model's.
    """

    part: tuple
    piece: Piece
    held: tuple[tuple[int, int], tuple[int, int]]
    static: tuple[int, int]
    kind: int = 0

    @property
    def decoding(self) -> bool:
        """Whether it is in the second stack."""
        return len(self.part) > 1 and self.part[0] not in BLOCKS

    @property
    def phase(self) -> str:
        """Its kind of work, in either stack."""
        return self.part[1 if self.decoding else 0]

    @property
    def end(self) -> str | None:
        """Of a block of the first stack, which group its own stands for: one of ENDS; None elsewhere."""
        return self.part[1] if self.part[0] in BLOCKS else None


class Place(NamedTuple):
    """A moment in a model: of a block of the first stack, or elsewhere.

    Attributes:
        start: layers before the block's group; None elsewhere.
        part: the moment's, with the group's name: "first", "second", "last", or a number, from 1, of a layer between them.
    """

    moment: Moment
    start: int | None
    part: tuple


@dataclass(frozen=True)
class Footprint:
    """The moments of a step.

    Attributes:
        depths, sizes: of the steps counted.
        hidden, inner: bytes a token of the hidden states between blocks, and between those of the second stack.
        moments: of the model's kinds of layers, one kind after another.
    """

    subject: Subject
    depths: tuple[int, int]
    sizes: tuple[int, int]
    hidden: int
    moments: tuple[Moment, ...]
    inner: int = 0

    # -- where moments are ---------------------------------------------------------------------------------------------
    def kinds(self, layers: int) -> tuple[int, ...]:
        """The kind of each of the first `layers` layers."""
        return in_turns(self.subject.layers, layers)

    def places(self, depth: int, gradients: bool = False) -> Iterator[Place]:
        """Where the moments of a model may hold most: in the first and in the last layer of each kind.

        Args:
            gradients: whether layers in the middle may hold more than both, because of later ones' gradients; those of
                kinds that the first group lacks always may.
        """
        for moment in self.moments:
            if moment.end is None:
                yield Place(moment, None, moment.part)
                continue
            starts = self._starts(moment, depth)
            if not starts:
                continue
            if moment.end == ENDS[0]:
                if starts[0] == 0:
                    yield Place(moment, 0, moment.part)
                continue
            if moment.phase == "behind" and starts[-1] + self.subject.period < depth:
                continue  # after the last block comes the head
            yield self._place(moment, starts[-1], depth)
            later = [at for at in starts if at > 0]
            if moment.phase == "backward" and (gradients or starts[0] > 0) and len(later) > 1:
                yield self._place(moment, later[0], depth)

    def _starts(self, moment: Moment, depth: int) -> list[int]:
        """Layers before each group that has a block of the moment's kind in its place."""
        period, kinds = self.subject.period, self.kinds(depth)
        own = [i for i in range(moment.part[2], depth, period) if kinds[i] == moment.kind]
        return [i - i % period for i in own]

    def _place(self, moment: Moment, start: int, depth: int) -> Place:
        run, _, within = moment.part
        period = self.subject.period
        names: dict[int, Any] = {period: "second", 0: ENDS[0]}
        name = ENDS[1] if start + period >= depth else names.get(start, start + within + 1)
        return Place(moment, start, (run, name, within))

    def through(self, place: Place, depth: int) -> int:
        """Layers up to the place, its own group included."""
        return depth if place.start is None else min(depth, place.start + self.subject.period)

    def _alike(self, place: Place, depth: int) -> int:
        """The depth at which a model of one kind of layer has its moment there."""
        return depth if place.moment.end == ENDS[0] else self.through(place, depth)

    # -- activations ---------------------------------------------------------------------------------------------------
    def held(self, moment: Moment, depth: int, tokens: int) -> int:
        """Bytes without parameters and gradients, where all layers are of the moment's kind."""
        return round(_line(self.depths, self._lines(moment, tokens), depth))

    def kept(self, moment: Moment, tokens: int) -> int:
        """Bytes of `held` for each further block: what it saves for the backward."""
        low, high = self._lines(moment, tokens)
        return round((high - low) / (self.depths[1] - self.depths[0]))

    def held_at(self, place: Place, depth: int, tokens: int) -> int:
        """Bytes without parameters and gradients."""
        moment = place.moment
        # what no block saves: rotary tables, which kinds without positions lack
        outside = [self.held(head, 0, tokens) for head in self._heads]
        more = max(outside) - outside[moment.kind]
        return self.held(moment, self._alike(place, depth), tokens) + self._further(place, depth, tokens) + more

    def saved_at(self, place: Place, depth: int, tokens: int) -> int:
        """Bytes of `held_at` that blocks save for the backward."""
        alike = self._alike(place, depth)
        return self.kept(place.moment, tokens) * alike + self._further(place, depth, tokens)

    def _further(self, place: Place, depth: int, tokens: int) -> int:
        """Bytes that layers before a place save beyond as many of its own kind."""
        moment = place.moment
        saved = [self.kept(head, tokens) for head in self._heads]
        own, before = saved[moment.kind], self.kinds(depth if place.start is None else place.start)
        saves = self.kept(moment, tokens) > own // 2  # nothing is saved as it begins and ends
        return sum(saved[kind] - own for kind in before) if saves else 0

    def _lines(self, moment: Moment, tokens: int) -> tuple[float, float]:
        """Bytes held in the steps of both depths."""
        low, high = (_line(self.sizes, x, tokens) for x in moment.held)
        return low, high

    @functools.cached_property
    def _heads(self) -> list[Moment]:
        """Of each kind, the moment after the forward; the old gradients are freed then, and there is no new one yet."""
        return [m for m in self.moments if m.part == ("head",)]

    # -- parameters and gradients --------------------------------------------------------------------------------------
    def static(self, moment: Moment, depth: int) -> int:
        """Bytes of parameters and gradients when the moment began, where all layers are of its kind."""
        return round(_line(self.depths, moment.static, depth))

    def static_at(self, place: Place, depth: int) -> int:
        """Bytes of parameters and gradients when the moment began."""
        moment, kinds = place.moment, self.kinds(depth)
        blocks, trained = self.block_parameters, self.block_gradients
        total = self.static(moment, depth) + sum(blocks[kind] - blocks[moment.kind] for kind in kinds)
        if place.start is None or moment.phase != "backward":
            gradients = self._slope(moment) - blocks[moment.kind]  # of a block, where the moment holds any
            return total + (sum(trained[kind] - gradients for kind in kinds) if gradients else 0)
        # those of later layers; of one kind of layer they are counted for all, or for the last group, already
        later = (depth if moment.end == ENDS[0] else self.subject.period) - 1 - moment.part[2]
        further = kinds[place.start + moment.part[2] + 1 :]
        return total + sum(trained[kind] for kind in further) - later * trained[moment.kind]

    def _slope(self, moment: Moment) -> int:
        """Bytes of parameters and gradients of a block."""
        return round((moment.static[1] - moment.static[0]) / (self.depths[1] - self.depths[0]))

    @functools.cached_property
    def block_parameters(self) -> list[int]:
        """Bytes of a block's parameters, by kind."""
        return [self._slope(head) for head in self._heads]

    @functools.cached_property
    def block_gradients(self) -> list[int]:
        """Bytes of a block's trained parameters, and of their gradients, by kind."""
        whole = [self._slope(m) for m in self._begun]
        return [x - parameters for x, parameters in zip(whole, self.block_parameters, strict=True)]

    @functools.cached_property
    def _begun(self) -> list[Moment]:
        """Of each kind, the first block's forward, with the gradients of the step before."""
        begun = {m.kind: m for m in reversed(self.moments) if m.part[0] == "forward"}
        return [begun[kind] for kind in sorted(begun)]

    def parameters(self, depth: int) -> int:
        """Bytes of all parameters."""
        return self.static(self._heads[0], 0) + sum(self.block_parameters[kind] for kind in self.kinds(depth))

    def trained(self, depth: int) -> int:
        """Bytes of those that are trained, and of their gradients."""
        outside = self.static(self._begun[0], 0) - self.static(self._heads[0], 0)
        return outside + sum(self.block_gradients[kind] for kind in self.kinds(depth))

    @property
    def edge_gradients(self) -> int:
        """Bytes of gradients that there are as the last block's backward begins."""
        last = next(m for m in self.moments if m.part[:2] == ("backward", "last"))
        return self.static(last, 0) - self.static(self._heads[0], 0)

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
    """Count four steps for each kind of layer; with tiles, of three and four tiles, from which on each tile holds the same.

    Args:
        sizes: tokens of the steps.
        graphs: cache of this model's compiled blocks.

    Raises:
        RuntimeError: where steps of two lengths or depths differ in more than sizes.
    """
    depths = 2 * subject.period, 3 * subject.period
    sizes = sizes or _lengths(subject.memory)
    graphs = (graphs or Graphs(Tape())) if subject.compile_blocks else None
    moments, hidden = [], {}
    for kind, make in enumerate(subject.kinds):
        counted, hidden = _counted(replace(subject, make=make), depths, sizes, graphs)
        moments += [replace(m, kind=kind) for m in counted]
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
