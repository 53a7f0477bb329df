"""What an exchange moves on each of very many ranks, without their programs: gather, butterfly, their hierarchical forms.

The butterflies are counted half by half and are exact. A gather's rows are counted as if branches nested, for all ranks at
once, times the ratio of the exact counts of `SAMPLES` ranks to that, which is 1 for nested patterns. Besides:
  - a gather's rank sends as much as it receives; causal, as much as its mirror rank (R - 1 - rank) receives;
  - it waits for every rank of its segment of the widest branch, and exchanges messages with as many as sampled ranks do,
    with those between them on a line;
  - a hierarchical gather's second round sends what the ranks of the node receive on the mean.
Shape letters: L tokens of a rank, R ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lightning_dilated.pattern.rows import place
from lightning_dilated.planning.simulating.rounds import Array, Moves, Reach, Rows, bounds, reached, reaches, staged
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.exchange.butterfly import half
from lightning_dilated.sequence.exchange.program import count
from lightning_dilated.sequence.requirements import Problem

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


def _rows(sent: NDArray, received: NDArray, messages: NDArray, peers: NDArray) -> Rows:
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
        out.append(_rows(side(held), side(held[partner]), np.ones(len(ranks)), ranks & ~distance))
        if share > 1:
            own = held[partner]
            rest = parts[partner // distance].sum(1) - own
            spread = np.stack([own * (per_node - 1), 0 * own]), np.stack([rest, 0 * rest])
            out.append(
                _rows(*(x.astype(float) for x in spread), np.full(len(ranks), per_node - 1.0), ranks // per_node)
            )
    return out


def _nested(problem: Problem, found: list[Reach], inner: tuple[NDArray, NDArray], low: NDArray, high: NDArray) -> Array:
    """(R,) rows in [low, high) that ranks need from outside of `inner`, if each branch's rows lie among a narrower one's."""
    total = np.zeros(problem.shard.ranks)
    for head in {x.head for x in found}:
        begin, end = inner
        for x in (x for x in found if x.head == head):
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
    found = list(reaches(problem))
    found.sort(key=lambda x: int((x.stop - x.start).max()))
    node = np.arange(problem.shard.ranks) // per_node * per_node
    last = np.minimum(node + per_node, problem.shard.ranks) - 1
    here = low[node], high[last]
    inside = _nested(problem, found, (low, high), *here)
    everywhere = _nested(problem, found, (low, high), np.zeros_like(low), np.full_like(low, problem.shard.seq_len))
    return (
        inside,
        everywhere - inside,
        _nested(problem, found, here, np.zeros_like(low), np.full_like(low, problem.shard.seq_len)),
    )


def _sampled(problem: Problem, exchange: str, per_node: int, near: Array, far: Array) -> tuple[Array, Array]:
    """((2, R) rows received, (R,) messages) of estimates, set to the exact counts of sampled ranks."""
    ranks = problem.shard.ranks
    chosen = sorted({i * (ranks - 1) // (SAMPLES - 1) for i in range(SAMPLES)})
    found = [EXCHANGES[exchange].count(problem, rank, per_node) for rank in chosen]
    rows = np.zeros((2, ranks))
    for i, (side, estimate) in enumerate((("near", near), ("far", far))):
        true = sum(x.units["forward", side].own / 2 for x in found)
        rows[i] = estimate * (true / estimate[chosen].sum() if estimate[chosen].sum() else 1.0)
    return rows, np.interp(np.arange(ranks), chosen, [x.messages / 2 for x in found])


def _mirrored(problem: Problem, x: Array) -> Array:
    """What ranks send, from what they receive."""
    return x[..., ::-1] if problem.causal else x


def _together(problem: Problem) -> NDArray:
    """A number for each rank: that of its segment of the widest branch."""
    low, _ = bounds(problem)
    width, shift = max((place(b, problem.shard.seq_len) for b in problem.pattern.branches), key=lambda x: x[0])
    return (low + shift) // width


def _gather(problem: Problem, per_node: int) -> list[Rows]:
    inside, outside, _ = _needs(problem, per_node)
    received, messages = _sampled(problem, "gather", per_node, inside, outside)
    messages = np.maximum(messages, _mirrored(problem, messages))
    return [_rows(_mirrored(problem, received), received, messages, _together(problem))]


def _hierarchical_gather(problem: Problem, per_node: int) -> list[Rows]:
    inside, outside, joint = _needs(problem, per_node)
    spread = inside + outside * (per_node - 1) / per_node
    received, messages = _sampled(problem, "hierarchical_gather", per_node, spread, joint / per_node)
    messages = np.maximum(messages, _mirrored(problem, messages)) - (per_node - 1)
    ranks, none = np.arange(problem.shard.ranks), np.zeros(problem.shard.ranks)
    between = np.stack([none, received[1]])
    twins = _together(problem) * per_node + ranks % per_node
    mean = np.repeat(received[0].reshape(-1, per_node).mean(1), per_node)
    within = _rows(
        np.stack([mean, none]), np.stack([received[0], none]), np.full(len(ranks), per_node - 1.0), ranks // per_node
    )
    return [_rows(_mirrored(problem, between), between, messages, twins), within]
