"""What one call of sharded attention moves and computes on every rank, as arrays over the ranks.

Up to `EXACT` ranks every number is counted from the ranks' own programs (`exact`), for more without them (`many`). The pairs
of arriving rows are counted for all ranks at once and are exact for any number of ranks.

With many ranks the butterflies are counted half by half and are exact. A gather's rows are counted as if branches nested,
for all ranks at once, times the ratio of the exact counts of `SAMPLES` ranks to that, which is 1 for nested patterns.
Further assumptions:
  - a gather's rank sends as much as it receives; causal, as much as its mirror rank (R - 1 - rank) receives;
  - it waits for every rank of its segment of the widest branch, and exchanges messages with as many as sampled ranks do,
    interpolated between those;
  - a hierarchical gather's second round sends what the ranks of the node receive on average.

Shape letters: N tokens, L tokens of a rank, R ranks, H query heads, w segment length, r dilation rate, o offset.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_dilated.pattern.rows import segment_width
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.exchange.butterfly import half, wide_branches
from lightning_dilated.sequence.exchange.program import Round, count
from lightning_dilated.sequence.exchange.switch import Switched
from lightning_dilated.sequence.requirements import Problem, served

#: up to this many ranks the programs of all are counted
EXACT = 16

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """One all-to-all on all ranks.

    Attributes:
        sent, received: (2, R) rows to and from other ranks, intra-node and inter-node.
        messages: (R,) peers that a rank sends to or receives from, whichever is more.
        packed, landed: (R,) rows of the send and the receive buffer, with a rank's copies to itself.
        peers: whom a rank waits for: (R, R) booleans; or (R,) integers, equal ones waiting for each other.
    """

    sent: Array
    received: Array
    messages: Array
    packed: Array
    landed: Array
    peers: NDArray

    def back(self) -> Rows:
        """The same round in the other direction."""
        return Rows(self.received, self.sent, self.messages, self.landed, self.packed, self.peers)

    def latest(self, times: Array) -> Array:
        """The latest time among a rank's peers and its own."""
        if self.peers.ndim == 2:
            return np.where(self.peers, times, -np.inf).max(1)
        out = np.full(int(self.peers.max()) + 1, -np.inf)
        np.maximum.at(out, self.peers, times)
        return out[self.peers]


@dataclass(frozen=True)
class Moves:
    """The exchange of one call on all ranks.

    Attributes:
        style: "kept" (rows are saved, gradients return through the rounds), "ring" (rows travel twice) or "switch".
        rounds: of the forward; of a switch those of keys and of queries.
        returns: the rounds that return a ring's gradients.
        pairs, batches: (rounds, R) what a rank computes once a round has arrived, and in how many calls.
        queries: (R,) query rows, over heads, that other ranks' keys reach; as if those of a wide branch were among a
            narrower one's.
    """

    style: str
    rounds: list[Rows]
    returns: list[Rows]
    pairs: Array
    batches: Array
    queries: Array


def exact(problem: Problem, exchange: str, per_node: int) -> Moves:
    """Counted from the program of every rank."""
    ranks = problem.shard.ranks
    programs = [EXCHANGES[exchange].program(problem, rank, per_node) for rank in range(ranks)]
    if isinstance(programs[0], Switched):
        rounds = [_rows([getattr(x, side) for x in programs], per_node) for side in ("keys", "queries")]
        pairs, batches = np.zeros((2, ranks)), np.zeros((2, ranks))
        for rank, program in enumerate(programs):
            pairs[1, rank] = sum(task.pairs for task in program.tasks)
            batches[1, rank] = len({(t.branch, len(t.queries)) for t in program.tasks})
        return Moves("switch", rounds, [], pairs, batches, reached(problem))
    rounds = [_rows(list(steps), per_node) for steps in zip(*(x.rounds for x in programs), strict=True)]
    if programs[0].keep:
        return Moves("kept", rounds, [], *staged(problem, exchange, per_node, len(rounds)), reached(problem))
    returns = [_rows(list(steps), per_node) for steps in zip(*(x.returns for x in programs), strict=True)]
    return Moves("ring", rounds, returns, *_by_hops(problem), reached(problem))


