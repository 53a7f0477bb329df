"""Seconds and memory of a step of any model on any number of GPUs, and the longest sequence that fits.

The measurements are of one H200 (`h200.json`, by benchmarks/step_parts.py), of compiled blocks. But `long_forward` and
`long_backward` in it are 413 and 433 TFLOP/s, published for cuDNN on an H100 (arXiv 2407.08608, its bars for head dim 64
and 16,384 rows), which whole steps reach; short calls measured 487 and 438 (benchmarks/results/2026-11-26_h200.md).
docs/planning.md lists how they are scaled. A recurrence adds the time of its rule, measured on an H100
(`h100_recurrence.json`) and scaled by its FLOPs, and of the kernels around it by what they move; a short convolution
adds what its kernels move. `planning.ranks` adds what ranks wait for each other.

Shape letters: N tokens of the sequence, R ranks, K kv heads, L tokens of a rank, E embedding dim, V vocabulary, D head
dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_dilated.ext.planning.counting.compiled import Graphs
from lightning_dilated.ext.planning.counting.dry_run import BlockWork, Work
from lightning_dilated.ext.planning.counting.footprint import (
    Exchanged,
    Footprint,
    Subject,
    footprint,
    lighter,
    of_call,
    of_subject,
)
from lightning_dilated.ext.planning.counting.memory_tracker import ACTIVATIONS, GRADIENTS, Tape
from lightning_dilated.ext.planning.counting.model_specs import Facts, RecurrentLayer
from lightning_dilated.ext.planning.gpus import GPUS, Gpu
from lightning_dilated.ext.planning.machine import Line, Machine, Parts, measured_rules
from lightning_dilated.ext.planning.memory import GIB, Memory, memory, on_host, states_on_host
from lightning_dilated.ext.planning.ranks import Recurring, Step, attention_seconds, measured_pattern, step_on_ranks
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.ext.planning.streams import Carried, Exchange, further_work, in_chunks, with_carried
from lightning_dilated.ext.streams.carried_rows import chunk_count
from lightning_dilated.memory.chunked_loss import loss_tile
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.pattern.rows import in_turns, pairs, query_rows
from lightning_dilated.sequence.planner import ExchangeMemoryError

#: bytes/s between a GPU and pinned memory of its host, each way; of PCIe 5.0 x16
HOST_LINK = 50e9
#: bytes/s of a node's memory for AdamW(fused=True) of all its ranks together: assumed, for two sockets with DDR5
HOST_MEMORY = 200e9
#: numbers that AdamW reads and writes a parameter
ADAMW_PASSES = 7
#: bytes/s of an H200's memory, as copies reach it
BANDWIDTH = 4.1e12
#: the share of a block without attention that is passes over hidden states (norms, gates, sums, casts), on the measured
#: machine, by a trace of its step; passes grow with the width, products with its square
PASSES = 0.28
#: the share of a pair's time that its head dim does not change, exponentials and masks, at a head dim of `SOFTMAX_DIM`: from
#: TFLOP/s of cuDNN on an H100 over 16,384 rows with head dims 64 and 128, forward and backward (arXiv 2407.08608, its bars)
SOFTMAX_DIM, SOFTMAX_FORWARD, SOFTMAX_BACKWARD = 64, 2 - 2 * 413 / 595, 2 - 2 * 433 / 516
#: passes over the logits, in their own dtype, that the loss needs in addition to products, forward and backward; from times
#: of the compiled loss on an H200, benchmarks/results/2026-11-23_h200_one_gpu.md
LOSS_FORWARD, LOSS_BACKWARD = 5, 4
#: bytes moved for each element and tile of the loss to sum a weight's gradient, and those added where it is in 16 bits
TILE_SUM, TILE_SUM_CAST = 12, 6
#: passes over the hidden states of a block: for a window's norm and products, for their gradients; and what windows of
#: heads, and tiles, took in addition on an H200, by benchmarks/results/2026-11-22_h200_longest.md
WINDOW_FORWARD, WINDOW_BACKWARD, WINDOWS, TILES = 4, 8, 17, 53
#: fields of a Machine whose seconds scale with heads
LINES = ("arrive_forward", "arrive_backward", "pack", "add", "few_forward", "few_backward")
#: those of them that move memory alone
MOVES = LINES[2:]
FILE = Path(__file__).with_name("h200.json")


@functools.cache
def measured_machine() -> Machine:
    """One H200 and a model of 12 blocks of 768."""
    return Machine.load(FILE)


@dataclass(frozen=True)
class Time:
    """Seconds of a step.

    Attributes:
        seconds: with what the memory settings recompute or wait for, and what sharded parameters add.
        hidden: seconds of copies to and from the host that overlap with computation.
        exposed: seconds that computation waits: for other ranks, for parameters, for the host.
        flops: of the model, forward and backward, on a rank, without recomputation.
        peak: FLOP/s of the GPU.
        optimizer: seconds of the optimizer, where it runs on the host.
        exchange: of a stream whose chunks ranks share: what a rank receives in a step; else None.
    """

    step: Step
    seconds: float
    hidden: float
    exposed: float
    flops: float
    peak: float
    optimizer: float = 0.0
    exchange: Exchange | None = None

    @property
    def mfu(self) -> float:
        """Model FLOP/s over those of the GPU."""
        return self.flops / self.seconds / self.peak


@dataclass(frozen=True)
class Slower:
    """How many times as long a GPU takes as the measured one: for products, and for what moves memory."""

    products: float
    memory: float

    @classmethod
    def of(cls, gpu: Gpu) -> Slower:
        """By data sheets."""
        base = GPUS["H200"]
        return cls(base.flops / gpu.flops, base.bandwidth / gpu.bandwidth)


def scaled(facts: Facts, gpu: Gpu, base: Machine | None = None, head_dim: int | None = None) -> Machine:
    """The measured machine, as if it had run another model; `head_dim`: D, where `facts` has fewer and wider heads."""
    base, call, slower = base or measured_machine(), facts.call, Slower.of(gpu)
    wide = call.head_dim / base.head_dim
    heads = call.heads / base.heads * wide * slower.products
    each = _of_a_pair(base, call.head_dim, head_dim or call.head_dim, slower)
    parts = tuple(_parts(facts, base, p, each, slower) for p in base.parts)
    scale = {name: wide * (slower.memory if name in MOVES else slower.products) for name in LINES}
    optimizer = base.optimizer * slower.memory
    return Machine(
        f"{gpu.name}, scaled from {base.name}", facts.dim, facts.depth, call.heads, call.head_dim, call.kv_heads,
        facts.hidden, facts.vocab, facts.precision, call.causal, base.first, facts.trained.block,
        facts.trained.edge, tuple(replace(p, wide_forward=p.wide_forward * heads, wide_backward=p.wide_backward * heads)
                                     for p in parts),
        optimizer * facts.trained_parameters / (base.depth * base.block_parameters + base.edge_parameters),
        _repeated(facts, base, slower),
        *(Line(x.fixed, x.each * scale[name]) for name in LINES for x in [getattr(base, name)]),
        base.long_forward * each[0], base.long_backward * each[1],
    )  # fmt: skip


def _of_a_pair(base: Machine, joined: int, dim: int, slower: Slower) -> tuple[float, float]:
    """How many times as long a pair takes as the measured one, forward and backward; `joined`: features of `joined / dim`
    heads counted as one."""
    grown = lambda share, d: share + (1 - share) * d / SOFTMAX_DIM  # noqa: E731
    of = lambda share: grown(share, dim) / grown(share, base.head_dim) * joined / dim * slower.products  # noqa: E731
    return of(SOFTMAX_FORWARD), of(SOFTMAX_BACKWARD)


def _parts(facts: Facts, base: Machine, parts: Parts, of_a_pair: tuple[float, float], slower: Slower) -> Parts:
    """Seconds of the parts of L tokens; `of_a_pair`: see `_of_a_pair`."""
    call, tokens = facts.call, parts.tokens
    pattern, heads = measured_pattern(base, tokens), (call.heads, call.kv_heads)
    attended, rows = pairs(pattern, tokens, *heads, call.causal), query_rows(pattern, tokens, *heads)
    wide = call.head_dim / base.head_dim * slower.memory
    forward, backward = (
        x.pair * pair * attended + x.row * wide * rows
        for x, pair in zip(attention_seconds(base, tokens), of_a_pair, strict=True)
    )
    rest, head, width = _rest(facts, base, parts, slower), _head(facts, base, parts, slower), facts.dim / base.dim
    return replace(
        parts,
        attention_forward=forward,
        attention_backward=backward,
        rest_forward=rest[0],
        rest_backward=rest[1],
        edge_forward=parts.edge_forward * width * slower.memory + head[0],
        edge_backward=parts.edge_backward * width * slower.memory + head[1],
    )


def _rest(facts: Facts, base: Machine, parts: Parts, slower: Slower) -> tuple[float, float]:
    """Seconds of a block without the op, forward and backward."""
    if facts.work is not None:
        return tuple(_seconds(base, parts, x, slower) for x in (facts.work.forward, facts.work.backward))
    trained, tokens = facts.trained, parts.tokens
    products = (1 - PASSES) * trained.weights / base.block_parameters * slower.products
    passes = PASSES * facts.dim / base.dim * slower.memory
    each = tokens * _size(facts) / BANDWIDTH * slower.memory  # of one element a token that updates read or write
    more = [_seconds(base, parts, x, slower) for x in facts.convolution] or [0.0, 0.0]
    return (
        parts.rest_forward * (products + passes) + trained.forward * each + more[0],
        parts.rest_backward * (products * trained.backward_products + passes) + trained.backward * each + more[1],
    )


def _repeated(facts: Facts, base: Machine, slower: Slower) -> float:
    """The time of a recomputed forward of a block without the op, relative to the first."""
    if facts.work is None:
        return base.again
    again, forward = (_seconds(base, base.parts[0], x, slower) for x in (facts.work.again, facts.work.forward))
    return again / forward


def _seconds(base: Machine, parts: Parts, work: Work, slower: Slower) -> float:
    """Seconds of counted work for L tokens, its products at the speed of the measured block's forward."""
    flops = 2 * base.block_parameters * parts.tokens / ((1 - PASSES) * parts.rest_forward)
    return parts.tokens * work.seconds(flops / slower.products, BANDWIDTH / slower.memory)


