"""Longest: the most tokens that fit with each memory setting, and the setting to take.

Shape letters: N tokens of the sequence, R ranks, K kv heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.planning.counting.exchange_memory import Exchanged
from lightning_dilated.planning.counting.footprint import Footprint, Subject, footprint
from lightning_dilated.planning.counting.inductor import Graphs
from lightning_dilated.planning.counting.trace import Tape
from lightning_dilated.planning.estimate import Facts, Time, estimate
from lightning_dilated.planning.gpus import Gpu
from lightning_dilated.planning.memory import GIB, Memory, Setup, memory, on_host, states_on_host

#: tokens of a tile that plans reckon with
TILE = 16384
#: windows of heads that plans reckon with, at most
WINDOWS = 6
#: lengths are told in multiples of this many tokens a rank
GRAIN = 1024
#: no length beyond this is looked for, a rank
MOST = 1 << 30


@dataclass(frozen=True)
class Case:
    """A model with memory settings on a machine.

    Attributes:
        subject: the model, without settings.
        facts: what its time follows from.
        setup: how it is run.
        gpu: of each rank.
        host: GiB of host memory that a rank may take, for block inputs and what `cpu_offload` keeps there; 0: no block
            inputs wait there, and the rest is not limited.
        counted, graphs: footprints by settings and graphs of compiled blocks, kept.
    """

    subject: Subject
    facts: Facts
    setup: Setup
    gpu: Gpu
    host: float = 0.0
    counted: dict[MemorySettings, Footprint] = field(default_factory=dict, compare=False)
    graphs: Graphs = field(default_factory=lambda: Graphs(Tape()), compare=False)

    def found(self, settings: MemorySettings) -> Footprint:
        """The footprint with these settings."""
        bare = replace(settings, offload=0.0)  # which the count does not look at
        if bare not in self.counted:
            self.counted[bare] = footprint(replace(self.subject, memory=bare), graphs=self.graphs)
        one = self.counted[bare]
        return replace(one, subject=replace(one.subject, memory=settings))

    def memory(self, settings: MemorySettings, tokens: int, rows: Exchanged | None = None) -> Memory:
        """What a rank holds with N tokens; `rows`: what the exchange takes, where it is known."""
        return memory(self.found(settings), self.facts.depth, tokens, self.setup, rows)

    def time(self, settings: MemorySettings, tokens: int) -> Time:
        """Seconds of a step of N tokens."""
        found = self.found(settings)
        away = on_host(found, self.facts.depth, -(-tokens // self.setup.ranks))
        return estimate(self.facts, settings, tokens, self.setup, self.gpu, away)

    def fits(self, settings: MemorySettings, tokens: int, rows: Exchanged | None = None) -> bool:
        """Whether N tokens fit into GPU and host."""
        x = self.memory(settings, tokens, rows)
        away = x.host + (x.states if self.host else 0)
        return x.peak <= self.gpu.usable(self.setup.ranks) and away <= self.host * GIB

    @property
    def room(self) -> float:
        """GiB of host memory that are left for block inputs."""
        states = states_on_host(self.found(MemorySettings()), self.facts.depth, self.setup)
        return max(0.0, self.host - states / GIB)

    def longest(self, settings: MemorySettings) -> int:
        """The most tokens N that fit, a multiple of GRAIN R; 0 where none do."""
        unit = GRAIN * self.setup.ranks
        up_to = lambda rows: last_true(lambda n: self.fits(settings, n * unit, rows), MOST // GRAIN)  # noqa: E731
        found = up_to(Exchanged())
        while found and self.setup.ranks > 1:  # an exchange is priced once for each guess
            rows = self.memory(settings, found * unit).exchange
            less = min(found, up_to(rows))
            if less == found or self.fits(settings, less * unit):
                return less * unit
            found = less * 99 // 100
        return found * unit


def last_true(holds: Callable[[int], bool], most: int) -> int:
    """The largest n in 1..most that a rule holds for, which holds up to some n; 0 where there is none."""
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def candidates(kv_heads: int, host: float = 0.0, depth: int = 2, tile: int = TILE) -> list[MemorySettings]:
    """Settings to choose from; those with host memory only where there is some."""
    chunks = max(c for c in range(1, WINDOWS + 1) if kv_heads % c == 0)
    found = [
        MemorySettings(),
        MemorySettings("attention-kept"),
        MemorySettings("block"),
        MemorySettings("block", tile=tile),
        MemorySettings("block", tile=tile, head_chunks=chunks),
        MemorySettings("block", 2, tile=tile, head_chunks=chunks),
    ]
    if host > 0:
        budget = max(host, 1.0 + 1e-9)  # up to 1 it would be a fraction
        found += [replace(x, offload=budget) for x in found[3:]]
    fitting = [x for x in found if x.every <= depth]
    return list(dict.fromkeys(fitting))


def recommended(case: Case, settings: Sequence[MemorySettings], tokens: int | None) -> MemorySettings | None:
    """The fastest settings with which N tokens fit, the first of equals; without N, those that take most; else None."""
    if tokens is None:
        best = max(settings, key=lambda x: case.longest(x), default=None)
        return best if best is not None and case.longest(best) else None
    fitting = [x for x in settings if case.fits(x, tokens)]
    return min(fitting, key=lambda x: case.time(x, tokens).seconds, default=None)


def in_words(settings: MemorySettings) -> str:
    """Settings as a short text."""
    parts = ["all kept" if settings.policy == "none" else settings.policy]
    parts += [f"every={settings.every}"] * (settings.every > 1)
    parts += [f"tile={settings.tile}"] * (settings.tile is not None)
    parts += [f"head_chunks={settings.head_chunks}"] * (settings.head_chunks > 1)
    parts += [f"offload={_budget(settings.offload)}"] * (settings.offload > 0)
    return ", ".join(parts)


def _budget(x: float) -> str:
    return f"{x:g}" if x <= 1 else f"{x:.0f} GiB"


def yaml_lines(settings: MemorySettings, setup: Setup, residual: str | None = None) -> list[str]:
    """Lines of a recipe that have these settings."""
    return list(_yaml(settings, setup, residual))


def _yaml(settings: MemorySettings, setup: Setup, residual: str | None) -> Iterator[str]:
    if setup.strategy != "single" or settings != MemorySettings():
        yield "trainer:"
    if setup.cpu_offload or setup.bucket_cap_mb is not None:
        yield "  strategy:"
        yield f"    class_path: lightning_dilated.RingDilated{'FSDP' if setup.cpu_offload else ''}Strategy"
        yield "    init_args:"
        yield "      cpu_offload: true" if setup.cpu_offload else f"      bucket_cap_mb: {setup.bucket_cap_mb}"
    elif setup.strategy != "single":
        yield f"  strategy: {setup.strategy}"
    if setup.strategy != "single":
        yield f"  devices: {min(setup.ranks, setup.per_node)}"
        if setup.ranks > setup.per_node:
            yield f"  num_nodes: {-(-setup.ranks // setup.per_node)}"
    if settings != MemorySettings():
        yield "  callbacks:"
        yield "    - class_path: lightning_dilated.callbacks.ActivationRecompute"
        given = {"policy": settings.policy, "every": settings.every, "tile": settings.tile}
        given |= {"head_chunks": settings.head_chunks, "offload": settings.offload}
        usual = MemorySettings("block")
        given = {name: value for name, value in given.items() if value != getattr(usual, name)}
        if given:
            yield "      init_args:"
        for name, value in given.items():
            yield f"        {name}: {round(value, 2) if isinstance(value, float) else value}"
    if residual is not None or setup.optimizer == "adamw8bit":
        yield "model:"
        yield "  init_args:"
    if residual is not None:
        yield f"    residual_dtype: {residual}"
    if setup.optimizer == "adamw8bit":
        yield "    optimizer:"
        yield "      class_path: torchao.optim.AdamW8bit"
