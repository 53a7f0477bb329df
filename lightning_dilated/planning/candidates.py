"""Memory settings to choose from, the best of them for a model on a machine, and what they are in words and in a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.planning.estimate import Case, Facts
from lightning_dilated.planning.memory import Setup

#: tokens of a tile in them
TILE = 16384
#: most windows of heads in them
SEARCH_WINDOWS = 6


def candidates(kv_heads: int, host: float = 0.0, depth: int = 2, tile: int | None = TILE) -> list[MemorySettings]:
    """Settings to choose from; with offload only where there is host memory; `tile` None: without tiles."""
    chunks = max(c for c in range(1, SEARCH_WINDOWS + 1) if kv_heads % c == 0)
    settings = [
        MemorySettings(),
        MemorySettings("attention-kept"),
        MemorySettings("block"),
        MemorySettings("block", tile=tile),
        MemorySettings("block", tile=tile, head_chunks=chunks),
        MemorySettings("block", 2, tile=tile, head_chunks=chunks),
    ]
    if host > 0:
        budget = max(host, 1.0 + 1e-9)  # up to 1 it would be a fraction
        settings += [replace(x, offload=budget) for x in settings[3:]]
    fitting = [x for x in settings if x.every <= depth]
    return list(dict.fromkeys(fitting))


def candidates_of(facts: Facts, host: float = 0.0) -> list[MemorySettings]:
    """Those of a model."""
    return candidates(facts.windows, host, facts.depth, TILE if facts.tiles else None)


def streams(settings: Sequence[MemorySettings], ranks: int = 1) -> list[MemorySettings]:
    """Settings for sequences that do not fit, chunk by chunk: the fastest first; R ranks share chunks R times as long. In
    tiles where those compared before have some."""
    sizes = [("none", 1 << 18, None), ("attention-kept", 1 << 20, None), ("block", 1 << 20, None)]
    sizes += [("block", 1 << 20, TILE)] * any(x.tile for x in settings)
    chunked = [MemorySettings(policy, tile=tile, stream=size * ranks) for policy, size, tile in sizes]
    return [x for x in chunked if x not in settings]


def recommended(case: Case, settings: Sequence[MemorySettings], tokens: int | None) -> MemorySettings | None:
    """The fastest settings with which N tokens fit, or without N those that fit most; None if none fit."""
    if tokens is None:
        best = max(settings, key=lambda x: case.longest(x), default=None)
        return best if best is not None and case.longest(best) else None
    fitting = [x for x in settings if case.fits(x, tokens)]
    return min(fitting, key=lambda x: case.time(x, tokens).seconds, default=None)


def in_words(settings: MemorySettings) -> str:
    """Settings in a few words."""
    parts = ["all kept" if settings.policy == "none" else settings.policy]
    parts += [f"every={settings.every}"] * (settings.every > 1)
    parts += [f"tile={settings.tile}"] * (settings.tile is not None)
    parts += [f"head_chunks={settings.head_chunks}"] * (settings.head_chunks > 1)
    parts += [f"offload={_budget(settings.offload)}"] * (settings.offload > 0)
    parts += [f"stream={settings.stream}"] * (settings.stream is not None) + ["truncate"] * settings.truncate
    return ", ".join(parts)


def _budget(x: float) -> str:
    return f"{x:g}" if x <= 1 else f"{x:.0f} GiB"


def yaml_lines(settings: MemorySettings, setup: Setup, residual: str | None = None) -> list[str]:
    """The lines of a recipe for these settings."""
    return list(_yaml(settings, setup, residual))


def _yaml(settings: MemorySettings, setup: Setup, residual: str | None) -> Iterator[str]:
    if setup.strategy != "single" or settings != MemorySettings():
        yield "trainer:"
    shared = setup.ranks > 1 and settings.stream is not None
    if setup.cpu_offload or setup.bucket_cap_mb is not None or shared:
        yield "  strategy:"
        yield f"    class_path: lightning_dilated.RingDilated{'FSDP' if setup.cpu_offload else ''}Strategy"
        yield "    init_args:"
        yield from ["      layout: chunked"] * shared + ["      cpu_offload: true"] * setup.cpu_offload
        yield from [f"      bucket_cap_mb: {setup.bucket_cap_mb}"] * (setup.bucket_cap_mb is not None)
    elif setup.strategy != "single":
        yield f"  strategy: {setup.strategy}"
    if setup.strategy != "single":
        yield f"  devices: {min(setup.ranks, setup.per_node)}"
        if setup.ranks > setup.per_node:
            yield f"  num_nodes: {-(-setup.ranks // setup.per_node)}"
    if settings != MemorySettings():
        yield "  callbacks:"
        yield "    - class_path: lightning_dilated.callbacks.ActivationRecompute"
        options = {"policy": settings.policy, "every": settings.every, "tile": settings.tile}
        options |= {"head_chunks": settings.head_chunks, "offload": settings.offload}
        options |= {"stream": settings.stream, "truncate": settings.truncate}
        defaults = MemorySettings("block")
        # the policy is always named: another callback of a recipe may have set it
        options = {
            name: value for name, value in options.items() if name == "policy" or value != getattr(defaults, name)
        }
        yield "      init_args:"
        for name, value in options.items():
            yield f"        {name}: {round(value, 2) if isinstance(value, float) else value}"
    if residual is not None or setup.optimizer == "adamw8bit":
        yield "model:"
        yield "  init_args:"
    if residual is not None:
        yield f"    residual_dtype: {residual}"
    if setup.optimizer == "adamw8bit":
        yield "    optimizer:"
        yield "      class_path: torchao.optim.AdamW8bit"
