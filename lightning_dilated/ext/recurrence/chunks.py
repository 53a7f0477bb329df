"""Compute chunks as affine maps of the state, S -> a S - X^T Y S + B and out = R S + O, and pass states through them.

Shape letters: T chunks, C slots of a chunk, K kv heads, G query heads of a kv head, D head dim, E value dim, n runs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_dilated.ext.recurrence.rules import positive, ratio, unit
from lightning_dilated.ext.recurrence.runs import Tables

#: minimum number of chunks, at least 2, of a run that is passed in groups; groups save launches, which limit a GPU here
GROUPED_FROM = 32


class Transition(NamedTuple):
    """The map S -> a S - X^T Y S of each chunk. a (T, K, 1, 1) is None if it is 1; X, Y (T, K, C, D) are None if 0."""

    decay: Tensor | None = None  # the factor a
    left: Tensor | None = None  # the matrix X
    right: Tensor | None = None  # the matrix Y


class GatedChunks(NamedTuple):
    """The maps of gated delta chunks: S -> a S - X^T Y S + B, and out = R S + O.

    Attributes:
        added: B (T, K, D, E).
        read: R (T, K, G, C, D).
        own: O (T, K, G, C, E), the output that a chunk's tokens read from each other.
    """

    transition: Transition
    added: Tensor
    read: Tensor
    own: Tensor


def take(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows of x (rows, ...) at `index` (T, C), as (T, C, ...); an index equal to `rows` gives a row of 0."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[index]


def put(chunks: Tensor, tables: Tables) -> Tensor:
    """Reorder chunks (T, K, G, C, E) into tokens (B L, H, E); tokens without a document are 0."""
    rows = chunks.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
    return take(rows, tables.outputs)


def grouped(q: Tensor, index: Tensor, kv_heads: int) -> Tensor:
    """Reorder rows of q (rows, H, D) into chunks (T, K, G, C, D)."""
    return take(q, index).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)


def fading(log_decay: Tensor) -> Tensor:
    """Return the share of each token j that remains at each token i, exp(sum of log_decay over j + 1..i): (T, K, C, C).

    Each j has a separate sum, because a difference of prefix sums loses digits after a very negative log_decay.
    """
    width = log_decay.shape[-1]
    later = torch.ones(width, width, dtype=torch.bool, device=log_decay.device).triu()
    between = log_decay[..., None].masked_fill(later, 0).cumsum(-2)
    return between.masked_fill_(later.triu(1), -torch.inf).exp_()  # in place: it is the largest tensor of a forward


def gated_chunks(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, tables: Tables) -> GatedChunks:
    """Compute the chunks of q (rows, H, D), k (rows, K, D), v (rows, K, E), log_decay and beta (rows, K).

    This is the WY form (arXiv 2412.06464): a triangular system computes what each token adds to the state, given the
    additions of the chunk's earlier tokens.
    """
    q = unit(grouped(q, tables.queries, k.shape[1]))
    k, v = unit(take(k, tables.keys).transpose(1, 2)), take(v, tables.keys).transpose(1, 2)
    beta, log_decay = (take(x, tables.keys).transpose(1, 2) for x in (beta, log_decay))
    fade, past = fading(log_decay), log_decay.cumsum(-1).exp()[..., None]
    system = (beta[..., None] * (k @ k.mT) * fade).tril(-1)
    right = torch.cat([v, past * k], -1) * beta[..., None]
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fresh, stored = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores = (q @ k.mT[:, :, None]) * fade[:, :, None]
    left = fade[..., -1, :, None] * k
    transition = Transition(past[..., -1:, :], left, stored)
    read = past[:, :, None] * q - scores @ stored[:, :, None]
    return GatedChunks(transition, left.mT @ fresh, read, scores @ fresh[:, :, None])


class SegmentChunks(NamedTuple):
    """Memory segments of the kinds linear and delta: features Phi (T, K, C, D) and values V (T, K, C, E), which are 0
    in empty slots, and their sums [Phi^T V | Phi^T 1] (T, K, D, E + 1)."""

    keys: Tensor
    values: Tensor
    sums: Tensor


def segment_chunks(features: Tensor, v: Tensor, tables: Tables) -> SegmentChunks:
    """Compute the segments of features (rows, K, D) and values (rows, K, E)."""
    keys, values = take(features, tables.keys).transpose(1, 2), take(v, tables.keys).transpose(1, 2)
    return SegmentChunks(keys, values, torch.cat([keys.mT @ values, keys.sum(-2)[..., None]], -1))


def delta_transition(chunks: SegmentChunks, normalizer: Tensor, closed: Tensor) -> Transition:
    """Return the delta rule of each segment, given the `normalizer` (T, K, D, 1) of the segments before it.

    A key is divided by its product with the past normalizer, as in the paper, or with its own segment's normalizer if
    this product is larger. D Phi Phi^T then has no row sum above 1, so the transition's spectral radius is at most 1.
    """
    past, current = chunks.keys @ normalizer, chunks.keys @ chunks.sums[..., -1:]
    return Transition(None, chunks.keys, ratio(chunks.keys, torch.maximum(past, current)) * closed[:, None, None, None])


def read_normalized(q: Tensor, state: Tensor, tables: Tables) -> Tensor:
    """Return phi(q) M / phi(q) z (T, K, G, C, E), or 0 if phi(q) z is 0; `state` is [M | z] (T, K, D, E + 1)."""
    read = positive(grouped(q, tables.queries, state.shape[1])) @ state[:, :, None]
    return ratio(read[..., :-1], read[..., -1:])


def pass_states(transition: Transition, added: Tensor, begin: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk, (T, K, D, E), and the state after each run, (n, K, D, E).

    Args:
        added: (T, K, D, E), the B of each chunk's map.
        begin: (n, K, D, E) the state before each run.
        counts: `Tables.counts`.
    """
    if transition.left is not None and transition.left.shape[2] >= transition.left.shape[3]:
        transition = _multiplied(transition)
    steps, runs = len(counts), len(begin)
    if steps >= GROUPED_FROM and counts[-1] == runs:
        group = math.isqrt(steps // 2)
        return _pass_groups(transition, added, begin, group, steps // group)
    return _pass_steps(transition, added, begin, counts)


def _pass_steps(transition: Transition, added: Tensor, begin: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Compute `pass_states` chunk by chunk."""
    steps = zip(*(_steps(x, counts) for x in (*transition, added)), strict=True)
    before, after, state = [begin[:0]], [], begin
    for count, (decay, left, right, new) in zip(counts, steps, strict=True):
        after.append(state[count:])
        state = state[:count]
        before.append(state)
        next_state = state if decay is None else decay * state
        if right is not None:
            changed = right @ state
            next_state = next_state - (changed if left is None else left.mT @ changed)
        state = next_state + new
    return torch.cat(before), torch.cat([state, *reversed(after)])


def _pass_groups(
    transition: Transition, added: Tensor, begin: Tensor, group: int, number: int
) -> tuple[Tensor, Tensor]:
    """Compute `pass_states` for runs of equal length: `number` groups of `group` chunks each, then the last few chunks.

    A first pass computes the maps of all groups in parallel. Then a loop computes the state before each group, and a
    second pass computes the states before all chunks in parallel. This takes 2 * group + number steps instead of
    group * number."""
    runs, dim = len(begin), begin.shape[2]
    inside = runs * group * number
    counts, tail_counts = (number * runs,) * group, (runs,) * ((len(added) - inside) // runs)

    def by_group(x: Tensor | None) -> Tensor | None:
        """Sort chunks by their index within a group, and then by group."""
        return None if x is None else x[:inside].unflatten(0, (number, group, runs)).transpose(0, 1).flatten(0, 2)

    maps, sums = Transition(*map(by_group, transition)), by_group(added)
    whole = torch.eye(dim, dtype=begin.dtype, device=begin.device).expand(number * runs, *begin.shape[1:2], dim, dim)
    _, composed = _pass_steps(maps, pad(sums, (dim, 0)), pad(whole, (0, begin.shape[3])), counts)
    state, firsts = begin, []
    for group_map in composed.split(runs):
        firsts.append(state)
        state = group_map[..., :dim] @ state + group_map[..., dim:]
    before, _ = _pass_steps(maps, sums, torch.cat(firsts), counts)
    before = before.unflatten(0, (group, number, runs)).transpose(0, 1).flatten(0, 2)
    last = Transition(*(None if x is None else x[inside:] for x in transition))
    later, after = _pass_steps(last, added[inside:], state, tail_counts)
    return torch.cat([before, later]), after


def _multiplied(transition: Transition) -> Transition:
    """Return the same map with `right` = X^T Y (T, K, D, D) and no `left`; X^T Y is no larger than Y if C >= D."""
    return Transition(transition.decay, None, transition.left.mT @ transition.right)


def _steps(x: Tensor | None, counts: tuple[int, ...]) -> tuple[Tensor | None, ...]:
    return (None,) * len(counts) if x is None else x.split(counts)
