"""Estimate the seconds of a step on many ranks, in closed form, from the measured parts of one device.

While a rank computes the pairs of its own rows, the rows of a layer (or their gradients) are transferred. If a transfer
takes longer, the rank waits. It then computes the pairs with arrived rows. The time of a step is the busiest rank's
computation plus the waits for the slowest link. A link's time follows from its bytes, its messages and the latency of
each round (`Links`). With many ranks, a few evenly spread ranks are counted (`planner.priced_ranks`).

Not counted: slower computation during communication; launches by the host, which runs ahead; loading and logging,
except for a fixed `overhead`; collectives of single numbers.

Shape letters: N tokens, L tokens of a rank, R ranks, P counted ranks, which represent all.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_dilated.ext.planning.machine import Machine
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.pattern import Branch, DilatedPattern
from lightning_dilated.pattern.rows import blocks, pairs, query_rows, segment_width
from lightning_dilated.sequence import strided
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.exchange.all_to_all import tasks_by_owner
from lightning_dilated.sequence.head_size import in_groups, plan_in_groups, trade_price
from lightning_dilated.sequence.planner import Links, Plan, local_pairs, make_problem, plan, priced_ranks
from lightning_dilated.sequence.requirements import Problem, row_requests

#: bytes of a bucket of gradients: the default of torch's DistributedDataParallel
BUCKET = 25 * 2**20
#: kinds of attention work: pairs of own rows, pairs with arrived rows, copies of the few query rows that attend to
#: arrived rows, and trades of tokens for heads
ATTENTION, ARRIVALS, FEW, TRADES = "attention", "arrivals", "few rows", "tokens for heads"

Array = NDArray[np.float64]


class Recurring(NamedTuple):
    """Seconds of a layer's recurrence or hashed heads. The time of the rule, or of lookups, is separate from the time of
    the layers around it, because recomputation may keep its output."""

    rule_forward: float = 0.0
    rule_backward: float = 0.0
    forward: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True)
class Step:
    """The time of a step.

    Attributes:
        ranks, tokens: R, and N of the whole sequence.
        exchange: name of the exchange of the first pattern that crosses ranks; None if no pattern crosses ranks.
        seconds: seconds of the step.
        compute: seconds by kind of work on the busiest rank.
        exposed: seconds that the busiest rank waits for communication.
        uneven: seconds that the busiest rank computes longer than the average rank. In a causal run with contiguous
            shards, the last rank's queries attend to most keys.
        received: bytes that a rank receives on average, by (pass, "near" or "far"). The passes are "forward", "again"
            (recomputed forwards), "backward" and "gradients".
    """

    ranks: int
    tokens: int
    exchange: str | None
    seconds: float
    compute: Mapping[str, float]
    exposed: float
    uneven: float
    received: Mapping[tuple[str, str], float]

    def bytes(self, *runs: str) -> tuple[float, float]:
        """Return the mean (intra-node, inter-node) bytes that a rank receives in `runs`; default: all but gradients."""
        runs = runs or ("forward", "again", "backward")
        return tuple(sum(self.received.get((run, side), 0.0) for run in runs) for side in ("near", "far"))


class Work(NamedTuple):
    """The attention of one rank in one layer.

    Attributes:
        own: by branch, (pairs, query rows) of the rank's own queries and keys.
        pairs: number of (query, key) pairs with keys that arrived. calls: number of calls that compute these pairs.
        queries: number of query rows, over heads, that attend to these keys.
    """

    own: Mapping[int, tuple[int, int]]
    pairs: int
    calls: int
    queries: int


def work_of(problem: Problem, exchange: str | None, rank: int) -> Work:
    """Count the attention work of a rank in one layer."""
    if problem.shard.interleaved:
        pairs_of = strided.owner_pairs if exchange == "switch" else strided.query_pairs
        return Work({}, pairs_of(problem, rank), len(problem.pattern.branches), 0)
    own_work: dict[int, tuple[int, int]] = {}
    sizes = problem.shard.seq_len, problem.num_heads, problem.num_kv_heads
    for piece in problem.shard.ranges(rank):
        for block in blocks(problem.pattern, *sizes, (piece.start, piece.stop), problem.heads):
            number, rows = own_work.get(block.branch, (0, 0))
            own_work[block.branch] = number + block.pairs(problem.causal), rows + block.query_rows
    if exchange != "switch":
        return Work(own_work, *arriving(problem, rank))
    tasks = tasks_by_owner(problem, rank).get(rank, [])
    elsewhere = local_pairs(problem, rank)  # pairs of this rank's rows that the owners of wide segments compute
    for branch in sorted(own_work, key=lambda x: -segment_width(problem.pattern.branches[x], problem.shard.seq_len)):
        number, rows = own_work[branch]
        less = min(number, elsewhere)
        own_work[branch], elsewhere = (number - less, rows * (number - less) // max(1, number)), elsewhere - less
    return Work(own_work, sum(t.pairs for t in tasks), len({(t.branch, len(t.queries)) for t in tasks}), 0)


def arriving(problem: Problem, rank: int) -> tuple[int, int, int]:
    """Return `Work.pairs`, `Work.calls` and `Work.queries` of a rank.

    For `queries`, each head counts only the branch with the most query rows, as if it contained all other rows.
    """
    total, calls = 0, set()
    reached: dict[int, Counter[int]] = defaultdict(Counter)
    for request in row_requests(problem, rank):
        if request.pairs:
            total += request.pairs
            calls.add((request.branch, len(request.queries), sum(map(len, request.keys))))
            reached[request.head][request.branch] += len(request.queries)
    return total, len(calls), sum(max(by_branch.values()) for by_branch in reached.values())


def _is_wide(branch: Branch, problem: Problem) -> bool:
    """Return whether the branch's segments are longer than a rank's longest range."""
    return segment_width(branch, problem.shard.seq_len) > max(map(len, problem.shard.ranges(0)))


def plan_of(single: Problem, exchange: str, head_size: int | str, **options: Any) -> Plan:
    """Plan the call `single` in groups of `head_size` ranks, or in groups of the cheapest size for "auto"."""
    if head_size == "auto":
        return plan_in_groups(single, 0, exchange, **options)
    return plan(single if head_size == 1 else in_groups(single, int(head_size)), exchange, **options)


@dataclass(frozen=True)
class Layer:
    """The attention of a layer.

    Attributes:
        forward, backward: seconds (P,) by kind of work.
        late: (forward, backward) seconds that a rank waits for transfers after computing the pairs of its own rows.
        received: mean bytes that a rank receives, by (pass, "near" or "far").
    """

    exchange: str | None
    forward: Mapping[str, Array]
    backward: Mapping[str, Array]
    late: tuple[float, float] = (0.0, 0.0)
    received: Mapping[tuple[str, str], float] = field(default_factory=dict)


@functools.lru_cache(maxsize=256)
def layer_on_ranks(machine: Machine, pattern: DilatedPattern, exchange: str, tokens: int, setup: Setup) -> Layer:
    """Return the attention of one layer with `pattern` over R ranks of L tokens."""
    ranks = setup.ranks
    sizes: dict[str, Any] = {"head_dim": machine.head_dim, "element_size": machine.element_size}
    single = make_problem(
        pattern,
        tokens * ranks,
        machine.heads,
        machine.kv_heads,
        ranks=ranks,
        layout=setup.layout,
        causal=machine.causal,
    )
    per_node = min(setup.per_node, ranks)
    chosen = plan_of(single, exchange, setup.head_size, ranks_per_node=per_node, links=setup.links, **sizes)
    problem, size = chosen.problem, chosen.head_size
    name = chosen.exchange
    members = [single] if size == 1 else [in_groups(single, size, member) for member in range(size)]
    each = [(members[rank % size], rank // size) for rank in ranks_that_count(setup)]
    works = [work_of(member, name, rank) for member, rank in each]
    times = _own_seconds(machine, problem, works, tokens)
    forward, backward = ({ATTENTION: x} for x in times)
    if size > 1:
        _, trade = trade_price(single, size, machine.head_dim, machine.element_size, setup.links)
        forward[TRADES], backward[TRADES] = (np.full(len(works), trade * share) for share in (3 / 8, 5 / 8))
    if name is None:
        return Layer(None, forward, backward)
    many, calls, queries = (
        np.array(x, dtype=float) for x in zip(*((w.pairs, w.calls, w.queries) for w in works), strict=True)
    )
    forward |= {ARRIVALS: machine.arrive_forward.of(many, calls), FEW: machine.few_forward.of(queries)}
    backward |= {ARRIVALS: machine.arrive_backward.of(many, calls), FEW: machine.few_backward.of(queries)}
    travels, received = _travel(machine, each, name, max(1, per_node // size), setup.links)
    late = tuple(float(max(0.0, (x - local).max())) for x, local in zip(travels, times, strict=True))
    return Layer(name, forward, backward, late, received)  # type: ignore[arg-type]


def ranks_that_count(setup: Setup) -> list[int]:
    """Return the ranks that are counted to represent all ranks: `priced_ranks` and all members of their head groups."""
    ranks = setup.ranks
    most = min(setup.per_node, ranks) if setup.head_size == "auto" else int(setup.head_size)
    firsts = {rank // most * most for rank in priced_ranks(ranks)}
    return sorted({rank for first in firsts for rank in range(first, min(first + most, ranks))})


def _own_seconds(machine: Machine, problem: Problem, works: list[Work], tokens: int) -> tuple[Array, Array]:
    """Return the seconds of pairs of a rank's own rows: (forward (P,), backward (P,))."""
    parts, rates, out = machine.at(tokens), attention_seconds(machine, tokens), []
    for rate, least in zip(rates, (parts.wide_forward, parts.wide_backward), strict=True):
        each = []
        for work in works:
            narrow, seconds = [0, 0], 0.0
            for branch, (number, rows) in work.own.items():
                if _is_wide(problem.pattern.branches[branch], problem):
                    seconds += max(least, rate.of(number, rows))
                else:
                    narrow = [narrow[0] + number, narrow[1] + rows]
            each.append(seconds + rate.of(*narrow))
        out.append(np.array(each))
    return out[0], out[1]


