"""Estimate the time and memory of a training step on any number of GPUs, and the longest sequence that fits.

The times in `h200.json` were measured on one H200 with compiled blocks by benchmarks/step_parts.py. In a step, the same
kernels take longer, so attention's times have a factor of 1.11 and `rest` has 1.03 (traces in
benchmarks/results/2026-11-28_h200_two_third.md). `long_forward` and `long_backward` are published numbers, 413 and 433
TFLOP/s of cuDNN on an H100 (arXiv 2407.08608, head dim 64, 16,384 rows). Whole steps reach these speeds; short calls
alone reached 487 and 438 TFLOP/s (benchmarks/results/2026-11-26_h200.md). docs/planning.md describes how times are
scaled. A recurrence adds the time of its rule, measured on an H100 (`h100_recurrence.json`) and scaled by FLOPs. The
time of other kernels of recurrences and short convolutions is computed from the bytes that they move. Lookups of
hashed heads have a time for each row and each lookup, and ranks wait for all of their rows. `planning.ranks` adds waits
between ranks.

Shape letters: N tokens of the sequence, R ranks, L tokens of a rank, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_dilated.ext.planning.counting.compiled import Graphs
from lightning_dilated.ext.planning.counting.dry_run import BlockWork, Work
from lightning_dilated.ext.planning.counting.footprint import (
    CountedModel,
    Exchanged,
    Footprint,
    footprint,
    lighter,
    of_call,
    of_subject,
)
from lightning_dilated.ext.planning.counting.hashed import (
    CarriedBytes,
    carried_hashed,
    entry_seconds,
    looked_up_share,
    sent_bytes,
)
from lightning_dilated.ext.planning.counting.memory_tracker import ACTIVATIONS, GRADIENTS, Tape
from lightning_dilated.ext.planning.counting.model_specs import Facts, HashedLayer, RecurrentLayer
from lightning_dilated.ext.planning.gpus import GPUS, Gpu
from lightning_dilated.ext.planning.machine import Line, Machine, Parts, measured_rules
from lightning_dilated.ext.planning.memory import GIB, Memory, memory, on_host, states_on_host
from lightning_dilated.ext.planning.ranks import Recurring, Step, attention_seconds, measured_pattern, step_on_ranks
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.ext.planning.streams import Carried, Exchange, further_work, in_chunks, with_carried
from lightning_dilated.ext.streams.carried_rows import chunk_count
from lightning_dilated.memory.chunked_loss import loss_tile
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.pattern.rows import cycle_to, pairs, query_rows
from lightning_dilated.sequence.planner import ExchangeMemoryError

#: bytes/s between a GPU and pinned memory of its host, each way, over PCIe 5.0 x16
HOST_LINK = 50e9
#: assumed bytes/s of a node's memory (two sockets with DDR5) while AdamW(fused=True) runs for all ranks of the node
HOST_MEMORY = 200e9
#: numbers that AdamW reads and writes for each parameter
ADAMW_PASSES = 7
#: bytes/s that copies within an H200's memory reach
BANDWIDTH = 4.1e12
#: share of passes over hidden states (norms, gates, sums, casts) in a block's time without attention, from a trace on
#: the measured machine. The time of passes is proportional to the width, and the time of products to its square
PASSES = 0.28
#: share of a pair's time that does not depend on the head dim (exponentials and masks), at head dim `SOFTMAX_DIM`,
#: computed from TFLOP/s of cuDNN on an H100 with 16,384 rows and head dims 64 and 128 (arXiv 2407.08608)
SOFTMAX_DIM, SOFTMAX_FORWARD, SOFTMAX_BACKWARD = 64, 2 - 2 * 413 / 595, 2 - 2 * 433 / 516
#: passes over the logits, in their dtype, that the loss needs in addition to products, in forward and backward, derived
#: from times of the compiled loss on an H200 (benchmarks/results/2026-11-23_h200_one_gpu.md)
LOSS_FORWARD, LOSS_BACKWARD = 5, 4
#: bytes moved for each weight and tile to sum weight gradients over tiles of the loss, and further bytes for 16 bits
TILE_SUM, TILE_SUM_CAST = 12, 6
#: passes over a block's hidden states, measured on an H200 (benchmarks/results/2026-11-22_h200_longest.md): norm and
#: products of a window of heads, their gradients, and further passes if there are several windows, or tiles
WINDOW_FORWARD, WINDOW_BACKWARD, WINDOWS, TILES = 4, 8, 17, 38
#: fields of a Machine with seconds that are proportional to the number of heads
LINES = ("arrive_forward", "arrive_backward", "pack", "add", "few_forward", "few_backward")
#: fields in `LINES` for work that only moves memory
MOVES = LINES[2:]


@functools.cache
def measured_machine() -> Machine:
    """Load the times that were measured on one H200 for a model with 12 blocks of width 768."""
    return Machine.load(Path(__file__).with_name("h200.json"))


@dataclass(frozen=True)
class Time:
    """The time of a step.

    Attributes:
        seconds: the whole step, including recomputation, copies and waits for sharded parameters.
        hidden: seconds of copies to and from the host that overlap with computation.
        exposed: seconds that computation waits for other ranks, parameters or the host.
        flops: FLOPs of the model on a rank, forward and backward, without recomputation.
        peak: FLOP/s of the GPU.
        optimizer: seconds of the optimizer if it runs on the host, else 0.
        exchange: bytes that a rank receives in a step of a stream, if ranks share its chunks; else None.
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
        """Model FLOP/s divided by the GPU's peak FLOP/s."""
        return self.flops / self.seconds / self.peak


