"""Planned steps on few and on thousands of ranks: a table of weak scaling of a geometric pattern over the whole
sequence.

Shape letters: N tokens, L tokens of a rank, R ranks.

The picture shows tokens/s per GPU against the number of GPUs.
"""

from __future__ import annotations

import bisect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_dilated.ext.planning.machine import Machine
from lightning_dilated.ext.planning.ranks import Step, step_on_ranks
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.planner import Links, make_problem

FORMS = ("gather", "butterfly", "hierarchical_gather", "hierarchical_butterfly")


@dataclass(frozen=True)
class Setting:
    """Settings that all rows of a table share.

    Attributes:
        machine: measurements of one device.
        ranks_per_node: number of ranks with fast links between them.
        links: speeds and latencies.
        recompute: one of `models.recompute.POLICIES`.
        overheads: (tokens of a rank, seconds of a step outside of its parts) in ascending order; linear between points,
            proportional to the tokens beyond the last.
    """

    machine: Machine
    ranks_per_node: int = 8
    links: Links = field(default_factory=Links)
    recompute: str = "none"
    overheads: tuple[tuple[int, float], ...] = ()

    def overhead(self, tokens: int) -> float:
        """Return the seconds of a step outside of its parts."""
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

    def step(self, tokens: int, ranks: int, exchange: str = "auto") -> Step:
        """Return the step of geometric(first, L * R), with L tokens per rank. Raises the errors of `step_on_ranks`."""
        pattern = DilatedPattern.geometric(self.machine.first, tokens * ranks)
        setup = Setup("ring_dilated", ranks, self.ranks_per_node, exchange=exchange, links=self.links)
        over = self.overhead(tokens)
        return step_on_ranks(self.machine, [pattern], tokens, setup, recompute=self.recompute, overhead=over)

    def assumptions(self) -> str:
        """Describe the assumptions behind the numbers."""
        m, x = self.machine, self.links
        over = ", ".join(f"{seconds * 1e3:.1f} ms with {tokens:,} tokens" for tokens, seconds in self.overheads)
        host = f"; what a step of one device took beyond its parts is in every step: {over}" if over else ""
        kv = "" if m.kv_heads == m.heads else f" ({m.kv_heads} kv)"
        return (
            f"Planned from one device ({m.name}): {m.depth} blocks of {m.dim}, {m.heads} heads of {m.head_dim}{kv}, "
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
    """Return the steps for every L, R and exchange that supports them. One rank has a single step.

    Raises:
        ValueError: for an unknown exchange, or if L is not the shortest segment times a power of 2.
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


def table(setting: Setting, steps: Sequence[Step]) -> list[str]:
    """Return a Markdown table of the steps, each relative to one rank with the same number of tokens.

    Bytes are the mean over ranks in a layer: all received bytes, and in brackets the bytes from other nodes.
    """
    lines = [
        "| tokens a GPU | GPUs | tokens | exchange | forward MB a layer (far) | backward MB a layer (far) | exposed ms "
        "| step ms | thousand tokens/s a GPU | of one GPU |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    depth = setting.machine.depth
    for step in steps:
        sizes, alone = [], setting.step(step.tokens // step.ranks, 1).seconds
        for run in ("forward", "backward"):
            near, far = (x / depth / 1e6 for x in step.bytes(run))
            sizes.append(f"{near + far:.2f} ({far:.2f})")
        lines.append(
            f"| {step.tokens // step.ranks:,} | {step.ranks:,} | {step.tokens:,} | {step.exchange or 'none'} | {sizes[0]} "
            f"| {sizes[1]} | {step.exposed * 1e3:.2f} | {step.seconds * 1e3:.1f} | {_speed(step):.1f} "
            f"| {100 * alone / step.seconds:.1f} % |"
        )
    return lines


def _speed(step: Step) -> float:
    """Return thousand tokens/s per rank."""
    return step.tokens / step.ranks / step.seconds / 1e3


#: a colour and a marker per exchange; flat forms have dashed lines, so that both lines are visible if they coincide
STYLES = {
    "gather": ("tab:blue", "o", "--"),
    "butterfly": ("tab:orange", "s", "--"),
    "hierarchical_gather": ("tab:green", "^", "-"),
    "hierarchical_butterfly": ("tab:red", "v", "-"),
    "switch": ("tab:purple", "D", "--"),
    "ring": ("tab:brown", "x", "--"),
}


def scale_plot(steps: Sequence[Step], path: str | Path, caption: str) -> None:
    """Write a PNG with a column per L: above, tokens/s per GPU; below, the exposed share of a step, both by GPUs.

    Args:
        steps: result of `sweep`; lines of exchanges without a hierarchy begin at one rank.
        caption: the assumptions, which are printed below.
    """
    sizes = sorted({s.tokens // s.ranks for s in steps})
    figure = Figure(figsize=(1.0 + 5.0 * len(sizes), 7.6))
    axes = figure.subplots(2, len(sizes), squeeze=False, sharex=True, sharey="row")
    top = max(map(_speed, steps))
    for column, size in enumerate(sizes):
        selected = [s for s in steps if s.tokens // s.ranks == size]
        longest = max(s.tokens for s in selected)
        axes[0][column].set_title(f"{size:,} tokens a GPU, up to N = {longest:,}", fontsize=10)
        _lines(axes[0][column], selected, _speed)
        _lines(axes[1][column], selected, lambda s: 100 * s.exposed / s.seconds)
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
    """Draw a line per exchange. Without a hierarchy, it starts at the single rank, which exchanges nothing."""
    ranks = sorted({s.ranks for s in steps})
    for name, (colour, marker, dashes) in STYLES.items():
        selected = [s for s in steps if s.exchange == name]
        if selected:
            first = [s for s in steps if s.exchange is None and name in ("gather", "butterfly", "switch", "ring")]
            points = sorted((s.ranks, value(s)) for s in (*first, *selected))
            axes.plot(*zip(*points, strict=True), label=name, color=colour, marker=marker, ls=dashes, ms=5, lw=1.4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [f"{r:,}" for r in ranks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