def _travel(
    machine: Machine, each: list[tuple[Problem, int]], exchange: str, per_node: int, links: Links
) -> tuple[tuple[Array, Array], dict[tuple[str, str], float]]:
    """Return the seconds of transfers, (forward (P,), backward (P,)) with copies to and from buffers, and the received
    bytes. `each`: P pairs (problem of a group member, rank of the group)."""
    times: list[list[float]] = [[], []]
    received: Counter[tuple[str, str]] = Counter()
    for member, rank in each:
        volume = EXCHANGES[exchange].volume(member, rank, per_node)
        size = {key: units.bytes(machine.head_dim, machine.element_size) for key, units in volume.units.items()}
        for key, number in size.items():
            received[key] += number / len(each)
        for run, line, into in zip(("forward", "backward"), (machine.pack, machine.add), times, strict=True):
            near, far = (size.get((run, side), 0.0) for side in ("near", "far"))
            latency = (volume.rounds * links.round + volume.messages * links.message) / 2
            into.append(max(near / links.near, far / links.far) + latency + line.of(near + far, volume.rounds / 2))
    return (np.array(times[0]), np.array(times[1])), dict(received)


class AttentionSeconds(NamedTuple):
    """Seconds of attention: `pair` for each (query, key) pair, and `row` in addition for each query row. `row` covers the
    start and end of the row's matrix products, masked pairs in tiles on the diagonal, and the merge of branches."""

    pair: float
    row: float

    def of(self, pairs: int, rows: int) -> float:
        """Return the seconds of calls with `pairs` pairs and `rows` query rows."""
        return self.pair * pairs + self.row * rows


