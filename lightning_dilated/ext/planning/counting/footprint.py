"""Derive the memory of a model's step at any length from two steps, of different lengths, under fake tensors.

Sizes are linear in tokens, so two steps with the model's true depth suffice. The attention op's workspace is not
linear; `planning.counting.workspace` computes it for each length.

Shape letters: N tokens of the sequence, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_dilated.ext.planning.counting import dry_run
from lightning_dilated.ext.planning.counting.compiled import Graphs
from lightning_dilated.ext.planning.counting.hashed import HashedSizes, hashed_workspace
from lightning_dilated.ext.planning.counting.memory_tracker import BACKWARD, Meter, Piece, Tape
from lightning_dilated.ext.planning.counting.repeats import BLOCKS
from lightning_dilated.ext.planning.counting.workspace import OpCall, recurrence_workspace, workspace
from lightning_dilated.ext.planning.ranks import arriving, plan_of
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.models import DilatedModule
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import cycle_to, segment_width
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.exchange.all_to_all import AllToAllProgram
from lightning_dilated.sequence.exchange.program import Round, count
from lightning_dilated.sequence.exchange.row_ops import MAX_SELECTED_SHARE
from lightning_dilated.sequence.planner import Links, Plan, make_problem, price

#: numbers of tokens of the two counted steps
SIZES = (1 << 17, 1 << 18)
#: counted lengths are multiples of this number of tokens, because an image has whole rows of patches
GRAIN = 2048


@dataclass(frozen=True)
class Decoder:
    """A second stack of blocks. `name`: prefix of its parts on the tape; `parameters`: their number in one block."""

    name: str
    depth: int
    call: OpCall
    parameters: int


@dataclass(frozen=True)
class CountedModel:
    """A model to count.

    Attributes:
        make: a function that returns the model with a given depth, not yet built.
        batch: a function that returns a batch with a given number of tokens; it is called under fake tensors.
        call: a call of the attention op on one rank.
        depth: number of blocks in the first stack.
        by_operator: whether each operator of a block is a kernel, as in another library's uncompiled layers.
    """

    make: Callable[[int], DilatedModule]
    batch: Callable[[int], Any]
    precision: str
    memory: MemorySettings
    compile_blocks: bool
    call: OpCall
    depth: int
    decoder: Decoder | None = None
    by_operator: bool = False


@dataclass(frozen=True)
class Moment:
    """A piece of a step, as counted in the steps of both lengths.

    Attributes:
        piece: the piece of the shorter step.
        held: bytes at the piece's peak in each step, without parameters and gradients.
        saved: bytes of `held` that blocks of the first stack save for the backward.
        group: index of the group of blocks that are recomputed together; outside the first stack, the last group.
        within: index of the block in its group; None outside the first stack's blocks.
    """

    piece: Piece
    held: tuple[int, int]
    saved: tuple[int, int]
    group: int
    within: int | None = None

    @property
    def part(self) -> tuple:
        return self.piece.part

    @property
    def static(self) -> int:
        return self.piece.static

    @property
    def decoding(self) -> bool:
        """True if the piece belongs to the second stack."""
        return len(self.part) > 1 and self.part[0] not in BLOCKS

    @property
    def phase(self) -> str:
        """The kind of work, such as "forward", without the name of a stack."""
        return self.part[1 if self.decoding else 0]


@dataclass(frozen=True)
class Footprint:
    """The memory of a step at any number of tokens, moment by moment.

    Attributes:
        sizes: numbers of tokens of the two counted steps.
        hidden, inner: bytes per token of the hidden states between blocks, in the first stack and in the second stack.
        parameters, trained: bytes of all parameters, and bytes of trained parameters.
        blocks: (bytes of all parameters, bytes of trained parameters) of each block of the first stack.
    """

    subject: CountedModel
    sizes: tuple[int, int]
    hidden: int
    moments: tuple[Moment, ...]
    parameters: int
    trained: int
    blocks: tuple[tuple[int, int], ...]
    inner: int = 0

    def held(self, moment: Moment, tokens: int) -> int:
        """Return the bytes at a moment's peak, without parameters and gradients."""
        return _line(self.sizes, moment.held, tokens)

    def saved(self, moment: Moment, tokens: int) -> int:
        """Return the bytes of `held` that blocks save for the backward."""
        return _line(self.sizes, moment.saved, tokens)

    def layers(self, moment: Moment) -> int:
        """Return the number of the first stack's layers up to the end of the moment's group."""
        return min(self.subject.depth, (moment.group + 1) * self.subject.memory.every)

    @functools.cached_property
    def edge_gradients(self) -> int:
        """Bytes of gradients that exist when the last block's backward begins."""
        return next(m.static for m in self.moments if m.part[0] == "backward") - self.parameters

    @functools.cached_property
    def first_kept(self) -> int:
        """1 if the first block's input is never offloaded, because nothing before it is trained; else 0."""
        return 0 if any(m.part == ("first",) for m in self.moments) else 1

    @property
    def parameter_size(self) -> int:
        return dry_run.PRECISIONS[self.subject.precision][0].itemsize

    def room(self, moment: Moment, call: OpCall) -> int:
        """Return the bytes that the op in the moment's layer needs in addition to its inputs and results."""
        piece = moment.piece
        if not piece.op:
            return 0
        call = replace(call, dtype=piece.dtype, pattern=call.cycle[piece.part[-1] % len(call.cycle)], others=())
        forward = not piece.op.endswith(BACKWARD)
        if piece.logits:
            sizes = HashedSizes(piece.heads, call.head_dim, *piece.logits)
            tokens = call.batch * call.tokens
            return hashed_workspace(forward, tokens, sizes, call.dtype, piece.spec, Meter, call.capability)
        if piece.spec:
            return recurrence_workspace(forward, call, piece.spec, Meter)
        if piece.heads != call.heads:
            call = replace(call, window=(0, piece.heads))
        return workspace(call)[not forward]


