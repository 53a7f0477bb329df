"""Explain which tokens a pattern connects at a length: walls, dead residues, reach, cost, sight, and a picture.

Sight is the share of (query, key) pairs at a distance that one layer connects. In a branch of rate r a query sees only
keys with its own residue, at distances that r divides; information from other distances needs two layers or more.
Shape letters: N tokens, H query heads, D head dim, r dilation rate, o offset.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from lightning_dilated._validation import integer
from lightning_dilated.pattern.branch import Branch
from lightning_dilated.pattern.rows import cycle_to, seen_within, segment_index, shortest_cycle, used_index
from lightning_dilated.pattern.rows import pairs as count_pairs

if TYPE_CHECKING:
    from lightning_dilated.pattern.branch import AnyBranch
    from lightning_dilated.pattern.pattern import DilatedPattern


#: a function from a mask (N,) of positions that reach the last token to a mask of positions that one branch adds
Step: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
#: pixels of a panel's longest side; positions of longer sequences are binned
PIXELS = 256
#: maximum number of tokens in a picture; a panel computes PIXELS x N pairs for each head
LONGEST = 1 << 17


def plot(
    pattern: DilatedPattern,
    seq_len: int,
    num_heads: int,
    causal: bool,
    path: str | Path | None = None,
    head: int | None = None,
    num_kv_heads: int | None = None,
) -> Any:
    """Draw one head, or all heads together and up to three single heads (`drawn_heads`); see `DilatedPattern.plot`."""
    from matplotlib.figure import Figure

    seq_len = integer(seq_len, "seq_len", 1)
    pattern.check_heads(num_heads, num_kv_heads)
    if seq_len > LONGEST:
        raise ValueError(
            f"a picture shows up to {LONGEST} tokens, got seq_len={seq_len}; the pattern repeats, so draw fewer tokens."
        )
    if head is not None and not 0 <= head < num_heads:
        raise ValueError(f"head must lie in 0..{num_heads - 1}, got {head}.")
    panels = [None, *drawn_heads(pattern, num_heads)] if head is None else [head]
    figure = Figure(figsize=(3.4 * len(panels), 3.9), layout="constrained", dpi=120)
    for axes, which in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        heads = range(num_heads) if which is None else [which]
        image = picture(pattern, seq_len, num_heads, causal, list(heads), num_kv_heads)
        shade = (image / image.max().clamp(min=1e-9)).sqrt().numpy()
        axes.imshow(shade, cmap="Blues", extent=(0, seq_len, seq_len, 0), vmin=0)
        axes.set_title("all heads" if which is None else f"head {which}", fontsize=10)
        axes.set_xlabel("key")
        axes.set_ylabel("query")
        axes.tick_params(labelsize=7)
    branches = ", ".join(
        f"({b.segment_length}, {b.dilation_rate})" if isinstance(b, Branch) else repr(b) for b in pattern.branches
    )
    figure.suptitle(
        f"branches (segment, dilation): {branches}; {'causal' if causal else 'both directions'}", fontsize=9
    )
    if path is not None:
        figure.savefig(path)
    return figure


def drawn_heads(pattern: DilatedPattern, num_heads: int, most: int = 3) -> list[int]:
    """Return up to `most` heads, sorted: first one head for each distinct set of branches, then further heads."""
    first: dict[tuple[bool, ...], int] = {}
    for h in range(num_heads):
        first.setdefault(tuple(branch.serves(h) for branch in pattern.branches), h)
    leaders = list(first.values())
    return sorted([*leaders, *(h for h in range(num_heads) if h not in leaders)][:most])


def picture(
    pattern: DilatedPattern,
    seq_len: int,
    num_heads: int,
    causal: bool,
    heads: list[int],
    num_kv_heads: int | None = None,
) -> torch.Tensor:
    """Return the mean number of branches of a head that connect (query, key): (side, side) fp32, side <= PIXELS."""
    side = min(seq_len, PIXELS)
    # one query per row of pixels; golden-ratio steps within the rows avoid a bias towards some residues
    edges = torch.arange(side + 1) * seq_len // side
    width = edges[1:] - edges[:-1]
    query = edges[:-1] + ((torch.arange(side) * 0.618034) % 1 * width).long()
    counts = torch.zeros(side, seq_len)
    for i in range(len(pattern.branches)):
        segment, used = used_index(pattern, i, seq_len, num_heads, num_kv_heads)
        together = segment[query][:, None] == segment[None, :]
        together &= seen_within(pattern.branches[i], query[:, None], torch.arange(seq_len)[None, :])
        for h in heads:
            counts += together & used[h][query][:, None] & used[h][None, :]
    if causal:
        counts *= torch.arange(seq_len)[None, :] <= query[:, None]
    column = torch.bucketize(torch.arange(seq_len), edges[1:], right=True)
    image = torch.zeros(side, side).index_add_(1, column, counts)
    return image / width / len(heads)


#: maximum number of tokens for which reach is computed, because this takes several passes over all tokens
REACH_LIMIT = 1 << 24


@dataclass(frozen=True)
class Explanation:
    """The result of `DilatedPattern.explain`; `str` formats it as text.

    Attributes:
        seq_len, num_heads, depth, causal: the arguments of `explain`.
        walls: positions that no information crosses, at any depth.
        dead_residues: (first layer with this pattern, branch number) -> residues (index mod r) that no head uses there.
        uncovered: share of (head, position) rows that no branch covers; their output is 0.
        reach: share of positions from which information reaches the last token within `depth` layers; None beyond
            `REACH_LIMIT` tokens.
        layers_to_full_reach: layers until all positions reach the last token; None if some never do.
        pairs: (query, key) pairs of one layer, over all heads; a forward costs 4 D FLOPs a pair, a backward 10 D. If
            layers differ, this number is their rounded mean; `uncovered` and `keys_per_row` are also means.
        keys_per_row: mean number of keys of a query in a head.
        pattern_heads: mean number of a layer's heads that follow its pattern: all heads except hashed heads, which
            `uncovered`, `pairs` and `keys_per_row` do not count.
        patterns: patterns that layers 0, 1, ... cycle through.
        sight: the pairs that one step connects, by octave of the distance.
        beyond: a description of layers that connect tokens by other means than the pattern; None: there are none.
    """

    patterns: tuple[DilatedPattern, ...]
    seq_len: int
    num_heads: int
    depth: int
    causal: bool
    walls: tuple[int, ...]
    dead_residues: dict[tuple[int, int], tuple[int, ...]]
    uncovered: float
    reach: float | None
    layers_to_full_reach: int | None
    pairs: int
    keys_per_row: float
    pattern_heads: float
    sight: tuple[Octave, ...] = ()
    beyond: str | None = None

    def flops(self, head_dim: int, backward: bool = False) -> int:
        """Return the FLOPs of one layer's attention in a forward; `backward`: in a forward and a backward."""
        return (14 if backward else 4) * integer(head_dim, "head_dim", 1) * self.pairs

    @property
    def hints(self) -> tuple[str, ...]:
        """Problems, each with a change that solves it, the most important first; empty if there are no problems."""
        hints = []
        if self.walls:
            hints.append(
                f"{len(self.walls)} wall(s): attention never crosses position {self.walls[0]}"
                + (f", {self.walls[1]}, ..." if len(self.walls) > 1 else "")
                + f" at any depth. Add a branch with a segment of at least {self.seq_len}, or "
                + (
                    'use pattern.shifted() on every other layer (shift_layers="odd" of the models).'
                    if self.segmented
                    else "a wider window."
                )
            )
        for (layer, i), residues in self.dead_residues.items():
            pattern = self.patterns[layer]
            where = f"branches[{pattern.listed(i)[0]}]" + (f" of layer {layer}" if len(self.patterns) > 1 else "")
            hints.append(
                f"{where} leaves {len(residues)} of {pattern.branches[i].dilation_rate} residues to no head. Use a dilation "
                "rate of at most the number of heads it serves"
                + (", one that divides it." if pattern.offsets == "blocked" else ".")
            )
        if self.uncovered:
            hints.append(
                f"{self.uncovered:.1%} of the rows have no key in any branch and give 0; add a branch of rate 1."
            )
        if not hints and self.reach is not None and self.layers_to_full_reach is None:
            hints.append(
                "some positions never reach the last token at any depth: no branch joins their residues"
                + (" across segments" if self.segmented else "")
                + ". Use a lower dilation rate"
                + (
                    ", or pattern.shifted() on every other layer."
                    if self.segmented and len(self.patterns) == 1
                    else "."
                )
            )
        return (*hints, *(sight_hints(self.sight) if self.pattern_heads == self.num_heads else ()))

    @property
    def dense_pairs(self) -> float:
        """(query, key) pairs of one layer with dense attention, over `pattern_heads`."""
        return self.pattern_heads * self.seq_len * (self.seq_len + 1 if self.causal else 2 * self.seq_len) / 2

    @property
    def segmented(self) -> bool:
        """True if any branch has segments, which a shift would move."""
        return any(b.segment_length is not None for pattern in self.patterns for b in pattern.branches)

    @property
    def layers_in_words(self) -> list[str]:
        """The pattern, or each pattern with its layers."""
        if len(self.patterns) == 1:
            return [f"{self.patterns[0]}"]
        layers = cycle_to(self.patterns, self.depth)
        numbers = {x: [i for i, y in enumerate(layers) if y == x] for x in dict.fromkeys(layers)}
        return [f"layers {', '.join(map(str, which))}: {pattern}" for pattern, which in numbers.items()]

    def __str__(self) -> str:
        full = "never" if self.layers_to_full_reach is None else f"{self.layers_to_full_reach} layers"
        kind = "causal" if self.causal else "both directions"
        work = self.dense_pairs / max(self.pairs, 1)
        against = (
            f"dense attention costs {work:.1f} times as much" if work >= 1 else "more than dense: branches overlap"
        )
        lines = [
            *self.layers_in_words,
            f"  {self.seq_len} tokens, {self.num_heads} heads, {self.depth} layers, {kind}",
            f"  keys a row       {self.keys_per_row:.1f}; {against}",
            f"  forward FLOPs    {4 * self.pairs:.3e} x head dim, a layer",
        ]
        if self.reach is not None:
            lines.append(
                f"  last token       reached from {self.reach:.1%} of all positions; from all positions after: {full}"
            )
        lines += [f"  sight            {line}" for line in sight_table(self.sight)]
        lines += [f"  note             {hint}" for hint in self.hints] or [
            "  note             no walls, no dead residues"
        ]
        lines += [f"  beyond           {self.beyond}"] if self.beyond else []
        return "\n".join(lines)


