"""Exact attention weights of chosen queries over all keys, without an N x N matrix.

    weight[p,j,h] = c(p,j,h) exp(s_pj) / (sum_i c(p,i,h) exp(s_pi) + n_pad(p,h)),   s = scale q.k

c is the number of branches in which query p sees key j; n_pad is the number of zero keys that padding="attended" adds,
else 0. `dilated_attention` computes one softmax with these weights, so its output is the sum of v weighted by them.
Shape letters: B batch, N tokens, Q chosen queries, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dilated._validation import integer
from lightning_dilated.attention.functional import autocast, check_call
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.branch import AnyBranch
from lightning_dilated.pattern.rows import check_bounds, check_padding, head_rows, padded_keys, segment_at
from lightning_dilated.sequence.group import active_sequence


@torch.no_grad()
def attention_weights(
    q: Tensor,
    k: Tensor,
    pattern: DilatedPattern,
    queries: Sequence[int] | Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    lengths: Tensor | Sequence[int] | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return the weights that `dilated_attention` gives every key for chosen queries. Memory and time are O(B H Q N).

    Args:
        q: (B, N, H, D) queries, as `dilated_attention` takes them.
        k: (B, N, K, D) keys, where K divides H.
        pattern: the pattern, which determines the keys of each query.
        queries: Q positions in [0, N), the same in every sample; [0] for a class token at the start.
        causal, scale, lengths, cu_seqlens: as in `dilated_attention`.

    Returns:
        (B, H, Q, N), fp32 (fp64 for float64 inputs), without a gradient. A row sums to 1. It sums to less with
        padding="attended", because zero keys take a share, and to 0 if the query has no key or is outside its sample.

    Raises:
        TypeError, ValueError: with the argument, its value and the allowed values.
        RuntimeError: if several ranks share a sequence, because this rank does not hold all keys.
    """
    sequence = active_sequence()
    if sequence is not None and sequence.ranks > 1:
        raise RuntimeError(
            f"attention_weights needs all keys, but {sequence.ranks} ranks share the sequence. Call it on one rank with the "
            "whole sequence (sequence_gather puts q and k together), outside of the strategy's steps."
        )
    q, k = autocast(q, k)  # round as the op does
    lengths, cu_seqlens, scale = check_call(q, k, k, pattern, causal, scale, 0.0, lengths, cu_seqlens, False, "auto")
    positions = _positions(queries, q.shape[1])
    counts, pads = _counts(q, k, pattern, positions, causal, _documents(q, lengths, cu_seqlens))
    with torch.autocast(q.device.type, enabled=False):
        return _softmax(_scores(q[:, positions], k, scale), counts.to(q.device), pads.to(q.device))


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return scale q.k, (B, H, Q, N); with grouped-query attention the query heads of a kv head are neighbours."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q = q.to(wide).unflatten(2, (k.shape[2], -1)) * scale
    return torch.einsum("bqkgd,bnkd->bkgqn", q, k.to(wide)).flatten(1, 2)