def _recurring(layer: RecurrentLayer | None, tokens: int, gpu: Gpu) -> Recurring:
    """Seconds that a layer's recurrence adds, with L tokens; of a rule that was not measured none."""
    if layer is None:
        return Recurring()
    base, times = measured_machine(), measured_rules()
    flops = 0 if layer.unmeasured else tokens * layer.flops * GPUS[times.gpu].flops / gpu.flops
    rule = times.of(layer.description.kind, flops) if flops else (0.0, 0.0)
    of = functools.partial(_seconds, base, base.at(tokens), slower=Slower.of(gpu))
    return Recurring(*rule, of(layer.forward), of(layer.backward))


def _head(facts: Facts, base: Machine, parts: Parts, slower: Slower) -> tuple[float, float]:
    """Seconds, forward and backward, that an output projection adds where it is wider than the measured one: products at the
    speed of a block's products, and the loss's passes over the logits."""
    more = max(0, facts.vocab - base.vocab)
    products = (1 - PASSES) * more * facts.dim / base.block_parameters * slower.products
    each = more * parts.tokens * _size(facts) / BANDWIDTH * slower.memory * facts.logits
    # a frozen projection has no gradient of its own, and one of features none of its input
    back = parts.rest_backward if facts.whole else facts.logits * parts.rest_forward
    return products * parts.rest_forward + LOSS_FORWARD * each, products * back + LOSS_BACKWARD * each