@dataclass(frozen=True)
class RelativeSpeed:
    """A GPU's time divided by the measured GPU's, for products and for moving memory."""

    products: float
    memory: float

    @classmethod
    def of(cls, gpu: Gpu) -> RelativeSpeed:
        """Compute the ratios from data sheets."""
        base = GPUS["H200"]
        return cls(base.flops / gpu.flops, base.bandwidth / gpu.bandwidth)


def scaled(facts: Facts, gpu: Gpu, base: Machine | None = None, head_dim: int | None = None) -> Machine:
    """Scale the measured times to another model and GPU; `head_dim`: the true D if `facts` has joined heads."""
    base, call, slower = base or measured_machine(), facts.call, RelativeSpeed.of(gpu)
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


def _of_a_pair(base: Machine, joined: int, dim: int, slower: RelativeSpeed) -> tuple[float, float]:
    """Return a pair's (forward, backward) time divided by the time on `base`; `joined`: head dim of heads that `lighter`
    joined."""
    grown = lambda share, d: share + (1 - share) * d / SOFTMAX_DIM  # noqa: E731
    times = lambda share: grown(share, dim) / grown(share, base.head_dim) * joined / dim * slower.products  # noqa: E731
    return times(SOFTMAX_FORWARD), times(SOFTMAX_BACKWARD)


def _parts(facts: Facts, base: Machine, parts: Parts, of_a_pair: tuple[float, float], slower: RelativeSpeed) -> Parts:
    """Scale the measured parts of a step for L tokens; `of_a_pair`: returned by `_of_a_pair`."""
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


def _rest(facts: Facts, base: Machine, parts: Parts, slower: RelativeSpeed) -> tuple[float, float]:
    """Return the (forward, backward) seconds of a block without attention."""
    if facts.work is not None:
        return tuple(_seconds(base, parts, x, slower) for x in (facts.work.forward, facts.work.backward))
    trained, tokens = facts.trained, parts.tokens
    products = (1 - PASSES) * trained.weights / base.block_parameters * slower.products
    passes = PASSES * facts.dim / base.dim * slower.memory
    each = tokens * _size(facts) / BANDWIDTH * slower.memory  # seconds to move one element for every token
    extra = [_seconds(base, parts, x, slower) for x in facts.convolution] or [0.0, 0.0]
    return (
        parts.rest_forward * (products + passes) + trained.forward * each + extra[0],
        parts.rest_backward * (products * trained.backward_products + passes) + trained.backward * each + extra[1],
    )


