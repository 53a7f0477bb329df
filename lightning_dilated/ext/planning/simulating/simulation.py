"""One training step on R ranks, event by event, from the plan of its exchange and the measured times of one device.

The order of events is the code's: each block's forward with its attention as `attention.executors.remote` runs it; the
backward with its recomputation, arrivals first, gradients sent back to their owners while local blocks run; gradients
averaged after it, or on several nodes in buckets concurrently with it; the optimizer at the end. Compute times come from the
machine, speeds from `Links`. Not simulated:
  - communication that slows computation, or other communication, down; the host (control messages, launches), which runs
    ahead;
  - loading, logging, and what the Trainer does between steps, except for a fixed `overhead`; reductions of single numbers;
  - fp32 copies of all rows in the forward of a switch; those of a dense pattern, most of whose rows get something from
    others, are priced as rows that are picked;
  - ranks with fewer tokens than others: all have the local work of the longest shard. Arrivals are each rank's own (causal:
    the later the rank, the more), and the step lasts as long as the busiest rank's.
With more than `rounds.EXACT` ranks some counts are approximate, see `rounds.many`.

Shape letters: N tokens, L tokens of a rank, R ranks, w segment length.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from lightning_dilated._validation import integer
from lightning_dilated.ext.planning.simulating.machine import Machine
from lightning_dilated.ext.planning.simulating.rounds import EXACT, Moves, bounds, exact, many
from lightning_dilated.ext.planning.simulating.timeline import GRADIENTS, Clock, Event, Op
from lightning_dilated.memory.recompute import check_policy
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import blocks, pairs, query_rows, segment_width
from lightning_dilated.sequence.planner import Links, make_problem, plan
from lightning_dilated.sequence.requirements import Problem

#: bytes of a bucket of gradients, and of the first one: the defaults of torch's DistributedDataParallel
BUCKET, FIRST_BUCKET = 25 * 2**20, 2**20


class Recurring(NamedTuple):
    """Seconds of a layer's recurrence: of its rule, whose output recomputation may keep, and of what is around it."""

    rule_forward: float = 0.0
    rule_backward: float = 0.0
    forward: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True)
class Step:
    """A simulated step.

    Attributes:
        ranks, tokens: R, and N of the whole sequence.
        exchange: its name, of the first pattern that has one; None where nothing crosses a cut.
        recompute: the policy.
        seconds: of the step.
        alone: seconds of a step of one rank with as many tokens and the branches that fit them.
        compute: seconds by kind of work on the rank that has most of it.
        exposed: seconds that that rank waits for communication or for other ranks.
        uneven: seconds that that rank computes longer than the average rank: in a causal, contiguous run the last rank's
            queries see most keys.
        moved: bytes received by all ranks, by (pass, "near" or "far"); the passes are forward, again (recomputed forwards),
            backward and gradients.
        events: of the rank that was watched.
    """

    ranks: int
    tokens: int
    exchange: str | None
    recompute: str
    seconds: float
    alone: float
    compute: Mapping[str, float]
    exposed: float
    moved: Mapping[tuple[str, str], float]
    events: tuple[Event, ...] = ()
    uneven: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of one rank."""
        return self.tokens / self.ranks / self.seconds

    @property
    def efficiency(self) -> float:
        """Of weak scaling: tokens/s of a rank over those of one rank alone with the same tokens of its own."""
        return self.alone / self.seconds

    def bytes(self, *runs: str) -> tuple[float, float]:
        """(intra-node, inter-node) bytes that a rank receives on average in these passes, by default all of the exchange."""
        runs = runs or ("forward", "again", "backward")
        return tuple(sum(self.moved.get((run, side), 0.0) for run in runs) / self.ranks for side in ("near", "far"))


def simulate(
    machine: Machine,
    pattern: DilatedPattern | Sequence[DilatedPattern],
    tokens: int,
    ranks: int,
    *,
    exchange: str | Sequence[str] = "auto",
    ranks_per_node: int | None = None,
    links: Links = Links(),  # noqa: B008 - frozen
    recompute: str = "none",
    overhead: float = 0.0,
    average: bool = True,
    bucket_cap_mb: int | None = None,
    watched: int | None = None,
    inner: Machine | None = None,
    recurring: Sequence[Recurring] = (),
) -> Step:
    """A step of the machine's model over one sequence of L * R tokens.

    Args:
        machine: measured times of one device.
        pattern: of every layer, or a list that layers 0, 1, ... cycle through.
        tokens: L, of each rank.
        ranks: R.
        exchange: "auto" or a name of `EXCHANGES`, or a list with one for each pattern; "ring" and "switch" for up to
            `rounds.EXACT` ranks.
        ranks_per_node: ranks that share fast links; None: all of them.
        links: speeds and latencies.
        recompute: one of `models.recompute.POLICIES`.
        overhead: seconds added to every step.
        average: whether gradients are averaged over the ranks.
        bucket_cap_mb: MiB that are averaged at a time, during the backward; None: on one node all at once after it, else in
            DDP's own buckets.
        watched: the rank whose events are returned.
        inner: times of a second stack of blocks, which runs between the first one's forward and its backward.
        recurring: of the recurrences that layers 0, 1, ... of the first stack cycle through; none: no layer has one.

    Raises:
        ValueError, TypeError: for invalid sizes, names or exchanges, with the condition that fails.
    """
    tokens, ranks = integer(tokens, "tokens", 1), integer(ranks, "ranks", 1)
    per_node = ranks if ranks_per_node is None else integer(ranks_per_node, "ranks_per_node", 1)
    if watched is not None and not 0 <= watched < ranks:
        raise ValueError(f"watched={watched} is not one of the ranks 0..{ranks - 1}.")
    check_policy(recompute)
    if bucket_cap_mb is not None:
        integer(bucket_cap_mb, "bucket_cap_mb", 1)
    if not 0 <= overhead < math.inf:
        raise ValueError(f"overhead must be a finite number of seconds, at least 0; got {overhead!r}.")
    cycle = [pattern] if isinstance(pattern, DilatedPattern) else list(pattern)
    layers = list(zip(cycle, [exchange] * len(cycle) if isinstance(exchange, str) else exchange, strict=True))
    narrow = {x: _narrow(x, tokens, ranks) for x in cycle}

    def of(machine: Machine) -> list[tuple[str | None, Op]]:
        """The exchange's name and the op of each layer of the cycle."""
        each = {(x, how): _op(x, narrow[x], tokens, ranks, how, per_node, links, machine) for x, how in set(layers)}
        return [each[layer] for layer in layers]

    ops = of(machine)
    stacks = [_Stack(machine, [op for _, op in ops], recurring or [Recurring()])]
    stacks += [] if inner is None else [_Stack(inner, [op for _, op in of(inner)], [Recurring()])]
    clock = Clock(ranks, per_node, links, watched)
    if overhead:
        clock.work("overhead", overhead)
    _run(clock, stacks, tokens, recompute, _Buckets(clock, average, bucket_cap_mb))
    spent = sum(clock.spent.values())
    busiest = int(np.argmax(spent))
    seconds = float(clock.free["compute"].max())
    same = {"recompute": recompute, "overhead": overhead, "inner": inner, "recurring": recurring}
    alone = seconds if ranks == 1 else simulate(machine, [narrow[x] or x for x in cycle], tokens, 1, **same).seconds
    return Step(
        ranks,
        tokens * ranks,
        next((name for name, _ in ops if name), None),
        recompute,
        seconds,
        alone,
        {kind: float(x[busiest]) for kind, x in clock.spent.items()},
        max(0.0, seconds - float(spent[busiest])),
        dict(clock.moved),
        tuple(clock.events),
        float(spent.max() - spent.mean()),
    )


