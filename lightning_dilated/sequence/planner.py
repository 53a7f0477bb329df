"""The plan of a sharded call: bytes, rounds, time, work and saved memory of every exchange, and the cheapest exchange.

A plan follows from integers and stated link speeds only; making it uses no device and no other process.

Shape letters: N tokens, H query heads, D head dim, R ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_dilated._validation import integer
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import global_tokens, row_pairs, windowed
from lightning_dilated.sequence import strided
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.exchange.all_to_all import AllToAllProgram, tasks_by_owner, windows
from lightning_dilated.sequence.exchange.program import count
from lightning_dilated.sequence.exchange.row_ops import MAX_SELECTED_SHARE
from lightning_dilated.sequence.links import Links
from lightning_dilated.sequence.ranges import clip, intersect
from lightning_dilated.sequence.requirements import (
    Document,
    Problem,
    crosses,
    row_requests,
    segment_rows,
    served,
    straddling,
    wide_segments,
)
from lightning_dilated.sequence.shard import GIB, Shard, check_exchange

#: at most this number of ranks is priced, evenly spread over all ranks
PRICED = 8
#: attention FLOP/s (both passes) and memory bytes/s of an H200, and bytes of a switch's fp32 copies per element of q,
#: for the seconds of these copies and of waiting for a busier rank
FLOPS, MEMORY, COPIED = 400e12, 4e12, 40
#: slowdown of causal attention over a whole long sequence by the owners of a switch, relative to pieces on zigzag
#: ranks: 931 ms instead of 867 ms for 524,288 tokens on four H200
SWITCH_SLOWDOWN = 1.08
#: "auto" leaves out exchanges that save more than this many times the rank's own rows of K and V
MAX_SAVED_RATIO = 4
#: the link speeds that prices assume by default
DEFAULTS = Links()
#: with up to this number of ranks, the memory of an exchange is counted on all of them, else on the priced ranks
LISTED_RANKS = 64


class ExchangeMemoryError(ValueError):
    """Raised if the named exchange of a call, or every exchange, needs more memory than allowed."""


@dataclass(frozen=True)
class Price:
    """The price of one exchange: bytes that the most expensive priced rank receives, and their time.

    Attributes:
        forward, backward: bytes received.
        far: bytes of both passes received from other nodes.
        rounds, messages: collectives of both passes, and messages received in them.
        kept: bytes of received rows that are saved for the backward.
        seconds: time of both passes with nothing hidden behind computation.
        waiting: seconds that ranks wait for the busiest rank (causal attention over contiguous shards), and seconds of
            the switch's copies of whole tensors.
        held: the maximum number of bytes that a rank holds at once, see `held`; None without a limit.
    """

    exchange: str
    forward: int
    backward: int
    far: int
    rounds: int
    messages: int
    kept: int
    seconds: float
    waiting: float = 0.0
    held: int | None = None


@dataclass(frozen=True)
class HeadPrice:
    """The price of a call with head-parallel groups of `head_size` ranks.

    Attributes:
        exchange: exchange between groups; None if no segment crosses groups.
        traded: bytes that a rank receives in trades of tokens for heads, in both passes.
        exchanged: bytes that a rank receives in the exchange between groups.
        seconds: time of the trade, its copies and the exchange, with nothing hidden behind computation.
        waiting: seconds of waiting for ranks with more to compute.
    """

    head_size: int
    exchange: str | None
    traded: int
    exchanged: int
    seconds: float
    waiting: float

    @property
    def total(self) -> float:
        """Seconds, including waiting."""
        return self.seconds + self.waiting

    def __str__(self) -> str:
        rows = "nothing" if self.exchange is None else f"{self.exchange} {self.exchanged / 1e6:.2f} MB"
        trade = f"tokens for heads {self.traded / 1e6:.2f} MB, " if self.head_size > 1 else ""
        return f"{trade}between ranks {rows}, {self.seconds * 1e3:.3f} ms, waiting {self.waiting * 1e3:.3f}"


@dataclass(frozen=True)
class Plan:
    """The exchange that `plan` chose for a call, with reasons. `str` returns a table.

    Attributes:
        problem: the call.
        exchange: name of the exchange; None if no segment crosses a shard.
        prices: prices of the exchanges that serve the call.
        rejected: (exchange, reason) of the other exchanges.
        links: the link speeds of the prices; None without prices.
        head_prices, head_reasons: with `head_size="auto"`, prices of sizes of head-parallel groups, and (size, reason)
            for sizes without a price.
    """

    problem: Problem
    exchange: str | None
    prices: tuple[Price, ...] = ()
    rejected: tuple[tuple[str, str], ...] = ()
    links: Links | None = None
    head_prices: tuple[HeadPrice, ...] = ()
    head_reasons: tuple[tuple[int, str], ...] = ()

    @property
    def head_size(self) -> int:
        """Number of ranks in a head-parallel group."""
        return getattr(self.problem.shard, "members", 1)

    def __str__(self) -> str:
        return "\n".join([self._exchange_lines(), *self.head_lines()])

    def head_lines(self) -> list[str]:
        """Return lines about sizes of head-parallel groups; an empty list without head_size="auto"."""
        if not self.head_prices and not self.head_reasons:
            return []
        lines = [f"head_size: {self.head_size}"]
        lines += [f"  {x.head_size:<6}{x}" for x in self.head_prices]
        taken = "not taken, " if self.head_prices else ""
        return lines + [f"  {size:<6}{taken}{why}" for size, why in self.head_reasons]

    def _exchange_lines(self) -> str:
        if self.exchange is None:
            return "no segment crosses a shard: nothing is exchanged"
        lines = [f"exchange: {self.exchange}"]
        lines.append(
            f"{'':24}{'forward':>12}{'backward':>12}{'far':>12}{'kept':>12}{'rounds':>8}{'messages':>10}{'ms':>9}{'waiting':>9}"
        )
        for p in self.prices:
            sizes = "".join(f"{x / 1e6:>9.2f} MB" for x in (p.forward, p.backward, p.far, p.kept))
            lines.append(
                f"  {p.exchange:<22}{sizes}{p.rounds:>8}{p.messages:>10}{p.seconds * 1e3:>9.3f}{p.waiting * 1e3:>9.3f}"
            )
        lines += [f"links: {self.links}"] if self.links else []
        lines += [f"  {name}: not taken, {reason}" for name, reason in self.rejected]
        waits = max((p.waiting for p in self.prices if p.exchange != "switch"), default=0.0)
        # with windows and global tokens, every query has the same number of keys
        grows = any(b.width is None and b.tokens is None for b in self.problem.pattern.branches)
        late = grows and self.problem.causal and self.problem.shard.layout == "contiguous"
        if late and self.prices and waits > min(p.seconds for p in self.prices):
            lines.append(
                f"the last ranks' queries see most keys: if rows travel, the other ranks wait {waits * 1e3:.3f} ms for "
                "them; layout='zigzag' gives every rank an early and a late part"
            )
        return "\n".join(lines)


def make_problem(
    pattern: DilatedPattern,
    seq_len: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    *,
    ranks: int,
    layout: str = "contiguous",
    causal: bool = False,
    cu_seqlens: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    batch: int = 1,
    head_size: int = 1,
    head_rank: int = 0,
) -> Problem:
    """Return the problem of a call on `ranks` ranks; `head_rank` is the rank's number in its head-parallel group.

    Args:
        pattern, num_heads, num_kv_heads, causal: as in the call.
        seq_len: N.
        layout: layout of the positions: "contiguous", "zigzag" or "strided".
        cu_seqlens: bounds of packed documents, instead of `lengths`.
        lengths: tokens of each sample.
        batch: number of samples of N tokens, without `lengths` and `cu_seqlens`.
        head_size: number of ranks in a head-parallel group, a divisor of `ranks`.

    Raises:
        TypeError, ValueError: if an argument is invalid. The message names it.
    """
    num_heads, num_kv_heads = pattern.check_heads(num_heads, num_kv_heads)
    if integer(ranks, "ranks", 1) % integer(head_size, "head_size", 1):
        raise ValueError(f"head_size={head_size} must divide ranks={ranks}.")
    shard = Shard(seq_len, ranks // head_size, layout, head_size)
    if cu_seqlens is not None:
        documents = [Document(0, 1, a, b) for a, b in itertools.pairwise(cu_seqlens) if b > a]
    elif lengths is not None:
        documents = [Document(i, 1, 0, n) for i, n in enumerate(lengths) if n]
    else:
        documents = [Document(0, batch, 0, seq_len)] if batch and seq_len else []
    window = windows(num_heads, num_kv_heads, head_size)[head_rank]
    return Problem(pattern, num_heads, num_kv_heads, causal, shard, straddling(documents, shard), window)


# -- work --------------------------------------------------------------------------------------------------------------
def rank_pairs(problem: Problem, exchange: str, rank: int) -> int:
    """Count the (query, key) pairs that a rank computes in wide segments; no exchange affects narrow segments."""
    if exchange != "switch":
        return joint_pairs(problem, rank) + local_pairs(problem, rank)
    if problem.shard.interleaved:
        return strided.owner_pairs(problem, rank)
    return sum(task.pairs for task in tasks_by_owner(problem, rank).get(rank, []))


def busiest_pairs(problem: Problem, exchange: str, ranks: Sequence[int]) -> int:
    """Return the largest number of pairs of one rank, among `ranks` and the owners of these ranks' segments."""
    if exchange != "switch" or problem.shard.interleaved:
        return max(rank_pairs(problem, exchange, rank) for rank in ranks)
    tasks = (tasks_by_owner(problem, rank).values() for rank in ranks)
    return max((sum(task.pairs for task in owned) for owners in tasks for owned in owners), default=0)