def _repeated(facts: Facts, base: Machine, slower: RelativeSpeed) -> float:
    """Return the time of a recomputed forward without attention, divided by the time of the first forward."""
    if facts.work is None:
        return base.again
    again, forward = (_seconds(base, base.parts[0], x, slower) for x in (facts.work.again, facts.work.forward))
    return again / forward


def _seconds(base: Machine, parts: Parts, work: Work, slower: RelativeSpeed) -> float:
    """Return the seconds of counted work for L tokens; products run at the measured forward's speed."""
    flops = 2 * base.block_parameters * parts.tokens / ((1 - PASSES) * parts.rest_forward)
    return parts.tokens * work.seconds(flops / slower.products, BANDWIDTH / slower.memory)


def _recurring(layer: RecurrentLayer | None, tokens: int, gpu: Gpu) -> Recurring:
    """Return the seconds that a layer's recurrence adds for L tokens; 0 for a rule that was not measured."""
    if layer is None:
        return Recurring()
    times = measured_rules()
    flops = 0 if layer.unmeasured else tokens * layer.flops * GPUS[times.gpu].flops / gpu.flops
    rule = times.of(layer.description.kind, flops) if flops else (0.0, 0.0)
    return Recurring(*rule, *_around(layer, tokens, gpu))


def _hashed(layer: HashedLayer | None, tokens: int, gpu: Gpu, setup: Setup) -> Recurring:
    """Return the seconds that a layer's hashed heads add for L tokens."""
    if layer is None:
        return Recurring()
    rows = tokens * layer.sizes.kv_heads
    return Recurring(
        *_looked_up(layer, rows, rows * layer.description.probes, gpu, setup), *_around(layer, tokens, gpu)
    )


def _looked_up(layer: HashedLayer, rows: float, lookups: float, gpu: Gpu, setup: Setup) -> tuple[float, ...]:
    """Return the (forward, backward) seconds of the op of hashed heads for a rank's rows and lookups."""
    call, slower = (layer.description, layer.sizes), RelativeSpeed.of(gpu).memory
    seconds = [(rows + lookups) * x * slower for x in entry_seconds(*call)]
    if setup.ranks == 1:
        return tuple(seconds)
    far = max(0.0, 1 - setup.per_node / setup.ranks)
    link = (1 - far) / setup.links.near + far / setup.links.far
    sent = sent_bytes(*call, layer.dtype, rows, lookups, setup.ranks)
    return tuple(x + size * link for x, size in zip(seconds, sent, strict=True))


def _around(layer: RecurrentLayer | HashedLayer, tokens: int, gpu: Gpu) -> tuple[float, float]:
    """Return the (forward, backward) seconds of the counted work of a recurrence or of hashed heads."""
    base = measured_machine()
    seconds = functools.partial(_seconds, base, base.at(tokens), slower=RelativeSpeed.of(gpu))
    return seconds(layer.forward), seconds(layer.backward)


def _head(facts: Facts, base: Machine, parts: Parts, slower: RelativeSpeed) -> tuple[float, float]:
    """Return the (forward, backward) seconds that the output projection adds if it is wider than the measured one."""
    wider = max(0, facts.vocab - base.vocab)
    products = (1 - PASSES) * wider * facts.dim / base.block_parameters * slower.products
    each = wider * parts.tokens * _size(facts) / BANDWIDTH * slower.memory * facts.logits
    # a frozen projection has no weight gradient; a projection of input features has no input gradient
    back = parts.rest_backward if facts.whole else facts.logits * parts.rest_forward
    return products * parts.rest_forward + LOSS_FORWARD * each, products * back + LOSS_BACKWARD * each