#: maximum number of positions that are processed in one step
AT_ONCE = 1 << 22


def explain(
    pattern: DilatedPattern | Sequence[DilatedPattern],
    seq_len: int,
    num_heads: int,
    depth: int,
    causal: bool,
    num_kv_heads: int | None = None,
    hashed: Sequence[int] = (),
) -> Explanation:
    """Explain a pattern, or patterns that layers cycle through; see `DilatedPattern.explain`.

    `hashed`: numbers of hashed query heads that layers cycle through; these heads do not follow the pattern.
    """
    seq_len, depth = integer(seq_len, "seq_len", 1), integer(depth, "depth", 1)
    layers = cycle_to(list(pattern) if isinstance(pattern, Sequence) else [pattern], depth)
    cycle = shortest_cycle(layers)
    for member in cycle:
        num_heads, kv_heads = member.check_heads(num_heads, num_kv_heads)
    reach, full = _reach([_steps(x, seq_len, num_heads, kv_heads, causal) for x in cycle], seq_len, depth)
    pairs = {x: count_pairs(x, seq_len, num_heads, kv_heads, causal) for x in cycle}
    followers = [num_heads - n for n in cycle_to(hashed or (0,), depth)]
    each = list(zip(layers, followers, strict=True))
    missing = {x: _uncovered(*x, seq_len, num_heads, kv_heads) for x in set(each)}
    total, heads = round(sum(pairs[x] for x in layers) / depth), sum(followers) / depth
    dead = {
        (layer, i): residues
        for layer, x in enumerate(cycle)
        for i, branch in enumerate(x.branches)
        if x not in cycle[:layer] and (residues := _dead(branch, _residues(x, branch, num_heads, kv_heads), seq_len))
    }
    return Explanation(
        patterns=cycle,
        seq_len=seq_len,
        num_heads=num_heads,
        depth=depth,
        causal=causal,
        walls=walls(cycle, seq_len),
        dead_residues=dead,
        uncovered=sum(missing[x] for x in each) / (sum(followers) * seq_len),
        reach=reach,
        layers_to_full_reach=full,
        pairs=total,
        keys_per_row=total / (heads * seq_len),
        pattern_heads=heads,
        sight=sight(layers, seq_len, num_heads, kv_heads),
    )