def mean_pairs(problem: Problem, exchange: str, ranks: Sequence[int]) -> float:
    """Return the mean pairs of `ranks`. For a few ranks of a switch, count by query: these ranks may own no segment."""
    by_queries = exchange == "switch" and len(ranks) < problem.shard.ranks and not problem.shard.interleaved
    return sum(rank_pairs(problem, "gather" if by_queries else exchange, rank) for rank in ranks) / len(ranks)


def joint_pairs(problem: Problem, rank: int) -> int:
    """Count the pairs of a rank's requests, with keys outside the query's run of consecutive positions on the rank."""
    if problem.shard.interleaved:
        return strided.query_pairs(problem, rank)
    return sum(request.pairs for request in row_requests(problem, rank))


def local_pairs(problem: Problem, rank: int) -> int:
    """Count the pairs among a rank's own rows in wide segments, without pairs in requests (0 if rows interleave)."""
    pairs = 0
    for piece in problem.shard.ranges(rank):
        for segment in wide_segments(problem, piece) if piece.step == 1 else ():
            for head in served(problem, segment.branch):
                branch, rows = problem.pattern.branches[segment.branch], segment_rows(problem, segment, head)
                rows, width = intersect(rows, piece), branch.width
                n = len(rows)
                if branch.tokens is not None:
                    later = len(clip(rows, max(piece.start, segment.start + branch.tokens), piece.stop))
                    n, crossing = n - later, (n - later) * later
                    pairs += segment.document.samples * (crossing if problem.causal else 2 * crossing)
                pairs += segment.document.samples * row_pairs(n, width, problem.causal)
    return pairs


