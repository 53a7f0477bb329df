"""Sight: which distances between a query and a key one layer bridges, by octave of the distance.

In a branch of rate r a query sees keys of its own residue only, so only distances that r divides. What stands at any other
distance reaches it over a token in between, in two layers or more.
Shape letters: N tokens, H query heads, r dilation rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_dilated.pattern.branch import Branch
from lightning_dilated.pattern.pattern import DilatedPattern

#: (query, key) pairs that are drawn of an octave; octaves with fewer are counted whole
SAMPLES = 1 << 12
#: an octave whose queries see less of its distances is named as a problem
ENOUGH = 0.5
#: octaves are one line of the table where neither number falls by more
ALIKE = 0.1


@dataclass(frozen=True)
class Octave:
    """Distances d with `first` <= d < 2 `first`, and below N.

    Attributes:
        first: the shortest distance, a power of two.
        share: of the pairs of a query and a key so far apart, those that some head of some layer sees.
        heads: how many heads, summed over the layers, see such a pair in the mean.
    """

    first: int
    share: float
    heads: float


def sight(patterns: Sequence[DilatedPattern], seq_len: int, num_heads: int, num_kv_heads: int) -> tuple[Octave, ...]:
    """The octaves of N tokens for the patterns of all layers; of long octaves `SAMPLES` pairs are drawn, always the same."""
    layers = {pattern: patterns.count(pattern) for pattern in dict.fromkeys(patterns)}
    found, first = [], 1
    while first < seq_len:
        query, key = _drawn(first, min(2 * first, seq_len), seq_len)
        seen = torch.zeros(len(query), dtype=torch.bool)
        heads = 0.0
        for pattern, count in layers.items():
            by_head = _seen(pattern, query, key, seq_len, num_heads, num_kv_heads)
            seen |= by_head.any(0)
            heads += count * float(by_head.double().sum(0).mean())
        found.append(Octave(first, float(seen.double().mean()), heads))
        first *= 2
    return tuple(found)


def _drawn(first: int, stop: int, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions of queries, positions of keys) at distances from `first` to below `stop`."""
    distances = torch.arange(first, stop) if stop - first <= SAMPLES else None
    if distances is not None and int((seq_len - distances).sum()) <= SAMPLES:
        pairs = [(torch.arange(d, seq_len), torch.arange(seq_len - d)) for d in range(first, stop)]
        return torch.cat([q for q, _ in pairs]), torch.cat([k for _, k in pairs])
    generator = torch.Generator().manual_seed(first)
    drawn = torch.rand(2, SAMPLES, generator=generator, dtype=torch.float64)
    distance = first + (drawn[0] * (stop - first)).long()
    query = distance + (drawn[1] * (seq_len - distance)).long()
    return query, query - distance


def _seen(
    pattern: DilatedPattern,
    query: torch.Tensor,
    key: torch.Tensor,
    seq_len: int,
    num_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """(H, pairs) bool: which heads see which pairs in some branch."""
    seen = torch.zeros(num_heads, len(query), dtype=torch.bool)
    for branch in pattern.branches:
        residue = _common_residue(branch, query, key, seq_len)
        for head in range(num_heads) if branch.heads is None else branch.heads:
            seen[head] |= residue == pattern.offset(branch, head, num_heads, num_kv_heads)
    return seen


def _common_residue(branch: Branch, query: torch.Tensor, key: torch.Tensor, seq_len: int) -> torch.Tensor:
    """The residue that the two indices share in their segment; -1 in different segments, or where residues differ."""
    width = seq_len + branch.shift if branch.segment_length is None else branch.segment_length
    q, k = query + branch.shift, key + branch.shift
    residue = q % width % branch.dilation_rate
    together = (q // width == k // width) & (residue == k % width % branch.dilation_rate)
    return torch.where(together, residue, -1)


def sight_hints(octaves: Sequence[Octave]) -> tuple[str, ...]:
    """What to change where queries see few of the distances in one step."""
    blind = [x for x in octaves if x.share < ENOUGH]
    if not blind:
        return ()
    least = min(x.share for x in blind)
    seen = f"only {least:.0%}" if least else "none"
    return (
        f"from a distance of {blind[0].first:,} tokens on, one layer shows a query {seen} of what stands there: models do "
        "not learn to look it up at distances that vary. Give a few heads undilated attention over the whole sequence: "
        "DilatedPattern.hybrid(depth, num_heads), in YAML pattern: {hybrid: {}}.",
    )


def sight_table(octaves: Sequence[Octave]) -> list[str]:
    """A line for each run of octaves that are nearly alike: distances, and the least that is seen of them."""
    runs: list[list[Octave]] = []
    for octave in octaves:
        if runs and runs[-1][0].share - octave.share < ALIKE and runs[-1][0].heads < octave.heads * (1 + ALIKE):
            runs[-1].append(octave)
        else:
            runs.append([octave])
    return [
        f"{f'{run[0].first:,} to {2 * run[-1].first - 1:,} tokens back':<32}{min(x.share for x in run):>4.0%} seen in one "
        f"step, by {min(x.heads for x in run):.1f} heads of all layers"
        for run in runs
    ]
