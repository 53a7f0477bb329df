"""Simulated steps on few and on thousands of ranks: weak scaling of a geometric pattern over the whole sequence, a table.

Shape letters: N tokens, L tokens of a rank, R ranks.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.planning.simulating.machine import Machine
from lightning_dilated.planning.simulating.simulation import Step, simulate
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.planner import Links, make_problem

FORMS = ("gather", "butterfly", "hierarchical_gather", "hierarchical_butterfly")


@dataclass(frozen=True)
class Setting:
    """What a row of the table shares with the others.

    Attributes:
        machine: what one device needs.
        ranks_per_node: ranks that share fast links.
        links: speeds and latencies.
        recompute: one of `models.recompute.POLICIES`.
        overheads: (tokens of a rank, seconds of a step that are in no part of it), rising; linear in between, proportional
            to tokens beyond.
    """

    machine: Machine
    ranks_per_node: int = 8
    links: Links = field(default_factory=Links)
    recompute: str = "none"
    overheads: tuple[tuple[int, float], ...] = ()

    def overhead(self, tokens: int) -> float:
        """Seconds of a step that are in no part of it."""
        if not self.overheads:
            return 0.0
        sizes, seconds = zip(*self.overheads, strict=True)
        if not sizes[0] <= tokens <= sizes[-1]:
            near = 0 if tokens < sizes[0] else -1
            return seconds[near] * tokens / sizes[near]
        i = min(bisect.bisect_left(sizes, tokens, lo=1), len(sizes) - 1) if len(sizes) > 1 else 0
        if i == 0:
            return seconds[0]
        share = (tokens - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])

    def step(self, tokens: int, ranks: int, exchange: str = "auto", watched: int | None = None) -> Step:
        """The step of geometric(first, L * R), L tokens on each of R ranks; raises as `simulate` does."""
        pattern = DilatedPattern.geometric(self.machine.first, tokens * ranks)
        return simulate(
            self.machine,
            pattern,
            tokens,
            ranks,
            exchange=exchange,
            ranks_per_node=self.ranks_per_node,
            links=self.links,
            recompute=self.recompute,
            overhead=self.overhead(tokens),
            watched=watched,
        )

    def assumptions(self) -> str:
        """What the numbers rest on, in words."""
        m, x = self.machine, self.links
        over = ", ".join(f"{seconds * 1e3:.1f} ms with {tokens:,} tokens" for tokens, seconds in self.overheads)
        host = f"; what a step of one device took beyond its parts is in every step: {over}" if over else ""
        kv = "" if m.kv_heads == m.heads else f" ({m.kv_heads} kv)"
        return (
            f"Simulated from one device ({m.name}): {m.depth} blocks of {m.dim}, {m.heads} heads of {m.head_dim}{kv}, "
            f"{m.precision}, {'causal' if m.causal else 'no mask'}, recompute {self.recompute}; branches ({m.first}, 1), "
            f"({2 * m.first}, 2), ... up to one segment over all tokens. {self.ranks_per_node} GPUs a node, "
            f"{x.near / 1e9:g} GB/s a GPU inside it, {x.far / 1e9:g} GB/s a GPU between nodes; {x.round * 1e6:g} us a "
            f"collective, {x.message * 1e6:g} us a message (links: {x.source}); gradients averaged after the backward, "
            f"on several nodes beside it. "
            f"Communication slows nothing else down, and the host runs ahead{host}."
        )


def sweep(
    setting: Setting, tokens: Sequence[int], ranks: Sequence[int], exchanges: Sequence[str] = FORMS
) -> list[Step]:
    """Steps of every L, R and exchange that serves them; of one rank one step.

    Raises:
        ValueError: for a name that is no exchange, and where L is not the shortest segment times a power of 2.
    """
    unknown = [x for x in exchanges if x not in EXCHANGES]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no exchange; there are {', '.join(EXCHANGES)}.")
    return [
        setting.step(each, count, exchange if count > 1 else "auto")
        for each in tokens
        for count in ranks
        for exchange in (_serving(setting, each, count, exchanges) if count > 1 else ("auto",))
    ]


def _serving(setting: Setting, tokens: int, ranks: int, exchanges: Sequence[str]) -> list[str]:
    machine = setting.machine
    pattern = DilatedPattern.geometric(machine.first, tokens * ranks)
    heads = machine.heads, machine.kv_heads
    problem = make_problem(pattern, tokens * ranks, *heads, ranks=ranks, causal=machine.causal)
    return [x for x in exchanges if EXCHANGES[x].why_not(problem, setting.ranks_per_node) is None]


def table(steps: Sequence[Step], depth: int) -> list[str]:
    """The steps in Markdown; bytes are those that a rank receives on the mean in a layer, in all and from other nodes."""
    lines = [
        "| tokens a GPU | GPUs | tokens | exchange | forward MB a layer (far) | backward MB a layer (far) | exposed ms "
        "| step ms | thousand tokens/s a GPU | of one GPU |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for step in steps:
        sizes = []
        for run in ("forward", "backward"):
            near, far = (x / depth / 1e6 for x in step.bytes(run))
            sizes.append(f"{near + far:.2f} ({far:.2f})")
        lines.append(
            f"| {step.tokens // step.ranks:,} | {step.ranks:,} | {step.tokens:,} | {step.exchange or 'none'} | {sizes[0]} "
            f"| {sizes[1]} | {step.exposed * 1e3:.2f} | {step.seconds * 1e3:.1f} | {step.tokens_per_second / 1e3:.1f} "
            f"| {100 * step.efficiency:.1f} % |"
        )
    return lines