# -- memory ------------------------------------------------------------------------------------------------------------
def held(problem: Problem, exchange: str, rank: int, per_node: int, head_dim: int, element_size: int) -> int:
    """Return the peak bytes that received rows, and the fp32 sums of their gradients, need on a rank in a call.

    The peak is in the backward. Own rows that the exchange copies are counted; send buffers are not.
    """
    wide = max(4, element_size)
    program = EXCHANGES[exchange].program(problem, rank, per_node)
    row, wide_row = 2 * head_dim * element_size, 2 * head_dim * wide
    landed = lambda step: sum(map(count, step.receives.values()))  # noqa: E731
    if isinstance(program, AllToAllProgram):
        keys, queries = landed(program.keys), landed(program.queries)
        unit, sums = head_dim * element_size, head_dim * wide
        # q, k and v of the forward; the outputs, their gradients and log-sum-exp; the gradients of q, k and v
        return keys * (row + wide_row) + queries * (unit + 2 * unit + wide + sums)
    rows = [landed(step) for step in program.rounds]
    if program.keep:
        return sum(rows) * (row + wide_row)
    # a round's rows with their gradients, while the next rows arrive
    return max(a * (row + wide_row) + b * row for a, b in itertools.pairwise([*rows, 0]))


def most_held(problem: Problem, exchange: str, per_node: int, head_dim: int, element_size: int) -> int:
    """Return the maximum number of bytes that any rank of any head-parallel group holds at once."""
    ranks = problem.shard.ranks
    listed = range(ranks) if ranks <= LISTED_RANKS else priced_ranks(ranks)
    return max(held(x, exchange, r, per_node, head_dim, element_size) for x in members_of(problem) for r in listed)


