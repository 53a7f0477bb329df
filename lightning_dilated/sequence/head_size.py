"""The size of head-parallel groups: the cost of a call with each size, and the cheapest size, for `head_size="auto"`.

Costs follow from integers and stated link speeds. The ranks of a group trade tokens for heads, so that only groups
exchange rows with each other. A rank holds the same tokens with every size, so each call may choose its size.
Shape letters: N tokens, L tokens of a rank, H query heads, K kv heads, D head dim, R ranks, M ranks of a group.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from lightning_dilated.pattern.rows import pairs
from lightning_dilated.sequence.exchange.all_to_all import windows
from lightning_dilated.sequence.links import Links
from lightning_dilated.sequence.planner import (
    DEFAULTS,
    FLOPS,
    MEMORY,
    SWITCH_SLOWDOWN,
    HeadPrice,
    Plan,
    joint_pairs,
    plan,
    price,
    priced_ranks,
)
from lightning_dilated.sequence.requirements import Problem, crosses, straddling

#: bytes of GPU memory that an exchange of tokens for heads reads and writes in both passes: for each element of q, with
#: its output and both gradients, and for each element of k or v; counted from the copies in bf16
TRADED_Q, TRADED_KV = 90, 50
#: collectives of a trade, forward and backward
ROUNDS = 3, 5


@dataclass(frozen=True)
class TradeBytes:
    """Bytes that one rank receives from the other ranks of its group in each pass."""

    forward: int
    backward: int


def in_groups(problem: Problem, size: int, member: int = 0) -> Problem:
    """Return the problem of rank number `member` in each group of `size` ranks; `problem` must be without groups."""
    single = problem.shard
    shard = replace(single, ranks=single.ranks // size, members=size)
    first, stop = problem.heads
    count = stop - first
    low, high = windows(count, count * problem.num_kv_heads // problem.num_heads, size)[member]
    documents = straddling(problem.documents, shard)
    return replace(problem, shard=shard, documents=documents, heads=(first + low, first + high))


def trade_bytes(problem: Problem, size: int, rank: int, samples: int, head_dim: int, element_size: int) -> TradeBytes:
    """Return the exact bytes that a rank receives in a trade (as in `Wire.traffic`); `problem` is without groups."""
    first, stop = problem.heads
    cuts = windows(stop - first, (stop - first) * problem.num_kv_heads // problem.num_heads, size)
    group, me = range(rank // size * size, (rank // size + 1) * size), rank % size
    tokens = [problem.shard.length(r) for r in group]
    other_tokens = sum(tokens) - tokens[me]
    heads = [b - a for a, b in cuts]
    kv = [-(-b // problem.group) - a // problem.group for a, b in cuts]
    own, own_kv = heads[me], kv[me]
    elsewhere, kv_elsewhere = sum(heads) - own, sum(kv) - own_kv
    wide, unit = max(4, element_size), head_dim * element_size
    # q, k and v of other ranks' tokens arrive; outputs and log-sum-exp of own tokens return
    forward = other_tokens * (own + 2 * own_kv) * unit + tokens[me] * elsewhere * (unit + wide)
    # outputs, their gradients and log-sum-exp arrive; gradients of q, k and v return in fp32
    backward = other_tokens * own * (2 * unit + wide) + tokens[me] * (elsewhere + 2 * kv_elsewhere) * head_dim * wide
    return TradeBytes(samples * forward, samples * backward)


@functools.lru_cache(maxsize=1024)
def head_prices(
    problem: Problem,
    exchange: str = "auto",
    *,
    ranks_per_node: int | None = None,
    head_dim: int = 64,
    element_size: int = 2,
    links: Links = DEFAULTS,
    exchange_memory: int | None = None,
) -> tuple[tuple[HeadPrice, ...], tuple[tuple[int, str], ...]]:
    """Return prices of the sizes that serve a call, and (size, reason) of the others; arguments as in `planner.plan`.

    `problem` must be without groups. A group must be inside a node, and cannot have more ranks than the call has heads.

    Raises:
        ValueError: if no size serves the call.
    """
    ranks, (first, stop) = problem.shard.ranks, problem.heads
    per_node = ranks if ranks_per_node is None else ranks_per_node
    prices: list[HeadPrice] = []
    rejected: list[tuple[int, str]] = []
    errors: list[ValueError] = []
    for size in (x for x in range(1, ranks + 1) if ranks % x == 0):
        if size > per_node:
            rejected.append((size, f"these and larger groups would reach over nodes of {per_node} ranks"))
            break
        if per_node % size:
            rejected.append((size, f"does not divide the {per_node} ranks of a node"))
        elif size > stop - first:
            rejected.append((size, f"more ranks than the {stop - first} heads"))
        else:
            try:
                prices.append(_price(problem, size, exchange, per_node, head_dim, element_size, links, exchange_memory))
            except ValueError as error:
                errors.append(error)
                rejected.append((size, str(error)))
    if not prices:
        raise errors[0]
    return tuple(prices), tuple(rejected)


def _price(
    problem: Problem,
    size: int,
    exchange: str,
    per_node: int,
    head_dim: int,
    element_size: int,
    links: Links,
    memory: int | None,
) -> HeadPrice:
    grouped, sizes = in_groups(problem, size), {"head_dim": head_dim, "element_size": element_size, "links": links}
    chosen = plan(grouped, exchange, ranks_per_node=per_node, exchange_memory=memory, **sizes)
    moved, seconds, waiting = 0, 0.0, _uneven(problem, size, head_dim)
    if chosen.exchange is not None:
        prices = {x.exchange: x for x in chosen.prices}
        x = prices.get(chosen.exchange) or price(grouped, chosen.exchange, per_node // size, **sizes)
        moved, seconds, waiting = x.forward + x.backward, x.seconds, waiting + x.waiting
    if size == 1:
        return HeadPrice(1, chosen.exchange, 0, moved, seconds, waiting)
    most, trade = trade_price(problem, size, head_dim, element_size, links)
    waiting += _joined(problem, grouped, head_dim)
    return HeadPrice(size, chosen.exchange, most, moved, seconds + trade, waiting)


def trade_price(
    problem: Problem, size: int, head_dim: int, element_size: int, links: Links = DEFAULTS
) -> tuple[int, float]:
    """Return (bytes that a rank receives, seconds) for exchanging tokens for heads, and back, in both passes."""
    samples = sum(d.samples for d in problem.documents)
    ranks = problem.shard.ranks  # `problem` has no head-parallel groups
    # the first group and the last two; one of the last two may be short or empty
    priced = [rank for rank in range(ranks) if rank < size or rank >= ranks - 2 * size]
    trades = [trade_bytes(problem, size, rank, samples, head_dim, element_size) for rank in priced]
    most = max(x.forward + x.backward for x in trades)
    numbers = samples * problem.shard.longest * head_dim
    copied = numbers * (problem.num_heads * TRADED_Q + 2 * problem.num_kv_heads * TRADED_KV) / MEMORY
    return most, most / links.near + sum(ROUNDS) * (links.round + (size - 1) * links.message) + copied


def _uneven(problem: Problem, size: int, head_dim: int) -> float:
    """Return the seconds that ranks wait for the rank that has the heads with most pairs, over the whole sequence."""
    length = problem.shard.seq_len
    cuts = windows(problem.num_heads, problem.num_kv_heads, size)
    kinds = problem.num_heads, problem.num_kv_heads, problem.causal
    work = [pairs(problem.pattern, length, *kinds, heads=cut) if cut[0] < cut[1] else 0 for cut in cuts]
    groups = problem.shard.ranks // size
    pair_seconds = sum(d.samples for d in problem.documents) * 14 * head_dim / FLOPS
    return (max(work) - sum(work) / size) / groups * pair_seconds


def _joined(problem: Problem, grouped: Problem, head_dim: int) -> float:
    """Return the extra seconds of causal attention in whole segments, which single ranks would compute in pieces."""
    if not problem.causal or crosses(grouped):
        return 0.0
    chosen = priced_ranks(problem.shard.ranks)
    across = sum(joint_pairs(problem, rank) for rank in chosen) / len(chosen)
    return (SWITCH_SLOWDOWN - 1) * across * 14 * head_dim / FLOPS


def plan_in_groups(
    problem: Problem,
    rank: int,
    exchange: str = "auto",
    *,
    ranks_per_node: int | None = None,
    head_dim: int = 64,
    element_size: int = 2,
    links: Links = DEFAULTS,
    exchange_memory: int | None = None,
) -> Plan:
    """Return a rank's plan with the cheapest size of head-parallel groups; `problem` must be without groups.

    Every rank of the sequence chooses the same size. It is 1 if no segment crosses ranks, or if documents differ from
    batch to batch, because batches are not priced one by one.

    Raises:
        ValueError: as `planner.plan`.
    """
    sizes = {"head_dim": head_dim, "element_size": element_size}
    options: dict[str, Any] = {"ranks_per_node": ranks_per_node, "links": links, **sizes}
    options["exchange_memory"] = exchange_memory
    if (reason := _not_priced(problem)) is not None:
        return replace(plan(problem, exchange, **options), head_reasons=((1, reason),))
    prices, rejected = head_prices(problem, exchange, **options)
    best = min(prices, key=lambda x: (x.total, x.head_size))
    chosen = plan(in_groups(problem, best.head_size, rank % best.head_size), exchange, **options)
    return replace(chosen, head_prices=prices, head_reasons=rejected)


def _not_priced(problem: Problem) -> str | None:
    """Return the reason why a call has no groups, whatever they would cost; None if groups are priced."""
    if not crosses(problem):
        return "no segment crosses a shard"
    if any((d.start, d.stop) != (0, problem.shard.seq_len) for d in problem.documents):
        return "documents differ from batch to batch; set a number to have groups"
    return None
