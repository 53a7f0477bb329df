"""Simulated steps on few and on thousands of ranks: weak scaling of a geometric pattern over the whole sequence, a table.

Shape letters: N tokens, L tokens of a rank, R ranks.

Pictures of simulated steps: tokens/s a GPU over the number of GPUs, and one rank's streams over time.
"""

from __future__ import annotations

import bisect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_dilated.ext.planning.simulating.machine import Machine
from lightning_dilated.ext.planning.simulating.simulation import Step, simulate
from lightning_dilated.ext.planning.simulating.timeline import COMPUTE, EXCHANGE, GRADIENTS
from lightning_dilated.pattern import DilatedPattern
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


#: a colour and a marker for every exchange; flat forms are drawn with broken lines, so that equal ones stay visible
STYLES = {
    "gather": ("tab:blue", "o", "--"),
    "butterfly": ("tab:orange", "s", "--"),
    "hierarchical_gather": ("tab:green", "^", "-"),
    "hierarchical_butterfly": ("tab:red", "v", "-"),
    "switch": ("tab:purple", "D", "--"),
    "ring": ("tab:brown", "x", "--"),
}
#: colours of kinds of work and of passes
KINDS = {
    **{"attention": "tab:blue", "rest": "tab:gray", "edge": "tab:olive", "optimizer": "tab:purple"},
    **{"arrivals": "tab:cyan", "packing": "tab:pink", "few rows": "navy", "overhead": "lightgray"},
    **{"forward": "tab:orange", "again": "gold", "backward": "tab:red", "gradients": "tab:green"},
}


def scale_plot(steps: Sequence[Step], path: str | Path, caption: str) -> None:
    """Write a PNG: above, tokens/s a GPU over GPUs; below, the share of a step that is exposed; a column for each L.

    Args:
        steps: as from `scale.sweep`; those of one rank begin every line.
        caption: what the numbers rest on, printed below.
    """
    sizes = sorted({s.tokens // s.ranks for s in steps})
    figure = Figure(figsize=(1.0 + 5.0 * len(sizes), 7.6))
    axes = figure.subplots(2, len(sizes), squeeze=False, sharex=True, sharey="row")
    top = max(s.tokens_per_second for s in steps) / 1e3
    for column, size in enumerate(sizes):
        found = [s for s in steps if s.tokens // s.ranks == size]
        longest = max(s.tokens for s in found)
        axes[0][column].set_title(f"{size:,} tokens a GPU, up to N = {longest:,}", fontsize=10)
        _lines(axes[0][column], found, lambda s: s.tokens_per_second / 1e3)
        _lines(axes[1][column], found, lambda s: 100 * s.exposed / s.seconds)
        axes[0][column].set_ylim(0, 1.1 * top)
        axes[1][column].set_ylim(bottom=0)
        axes[1][column].set_xlabel("GPUs")
    axes[0][0].set_ylabel("thousand tokens/s a GPU")
    axes[1][0].set_ylabel("exposed communication, % of the step")
    handles, names = max((row.get_legend_handles_labels() for row in axes[0]), key=lambda x: len(x[1]))
    figure.legend(handles, names, loc="upper center", ncols=max(1, len(names)), fontsize=9, frameon=False)
    text = textwrap.fill(caption, 80 * len(sizes))
    below = 0.03 + 0.021 * (text.count("\n") + 1)
    figure.text(0.02, 0.01, text, fontsize=8, va="bottom")
    figure.subplots_adjust(
        left=0.16 / len(sizes) ** 0.8, right=0.98, top=0.9, bottom=below + 0.06, hspace=0.08, wspace=0.06
    )
    figure.savefig(path, dpi=150)


def _lines(axes: Axes, steps: Sequence[Step], value: Callable[[Step], float]) -> None:
    """A line for each exchange, from the one rank that exchanges nothing."""
    ranks = sorted({s.ranks for s in steps})
    for name, (colour, marker, dashes) in STYLES.items():
        mine = [s for s in steps if s.exchange == name]
        if mine:
            first = [s for s in steps if s.exchange is None and name in ("gather", "butterfly", "switch", "ring")]
            points = sorted((s.ranks, value(s)) for s in (*first, *mine))
            axes.plot(*zip(*points, strict=True), label=name, color=colour, marker=marker, ls=dashes, ms=5, lw=1.4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [f"{r:,}" for r in ranks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def timeline(step: Step, path: str | Path, caption: str) -> None:
    """Write a PNG of the events of the rank that was watched, a row for each stream.

    Raises:
        ValueError: for a step simulated without `watched`.
    """
    if not step.events:
        raise ValueError("this step has no events: simulate it with watched=RANK.")
    figure = Figure(figsize=(14, 3.4))
    axes = figure.add_subplot()
    streams = [x for x in (COMPUTE, EXCHANGE, GRADIENTS) if any(e.stream == x for e in step.events)]
    for i, stream in enumerate(streams):
        for kind in dict.fromkeys(e.kind for e in step.events if e.stream == stream):
            bars = [
                (e.start * 1e3, (e.stop - e.start) * 1e3) for e in step.events if (e.stream, e.kind) == (stream, kind)
            ]
            axes.broken_barh(bars, (i - 0.4, 0.8), color=KINDS.get(kind, "black"), label=f"{stream}: {kind}")
    axes.set_yticks(range(len(streams)), streams)
    axes.invert_yaxis()
    axes.set_xlim(0, step.seconds * 1e3)
    axes.set_xlabel("ms")
    axes.set_title(f"{step.ranks:,} ranks, {step.tokens:,} tokens, {step.exchange or 'no exchange'}", fontsize=10)
    figure.legend(*axes.get_legend_handles_labels(), loc="upper right", fontsize=7)
    text = textwrap.fill(caption, 200)
    figure.text(0.02, 0.01, text, fontsize=7, va="bottom")
    figure.subplots_adjust(left=0.07, right=0.87, top=0.9, bottom=0.2 + 0.04 * (text.count("\n") + 1))
    figure.savefig(path, dpi=150)