def _too_much(holds: dict[str, int], bound: int, named: str | None = None) -> ExchangeMemoryError:
    """Return the error, with its remedy, if the named exchange, or every exchange, holds more than the limit."""
    least = min(holds, key=lambda name: holds[name])
    sizes = ", ".join(f"{name} {_gib(n)}" for name, n in sorted(holds.items(), key=lambda x: x[1]))
    first = "no exchange of this call holds" if named is None else f"exchange={named!r} does not hold"
    other = "" if named is None or holds[least] > bound else f"Take exchange='auto' or {least!r}, or raise"
    return ExchangeMemoryError(
        f"{first} as little as exchange_memory_gib={bound / GIB:.6g} of other ranks' rows and their gradients. GiB at most: "
        f"{sizes}. {other or 'Raise'} exchange_memory_gib to {_gib(holds[named or least])}, share the sequence among more "
        "ranks, or take a pattern with fewer keys beyond a rank's tokens."
    )


def _gib(size: int) -> str:
    """Return a size in GiB, rounded up so that it is enough as a limit."""
    digits = 6
    return f"{-(-size * 10**digits // GIB) / 10**digits:.{digits}f}".rstrip("0").rstrip(".")


# -- prices ------------------------------------------------------------------------------------------------------------
def price(problem: Problem, exchange: str, per_node: int, head_dim: int, element_size: int, links: Links) -> Price:
    """Return the price of an exchange for the most expensive rank and window of heads among the priced ranks."""
    priced = priced_ranks(problem.shard.ranks)
    sizes = per_node, head_dim, element_size, links
    highest = max((_price(x, exchange, r, *sizes) for x in members_of(problem) for r in priced), key=_seconds)
    slower = SWITCH_SLOWDOWN if exchange == "switch" and problem.causal else 1
    late = (slower * busiest_pairs(x, exchange, priced) - mean_pairs(x, exchange, priced) for x in members_of(problem))
    waiting = max(late) * 14 * head_dim / FLOPS
    if exchange == "switch":
        rows = max(d.samples for d in problem.documents) * problem.shard.longest
        heads = max((x.heads[1] - x.heads[0] for x in members_of(problem) if _few_rows(x)), default=0)
        waiting += COPIED * rows * heads * head_dim / MEMORY
    return replace(highest, waiting=waiting)