def _rows(steps: list[Round], per_node: int) -> Rows:
    """One round from the ranks' own parts of it."""
    ranks = len(steps)
    sent, received = np.zeros((2, ranks)), np.zeros((2, ranks))
    peers, messages, own = np.eye(ranks, dtype=bool), np.zeros(ranks), np.zeros(ranks)
    for rank, step in enumerate(steps):
        for side, into in ((step.sends, sent), (step.receives, received)):
            for peer, message in side.items():
                peers[rank, peer] = True
                if peer != rank:
                    into[int(peer // per_node != rank // per_node), rank] += count(message)
        own[rank] = count(step.sends.get(rank, ()))
        messages[rank] = max(len(side.keys() - {rank}) for side in (step.sends, step.receives))
    return Rows(sent, received, messages, sent.sum(0) + own, received.sum(0) + own, peers)


@dataclass(frozen=True)
class Reach:
    """The keys of other ranks that the queries of one head and branch see: arrays over ranks.

    `first` is the position of index 0 of their segment, which holds [start, stop). Of a window these are the positions that
    a rank's queries see, and `share` of all pairs of the queries and keys is in the window.
    """

    branch: int
    head: int
    rate: int
    offset: int
    first: NDArray
    start: NDArray
    stop: NDArray
    queries: NDArray
    keys: NDArray
    share: NDArray | float = 1.0

    @property
    def pairs(self) -> Array:
        """(query, key) pairs."""
        return self.queries * self.keys * self.share

    def count(self, low: NDArray, high: NDArray) -> NDArray:
        """Positions that the head uses in [low, high) of the segment."""
        before = lambda x: np.maximum(-((self.first + self.offset - np.clip(x, self.start, self.stop)) // self.rate), 0)  # noqa: E731
        return np.maximum(before(high) - before(low), 0)


def bounds(problem: Problem) -> tuple[NDArray, NDArray]:
    """[low, high) of the positions of every rank.

    Raises:
        ValueError: for a layout other than contiguous, head-parallel groups, or documents that are not the sequence.
    """
    shard = problem.shard
    if shard.layout != "contiguous" or shard.members > 1 or problem.heads != (0, problem.num_heads):
        raise ValueError(
            f"steps are simulated for contiguous shards without head-parallel groups, not for layout={shard.layout!r} with "
            f"head_size={shard.members}."
        )
    if any((d.sample, d.samples, d.start, d.stop) != (0, 1, 0, shard.seq_len) for d in problem.documents):
        raise ValueError("steps are simulated for one sequence of a single document, not for packed or padded ones.")
    low = np.minimum(np.arange(shard.ranks, dtype=np.int64) * shard.chunk, shard.seq_len)
    return low, np.minimum(low + shard.chunk, shard.seq_len)


def reaches(problem: Problem) -> Iterator[Reach]:
    """What `row_requests` yields for contiguous shards, for all ranks at once; where a rank has none, `keys` is 0."""
    low, high = bounds(problem)
    length = problem.shard.seq_len
    for i, branch in enumerate(problem.pattern.branches):
        if branch.width is not None:
            yield from _window_reaches(problem, i, low, high)
            continue
        if branch.tokens is not None:
            yield from _global_reaches(problem, i, low, high)
            continue
        width, shift = segment_width(branch, length), branch.shift
        firsts = [(np.clip(x, 0, length - 1) + shift) // width * width - shift for x in (low, high - 1)]
        for head in served(problem, i):
            offset = problem.pattern.offset(branch, head, problem.num_heads, problem.num_kv_heads)
            for number, first in enumerate(firsts):
                start, stop = np.maximum(first, 0), np.minimum(first + width, length)
                bare = Reach(i, head, branch.dilation_rate, offset, first, start, stop, low, low)
                queries, before, after = bare.count(low, high), bare.count(start, low), bare.count(high, stop)
                keys = before + (0 if problem.causal else after)
                there = (queries > 0) & (low < high) & (firsts[0] != firsts[1] if number else True)
                keys = np.where(there, keys, 0)
                queries = np.where(keys > 0, queries, 0)
                yield Reach(i, head, branch.dilation_rate, offset, first, start, stop, queries, keys)


def _window_reaches(problem: Problem, number: int, low: NDArray, high: NDArray) -> Iterator[Reach]:
    """`reaches` of a window."""
    branch, length = problem.pattern.branches[number], problem.shard.seq_len
    width = branch.width or 0
    reach = min((width - 1) * branch.dilation_rate, length)
    start, stop, first = np.maximum(low - reach, 0), np.minimum(high + reach, length), np.zeros_like(low)
    for head in served(problem, number):
        offset = problem.pattern.offset(branch, head, problem.num_heads, problem.num_kv_heads)
        bare = Reach(number, head, branch.dilation_rate, offset, first, start, stop, low, low)
        rows, before, after = bare.count(low, high), bare.count(start, low), bare.count(high, stop)
        sides = [np.where(rows > 0, x, 0) for x in ((before,) if problem.causal else (before, after))]
        keys = sum(sides)
        queries = np.minimum(rows, sum(np.where(x > 0, np.minimum(rows, width - 1), 0) for x in sides))
        pairs = sum(_beside(rows, x, width) for x in sides)
        share = pairs / np.maximum(queries * keys, 1)
        yield Reach(number, head, branch.dilation_rate, offset, first, start, stop, queries, keys, share)


def _global_reaches(problem: Problem, number: int, low: NDArray, high: NDArray) -> Iterator[Reach]:
    """`reaches` of global tokens: theirs, and those of the other positions."""
    length, zeros = problem.shard.seq_len, np.zeros_like(low)
    edge = min(problem.pattern.branches[number].tokens or 0, length)
    stop = edge if problem.causal else length
    first, others = np.clip(edge - low, 0, high - low), np.clip(high - np.maximum(low, edge), 0, None)
    sides = (first, stop, low + (0 if problem.causal else length - high)), (others, edge, np.minimum(low, edge))
    for head in served(problem, number):
        for queries, end, keys in sides:
            keys = np.where(queries > 0, keys, 0)
            yield Reach(number, head, 1, 0, zeros, zeros, zeros + end, np.where(keys > 0, queries, 0), keys)


def _beside(queries: NDArray, keys: NDArray, width: int) -> NDArray:
    """Pairs of a window across a cut: query a, counted from the cut, sees min(keys, width - 1 - a) of the keys."""
    queries = np.minimum(queries, width - 1)
    all_keys = np.clip(width - keys, 0, queries)  # queries that see them all
    rest = queries - all_keys
    return all_keys * keys + rest * (2 * (width - 1) - (all_keys + queries - 1)) // 2


def reached(problem: Problem) -> Array:
    """`Moves.queries`: of each head, those of the branch with most."""
    by_head: dict[int, dict[int, Array]] = {}
    for x in reaches(problem):
        of_head = by_head.setdefault(x.head, {})
        of_head[x.branch] = of_head.get(x.branch, 0) + x.queries
    return sum((np.max(list(of_head.values()), 0) for of_head in by_head.values()), np.zeros(problem.shard.ranks))


def staged(problem: Problem, exchange: str, per_node: int, rounds: int) -> tuple[Array, Array]:
    """(pairs, batches), (rounds, R) each: computed after the round that brings the last of their rows.

    In the hierarchical forms a rank has a branch's rows a round sooner than this if all are in its own share.
    """
    ranks = problem.shard.ranks
    pairs, batches = np.zeros((rounds, ranks)), np.zeros((rounds, ranks))
    at, everything = np.arange(ranks), [x for x in reaches(problem) if x.keys.any()]
    for branch in sorted({x.branch for x in everything}):
        of_branch = [x for x in everything if x.branch == branch]
        stage = _stage(problem, exchange, per_node, rounds, branch)
        np.add.at(pairs, (stage, at), sum(x.pairs for x in of_branch))
        np.add.at(batches, (stage, at), _different(of_branch))
    return pairs, batches


def _different(of_branch: list[Reach]) -> NDArray:
    """The number of different sizes of (queries, keys) on each rank: requests of one size are one call."""
    codes = np.sort(np.stack([x.queries * (1 << 40) + x.keys for x in of_branch]), 0)
    new = np.concatenate([np.ones_like(codes[:1], dtype=bool), codes[1:] != codes[:-1]]) & (codes > 0)
    return new.sum(0)


def _stage(problem: Problem, exchange: str, per_node: int, rounds: int, branch: int) -> NDArray:
    """The round (R,) after which each rank has the rows of a branch."""
    ranks = np.arange(problem.shard.ranks)
    if "butterfly" not in exchange:
        return np.full_like(ranks, rounds - 1)
    head = served(problem, branch)[0]
    width = next(w for w, _, _, i in wide_branches(problem, head) if i == branch)
    level = np.full_like(ranks, (width * problem.shard.ranks // problem.shard.seq_len).bit_length() - 1)
    if problem.causal:  # keys before the rank came with its highest turn as the later half, because rows nest
        level = np.maximum(np.frexp(ranks & ((1 << level) - 1))[1], 1)
    inside = per_node.bit_length() - 1
    return np.where(level > inside, 2 * level - inside, level) - 1 if exchange.startswith("hier") else level - 1


def _by_hops(problem: Problem) -> tuple[Array, Array]:
    """(pairs, batches) of a ring: those with the rows of the rank so many hops back."""
    low, high = bounds(problem)
    ranks = problem.shard.ranks
    pairs, batches = np.zeros((ranks, ranks)), np.zeros((ranks, ranks))
    at, everything = np.arange(ranks), [x for x in reaches(problem) if x.keys.any()]
    for hops in range(1, ranks):
        source = (at - hops) % ranks
        seen = (source < at) | (not problem.causal)
        cut = [(x, np.where((x.keys > 0) & seen, x.count(low[source], high[source]), 0)) for x in everything]
        for branch in {x.branch for x in everything}:
            of_branch = [
                replace(x, queries=np.where(n > 0, x.queries, 0), keys=n) for x, n in cut if x.branch == branch
            ]
            pairs[hops] += sum(x.pairs for x in of_branch)
            batches[hops] += _different(of_branch)
    return pairs, batches


#: ranks of a gather that are counted one by one
SAMPLES = 9


def many(problem: Problem, exchange: str, per_node: int) -> Moves:
    """The exchange on all ranks.

    Raises:
        ValueError: for an exchange that is simulated for few ranks only.
    """
    makers: dict[str, Callable[[Problem, int], list[Rows]]] = {
        "gather": _gather,
        "butterfly": functools.partial(_butterfly, hierarchical=False),
        "hierarchical_gather": _hierarchical_gather,
        "hierarchical_butterfly": functools.partial(_butterfly, hierarchical=True),
    }
    if exchange not in makers:
        raise ValueError(
            f"exchange={exchange!r} is simulated for few ranks only, not for {problem.shard.ranks}. "
            f"Use {', '.join(makers)}."
        )
    rounds = makers[exchange](problem, per_node)
    return Moves("kept", rounds, [], *staged(problem, exchange, per_node, len(rounds)), reached(problem))


def _rows_by_level(sent: NDArray, received: NDArray, messages: NDArray, peers: NDArray) -> Rows:
    return Rows(sent, received, messages, sent.sum(0), received.sum(0), peers)


def _butterfly(problem: Problem, per_node: int, hierarchical: bool) -> list[Rows]:
    """The rounds of `butterfly.program`, or of its hierarchical form."""
    ranks, out = np.arange(problem.shard.ranks), []
    for level in range(1, problem.shard.ranks.bit_length()):
        distance = 1 << (level - 1)
        far, partner = distance >= per_node, ranks ^ distance
        share = per_node if hierarchical and far else 1
        # the rows of a half are those of all its ranks; one part of them for each number in the node
        parts = np.array(
            [[count(half(problem, r, level, (i, share))) for i in range(share)] for r in ranks[::distance]]
        )
        held = parts[ranks // distance, ranks % share]
        side = lambda n, far=far: np.stack([n * (not far), n * far]).astype(float)  # noqa: E731
        out.append(_rows_by_level(side(held), side(held[partner]), np.ones(len(ranks)), ranks & ~distance))
        if share > 1:
            own = held[partner]
            rest = parts[partner // distance].sum(1) - own
            spread = np.stack([own * (per_node - 1), 0 * own]), np.stack([rest, 0 * rest])
            out.append(
                _rows_by_level(
                    *(x.astype(float) for x in spread), np.full(len(ranks), per_node - 1.0), ranks // per_node
                )
            )
    return out


def _nested(
    problem: Problem, everything: list[Reach], inner: tuple[NDArray, NDArray], low: NDArray, high: NDArray
) -> Array:
    """(R,) rows in [low, high) that ranks need from outside of `inner`, if each branch's rows lie among a narrower one's.

    `everything`: narrow segments first.
    """
    total = np.zeros(problem.shard.ranks)
    for head in {x.head for x in everything}:
        begin, end = inner
        for x in (x for x in everything if x.head == head):
            last = np.minimum(x.stop, inner[1]) if problem.causal else x.stop
            cut = lambda a, b, x=x: x.count(np.maximum(a, low), np.minimum(b, high))  # noqa: E731
            total += np.where(x.keys > 0, cut(x.start, last) - cut(begin, end), 0)
            begin, end = (
                np.where(x.keys > 0, a, b)
                for a, b in ((np.minimum(begin, x.start), begin), (np.maximum(end, last), end))
            )
    return total


def _needs(problem: Problem, per_node: int) -> tuple[Array, Array, Array]:
    """(R,) rows that a rank needs from its node, from elsewhere, and that its node needs together from elsewhere."""
    low, high = bounds(problem)
    everything = sorted(reaches(problem), key=lambda x: int((x.stop - x.start).max()))
    node = np.arange(problem.shard.ranks) // per_node * per_node
    last = np.minimum(node + per_node, problem.shard.ranks) - 1
    here = low[node], high[last]
    inside = _nested(problem, everything, (low, high), *here)
    whole = np.zeros_like(low), np.full_like(low, problem.shard.seq_len)
    everywhere = _nested(problem, everything, (low, high), *whole)
    return inside, everywhere - inside, _nested(problem, everything, here, *whole)


def _sampled(problem: Problem, exchange: str, per_node: int, near: Array, far: Array) -> tuple[Array, Array]:
    """((2, R) rows received, (R,) messages) of estimates, set to the exact counts of sampled ranks."""
    ranks = problem.shard.ranks
    chosen = sorted({i * (ranks - 1) // (SAMPLES - 1) for i in range(SAMPLES)})
    volumes = [EXCHANGES[exchange].volume(problem, rank, per_node) for rank in chosen]
    rows = np.zeros((2, ranks))
    for i, (side, estimate) in enumerate((("near", near), ("far", far))):
        true = sum(x.units["forward", side].own / 2 for x in volumes)
        rows[i] = estimate * (true / estimate[chosen].sum() if estimate[chosen].sum() else 1.0)
    return rows, np.interp(np.arange(ranks), chosen, [x.messages / 2 for x in volumes])


def _mirrored(problem: Problem, x: Array) -> Array:
    """What ranks send, from what they receive."""
    return x[..., ::-1] if problem.causal else x


def _together(problem: Problem) -> NDArray:
    """A number for each rank: that of its segment of the widest branch."""
    low, _ = bounds(problem)
    widest = max(problem.pattern.branches, key=lambda b: segment_width(b, problem.shard.seq_len))
    return (low + widest.shift) // segment_width(widest, problem.shard.seq_len)


def _gather(problem: Problem, per_node: int) -> list[Rows]:
    inside, outside, _ = _needs(problem, per_node)
    received, messages = _sampled(problem, "gather", per_node, inside, outside)
    messages = np.maximum(messages, _mirrored(problem, messages))
    return [_rows_by_level(_mirrored(problem, received), received, messages, _together(problem))]


def _hierarchical_gather(problem: Problem, per_node: int) -> list[Rows]:
    inside, outside, joint = _needs(problem, per_node)
    spread = inside + outside * (per_node - 1) / per_node
    received, messages = _sampled(problem, "hierarchical_gather", per_node, spread, joint / per_node)
    messages = np.maximum(messages, _mirrored(problem, messages)) - (per_node - 1)
    ranks, none = np.arange(problem.shard.ranks), np.zeros(problem.shard.ranks)
    between = np.stack([none, received[1]])
    twins = _together(problem) * per_node + ranks % per_node
    mean = np.repeat(received[0].reshape(-1, per_node).mean(1), per_node)
    within = _rows_by_level(
        np.stack([mean, none]), np.stack([received[0], none]), np.full(len(ranks), per_node - 1.0), ranks // per_node
    )
    return [_rows_by_level(_mirrored(problem, between), between, messages, twins), within]