class _Stack(NamedTuple):
    """Blocks, whose layers cycle through ops and through recurrences."""

    machine: Machine
    ops: Sequence[Op]
    recurring: Sequence[Recurring]


def _run(clock: Clock, stacks: list[_Stack], tokens: int, recompute: str, buckets: _Buckets) -> None:
    """Forward of the stacks in order, backward in reverse, and optimizer."""
    half = lambda seconds: clock.work("rest", seconds / 2)  # noqa: E731 - before and after the op: for the picture only
    for machine, ops, recurring in stacks:
        parts = machine.at(tokens)
        for layer in range(machine.depth):
            more = recurring[layer % len(recurring)]
            half(parts.rest_forward)
            ops[layer % len(ops)].forward(clock)
            _recur(clock, more.rule_forward + more.forward)
            half(parts.rest_forward)
        clock.work("edge", parts.edge_forward)
    for machine, ops, recurring in reversed(stacks):
        parts = machine.at(tokens)
        clock.work("edge", parts.edge_backward)
        for layer in reversed(range(machine.depth)):
            op, more = ops[layer % len(ops)], recurring[layer % len(recurring)]
            if recompute != "none":
                half(parts.rest_forward * machine.again)
                if recompute == "block":
                    op.forward(clock, "again")
                _recur(clock, more.forward + (more.rule_forward if recompute == "block" else 0.0))
                half(parts.rest_forward * machine.again)
            half(parts.rest_backward)
            _recur(clock, more.rule_backward + more.backward)
            op.backward(clock)
            half(parts.rest_backward)
            buckets.add(machine.block_parameters * machine.parameter_size)
        # after the blocks', as those of an embedding are
        buckets.add(machine.edge_parameters * machine.parameter_size)
    buckets.finish()
    clock.work("optimizer", sum(stack.machine.optimizer for stack in stacks))


def _recur(clock: Clock, seconds: float) -> None:
    if seconds:
        clock.work("recurrence", seconds)