def walls(patterns: Sequence[DilatedPattern], seq_len: int) -> tuple[int, ...]:
    """Return all positions x such that no branch of any layer has x - 1 and x in the same segment."""
    branches = [
        b for pattern in patterns for b in pattern.branches if b.width != 1
    ]  # a window of width 1 contains only the query
    if not branches:
        return tuple(range(1, seq_len))
    segments = {(b.segment_length, b.shift) for b in branches if b.segment_length is not None}
    if any(b.segment_length is None for b in branches):
        return ()
    first, period = 0, 1  # common walls of the segment lengths so far: first, first + period, ...
    for width, shift in segments:
        common = math.gcd(period, width)
        if (distance := -shift - first) % common:
            return ()
        turns = distance // common * pow(period // common, -1, width // common) % (width // common)
        first, period = first + period * turns, math.lcm(period, width)
    return tuple(range(first or period, seq_len, period))


def _residues(pattern: DilatedPattern, branch: AnyBranch, num_heads: int, num_kv_heads: int) -> frozenset[int]:
    served = range(num_heads) if branch.heads is None else branch.heads
    return frozenset(pattern.offset(branch, h, num_heads, num_kv_heads) for h in served)


def _dead(branch: AnyBranch, used: frozenset[int], seq_len: int) -> tuple[int, ...]:
    if branch.width is not None:  # a window covers one residue by definition
        return ()
    longest = seq_len + branch.shift if branch.segment_length is None else branch.segment_length
    return tuple(o for o in range(min(branch.dilation_rate, longest)) if o not in used)