def attention_seconds(machine: Machine, tokens: int) -> tuple[AttentionSeconds, AttentionSeconds]:
    """Return the `AttentionSeconds` of the forward and of the backward over L tokens."""
    heads, pattern = (machine.heads, machine.kv_heads), measured_pattern(machine, tokens)
    attended, rows = pairs(pattern, tokens, *heads, machine.causal), query_rows(pattern, tokens, *heads)
    parts = machine.at(tokens)

    def rates(total: float, pair: float) -> AttentionSeconds:
        pair = min(pair, total / attended) or total / attended
        return AttentionSeconds(pair, max(0.0, total - pair * attended) / rows)

    return rates(parts.attention_forward, machine.long_forward), rates(parts.attention_backward, machine.long_backward)


def measured_pattern(machine: Machine, tokens: int) -> DilatedPattern:
    """Return the pattern that was measured at L tokens: geometric(first, tokens)."""
    doublings = max(tokens // machine.first, 1).bit_length() - 1
    return DilatedPattern.geometric(machine.first, machine.first << doublings)


def step_on_ranks(
    machine: Machine,
    cycle: Sequence[DilatedPattern],
    tokens: int,
    setup: Setup,
    *,
    exchanges: Sequence[str] | None = None,
    recompute: str = "none",
    overhead: float = 0.0,
    inner: Machine | None = None,
    recurring: Sequence[Recurring] = (),
    hashed: Sequence[Recurring] = (),
) -> Step:
    """Estimate a step of the machine's model over one sequence of L * R tokens.

    Args:
        machine: measured times of one device.
        cycle: patterns that the layers cycle through.
        tokens: L, the tokens of each rank.
        setup: ranks, layout, head groups, links, strategy. Strategies other than ring_dilated_fsdp average gradients.
        exchanges: for each pattern, "auto" or a name in `EXCHANGES`; None: the exchange of `setup`.
        recompute: one of `memory.recompute.POLICIES`.
        overhead: seconds added to every step.
        inner: times of a second stack of blocks, which runs between the first stack's forward and backward.
        recurring: recurrences that the first stack's layers cycle through; empty: no layer has one.
        hashed: hashed heads that the first stack's layers cycle through; empty: no layer has them.

    Raises:
        ValueError: if an exchange does not serve the call.
    """
    names = exchanges or [setup.exchange] * len(cycle)
    work: Counter[str] = Counter()  # seconds that are the same on all ranks
    each: dict[str, Array] = defaultdict(lambda: np.zeros(1))  # seconds of each counted rank
    received: Counter[tuple[str, str]] = Counter()
    late, first = 0.0, None
    again = 1 if recompute == "block" else 0
    for stack, mixers in ((machine, {"recurrence": recurring, "hashed heads": hashed}), (inner, {})):
        if stack is None:
            continue
        parts = stack.at(tokens)
        work["edge"] += parts.edge_forward + parts.edge_backward
        work["optimizer"] += stack.optimizer
        once_more = stack.again * parts.rest_forward if recompute != "none" else 0.0
        work["rest"] += stack.depth * (parts.rest_forward + parts.rest_backward + once_more)
        for number in range(stack.depth):
            layer = layer_on_ranks(stack, cycle[number % len(cycle)], names[number % len(cycle)], tokens, setup)
            first = first or layer.exchange
            for kind in layer.forward:
                each[kind] = each[kind] + (1 + again) * layer.forward[kind] + layer.backward[kind]
            late += (1 + again) * layer.late[0] + layer.late[1]
            for (run, side), size in layer.received.items():
                received[run, side] += size
                received["again", side] += again * size * (run == "forward")
            for kind, layers in mixers.items():
                if layers:
                    work[kind] += _recurrence(layers[number % len(layers)], recompute)
    work["overhead"] += overhead
    stacks = [x for x in (machine, inner) if x is not None]
    averaged, late_gradients = _averaging(stacks, tokens, setup, each[ATTENTION].max())
    received.update(averaged)
    busy = sum(each.values()) + sum(work.values())
    busiest, waits = int(np.argmax(busy)), late + late_gradients
    compute = {kind: float(x[busiest]) if len(x) > 1 else float(x[0]) for kind, x in each.items()} | dict(work)
    seconds = float(busy.max()) + waits
    return Step(
        setup.ranks, tokens * setup.ranks, first, seconds, {k: x for k, x in compute.items() if x}, waits,
        float(busy.max() - busy.mean()), dict(received),
    )  # fmt: skip


def _recurrence(layer: Recurring, recompute: str) -> float:
    again = layer.forward * (recompute != "none") + layer.rule_forward * (recompute == "block")
    return sum(layer) + again


def _averaging(
    stacks: list[Machine], tokens: int, setup: Setup, attention: float
) -> tuple[dict[tuple[str, str], float], float]:
    """Return (received bytes, seconds of waiting) for the averaging of gradients over the ranks in ring_dilated.

    A ring moves 2 (R - 1) / R of the bytes through every rank. Over several nodes, each rank of a node has a ring
    through its own adapter, and buckets are averaged during the backward. On one node, all gradients are averaged after
    the backward, unless `bucket_cap_mb` is set. The step waits for the last buckets, or for the part of the averaging
    that exceeds the time of the backward, whichever is longer.
    """
    ranks, links = setup.ranks, setup.links
    if ranks == 1 or setup.strategy == "ring_dilated_fsdp":
        return {}, 0.0
    size = sum((x.depth * x.block_parameters + x.edge_parameters) * x.parameter_size for x in stacks)
    nodes = -(-ranks // setup.per_node)
    speed = min(links.near, links.far * setup.per_node) if nodes > 1 else links.near
    latency = links.round + 2 * math.ceil(math.log2(ranks)) * links.message
    bucket = setup.bucket_cap_mb * 2**20 if setup.bucket_cap_mb else BUCKET if nodes > 1 else size
    share = 2 * (ranks - 1) / ranks
    total = math.ceil(size / bucket) * latency + share * size / speed
    last = 2 * latency + share * (bucket + size % bucket) / speed  # a full bucket and the remainder
    backward = sum(x.depth * x.at(tokens).rest_backward for x in stacks) + attention / 2
    side = "far" if nodes > 1 else "near"
    return {("gradients", side): share * size}, total if bucket >= size else max(last, total - backward)
