"""The definition of dilated attention as explicit counts over (head, query, key): short, slow, never optimised.

Shape letters: H heads, N tokens. Everything else in the package is tested against what these functions say.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lightning_dilated.pattern.branch import integer

if TYPE_CHECKING:
    from lightning_dilated.pattern.pattern import DilatedPattern


def used_index(pattern: DilatedPattern, branch_index: int, seq_len: int, num_heads: int, num_kv_heads: int | None):
    """(segment of p, is p used by h): (N,) int64 and (H, N) bool for one branch over one document."""
    branch = pattern.branches[branch_index]
    position = torch.arange(seq_len) + branch.shift
    width = seq_len if branch.segment_length is None else branch.segment_length
    segment, index = position // max(width, 1), position % max(width, 1)
    used = torch.zeros(num_heads, seq_len, dtype=torch.bool)
    for head in range(num_heads):
        if branch.heads is None or head in branch.heads:
            offset = pattern.offset(branch, head, num_heads, num_kv_heads)
            used[head] = index % branch.dilation_rate == offset
    return segment, used


def check_bounds(bounds: list[int], seq_len: int) -> list[int]:
    """`bounds` of packed documents, or an error unless they rise from 0 to the number of tokens."""
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != seq_len or any(b < a for a, b in itertools.pairwise(bounds)):
        shown = str(bounds) if len(bounds) <= 8 else f"[{', '.join(map(str, bounds[:4]))}, ..., {bounds[-1]}]"
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens ({seq_len}), a bound a document and the end; got {shown}."
        )
    return bounds


def counts(
    pattern: DilatedPattern,
    seq_len: int,
    num_heads: int,
    causal: bool,
    num_kv_heads: int | None = None,
    cu_seqlens: Sequence[int] | torch.Tensor | None = None,
) -> torch.Tensor:
    """c(p, j, h) as (H, N, N) int64; see `DilatedPattern.counts`."""
    seq_len = integer(seq_len, "seq_len", 0)
    pattern.check_heads(num_heads, num_kv_heads)
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}.")
    bounds = [0, seq_len] if cu_seqlens is None else check_bounds([int(x) for x in cu_seqlens], seq_len)
    total = torch.zeros(num_heads, seq_len, seq_len, dtype=torch.int64)
    for start, stop in itertools.pairwise(bounds):
        for i in range(len(pattern.branches)):
            segment, used = used_index(pattern, i, stop - start, num_heads, num_kv_heads)
            together = (segment[:, None] == segment[None, :]) & used[:, :, None] & used[:, None, :]
            total[:, start:stop, start:stop] += together
    return total.tril() if causal else total


def pads(
    pattern: DilatedPattern, seq_len: int, num_heads: int, causal: bool, num_kv_heads: int | None = None
) -> torch.Tensor:
    """(H, N) int64: the zero keys that a released checkpoint let query p of head h see, summed over branches.

    0 everywhere unless `padding="attended"` and not causal. In a branch that holds (p, h): ceil(w'/r) less the keys of h
    that are really in p's segment, w' = min(w, N).
    """
    total = torch.zeros(num_heads, seq_len, dtype=torch.int64)
    if pattern.padding != "attended" or causal:
        return total
    for i, branch in enumerate(pattern.branches):
        segment, used = used_index(pattern, i, seq_len, num_heads, num_kv_heads)
        width = seq_len if branch.segment_length is None else min(branch.segment_length, seq_len)
        slots = -(-width // branch.dilation_rate)
        for p in range(seq_len):
            keys = (used & (segment == segment[p])).sum(1)
            total[:, p] += torch.where(used[:, p], slots - keys, 0)
    return total