def _softmax(scores: Tensor, counts: Tensor, pads: Tensor) -> Tensor:
    """Turn scores (B, H, Q, N) into weights, in place; each key counts c times, and n_pad zero keys are added."""
    if not scores.numel():
        return scores
    scores.masked_fill_(counts == 0, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    # a zero key has score 0; a row without keys has no maximum
    top = torch.where(pads[..., None] > 0, top.clamp(min=0), top).masked_fill_(top == -torch.inf, 0)
    weights = scores.sub_(top).exp_().mul_(counts)
    total = weights.sum(-1, keepdim=True) + pads[..., None] * torch.exp(-top)
    return weights.div_(torch.where(total > 0, total, 1.0))


def _positions(queries: Sequence[int] | Tensor, seq_len: int) -> list[int]:
    numbers = queries.tolist() if isinstance(queries, Tensor) else queries
    if not isinstance(numbers, (list, tuple, range)):
        raise TypeError(f"queries must be a list of positions such as [0], or a 1-D integer tensor; got {queries!r}.")
    positions = [integer(p, f"queries[{i}]", 0) for i, p in enumerate(numbers)]
    beyond = [p for p in positions if p >= seq_len]
    if beyond:
        raise ValueError(f"queries holds position {beyond[0]}, but there are {seq_len} tokens (0..{seq_len - 1}).")
    return positions


def _documents(q: Tensor, lengths: Tensor | None, cu_seqlens: Tensor | None) -> list[list[int]]:
    """Return the bounds of the documents of each sample; tokens after the last bound belong to no document."""
    batch, seq_len = q.shape[:2]
    if cu_seqlens is not None:
        return [check_bounds(cu_seqlens.tolist(), seq_len)]
    sizes = [seq_len] * batch if lengths is None else lengths.tolist()
    wrong = [n for n in sizes if not 0 <= n <= seq_len]
    if wrong:
        raise ValueError(f"lengths must lie in 0..{seq_len} (the tokens of a padded sample); got {wrong[0]}.")
    return [[0, n] for n in sizes]


def _counts(
    q: Tensor, k: Tensor, pattern: DilatedPattern, positions: list[int], causal: bool, documents: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """Return c (B, H, Q, N) and n_pad (B, H, Q) on the CPU; compute them once for samples with the same documents."""
    batch, seq_len, heads = q.shape[:3]
    counts = torch.zeros(batch, heads, len(positions), seq_len, dtype=torch.int32)
    pads = torch.zeros(batch, heads, len(positions), dtype=torch.int64)
    for bounds in {tuple(x) for x in documents}:
        alike = [b for b, x in enumerate(documents) if tuple(x) == bounds]
        counts[alike], pads[alike] = _sample_counts(pattern, positions, bounds, seq_len, heads, k.shape[2], causal)
    return counts, pads


def _sample_counts(
    pattern: DilatedPattern,
    positions: list[int],
    bounds: tuple[int, ...],
    seq_len: int,
    heads: int,
    kv_heads: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Return c (H, Q, N) and n_pad (H, Q) of one sample. In a branch a query sees every r-th key of its segment."""
    counts = torch.zeros(heads, len(positions), seq_len, dtype=torch.int32)
    pads = torch.zeros(heads, len(positions), dtype=torch.int64)
    for start, stop in itertools.pairwise(bounds):
        check_padding(pattern, stop - start)
    for i, position in enumerate(positions):
        document = bisect.bisect_right(bounds, position)
        if document == len(bounds):
            continue  # padding has no keys
        start, size = bounds[document - 1], bounds[document] - bounds[document - 1]
        p = position - start
        for branch in pattern.branches:
            segment, rate = segment_at(branch, size, p), branch.dilation_rate
            rows = head_rows(*segment, rate, (p - segment.first) % rate)
            using = _using_heads(pattern, branch, p, heads, kv_heads)
            first, last = rows.start, p if causal else segment.stop - 1
            if branch.width is not None:
                reach = (branch.width - 1) * rate
                first, last = max(first, p - reach), min(last, p + reach)
            if branch.tokens is not None and p >= branch.tokens:
                last = min(last, branch.tokens - 1)
            keys = slice(start + first, start + last + 1, rate)
            counts[using, i, keys] += 1
            if not causal:
                pads[using, i] += padded_keys(pattern, branch, size, len(rows))
    return counts, pads


def _using_heads(
    pattern: DilatedPattern, branch: AnyBranch, position: int, num_heads: int, num_kv_heads: int
) -> list[int]:
    """Return the query heads that use `position` in the branch."""
    width = position + branch.shift + 1 if branch.segment_length is None else branch.segment_length
    residue = (position + branch.shift) % width % branch.dilation_rate
    served = range(num_heads) if branch.heads is None else branch.heads
    return [h for h in served if pattern.offset(branch, h, num_heads, num_kv_heads) == residue]