def priced_ranks(ranks: int) -> Sequence[int]:
    """Return the ranks that are priced."""
    return range(ranks) if ranks <= PRICED else sorted({i * (ranks - 1) // (PRICED - 1) for i in range(PRICED)})


def _price(
    problem: Problem, exchange: str, rank: int, per_node: int, head_dim: int, element_size: int, links: Links
) -> Price:
    volume = EXCHANGES[exchange].volume(problem, rank, per_node)
    size = {key: units.bytes(head_dim, element_size) for key, units in volume.units.items()}
    total = lambda *names: round(sum(n for key, n in size.items() if any(name in key for name in names)))  # noqa: E731
    seconds = total("near") / links.near + total("far") / links.far
    seconds += volume.rounds * links.round + volume.messages * links.message
    kept = round(volume.kept * head_dim * element_size)
    passes = total("forward"), total("backward"), total("far")
    return Price(exchange, *passes, volume.rounds, volume.messages, kept, seconds)


def _seconds(x: Price) -> float:
    return x.seconds + x.waiting


def _few_rows(problem: Problem) -> bool:
    """Return True if at most `MAX_SELECTED_SHARE` of a rank's rows belong to wide segments of any branch."""
    length = problem.shard.longest
    branches = enumerate(problem.pattern.branches)
    wide = [i for i, b in branches if b.segment_length is None or b.segment_length > length or b.shift]
    rows = sum(len(served(problem, i)) / problem.pattern.branches[i].dilation_rate for i in wide)
    return rows <= MAX_SELECTED_SHARE * len(range(*problem.heads))


def members_of(problem: Problem) -> list[Problem]:
    """Return the problem of every member of a head-parallel group; all members must choose the same exchange."""
    cuts = windows(problem.num_heads, problem.num_kv_heads, problem.shard.members)
    return [replace(problem, heads=cut) for cut in cuts if cut[0] < cut[1]]


def _why_not(problem: Problem, exchange: str, per_node: int) -> str | None:
    reasons = (EXCHANGES[exchange].why_not(x, per_node) for x in members_of(problem))
    return next((reason for reason in reasons if reason), None)


def _able(problem: Problem, per_node: int) -> list[str]:
    return [x for x in EXCHANGES if _why_not(problem, x, per_node) is None]


@functools.lru_cache(maxsize=1024)
def plan(
    problem: Problem,
    exchange: str = "auto",
    *,
    ranks_per_node: int | None = None,
    head_dim: int = 64,
    element_size: int = 2,
    links: Links = DEFAULTS,
    exchange_memory: int | None = None,
) -> Plan:
    """Return the plan of a problem, with the named or the cheapest exchange.

    Args:
        problem: see `make_problem`.
        exchange: "auto" or a name of `EXCHANGES`.
        ranks_per_node: ranks that share fast links; None means all ranks.
        head_dim, element_size: D, and bytes of an element of q, k and v.
        links: the link speeds of this machine.
        exchange_memory: maximum number of bytes that a rank may hold at once, see `held`; None means no limit.

    Raises:
        ValueError: if the named exchange cannot serve the problem, or if the named exchange, or every exchange, holds
            more than `exchange_memory`. The message states the failed condition, or the bytes of each exchange.
    """
    check_exchange(exchange)
    if not crosses(problem):
        return Plan(problem, None)
    refused = [*windowed(problem.pattern), *global_tokens(problem.pattern)]
    if problem.shard.interleaved and refused:
        raise ValueError(
            f"layout='strided' does not serve {refused[0]}: the neighbours of every token, and the first tokens of a "
            "document, are on other ranks. Use layout='contiguous' or 'zigzag', where a rank has runs of tokens."
        )
    per_node = problem.shard.ranks if ranks_per_node is None else max(1, ranks_per_node // problem.shard.members)
    reason = None if exchange == "auto" else _why_not(problem, exchange, per_node)
    if reason:
        able = ", ".join(_able(problem, per_node))
        raise ValueError(f"exchange={exchange!r} cannot serve this call: {reason}. Use auto, {able}.")
    holds: dict[str, int] = {}
    if exchange_memory is not None:
        holds = {x: most_held(problem, x, per_node, head_dim, element_size) for x in _able(problem, per_node)}
        if (min(holds.values()) if exchange == "auto" else holds[exchange]) > exchange_memory:
            raise _too_much(holds, exchange_memory, None if exchange == "auto" else exchange)
    if exchange != "auto":
        return Plan(problem, exchange)
    over = {
        x: f"holds {n / 1e6:.2f} MB of rows and gradients, more than exchange_memory_gib"
        for x, n in holds.items()
        if n > (exchange_memory or 0)
    }
    whole = (0, problem.shard.seq_len)
    if any((d.start, d.stop) != whole for d in problem.documents):
        first = next(x for x in holds or ("gather",) if x not in over)
        reason = "documents differ from batch to batch; name it to use it"
        return Plan(problem, first, (), tuple((x, over.get(x, reason)) for x in EXCHANGES if x != first))
    chosen = _cheapest(problem, per_node, head_dim, element_size, links, over)
    return replace(chosen, prices=tuple(replace(p, held=holds.get(p.exchange)) for p in chosen.prices))


def _cheapest(
    problem: Problem, per_node: int, head_dim: int, element_size: int, links: Links, over: Mapping[str, str]
) -> Plan:
    """Return the plan with the cheapest exchange; `over`: {exchange that holds too much: reason}."""
    prices, rejected = [], dict(over)
    for exchange in EXCHANGES.values():
        reason = _why_not(problem, exchange.name, per_node)
        if reason is None:
            prices.append(price(problem, exchange.name, per_node, head_dim, element_size, links))
        else:
            rejected[exchange.name] = reason
    samples = max(d.samples for d in problem.documents)
    kv_heads = max(x.kv_heads[1] - x.kv_heads[0] for x in members_of(problem))
    own_bytes = 2 * samples * problem.shard.longest * kv_heads * head_dim * element_size
    allowed = [p for p in prices if p.exchange not in over]
    fits = [p for p in allowed if p.kept <= MAX_SAVED_RATIO * own_bytes] or allowed
    best = min(fits, key=_seconds)
    for p in allowed:
        if p not in fits:
            rejected[p.exchange] = (
                f"keeps {p.kept / 1e6:.1f} MB, more than {MAX_SAVED_RATIO} times the rank's own K and V"
            )
        elif p is not best:
            rejected[p.exchange] = f"takes {_seconds(p) * 1e3:.3f} ms, {best.exchange} {_seconds(best) * 1e3:.3f} ms"
    return Plan(problem, best.exchange, tuple(prices), tuple(rejected.items()), links)