def _uncovered(pattern: DilatedPattern, followers: int, seq_len: int, num_heads: int, num_kv_heads: int) -> int:
    """Count the (head, position) rows of the first heads, `followers` in number, that no branch covers."""
    missing = 0
    for head in range(followers):
        branches = [b for b in pattern.branches if b.serves(head)]
        if any(b.dilation_rate == 1 for b in branches):  # this branch covers all positions
            continue
        for start in range(0, seq_len, AT_ONCE):
            positions = torch.arange(start, min(start + AT_ONCE, seq_len))
            covered = torch.zeros(len(positions), dtype=torch.bool)
            for branch in branches:
                offset = pattern.offset(branch, head, num_heads, num_kv_heads)
                covered |= segment_index(branch, seq_len, positions)[1] % branch.dilation_rate == offset
            missing += len(positions) - int(covered.sum())
    return missing


def _steps(pattern: DilatedPattern, seq_len: int, num_heads: int, num_kv_heads: int, causal: bool) -> list[Step]:
    """Return, for each branch, a function from reached positions to their keys' positions; [] beyond `REACH_LIMIT`."""
    steps: list[Step] = []
    for b in pattern.branches if seq_len <= REACH_LIMIT else ():
        used = _residues(pattern, b, num_heads, num_kv_heads)
        if b.tokens is not None:
            steps.append(functools.partial(_global_sources, tokens=b.tokens, causal=causal))
        elif b.width is None:
            group, size = _classes(b, used, seq_len)
            steps.append(functools.partial(_sources, group=group, size=size, causal=causal))
        else:
            (offset,) = used
            steps.append(
                functools.partial(_window_sources, residue=(b.dilation_rate, offset), width=b.width, causal=causal)
            )
    return steps


