"""What a pattern can and cannot see at a given length: walls, dead residues, reach, cost.

Shape letters: N tokens, H query heads, w segment length, r dilation rate, t shift.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lightning_dilated.pattern.branch import integer
from lightning_dilated.pattern.rows import pairs as count_pairs

if TYPE_CHECKING:
    from lightning_dilated.pattern.branch import Branch
    from lightning_dilated.pattern.pattern import DilatedPattern

#: beyond this many tokens the reach is not searched (it takes a few passes over N)
REACH_LIMIT = 1 << 24


@dataclass(frozen=True)
class Explanation:
    """What `DilatedPattern.explain` found; printing it gives the text.

    Attributes:
        walls: first positions of the stretches that no information enters from before, at any depth.
        dead_residues: branch number -> residues (index mod r) that no head uses there.
        uncovered: share of (head, position) rows that no branch covers; their output is 0.
        reach: share of the positions the last token may see (all, or the past) that reach it through `depth` layers;
            None beyond `REACH_LIMIT` tokens.
        layers_to_full_reach: layers until the last token is reached from everywhere; None where that never happens.
        pairs: (query, key) pairs of one layer, over all heads; a forward costs 4 D pairs FLOPs, a backward 10 D. The mean of
            the layers, rounded, where odd layers have a pattern of their own, as are `uncovered` and `keys_per_row`.
        keys_per_row: mean keys of a query in a head.
        odd_layers: the pattern of layers 1, 3, ...; None where it is that of all others.
    """

    pattern: DilatedPattern
    seq_len: int
    num_heads: int
    depth: int
    causal: bool
    walls: tuple[int, ...]
    dead_residues: dict[int, tuple[int, ...]]
    uncovered: float
    reach: float | None
    layers_to_full_reach: int | None
    pairs: int
    keys_per_row: float
    odd_layers: DilatedPattern | None = None

    def flops(self, head_dim: int, backward: bool = False) -> int:
        """FLOPs of one layer's attention, forward, or forward and backward."""
        return (14 if backward else 4) * integer(head_dim, "head_dim", 1) * self.pairs

    @property
    def hints(self) -> tuple[str, ...]:
        """What to change, most important first; empty where there is nothing to say."""
        found = []
        if self.walls:
            found.append(
                f"{len(self.walls)} wall(s): tokens never cross position {self.walls[0]}"
                + (f", {self.walls[1]}, ..." if len(self.walls) > 1 else "")
                + f" at any depth. Add a branch with a segment of at least {self.seq_len}, or use pattern.shifted() on "
                'every other layer (shift_layers="odd" of the models).'
            )
        for i, residues in self.dead_residues.items():
            r = self.pattern.branches[i].dilation_rate
            found.append(
                f"branches[{i}] leaves {len(residues)} of {r} residues to no head. Use a dilation rate of at most the "
                "number of heads it serves" + (", one that divides it." if self.pattern.offsets == "blocked" else ".")
            )
        if self.uncovered:
            found.append(
                f"{self.uncovered:.1%} of the rows have no key in any branch and give 0; a branch of rate 1 covers all."
            )
        if not found and self.reach is not None and self.layers_to_full_reach is None:
            found.append(
                "some positions never reach the last token at any depth: no branch joins their residues across segments. "
                "Use a lower dilation rate"
                + (", or pattern.shifted() on every other layer." if self.odd_layers is None else ".")
            )
        return tuple(found)

    def __str__(self) -> str:
        full = "never" if self.layers_to_full_reach is None else f"{self.layers_to_full_reach} layers"
        dense = self.num_heads * self.seq_len * (self.seq_len + 1 if self.causal else 2 * self.seq_len) / 2
        kind = "causal" if self.causal else "both directions"
        work = dense / max(self.pairs, 1)
        against = (
            f"dense attention costs {work:.1f} times as much" if work >= 1 else "more than dense: branches overlap"
        )
        lines = [
            f"{self.pattern}",
            *([] if self.odd_layers is None else [f"  odd layers       {self.odd_layers}"]),
            f"  {self.seq_len} tokens, {self.num_heads} heads, {self.depth} layers, {kind}",
            f"  keys a row       {self.keys_per_row:.1f}; {against}",
            f"  forward FLOPs    {4 * self.pairs:.3e} x head dim, a layer",
        ]
        if self.reach is not None:
            lines.append(
                f"  last token       reached from {self.reach:.1%} of what it may see; all of it after: {full}"
            )
        lines += [f"  note             {hint}" for hint in self.hints] or [
            "  note             no walls, no dead residues"
        ]
        return "\n".join(lines)


def explain(
    pattern: DilatedPattern,
    seq_len: int,
    num_heads: int,
    depth: int,
    causal: bool,
    num_kv_heads: int | None = None,
    odd_layers: DilatedPattern | None = None,
) -> Explanation:
    """See `DilatedPattern.explain`."""
    seq_len, depth = integer(seq_len, "seq_len", 1), integer(depth, "depth", 1)
    num_heads, num_kv_heads = pattern.check_heads(num_heads, num_kv_heads)
    layers = _layers(pattern, odd_layers, depth)
    for other in layers[1:]:
        other.check_heads(num_heads, num_kv_heads)
    every = replace(pattern, branches=tuple(b for layer in layers for b in layer.branches))
    residues = [_residues(pattern, b, num_heads, num_kv_heads) for b in pattern.branches]
    reach, full = _reach([_classes_of(x, seq_len, num_heads, num_kv_heads) for x in layers], seq_len, depth, causal)
    mean = lambda of: sum(of(layers[i % len(layers)]) for i in range(depth)) / depth  # noqa: E731
    total = round(mean(lambda x: count_pairs(x, seq_len, num_heads, num_kv_heads, causal)))
    return Explanation(
        pattern=pattern,
        seq_len=seq_len,
        num_heads=num_heads,
        depth=depth,
        causal=causal,
        walls=walls(every, seq_len),
        dead_residues={i: dead for i, b in enumerate(pattern.branches) if (dead := _dead(b, residues[i], seq_len))},
        uncovered=mean(lambda x: _uncovered(x, seq_len, num_heads, num_kv_heads)),
        reach=reach,
        layers_to_full_reach=full,
        pairs=total,
        keys_per_row=total / (num_heads * seq_len),
        odd_layers=layers[1] if len(layers) > 1 else None,
    )