def estimate(facts: Facts, memory: MemorySettings, tokens: int, setup: Setup, gpu: Gpu, away: int = 0) -> Time:
    """Seconds of a step over N tokens.

    Args:
        facts: of the model; its `work`, if it has any, is that of the settings' tiles.
        memory: settings.
        tokens: N, on all ranks together; a rank has N / R, rounded up.
        away: bytes of block inputs that a rank copies to its host.

    Raises:
        ValueError: for an exchange that does not serve.
    """
    stacks = [replace(x, call=lighter(x.call, setup.ranks)) for x in facts.stacks]
    dims, tokens_here = [x.call.head_dim for x in facts.stacks], -(-tokens // setup.ranks)
    machines = [scaled(x, gpu, head_dim=d) for x, d in zip(stacks, dims, strict=True)]
    parameters, trained = facts.parameters, facts.trained_parameters
    recurrences = [_recurring(x, tokens_here, gpu) for x in facts.recurrences]
    facts = stacks[0]
    fsdp = setup.strategy == "ring_dilated_fsdp"
    rows = of_call(facts.call, tokens, setup)
    names = [x.name or setup.exchange for x in rows.cycle]
    run = functools.partial(
        step_on_ranks, machines[0], facts.call.cycle, tokens_here, setup, exchanges=names,
        inner=machines[1] if len(machines) > 1 else None, recurring=recurrences,
    )  # fmt: skip
    step = run(recompute=memory.policy)
    plain = step if memory.policy == "none" else run(recompute="none")
    again = _grouped(machines, memory, tokens_here, step.seconds - plain.seconds)
    again += sum(_again(x, m, memory, tokens_here) for x, m in zip(stacks, machines, strict=True))
    again += sum(_windowed(x, memory, tokens_here, gpu) for x in stacks) + _summed(facts, memory, tokens_here, gpu)
    busy = step.seconds - step.exposed + again
    waits = _parameters_late(stacks, machines[0].parameter_size, setup, busy) if fsdp else 0.0
    copies, host_optimizer, gpu_optimizer = 2 * away / HOST_LINK, 0.0, 0.0
    if setup.cpu_offload:
        part = machines[0].parameter_size / setup.ranks
        copies += (2 * parameters + trained) * part / HOST_LINK
        busy += waits  # for parameters, whose copies these are
        host_optimizer = ADAMW_PASSES * trained * part * min(setup.per_node, setup.ranks) / HOST_MEMORY
        gpu_optimizer = step.compute.get("optimizer", 0.0)
    exposed_copies = max(0.0, copies - busy)
    flops, waits = sum(_flops(x, tokens) for x in stacks) / setup.ranks, waits + exposed_copies + host_optimizer
    seconds = step.seconds - gpu_optimizer + again + waits
    return Time(step, seconds, copies - exposed_copies, step.exposed + waits, flops, gpu.flops, host_optimizer)


def _grouped(machines: list[Machine], memory: MemorySettings, tokens: int, recomputed: float) -> float:
    """Seconds of recomputing all but the last block of each group, first as a group, whose later blocks read all that they
    compute; then each is recomputed by itself.

    `recomputed`: seconds of recomputing every block once.
    """
    parts = [machine.at(tokens) for machine in machines]
    each = [p.rest_forward + p.attention_forward for p in parts]
    once = [machine.depth - -(-machine.depth // memory.every) for machine in machines]
    total = sum(m.depth * x for m, x in zip(machines, each, strict=True))
    skipped = sum(n * (1 - m.again) * p.rest_forward for n, m, p in zip(once, machines, parts, strict=True))
    return recomputed * sum(n * x for n, x in zip(once, each, strict=True)) / total + skipped


def _again(facts: Facts, machine: Machine, memory: MemorySettings, tokens: int) -> float:
    """Seconds that tiles and head chunks recompute; those of tiles are in counted work."""
    rest = facts.depth * machine.at(tokens).rest_forward * machine.again
    share = lambda part: part / facts.block_parameters * rest  # noqa: E731
    total = 0.0
    if memory.tile is not None and memory.policy == "none" and facts.work is None:
        total += share(facts.feed_forward)
    if memory.head_chunks > 1:
        total += share(facts.projection)
    return total


def _windowed(facts: Facts, memory: MemorySettings, tokens: int, gpu: Gpu) -> float:
    """Seconds that tiles and windows of heads take to read and write all hidden states again; counted work has those of
    tiles."""
    windows, forwards = memory.head_chunks, 1 + (memory.policy != "none") + (memory.every > 1)
    passes = TILES if memory.tile is not None and memory.tile < tokens and facts.work is None else 0
    if windows > 1:
        passes += (windows - 1) * (WINDOW_FORWARD * forwards + WINDOW_BACKWARD) + windows * WINDOW_FORWARD + WINDOWS
    return facts.depth * passes * tokens * facts.dim * _size(facts) / BANDWIDTH * Slower.of(gpu).memory


def _summed(facts: Facts, memory: MemorySettings, tokens: int, gpu: Gpu) -> float:
    """Seconds of summing the gradient of the output projection over tiles of the loss."""
    tile = loss_tile(memory.tile, facts.vocab)
    if not (facts.logits and facts.whole) or tile is None or tile >= tokens:
        return 0.0
    each = TILE_SUM + (TILE_SUM_CAST if _size(facts) == 2 else 0)
    return -(-tokens // tile) * facts.vocab * facts.dim * each / BANDWIDTH * Slower.of(gpu).memory


def _size(facts: Facts) -> int:
    """Bytes of an element of activations."""
    return 4 if facts.precision.startswith("32") else 2


def _parameters_late(stacks: list[Facts], size: int, setup: Setup, busy: float) -> float:
    """Seconds of waiting for sharded parameters and gradients: each block's are gathered twice, and its gradients are
    reduce-scattered once, concurrently with another block's computation."""
    ranks, links = setup.ranks, setup.links
    speed = links.near if ranks <= setup.per_node else min(links.near, links.far * setup.per_node)
    part = (ranks - 1) / max(1, ranks) / speed
    if setup.cpu_offload:  # a rank's part comes from the host before it is gathered, and its gradients go there
        part += 1 / ranks / HOST_LINK
    seconds = lambda numbers: numbers * size * part + links.round  # noqa: E731
    total = sum(x.depth * (2 * seconds(x.block_parameters) + seconds(x.trained.block)) for x in stacks)
    return max(0.0, total - busy) + seconds(stacks[0].block_parameters)


def _flops(facts: Facts, tokens: int) -> float:
    call = facts.call
    attended = sum(n * pairs(x.pattern, tokens, x.heads, x.kv_heads, x.causal) for x, n in call.layers(facts.depth))
    linear = facts.depth * (2 * facts.trained.weights + facts.trained.gradients)
    edge = facts.vocab * facts.dim  # frozen, only logits pass a gradient on to the blocks
    linear += 3 * edge if facts.whole else (1 + facts.logits) * edge - facts.projection
    rules = sum(x.flops for x in in_turns(facts.recurrences or (None,), facts.depth) if x is not None)
    return (2.0 * linear + 3.0 * rules) * tokens + 14.0 * call.head_dim * attended


#: longest lengths are multiples of this many tokens a rank
GRAIN = 1024
#: the longest length that is tried, tokens a rank
MOST = 1 << 30
#: on several ranks the longest length is found to within this share of it
CLOSE = 256


def _at_once(settings: MemorySettings) -> MemorySettings:
    """The settings of a chunk by itself."""
    return replace(settings, stream=None, truncate=False)


@dataclass(frozen=True)
class Case:
    """A model with memory settings on a machine.

    Attributes:
        host: GiB of host memory that a rank may use, for block inputs and what `cpu_offload` keeps there; 0: no block
            inputs are offloaded, and the rest is not limited.
        counted, works, graphs: caches of footprints by settings, of counted work by tokens of a tile, and of graphs of
            compiled blocks.
    """

    subject: Subject
    facts: Facts
    setup: Setup
    gpu: Gpu
    host: float = 0.0
    counted: dict[MemorySettings, Footprint] = field(default_factory=dict, compare=False)
    works: dict[int, BlockWork] = field(default_factory=dict, compare=False)
    graphs: Graphs = field(default_factory=lambda: Graphs(Tape()), compare=False)

    def footprint(self, settings: MemorySettings) -> Footprint:
        """What the model holds with these settings; counted once for all `offload`."""
        bare = replace(settings, offload=0.0, stream=None, truncate=False)
        if bare not in self.counted:
            self.counted[bare] = footprint(replace(self.subject, memory=bare), graphs=self.graphs)
        counted = self.counted[bare]
        return replace(counted, subject=replace(counted.subject, memory=settings))

    def memory(self, settings: MemorySettings, tokens: int, rows: Exchanged | None = None) -> Memory:
        """What a rank holds with N tokens; `rows`: the exchange's memory, where it is known."""
        if in_chunks(settings, tokens):
            return self._stream_memory(settings, tokens)
        return memory(self.footprint(settings), tokens, self.setup, rows)

    def _stream_memory(self, settings: MemorySettings, tokens: int) -> Memory:
        """That of a chunk, the carried rows, and the sums of gradients over chunks, in fp32."""
        size, ranks, call = settings.stream or tokens, self.setup.ranks, self.subject.call
        at_once, rows = replace(self, setup=self._shares_chunks()), None
        if ranks > 1:
            rows = of_subject(self.subject, size, at_once.setup)
            rows = with_carried(rows, lighter(call, ranks), tokens, size, ranks)
        chunk = at_once.memory(_at_once(settings), size, rows)
        return self._with(chunk, Carried.of(call, self.facts.depth, tokens, settings, self.gpu.memory, ranks))

    def step_memory(self, settings: MemorySettings, tokens: int, streams: int, length: int) -> Memory:
        """What a rank holds that carries the states of its streams, `length` tokens long, with N of each at a time."""
        call = replace(self.subject.call, batch=streams)
        carried = Carried.of_steps(call, self.facts.depth, length, tokens)
        return self._with(self.memory(_at_once(settings), streams * tokens), carried)

    def _with(self, chunk: Memory, carried: Carried) -> Memory:
        """That of a chunk, and of what it is carried with."""
        kinds = dict(chunk.kinds)
        kinds[ACTIVATIONS] = kinds.get(ACTIVATIONS, 0) + carried.on_gpu
        kinds[GRADIENTS] = kinds.get(GRADIENTS, 0) + 4 * self.facts.trained_parameters
        return replace(chunk, kinds=kinds, host=chunk.host + carried.on_host, carried=carried.on_gpu)

    def _shares_chunks(self) -> Setup:
        """How a chunk is run: several ranks exchange its rows by gather."""
        if self.setup.ranks == 1:
            return self.setup
        return replace(self.setup, exchange="gather", exchange_memory=None, layout="contiguous", head_size=1)

    def time(self, settings: MemorySettings, tokens: int) -> Time:
        """Of a step with N tokens; `step` of a stream is that of one chunk."""
        if in_chunks(settings, tokens):
            return self._stream_time(settings, tokens)
        away = 0
        if settings.offload:
            away = on_host(self.footprint(settings), -(-tokens // self.setup.ranks))
        return estimate(self._in_tiles(settings, tokens), settings, tokens, self.setup, self.gpu, away)

    def _in_tiles(self, settings: MemorySettings, tokens: int) -> Facts:
        """The numbers with the work of feed-forwards in tiles, where operators are counted and N tokens take several."""
        tile = settings.tile
        if self.facts.work is None or tile is None or tile >= -(-tokens // self.setup.ranks):
            return self.facts
        if tile not in self.works:
            of = self.subject
            self.works[tile] = BlockWork.of(of.make, of.batch, of.precision, tile)
        return replace(self.facts, work=self.works[tile])

    def _stream_time(self, settings: MemorySettings, tokens: int) -> Time:
        """Every chunk forward and backward, all but the last forward once more, the pairs that cross their bounds, and what
        carried rows take between ranks, of which nothing is taken to be hidden."""
        size, call, depth, setup = settings.stream or tokens, self.facts.call, self.facts.depth, self.setup
        of = replace(self, setup=self._shares_chunks()).time
        one = of(_at_once(settings), size)
        blocks = [of(MemorySettings(policy), size).seconds for policy in ("none", "block")]
        machine = scaled(self.facts, self.gpu)
        parts = machine.at(-(-size // setup.ranks))
        whole = depth * parts.rest_forward * (1 - machine.again)  # of a forward, what a recomputed one leaves out
        forward = 0.0 if settings.truncate else blocks[1] - blocks[0] + whole + parts.edge_forward
        of_forward, of_backward = attention_seconds(machine, parts.tokens)
        further = further_work(call, depth, tokens, size)
        forwards = 1 + (settings.policy == "block") + (depth - -(-depth // settings.every)) / depth
        crossing = forwards * of_forward.of(*further) + of_backward.of(*further)
        if not settings.truncate:
            before = (chunk_count(tokens, size) - 1) * size
            crossing += of_forward.of(*further_work(call, depth, before, size))
        optimizer = one.optimizer or one.step.compute.get("optimizer", 0.0)
        seconds = tokens / size * (one.seconds - optimizer) + (chunk_count(tokens, size) - 1) * forward + optimizer
        exchange = Exchange.of(lighter(call, setup.ranks), depth, tokens, settings, setup.ranks)
        waits = exchange.seconds(setup.links, setup.ranks, setup.per_node) if setup.ranks > 1 else 0.0
        seconds += crossing / setup.ranks + waits
        chunks = tokens / size
        return replace(
            one,
            seconds=seconds,
            hidden=one.hidden * chunks,
            exposed=one.exposed * chunks + waits,
            flops=_flops(self.facts, tokens) / setup.ranks,
            exchange=exchange if setup.ranks > 1 else None,
        )

    def fits(self, settings: MemorySettings, tokens: int, rows: Exchanged | None = None) -> bool:
        """Whether N tokens fit into GPU and host."""
        planned = self.memory(settings, tokens, rows)
        on_host = planned.host + (planned.states if self.host else 0)
        return planned.peak <= self.gpu.usable(self.setup.ranks) and on_host <= self.host * GIB

    @property
    def room(self) -> float:
        """GiB of host memory left for block inputs."""
        states = states_on_host(self.footprint(MemorySettings()), self.setup)
        return max(0.0, self.host - states / GIB)

    def longest(self, settings: MemorySettings) -> int:
        """The most tokens N that fit, a multiple of GRAIN * R; 0 where none do."""
        if settings.stream is not None and self.memory(settings, settings.stream).peak <= self.gpu.usable(
            self.setup.ranks
        ):
            unit = settings.stream
            return unit * last_true(lambda n: self.fits(settings, n * unit), MOST // unit)
        unit = GRAIN * self.setup.ranks
        up_to = lambda rows: last_true(lambda n: self.fits(settings, n * unit, rows), MOST // GRAIN)  # noqa: E731
        units = up_to(Exchanged())
        if self.setup.ranks == 1:
            return units * unit
        # an exchange is priced once for each guess; it grows with N, so what fits beside that of more tokens fits
        fitting, too_many, guess = 0, units + 1, units
        while too_many - fitting > max(1, fitting // CLOSE):
            rows = self._rows(settings, guess * unit)
            beside = 0 if rows is None else up_to(rows)
            if beside >= guess:
                fitting = guess
            else:
                fitting, too_many = max(fitting, beside), guess
            guess = (fitting + too_many) // 2
        return fitting * unit

    def _rows(self, settings: MemorySettings, tokens: int) -> Exchanged | None:
        """The exchange's memory at a length that is tried; None where the exchange holds too much."""
        for name in (self.setup.exchange, "auto"):  # a named exchange may not serve this length
            try:
                return replace(self, setup=replace(self.setup, exchange=name)).memory(settings, tokens).exchange
            except ExchangeMemoryError:
                return None
            except ValueError:
                if name == "auto":
                    raise
        return None


def last_true(holds: Callable[[int], bool], most: int) -> int:
    """The largest n in 1..most for which a monotone condition holds; 0 where there is none."""
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