def _reach(layers: list[list[Step]], seq_len: int, depth: int) -> tuple[float | None, int | None]:
    """Return the share of positions that reach the last token in `depth` layers, and the depth at which all do, or None
    if some never do. `layers`: steps that layers cycle through. The search starts at the last layer and goes down."""
    if seq_len > REACH_LIMIT:
        return None, None
    reached = torch.zeros(seq_len, dtype=torch.bool)
    reached[-1] = True
    share, layer, still = 1 / seq_len, 0, 0
    while not bool(reached.all()):
        grown = reached.clone()
        for step in layers[(depth - 1 - layer) % len(layers)]:
            grown |= step(reached)
        still = still + 1 if bool((grown == reached).all()) else 0
        if still == len(layers):
            return (share if layer >= depth else float(reached.float().mean())), None
        reached, layer = grown, layer + 1
        if layer <= depth:
            share = float(reached.double().mean())
    return (1.0 if layer <= depth else share), layer


def _classes(branch: AnyBranch, used: frozenset[int], seq_len: int) -> tuple[torch.Tensor, int]:
    """Return (class of each position, number of classes). Positions that see each other share a class; 0 is unused."""
    segment, index = segment_index(branch, seq_len, torch.arange(seq_len))
    residue = index % branch.dilation_rate
    table = torch.zeros(int(residue.max()) + 1, dtype=torch.bool)
    table[[o for o in used if o < len(table)]] = True
    group = torch.where(table[residue], 1 + segment * len(table) + residue, 0)
    return group, int(group.max()) + 1


def _sources(reached: torch.Tensor, group: torch.Tensor, size: int, causal: bool) -> torch.Tensor:
    """Return the positions to which any reached query attends in one branch."""
    position = torch.arange(len(reached))
    furthest = torch.full((size,), -1, dtype=torch.int64)
    furthest.scatter_reduce_(0, group, torch.where(reached, position, -1), "amax")
    furthest[0] = -1
    limit = furthest[group]
    return position <= limit if causal else limit >= 0


def _window_sources(reached: torch.Tensor, residue: tuple[int, int], width: int, causal: bool) -> torch.Tensor:
    """Return the positions to which any reached query attends in a window of positions o mod r; `residue`: (r, o)."""
    rate, offset = residue
    here, sources = reached[offset::rate], torch.zeros_like(reached)
    number = torch.arange(len(here))
    if not len(here):
        return sources
    beyond = len(here) + width
    after = torch.where(here, number, beyond).flip(0).cummin(0).values.flip(0)  # the next reached query
    visible = after - number < width
    if not causal:
        before = torch.where(here, number, -beyond).cummax(0).values
        visible |= number - before < width
    sources[offset::rate] = visible
    return sources


def _global_sources(reached: torch.Tensor, tokens: int, causal: bool) -> torch.Tensor:
    """Return the positions to which any reached query attends if the first `tokens` positions are global."""
    sources = torch.zeros_like(reached)
    numbers = reached.nonzero()[:, 0]
    if len(numbers) and causal:
        sources[: min(tokens, int(numbers[-1]) + 1)] = True
    elif len(numbers):
        sources[: len(reached) if int(numbers[0]) < tokens else tokens] = True
    return sources


# -- sight -------------------------------------------------------------------------------------------------------------
#: number of (query, key) pairs that are sampled from an octave; in octaves with fewer pairs, all are counted
SAMPLES = 1 << 12
#: octaves with a smaller share than this lead to a hint
ENOUGH = 0.5
#: consecutive octaves share a line of the table if their numbers differ by less than this
ALIKE = 0.1