def estimate(facts: Facts, memory: MemorySettings, tokens: int, setup: Setup, gpu: Gpu, away: int = 0) -> Time:
    """Estimate the time of a step over N tokens.

    Args:
        facts: the model's numbers; if its `work` is counted, it must have been counted with the settings' tiles.
        memory: the memory settings.
        tokens: N, the tokens of all ranks together; a rank has N / R, rounded up.
        setup: the ranks, their links and the strategy.
        gpu: the GPU of each rank.
        away: bytes of block inputs that a rank copies to its host.

    Raises:
        ValueError: if the named exchange does not serve the call.
    """
    stacks = [replace(x, call=lighter(x.call, setup.ranks)) for x in facts.stacks]
    dims, tokens_here = [x.call.head_dim for x in facts.stacks], -(-tokens // setup.ranks)
    machines = [scaled(x, gpu, head_dim=d) for x, d in zip(stacks, dims, strict=True)]
    parameters, trained = facts.parameters, facts.trained_parameters
    recurrences = [_recurring(x, tokens_here, gpu) for x in facts.recurrences]
    hashed = [_hashed(x, tokens_here, gpu, setup) for x in facts.hashed]
    facts = stacks[0]
    fsdp = setup.strategy == "ring_dilated_fsdp"
    rows = of_call(facts.call, tokens, setup)
    names = [x.name or setup.exchange for x in rows.cycle]
    run = functools.partial(
        step_on_ranks, machines[0], facts.call.cycle, tokens_here, setup, exchanges=names,
        inner=machines[1] if len(machines) > 1 else None, recurring=recurrences, hashed=hashed,
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
        busy += waits  # copies also overlap with the waits for parameters
        host_optimizer = ADAMW_PASSES * trained * part * min(setup.per_node, setup.ranks) / HOST_MEMORY
        gpu_optimizer = step.compute.get("optimizer", 0.0)
    exposed_copies = max(0.0, copies - busy)
    flops, waits = sum(_flops(x, tokens) for x in stacks) / setup.ranks, waits + exposed_copies + host_optimizer
    seconds = step.seconds - gpu_optimizer + again + waits
    return Time(step, seconds, copies - exposed_copies, step.exposed + waits, flops, gpu.flops, host_optimizer)


def _grouped(machines: list[Machine], memory: MemorySettings, tokens: int, recomputed: float) -> float:
    """Return the seconds to run all but the last block of each group once more. These forwards are complete, because
    the next block reads the output. `recomputed`: seconds to recompute every block once."""
    parts = [machine.at(tokens) for machine in machines]
    each = [p.rest_forward + p.attention_forward for p in parts]
    once = [machine.depth - -(-machine.depth // memory.every) for machine in machines]
    total = sum(m.depth * x for m, x in zip(machines, each, strict=True))
    skipped = sum(n * (1 - m.again) * p.rest_forward for n, m, p in zip(once, machines, parts, strict=True))
    return recomputed * sum(n * x for n, x in zip(once, each, strict=True)) / total + skipped


def _again(facts: Facts, machine: Machine, memory: MemorySettings, tokens: int) -> float:
    """Return the seconds of recomputation for tiles and head chunks; counted work already includes tiles."""
    rest = facts.depth * machine.at(tokens).rest_forward * machine.again
    share = lambda part: part / facts.block_parameters * rest  # noqa: E731
    total = 0.0
    if memory.tile is not None and memory.policy == "none" and facts.work is None:
        total += share(facts.feed_forward)
    if memory.head_chunks > 1:
        total += share(facts.projection)
    return total


def _windowed(facts: Facts, memory: MemorySettings, tokens: int, gpu: Gpu) -> float:
    """Return the seconds that tiles and windows add for passes over hidden states; counted work includes tiles."""
    windows, forwards = memory.head_chunks, 1 + (memory.policy != "none") + (memory.every > 1)
    passes = TILES if memory.tile is not None and memory.tile < tokens and facts.work is None else 0
    if windows > 1:
        passes += (windows - 1) * (WINDOW_FORWARD * forwards + WINDOW_BACKWARD) + windows * WINDOW_FORWARD + WINDOWS
    return facts.depth * passes * tokens * facts.dim * _size(facts) / BANDWIDTH * RelativeSpeed.of(gpu).memory


def _summed(facts: Facts, memory: MemorySettings, tokens: int, gpu: Gpu) -> float:
    """Return the seconds of summing the output projection's gradient over tiles of the loss."""
    tile = loss_tile(memory.tile, facts.vocab)
    if not (facts.logits and facts.whole) or tile is None or tile >= tokens:
        return 0.0
    each = TILE_SUM + (TILE_SUM_CAST if _size(facts) == 2 else 0)
    return -(-tokens // tile) * facts.vocab * facts.dim * each / BANDWIDTH * RelativeSpeed.of(gpu).memory


def _size(facts: Facts) -> int:
    """Return the bytes of an element of activations."""
    return 4 if facts.precision.startswith("32") else 2


def _parameters_late(stacks: list[Facts], size: int, setup: Setup, busy: float) -> float:
    """Return the seconds of waiting for sharded parameters and gradients. Each block's parameters are gathered twice
    and its gradients reduce-scattered once, while another block computes."""
    ranks, links = setup.ranks, setup.links
    speed = links.near if ranks <= setup.per_node else min(links.near, links.far * setup.per_node)
    part = (ranks - 1) / max(1, ranks) / speed
    if setup.cpu_offload:  # the shard is copied from the host, and its gradient to the host
        part += 1 / ranks / HOST_LINK
    seconds = lambda numbers: numbers * size * part + links.round  # noqa: E731
    total = sum(x.depth * (2 * seconds(x.block_parameters) + seconds(x.trained.block)) for x in stacks)
    return max(0.0, total - busy) + seconds(stacks[0].block_parameters)


def _flops(facts: Facts, tokens: int) -> float:
    call = facts.call
    attended = sum(n * pairs(x.pattern, tokens, x.heads, x.kv_heads, x.causal) for x, n in call.layers(facts.depth))
    linear = facts.depth * (2 * facts.trained.weights + facts.trained.gradients)
    edge = facts.vocab * facts.dim  # a frozen projection passes a gradient to the blocks only if it computes logits
    linear += 3 * edge if facts.whole else (1 + facts.logits) * edge - facts.projection
    mixers = *cycle_to(facts.recurrences or (None,), facts.depth), *facts.hashed
    rules = sum(x.flops for x in mixers if x is not None)
    return (2.0 * linear + 3.0 * rules) * tokens + 14.0 * call.head_dim * attended


#: the search for the longest length tries multiples of this number of tokens per rank
GRAIN = 1024
#: the longest length that is tried, in tokens per rank
MOST = 1 << 30
#: relative precision of the longest length on several ranks: 1 / CLOSE
CLOSE = 256


def _at_once(settings: MemorySettings) -> MemorySettings:
    """Return the settings for a single chunk."""
    return replace(settings, stream=None, truncate=False)


@dataclass(frozen=True)
class Case:
    """A model with memory settings on a machine.

    Attributes:
        host: GiB of host memory that a rank may use for block inputs and for `cpu_offload`. 0: block inputs are not
            offloaded, and `cpu_offload` is not limited.
        counted, works, graphs: caches of footprints by settings, work by tile length, and graphs of compiled blocks.
    """

    subject: CountedModel
    facts: Facts
    setup: Setup
    gpu: Gpu
    host: float = 0.0
    counted: dict[MemorySettings, Footprint] = field(default_factory=dict, compare=False)
    works: dict[int, BlockWork] = field(default_factory=dict, compare=False)
    graphs: Graphs = field(default_factory=lambda: Graphs(Tape()), compare=False)

    def footprint(self, settings: MemorySettings) -> Footprint:
        """Count the model's memory with these settings; settings that differ only in `offload` share one count."""
        bare = replace(settings, offload=0.0, stream=None, truncate=False)
        if bare not in self.counted:
            self.counted[bare] = footprint(replace(self.subject, memory=bare), graphs=self.graphs)
        counted = self.counted[bare]
        return replace(counted, subject=replace(counted.subject, memory=settings))

    def memory(self, settings: MemorySettings, tokens: int, rows: Exchanged | None = None) -> Memory:
        """Return a rank's memory for N tokens; `rows`: memory of the exchange, which is computed if `rows` is None."""
        if in_chunks(settings, tokens):
            return self._stream_memory(settings, tokens)
        return memory(self.footprint(settings), tokens, self.setup, rows)

    def _stream_memory(self, settings: MemorySettings, tokens: int) -> Memory:
        """Return the memory of a chunk plus the carried rows and the fp32 sums of gradients over chunks."""
        size, ranks, call = settings.stream or tokens, self.setup.ranks, self.subject.call
        at_once, rows = replace(self, setup=self._shares_chunks()), None
        if ranks > 1:
            rows = of_subject(self.subject, size, at_once.setup)
            rows = with_carried(rows, lighter(call, ranks), tokens, size, ranks)
        chunk = at_once.memory(_at_once(settings), size, rows)
        hashed = [CarriedBytes.of(x.description, x.sizes, x.dtype, tokens, size, ranks) for x in self.facts.hashed if x]
        return self._with(chunk, Carried.of(call, self.facts.depth, tokens, settings, self.gpu.memory, ranks, hashed))

    def step_memory(self, settings: MemorySettings, tokens: int, streams: int, length: int) -> Memory:
        """Return a rank's memory for a step over the next N tokens of each of `streams` streams of `length` tokens."""
        call = replace(self.subject.call, batch=streams)
        carried = Carried.of_steps(call, self.facts.depth, length, tokens)
        return self._with(self.memory(_at_once(settings), streams * tokens), carried)

    def _with(self, chunk: Memory, carried: Carried) -> Memory:
        """Return the memory of a chunk with the carried states and fp32 sums of gradients added."""
        kinds = dict(chunk.kinds)
        kinds[ACTIVATIONS] = kinds.get(ACTIVATIONS, 0) + carried.on_gpu
        kinds[GRADIENTS] = kinds.get(GRADIENTS, 0) + 4 * self.facts.trained_parameters
        return replace(chunk, kinds=kinds, host=chunk.host + carried.on_host, carried=carried.on_gpu)

    def _shares_chunks(self) -> Setup:
        """Return the setup of one chunk: several ranks exchange its rows by gather."""
        if self.setup.ranks == 1:
            return self.setup
        return replace(self.setup, exchange="gather", exchange_memory=None, layout="contiguous", head_size=1)

    def time(self, settings: MemorySettings, tokens: int) -> Time:
        """Estimate the time of a step with N tokens; for a stream, `Time.step` is the step of one chunk."""
        if in_chunks(settings, tokens):
            return self._stream_time(settings, tokens)
        away = 0
        if settings.offload:
            away = on_host(self.footprint(settings), -(-tokens // self.setup.ranks))
        return estimate(self._in_tiles(settings, tokens), settings, tokens, self.setup, self.gpu, away)

    def _in_tiles(self, settings: MemorySettings, tokens: int) -> Facts:
        """Return the facts; if they contain counted work and N tokens need several tiles, count it again in tiles."""
        tile = settings.tile
        if self.facts.work is None or tile is None or tile >= -(-tokens // self.setup.ranks):
            return self.facts
        if tile not in self.works:
            subject = self.subject
            self.works[tile] = BlockWork.of(subject.make, subject.batch, subject.precision, tile)
        return replace(self.facts, work=self.works[tile])

    def _stream_time(self, settings: MemorySettings, tokens: int) -> Time:
        """Estimate the time of a step in chunks, as a sum without overlap: each chunk's forward and backward, a second
        forward of all but the last, the pairs that cross chunk bounds, and transfers of carried rows between ranks."""
        size, call, depth, setup = settings.stream or tokens, self.facts.call, self.facts.depth, self.setup
        chunk_time = replace(self, setup=self._shares_chunks()).time
        one = chunk_time(_at_once(settings), size)
        blocks = [chunk_time(MemorySettings(policy), size).seconds for policy in ("none", "block")]
        machine = scaled(self.facts, self.gpu)
        parts = machine.at(-(-size // setup.ranks))
        whole = depth * parts.rest_forward * (1 - machine.again)  # forward work that recomputation skips
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
        seconds += crossing / setup.ranks + waits + self._carried_lookups(settings, tokens, forwards)
        chunks = tokens / size
        return replace(
            one,
            seconds=seconds,
            hidden=one.hidden * chunks,
            exposed=one.exposed * chunks + waits,
            flops=_flops(self.facts, tokens) / setup.ranks,
            exchange=exchange if setup.ranks > 1 else None,
        )

    def _carried_lookups(self, settings: MemorySettings, tokens: int, forwards: float) -> float:
        """Return the seconds of hashed heads for rows of earlier chunks; `forwards`: forwards beside the first pass."""
        total = 0.0
        for layer in filter(None, self.facts.hashed):
            size = settings.stream or tokens
            rows, last = carried_hashed(layer.description, layer.sizes, tokens, size)
            read = rows * looked_up_share(layer.description, size) / self.setup.ranks
            forward, backward = _looked_up(layer, read, 0, self.gpu, self.setup)
            first = 0.0 if settings.truncate or not rows else 1 - last / rows
            total += (forwards + first) * forward + backward
        return total

    def fits(self, settings: MemorySettings, tokens: int, rows: Exchanged | None = None) -> bool:
        """Return whether N tokens fit into the memory of the GPU and of the host."""
        planned = self.memory(settings, tokens, rows)
        on_host = planned.host + (planned.states if self.host else 0)
        return planned.peak <= self.gpu.usable(self.setup.ranks) and on_host <= self.host * GIB

    @property
    def room(self) -> float:
        """GiB of host memory left for block inputs."""
        states = states_on_host(self.footprint(MemorySettings()), self.setup)
        return max(0.0, self.host - states / GIB)

    def longest(self, settings: MemorySettings) -> int:
        """Return the largest number N of tokens that fits, a multiple of GRAIN * R or of `stream`; 0 if none fits."""
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
        # each guess plans one exchange, which takes at least as much memory as the exchanges of shorter lengths
        fitting, too_many, guess = 0, units + 1, units
        while too_many - fitting > max(1, fitting // CLOSE):
            rows = self._rows(settings, guess * unit)
            allowed = 0 if rows is None else up_to(rows)
            if allowed >= guess:
                fitting = guess
            else:
                fitting, too_many = max(fitting, allowed), guess
            guess = (fitting + too_many) // 2
        return fitting * unit

    def _rows(self, settings: MemorySettings, tokens: int) -> Exchanged | None:
        """Return the exchange's memory at a length; None if it exceeds `setup.exchange_memory`."""
        for name in (self.setup.exchange, "auto"):  # the named exchange may not serve this length
            try:
                return replace(self, setup=replace(self.setup, exchange=name)).memory(settings, tokens).exchange
            except ExchangeMemoryError:
                return None
            except ValueError:
                if name == "auto":
                    raise
        return None


def last_true(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest n in 1..most for which `holds` is True, or 0; `holds` must not change from False to True."""
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