def _layers(pattern: DilatedPattern, odd: DilatedPattern | None, depth: int) -> list[DilatedPattern]:
    """The patterns that take turns, from layer 0 on."""
    return [pattern] if odd is None or odd == pattern or depth == 1 else [pattern, odd]


def walls(pattern: DilatedPattern, seq_len: int) -> tuple[int, ...]:
    """Positions x such that no branch has x - 1 and x in one segment."""
    segments = [(b.segment_length, b.shift) for b in pattern.branches if b.segment_length is not None]
    if len(segments) < len(pattern.branches):
        return ()
    widest, shift = max(segments, key=lambda segment: segment[0])
    cuts = range(widest - shift, seq_len, widest)
    return tuple(x for x in cuts if all((x + t) % w == 0 for w, t in segments))


def _residues(pattern: DilatedPattern, branch: Branch, num_heads: int, num_kv_heads: int) -> frozenset[int]:
    served = range(num_heads) if branch.heads is None else branch.heads
    return frozenset(pattern.offset(branch, h, num_heads, num_kv_heads) for h in served)


def _dead(branch: Branch, used: frozenset[int], seq_len: int) -> tuple[int, ...]:
    longest = seq_len + branch.shift if branch.segment_length is None else branch.segment_length
    return tuple(o for o in range(min(branch.dilation_rate, longest)) if o not in used)


def _index(branch: Branch, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    position = torch.arange(seq_len) + branch.shift
    width = seq_len + branch.shift if branch.segment_length is None else branch.segment_length
    return position // width, position % width


def _uncovered(pattern: DilatedPattern, seq_len: int, num_heads: int, num_kv_heads: int) -> float:
    """Share of (head, position) that no branch serves; heads with a branch of rate 1 are whole at once."""
    missing = 0
    for head in range(num_heads):
        mine = [b for b in pattern.branches if b.heads is None or head in b.heads]
        if any(b.dilation_rate == 1 for b in mine):
            continue
        covered = torch.zeros(seq_len, dtype=torch.bool)
        for branch in mine:
            offset = pattern.offset(branch, head, num_heads, num_kv_heads)
            covered |= _index(branch, seq_len)[1] % branch.dilation_rate == offset
        missing += seq_len - int(covered.sum())
    return missing / (num_heads * seq_len)


def _classes_of(
    pattern: DilatedPattern, seq_len: int, num_heads: int, num_kv_heads: int
) -> list[tuple[torch.Tensor, int]]:
    """`_classes` of every branch; none beyond `REACH_LIMIT`."""
    branches = pattern.branches if seq_len <= REACH_LIMIT else ()
    return [_classes(b, _residues(pattern, b, num_heads, num_kv_heads), seq_len) for b in branches]


def _reach(
    layers: list[list[tuple[torch.Tensor, int]]], seq_len: int, depth: int, causal: bool
) -> tuple[float | None, int | None]:
    """(share of positions that reach the last token in `depth` layers, layers until all do or None).

    `layers` take turns from layer 0 on; the way leads down from the last one, and on in turns below layer 0.
    """
    if seq_len > REACH_LIMIT:
        return None, None
    reached = torch.zeros(seq_len, dtype=torch.bool)
    reached[-1] = True
    share, layer, still = 1 / seq_len, 0, 0
    while not bool(reached.all()):
        grown = reached.clone()
        for group, size in layers[(depth - 1 - layer) % len(layers)]:
            grown |= _sources(reached, group, size, causal)
        still = still + 1 if bool((grown == reached).all()) else 0
        if still == len(layers):
            return (share if layer >= depth else float(reached.float().mean())), None
        reached, layer = grown, layer + 1
        if layer <= depth:
            share = float(reached.double().mean())
    return (1.0 if layer <= depth else share), layer


def _classes(branch: Branch, used: frozenset[int], seq_len: int) -> tuple[torch.Tensor, int]:
    """(class of each position, classes): positions that see each other share one; class 0 is for the unused."""
    segment, index = _index(branch, seq_len)
    residue = index % branch.dilation_rate
    table = torch.zeros(int(residue.max()) + 1, dtype=torch.bool)
    table[[o for o in used if o < len(table)]] = True
    group = torch.where(table[residue], 1 + segment * len(table) + residue, 0)
    return group, int(group.max()) + 1


def _sources(reached: torch.Tensor, group: torch.Tensor, size: int, causal: bool) -> torch.Tensor:
    """Positions that some reached query attends to in one branch."""
    position = torch.arange(len(reached))
    furthest = torch.full((size,), -1, dtype=torch.int64)
    furthest.scatter_reduce_(0, group, torch.where(reached, position, -1), "amax")
    furthest[0] = -1
    limit = furthest[group]
    return position <= limit if causal else limit >= 0