class _Buckets:
    """Gradients collected until a bucket is full, as DDP does; a block's are complete when its backward is done.

    Without a size one bucket holds all of them on one node, as under `RingDilatedStrategy`; DDP's own first one is smaller.
    """

    def __init__(self, clock: Clock, average: bool, mib: int | None) -> None:
        self.clock, self.average, self.size = clock, average, 0
        usual = FIRST_BUCKET if clock.ranks > clock.per_node else math.inf
        self.limit, self.later = (usual, BUCKET) if mib is None else (mib * 2**20, mib * 2**20)

    def add(self, size: int) -> None:
        self.size += size
        while self.size >= self.limit:
            self._send(self.limit)
            self.size, self.limit = self.size - self.limit, self.later

    def finish(self) -> None:
        """Send the rest, and wait for all."""
        if self.size:
            self._send(self.size)
        self.clock.wait(self.clock.free[GRADIENTS])

    def _send(self, size: int) -> None:
        if self.average:
            self.clock.reduce(size)


def _narrow(pattern: DilatedPattern, tokens: int, ranks: int) -> DilatedPattern | None:
    """The branches whose segments fit into a rank; None without any."""
    branches = tuple(b for b in pattern.branches if ranks == 1 or segment_width(b, tokens * ranks) <= tokens)
    return replace(pattern, branches=branches) if branches else None


def _op(
    pattern: DilatedPattern,
    narrow: DilatedPattern | None,
    tokens: int,
    ranks: int,
    exchange: str,
    per_node: int,
    links: Links,
    machine: Machine,
) -> tuple[str | None, Op]:
    """The name of the exchange, and the op of every layer."""
    heads = machine.heads, machine.kv_heads
    problem = make_problem(pattern, tokens * ranks, *heads, ranks=ranks, causal=machine.causal)
    sizes = {"head_dim": machine.head_dim, "element_size": machine.element_size}
    name = plan(problem, exchange, ranks_per_node=per_node, links=links, **sizes).exchange
    local = _work(narrow, tokens, heads, machine.causal) if narrow else (0, 0)
    wide = [
        _most_work(replace(pattern, branches=(b,)), tokens, ranks, heads, machine.causal)
        for b in pattern.branches
        if narrow is None or b not in narrow.branches
    ]
    parts, (forward, backward) = machine.at(tokens), attention_seconds(machine, tokens)
    seconds = lambda each, more: each.of(*local) + sum(max(more, each.of(*x)) for x in wide)  # noqa: E731
    times = seconds(forward, parts.wide_forward), seconds(backward, parts.wide_backward)
    return name, Op(machine, moves_of(problem, name, per_node) if name else None, *times)


def _work(pattern: DilatedPattern, tokens: int, heads: tuple[int, int], causal: bool) -> tuple[int, int]:
    """(query, key) pairs, and query rows."""
    return pairs(pattern, tokens, *heads, causal), query_rows(pattern, tokens, *heads)


def _most_work(
    pattern: DilatedPattern, tokens: int, ranks: int, heads: tuple[int, int], causal: bool
) -> tuple[int, int]:
    """Those of a rank's own rows, on the rank with most; ranks differ where segments end within them."""
    shards = ((tokens * rank, tokens * (rank + 1)) for rank in {max(0, ranks // 2 - 1), ranks // 2, ranks - 1})
    of = [blocks(pattern, tokens * ranks, *heads, shard) for shard in shards]
    return max((sum(x.pairs(causal) for x in each), sum(x.query_rows for x in each)) for each in of)


class AttentionSeconds(NamedTuple):
    """Seconds of a (query, key) pair, and what a query row takes in addition: the begin and end of its products, the part of
    a tile beyond the diagonal, and merging its branches."""

    pair: float
    row: float

    def of(self, pairs: int, rows: int) -> float:
        """Seconds of a call."""
        return self.pair * pairs + self.row * rows


def attention_seconds(machine: Machine, tokens: int) -> tuple[AttentionSeconds, AttentionSeconds]:
    """Forward and backward, where L tokens are attended to."""
    heads = machine.heads, machine.kv_heads
    attended, rows = _work(measured_pattern(machine, tokens), tokens, heads, machine.causal)
    parts = machine.at(tokens)

    def of(total: float, pair: float) -> AttentionSeconds:
        pair = min(pair, total / attended) or total / attended
        return AttentionSeconds(pair, max(0.0, total - pair * attended) / rows)

    return of(parts.attention_forward, machine.long_forward), of(parts.attention_backward, machine.long_backward)


def measured_pattern(machine: Machine, tokens: int) -> DilatedPattern:
    """The pattern whose time was measured at so many tokens: geometric(first, tokens)."""
    doublings = max(tokens // machine.first, 1).bit_length() - 1
    return DilatedPattern.geometric(machine.first, machine.first << doublings)


@functools.lru_cache(maxsize=64)
def moves_of(problem: Problem, exchange: str, per_node: int) -> Moves:
    """What the exchange moves on every rank, counted or, for many ranks, estimated."""
    bounds(problem)  # raises its errors first
    return (exact if problem.shard.ranks <= EXACT else many)(problem, exchange, per_node)
