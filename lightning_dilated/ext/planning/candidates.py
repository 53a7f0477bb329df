"""List memory settings, recommend the fastest that fit, and format settings as words or as a recipe."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import yaml

from lightning_dilated.ext.planning.estimate import Case, Facts
from lightning_dilated.ext.planning.setup import Setup
from lightning_dilated.memory.settings import MemorySettings

#: number of tokens per tile in the candidates
TILE = 16384
#: the callback that takes the settings
RECOMPUTE = "ActivationRecompute"
#: strategy classes by the names that the Trainer accepts
CLASSES = {
    "ring_dilated": "lightning_dilated.RingDilatedStrategy",
    "ring_dilated_fsdp": "lightning_dilated.RingDilatedFSDPStrategy",
}
#: the largest number of head windows in the candidates
SEARCH_WINDOWS = 6


def candidates(kv_heads: int, host: float = 0.0, depth: int = 2, tile: int | None = TILE) -> list[MemorySettings]:
    """List the settings that a plan compares; `host`: GiB for offloaded inputs; `tile`: tokens per tile."""
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
        budget = max(host, 1.0 + 1e-9)  # `offload` up to 1 is a fraction of the inputs, not GiB
        settings += [replace(x, offload=budget) for x in settings[3:]]
    fitting = [x for x in settings if x.every <= depth]
    return list(dict.fromkeys(fitting))


def candidates_of(facts: Facts, host: float = 0.0) -> list[MemorySettings]:
    """List the settings that a plan of this model compares."""
    return candidates(facts.windows, host, facts.depth, TILE if facts.tiles else None)


def streams(settings: Sequence[MemorySettings], ranks: int = 1) -> list[MemorySettings]:
    """List settings that train chunk by chunk, the fastest first, for sequences that fit with no other settings. R
    ranks share chunks that are R times longer. Settings with tiles are listed only if one of `settings` has tiles."""
    sizes = [("none", 1 << 18, None), ("attention-kept", 1 << 20, None), ("block", 1 << 20, None)]
    sizes += [("block", 1 << 20, TILE)] * any(x.tile for x in settings)
    chunked = [MemorySettings(policy, tile=tile, stream=size * ranks) for policy, size, tile in sizes]
    return [x for x in chunked if x not in settings]


def recommended(case: Case, settings: Sequence[MemorySettings], tokens: int | None) -> MemorySettings | None:
    """Return the fastest settings that fit N tokens; without N, settings for the longest sequence. None if none fit."""
    if tokens is None:
        best = max(settings, key=lambda x: case.longest(x), default=None)
        return best if best is not None and case.longest(best) else None
    fitting = [x for x in settings if case.fits(x, tokens)]
    return min(fitting, key=lambda x: case.time(x, tokens).seconds, default=None)


def in_words(settings: MemorySettings) -> str:
    """Format settings as a short text."""
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
    """Return the lines of a recipe for these settings."""
    changes = _changes(settings, setup, residual)
    return _lines(changes) if changes else []


class _Indented(yaml.SafeDumper):
    """Indent lists in YAML, as the recipes do."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _lines(config: dict[str, Any]) -> list[str]:
    return yaml.dump(config, Dumper=_Indented, sort_keys=False, width=float("inf")).splitlines()


def whole_recipe(
    recipe: dict[str, Any], settings: MemorySettings, setup: Setup, options: dict[str, Any], residual: str | None
) -> list[str]:
    """Return the lines of a recipe with these settings in place of its own and all other entries unchanged.

    `options`: strategy options that `setup` does not contain.
    """
    config = copy.deepcopy(recipe)
    trainer, model = config["trainer"], config["model"]
    changes = _changes(settings, setup, residual)
    planned = changes.get("trainer", {})
    listed = trainer.get("callbacks") or []
    listed = listed if isinstance(listed, list) else [listed]
    place = next((i for i, x in enumerate(listed) if RECOMPUTE in str(x)), len(listed))
    other_callbacks = [x for x in listed if RECOMPUTE not in str(x)]
    trainer["callbacks"] = [*other_callbacks[:place], *planned.get("callbacks", []), *other_callbacks[place:]]
    if setup.strategy != "single":
        if setup.ranks > 1 and settings.stream is not None:
            options = {**options, "layout": "chunked"}
        trainer["strategy"] = _strategy(trainer.get("strategy"), setup, options)
    if "devices" not in trainer:
        trainer |= {x: planned[x] for x in ("devices", "num_nodes") if x in planned}
    arguments = changes.get("model", {}).get("init_args", {})
    if "optimizer" in arguments and isinstance(model["init_args"].get("optimizer"), dict):  # keep its other arguments
        arguments["optimizer"] = model["init_args"]["optimizer"] | arguments["optimizer"]
    model["init_args"] |= arguments
    return _lines(config)


def _strategy(listed: Any, setup: Setup, options: dict[str, Any]) -> Any:
    """Return the planned strategy with all changed options. If the recipe has the same class, its arguments stay."""
    path = str((listed.get("class_path") if isinstance(listed, dict) else listed) or "")
    same = path.rpartition(".")[2] in (setup.strategy, CLASSES[setup.strategy].rpartition(".")[2])
    arguments = dict(listed.get("init_args") or {}) if same and isinstance(listed, dict) else {}
    options = {**options, "cpu_offload": setup.cpu_offload, "bucket_cap_mb": setup.bucket_cap_mb}
    defaults = {"exchange": "auto", "head_size": 1, "cpu_offload": False}
    arguments |= {x: value for x, value in options.items() if value != arguments.get(x, defaults.get(x))}
    if not arguments:
        return listed if same else setup.strategy
    return {"class_path": path if same and path != setup.strategy else CLASSES[setup.strategy], "init_args": arguments}


def _changes(settings: MemorySettings, setup: Setup, residual: str | None) -> dict[str, Any]:
    """Return the part of a recipe that sets these settings."""
    trainer: dict[str, Any] = {}
    if setup.strategy != "single":
        options: dict[str, Any] = {"layout": "chunked"} if setup.ranks > 1 and settings.stream is not None else {}
        options |= {"cpu_offload": True} if setup.cpu_offload else {}
        options |= {"bucket_cap_mb": setup.bucket_cap_mb} if setup.bucket_cap_mb is not None else {}
        path = CLASSES["ring_dilated_fsdp" if setup.cpu_offload else "ring_dilated"]
        trainer["strategy"] = {"class_path": path, "init_args": options} if options else setup.strategy
        trainer["devices"] = min(setup.ranks, setup.per_node)
        if setup.ranks > setup.per_node:
            trainer["num_nodes"] = -(-setup.ranks // setup.per_node)
    if settings != MemorySettings():
        defaults = asdict(MemorySettings("block"))
        # the policy is always written, because another callback of the recipe may have set it
        options = {
            name: round(value, 2) if isinstance(value, float) else value
            for name, value in asdict(settings).items()
            if name == "policy" or value != defaults[name]
        }
        trainer["callbacks"] = [{"class_path": f"lightning_dilated.callbacks.{RECOMPUTE}", "init_args": options}]
    model: dict[str, Any] = {} if residual is None else {"residual_dtype": residual}
    if setup.optimizer == "adamw8bit":
        model["optimizer"] = {"class_path": "torchao.optim.AdamW8bit"}
    changes = {"trainer": trainer, "model": {"init_args": model} if model else {}}
    return {name: values for name, values in changes.items() if values}