@dataclass(frozen=True)
class Octave:
    """Distances d with `first` <= d < min(2 `first`, N).

    Attributes:
        first: the shortest distance, a power of two.
        share: share of pairs at these distances that at least one head of one layer sees.
        heads: mean number of heads, summed over layers, that see such a pair.
    """

    first: int
    share: float
    heads: float


def sight(patterns: Sequence[DilatedPattern], seq_len: int, num_heads: int, num_kv_heads: int) -> tuple[Octave, ...]:
    """Return the octaves of N tokens, for the patterns of all layers. Long octaves are sampled with a fixed seed."""
    layers = {pattern: patterns.count(pattern) for pattern in dict.fromkeys(patterns)}
    octaves, first = [], 1
    while first < seq_len:
        query, key = _drawn(first, min(2 * first, seq_len), seq_len)
        visible = torch.zeros(len(query), dtype=torch.bool)
        heads = 0.0
        for pattern, count in layers.items():
            by_head = _seen(pattern, query, key, seq_len, num_heads, num_kv_heads)
            visible |= by_head.any(0)
            heads += count * float(by_head.double().sum(0).mean())
        octaves.append(Octave(first, float(visible.double().mean()), heads))
        first *= 2
    return tuple(octaves)


def _drawn(first: int, stop: int, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (query positions, key positions) of pairs at distances `first` to `stop` - 1: all pairs, or a sample."""
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
    """Return (H, pairs) bool: whether each head sees each pair in some branch."""
    visible = torch.zeros(num_heads, len(query), dtype=torch.bool)
    for branch in pattern.branches:
        residue = _common_residue(branch, query, key, seq_len)
        residue = torch.where(torch.as_tensor(seen_within(branch, query, key)), residue, -1)
        for head in filter(branch.serves, range(num_heads)):
            visible[head] |= residue == pattern.offset(branch, head, num_heads, num_kv_heads)
    return visible


def _common_residue(branch: AnyBranch, query: torch.Tensor, key: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Return the residue of query and key if they have the same segment and the same residue, else -1."""
    (query_segment, q), (key_segment, k) = (segment_index(branch, seq_len, x) for x in (query, key))
    residue = q % branch.dilation_rate
    return torch.where((query_segment == key_segment) & (residue == k % branch.dilation_rate), residue, -1)


def sight_hints(octaves: Sequence[Octave]) -> tuple[str, ...]:
    """Return a hint if one layer connects queries to few tokens at some distances."""
    blind = [x for x in octaves if x.share < ENOUGH]
    if not blind:
        return ()
    least, most = min(x.share for x in blind), max(x.share for x in octaves if x.first >= blind[0].first)
    part = f"only {least:.0%}" if least else "none"
    if most > blind[0].share:  # larger distances have a larger share
        part = f"at most {most:.0%}"
    return (
        f"from a distance of {blind[0].first:,} tokens on, one layer shows a query {part} of the tokens there: models do "
        "not learn to look them up at varying distances. Give a few heads undilated attention over the whole sequence: "
        "DilatedPattern.hybrid(depth, num_heads), in YAML pattern: {hybrid: {}}.",
    )


def _alike(a: Octave, b: Octave) -> bool:
    """Return whether the numbers of two octaves are similar."""
    low, high = sorted((a.heads, b.heads))
    return abs(a.share - b.share) < ALIKE and high <= low * (1 + ALIKE)


def sight_table(octaves: Sequence[Octave]) -> list[str]:
    """Return a line for each run of similar octaves, with its distances, lowest share and lowest number of heads."""
    runs: list[list[Octave]] = []
    for octave in octaves:
        if runs and _alike(runs[-1][0], octave):
            runs[-1].append(octave)
        else:
            runs.append([octave])
    return [
        f"{f'{run[0].first:,} to {2 * run[-1].first - 1:,} tokens back':<32}{min(x.share for x in run):>4.0%} seen in one "
        f"step, by {min(x.heads for x in run):.1f} heads of all layers"
        for run in runs
    ]