def _line(at: tuple[int, int], values: tuple[int, int], x: int) -> int:
    """Evaluate the line through two points, in integers."""
    run = at[1] - at[0]
    return values[0] + ((values[1] - values[0]) * (x - at[0]) + run // 2) // run


def footprint(subject: CountedModel, sizes: tuple[int, int] | None = None, graphs: Graphs | None = None) -> Footprint:
    """Derive the footprint from two counted steps. With tiles, the steps have three and four tiles.

    Args:
        subject: model to count.
        sizes: numbers of tokens of the two steps; None: `_lengths`.
        graphs: cache of this model's compiled blocks.

    Raises:
        RuntimeError: if the two steps consist of different pieces.
    """
    sizes = sizes or _lengths(subject.memory)
    graphs = (graphs or Graphs(Tape())) if subject.compile_blocks else None
    make = functools.partial(subject.make, subject.depth)
    short, long = (
        dry_run.step(make, functools.partial(subject.batch, x), subject.precision, subject.memory, graphs)
        for x in sizes
    )
    if [(p.part, p.op, p.heads) for p in short.pieces] != [(p.part, p.op, p.heads) for p in long.pieces]:
        raise RuntimeError(
            "steps of two lengths consist of different pieces, so the memory at other lengths cannot be derived."
        )
    return Footprint(
        subject, sizes, short.hidden[dry_run.MAIN] // sizes[0], tuple(_moments(subject, short, long)),
        *short.whole, tuple(short.blocks), short.hidden[subject.decoder.name] // sizes[0] if subject.decoder else 0,
    )  # fmt: skip


def _lengths(settings: MemorySettings) -> tuple[int, int]:
    """Return the numbers of tokens of the two steps to count."""
    tile = settings.narrow_tile if settings.head_chunks > 1 else settings.tile
    part = None if tile is None else math.lcm(tile, GRAIN)
    return SIZES if part is None else (3 * part, 4 * part)


def _moments(subject: CountedModel, *steps: Tape) -> Iterator[Moment]:
    depth, every = subject.depth, subject.memory.every
    saved = [_saved(step, depth, subject.memory) for step in steps]
    last = (depth - 1) // every
    for one, two in zip(*(step.pieces for step in steps), strict=True):
        held = one.peak - one.static, two.peak - two.static
        if one.part[0] in BLOCKS:
            group, within = divmod(one.part[1], every)
            layers = group * every if one.part[0] == "forward" else min(depth, (group + 1) * every)
        else:
            outside = one.part in (("embedding",), ("first",), ("after",))
            group, within, layers = last, None, 0 if outside else depth
        yield Moment(one, held, tuple(x[layers] for x in saved), group, within)


def _saved(step: Tape, depth: int, settings: MemorySettings) -> list[int]:
    """Return the bytes that the first 0, 1, ... blocks save for the backward."""
    if settings.policy == "block":  # other tensors that stay after a block are autocast's copies of weights
        return [-(-i // settings.every) * step.hidden[dry_run.MAIN] for i in range(depth + 1)]
    begun = {piece.part: piece.begin for piece in reversed(step.pieces)}
    ends = [*(begun["forward", i] for i in range(depth)), begun["behind", depth - 1]]
    return [end - ends[0] for end in ends]


#: maximum number of heads that are counted on more than `EXACT` ranks (see `lighter`)
HEADS = 16
#: on up to this number of ranks, the buffers of each rank are counted; on more ranks, they are estimated
EXACT = 16


@dataclass(frozen=True)
class Exchanged:
    """Bytes of an exchange; each number is the maximum over ranks.

    Attributes:
        plan: the exchange's plan; None on one rank.
        name: the exchange's name; None if no segment crosses a shard.
        kept: bytes of rows that a layer saves for the backward.
        forward, backward: bytes of all temporary tensors of a call.
        queries: number of q rows, over heads, that attend to other ranks' keys.
        decoder: exchange of a second stack's calls.
        others: exchanges of layers 1, 2, ... if patterns differ; layers cycle through this exchange and `others`.
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
        """The exchanges that the layers cycle through."""
        return self, *self.others

    def most(self, name: str) -> int:
        """Return the maximum of a field over layers."""
        return max(getattr(x, name) for x in self.cycle)

    def kept_by(self, layers: int) -> int:
        """Return the bytes of rows that layers 0 to `layers` - 1 save."""
        return sum(x.kept for x in cycle_to(self.cycle, layers))


@functools.lru_cache(maxsize=4096)
def exchanged(
    pattern: DilatedPattern, tokens: int, heads: tuple[int, int, int], causal: bool, element_size: int, setup: Setup
) -> Exchanged:
    """Return the bytes that a call over N tokens exchanges; `heads` = (H, K, D).

    Raises:
        ValueError: if the exchange cannot run this pattern, or needs more than `setup.exchange_memory`.
    """
    if setup.ranks == 1:
        return Exchanged()
    single = make_problem(pattern, tokens, *heads[:2], ranks=setup.ranks, causal=causal, layout=setup.layout)
    chosen = plan_of(
        single, setup.exchange, setup.head_size, ranks_per_node=setup.per_node, head_dim=heads[2],
        element_size=element_size, links=setup.links, exchange_memory=setup.exchange_memory,
    )  # fmt: skip
    if chosen.exchange is None:
        return Exchanged(chosen)
    per_node = max(1, setup.per_node // chosen.head_size)
    if chosen.problem.shard.ranks > EXACT:
        return _priced(chosen, chosen.exchange, per_node, heads[2], element_size, setup.links)
    return _of(chosen, chosen.exchange, per_node, heads[2], element_size)


def _priced(chosen: Plan, name: str, per_node: int, dim: int, size: int, links: Links) -> Exchanged:
    """Estimate the bytes on many ranks. Assume that each rank sends the number of bytes that the busiest rank receives,
    and that all queries of the densest branch with segments longer than a shard attend to other ranks' keys."""
    problem = chosen.problem
    prices = chosen.prices or (price(problem, name, per_node, dim, size, links),)
    kept = next(p for p in prices if p.exchange == name).kept
    shard, wide = problem.shard.longest, max(4, size)
    served = lambda b: problem.num_heads if b.heads is None else len(b.heads)  # noqa: E731
    # in a window, only queries near the ends of a rank's tokens attend to other ranks' keys
    reach = lambda b: shard if b.width is None else min(shard, (2 - problem.causal) * (b.width - 1) * b.dilation_rate)  # noqa: E731
    rows = [
        reach(b) * served(b) // b.dilation_rate
        for b in problem.pattern.branches
        if segment_width(b, problem.shard.seq_len) > shard
    ]
    queries = max(rows, default=0)
    of_queries = queries * dim * (2 * size + wide), queries * dim * (3 * size + wide)
    return Exchanged(chosen, name, kept, 2 * kept + of_queries[0], 3 * kept * wide // size + of_queries[1], queries)


def _of(chosen: Plan, name: str, per_node: int, dim: int, size: int) -> Exchanged:
    """Count the bytes of each rank's program; return the maxima over ranks."""
    problem, wide = chosen.problem, max(4, size)
    row, wide_row = 2 * dim * size, 2 * dim * wide
    each = []
    for rank in range(problem.shard.ranks):
        program = EXCHANGES[name].program(problem, rank, per_node)
        rounds = (program.keys, program.queries) if isinstance(program, AllToAllProgram) else program.rounds
        packed, landed = zip(*(_buffers(x, rank) for x in rounds), strict=True)
        queries = 0 if problem.shard.interleaved else arriving(problem, rank)[2]
        # forward: rows of q, out and the fp32 sum of out; backward: rows of grad, q, out and the fp32 sum of dq
        of_queries = queries * dim * (2 * size + wide), queries * dim * (3 * size + wide)
        if isinstance(program, AllToAllProgram):  # all rounds are in memory together
            kept, forward, backward = (
                sum(landed) * row,
                sum(landed + packed) * row,
                sum(landed + packed) * (row + wide_row),
            )
        elif program.keep:
            kept, forward = sum(landed) * row, sum(landed + packed) * row
            backward = sum(landed) * wide_row + sum(packed) * wide_row * 2
        else:  # two rounds are in memory together
            kept, forward = 0, 2 * (max(landed) + max(packed)) * row
            backward = 2 * (max(landed) + max(packed)) * (row + wide_row)
        each.append((kept, forward + of_queries[0], backward + of_queries[1], queries))
    return Exchanged(chosen, name, *map(max, zip(*each, strict=True)))


def _buffers(step: Round, rank: int) -> tuple[int, int]:
    """Return the numbers of rows in a rank's (send buffers, receive buffers); both include rows for the rank itself."""
    local = count(step.sends.get(rank, ()))
    remote = lambda side: sum(count(rows) for peer, rows in side.items() if peer != rank)  # noqa: E731
    return remote(step.sends) + local, remote(step.receives) + local


def of_call(call: OpCall, tokens: int, setup: Setup) -> Exchanged:
    """Return `exchanged` for a model's calls over N tokens."""
    call = lighter(call, setup.ranks)
    heads = call.heads, call.kv_heads, call.head_dim
    first, *others = (
        exchanged(pattern, tokens, heads, call.causal, call.dtype.itemsize, setup) for pattern in call.cycle
    )
    return replace(first, others=tuple(others))


def of_subject(subject: CountedModel, tokens: int, setup: Setup) -> Exchanged:
    """Return `exchanged` for the calls of both stacks of a model."""
    main = of_call(subject.call, tokens, setup)
    if subject.decoder is None:
        return main
    return replace(main, decoder=of_call(subject.decoder.call, tokens, setup))


def lighter(call: OpCall, ranks: int) -> OpCall:
    """Return the call with fewer and wider heads if there are many ranks, because counting each head takes long. The
    bytes, FLOPs and query heads per kv head are unchanged."""
    group = call.heads // call.kv_heads
    if ranks <= EXACT or call.heads <= HEADS or any(b.heads is not None for x in call.cycle for b in x.branches):
        return call
    kv = max((d for d in range(1, call.kv_heads + 1) if call.kv_heads % d == 0 and d * group <= HEADS), default=1)
    return replace(call, heads=kv * group, kv_heads=kv, head_dim=call.head_dim * call.kv_heads // kv)


def sharded(call: OpCall, tokens: int, ranks: int, rows: Exchanged) -> OpCall:
    """Return the call of the rank in the middle of a sequence of N tokens."""
    tokens_here = -(-tokens // ranks)
    if ranks == 1:
        return replace(call, tokens=tokens)
    rank = ranks // 2
    tokens_here = min(tokens_here, tokens - rank * tokens_here) if tokens > rank * tokens_here else tokens_here
    final = rows.most("queries") <= MAX_SELECTED_SHARE * tokens_here * call.heads
    return replace(call, tokens=tokens_here, whole=tokens, offset=rank * tokens_here, final=final)
