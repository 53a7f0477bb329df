"""Reads the patterns of a model's layers from a single pattern, a repeating list or a hybrid.

Shape letters: H query heads, w segment length.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, TypeAlias

from lightning_dilated._validation import integer, known_keys
from lightning_dilated.pattern.pattern import LAYERS, DilatedPattern
from lightning_dilated.pattern.rows import cycle_to, shortest_cycle

#: a model's `pattern`: one pattern for all layers, or a list for layers 0, 1, ... that repeats
LayersLike: TypeAlias = DilatedPattern | Mapping[str, Any] | Sequence[DilatedPattern | Mapping[str, Any]]

#: options of {"hybrid": {...}}; the model sets the other arguments
HYBRID = tuple(inspect.signature(DilatedPattern.hybrid).parameters)[3:]


def read_patterns(
    value: LayersLike, depth: int, num_heads: int, num_kv_heads: int | None = None
) -> DilatedPattern | tuple[DilatedPattern, ...]:
    """Return one pattern for all layers, or the shortest tuple of patterns that repeats over layers 0, 1, ...

    Args:
        value: a pattern, or its mapping (see `DilatedPattern.from_dict`); a list of patterns or mappings; or
            {"hybrid": options} with options of `DilatedPattern.hybrid`.
        depth: layers of the model.
        num_heads, num_kv_heads: heads of the model; every pattern is checked against them.

    Raises:
        TypeError, ValueError: for any other value, an empty list, or a list longer than `depth`.
    """
    depth = integer(depth, "depth", 1, most=LAYERS)
    if isinstance(value, Mapping) and "hybrid" in value:
        extra = [name for name in value if name != "hybrid"]
        if extra:
            raise ValueError(f"pattern names hybrid and {', '.join(extra)}: give hybrid alone or a pattern without it")
        options = {} if value["hybrid"] is None else value["hybrid"]
        if not isinstance(options, Mapping):
            raise TypeError(f"pattern.hybrid must be a mapping of {', '.join(HYBRID)}; got {options!r}.")
        known_keys(options, "pattern.hybrid", HYBRID)
        value = DilatedPattern.hybrid(depth, num_heads, num_kv_heads, **options)
    patterns: tuple[DilatedPattern, ...]
    if isinstance(value, (DilatedPattern, Mapping)):
        patterns = (DilatedPattern.from_dict(value),)
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes, Set)):
        patterns = tuple(DilatedPattern.from_dict(member) for member in value)
    else:
        raise TypeError(f"pattern must be a DilatedPattern, a mapping, or a list of them, one a layer; got {value!r}.")
    if not 1 <= len(patterns) <= depth:
        raise ValueError(
            f"pattern lists {len(patterns)} patterns for a model of {depth} layers: it takes 1 to {depth}, and a shorter "
            "list repeats."
        )
    for pattern in patterns:
        pattern.check_heads(num_heads, num_kv_heads)
    cycle = shortest_cycle(patterns)
    return cycle[0] if len(cycle) == 1 else cycle


def layer_patterns(
    pattern: DilatedPattern | Sequence[DilatedPattern],
    depth: int,
    shift_layers: str = "none",
    shift_below: int | None = None,
) -> tuple[DilatedPattern, ...]:
    """Return the pattern of each of `depth` layers.

    In layers 1, 3, ..., `shift_layers="odd"` shifts segments shorter than `shift_below` (all finite segments if None)
    by w // 2, so that consecutive layers have different boundaries.

    Raises:
        ValueError: if an option is unknown or has no effect, or if a pattern cannot be shifted or is shifted already.
    """
    cycle = (pattern,) if isinstance(pattern, DilatedPattern) else tuple(pattern)
    if shift_layers not in ("none", "odd"):
        raise ValueError(f"shift_layers must be none or odd; got {shift_layers!r}.")
    if shift_layers == "none":
        if shift_below is not None:
            raise ValueError(f'shift_below={shift_below!r} needs shift_layers="odd"; without it no layer is shifted.')
        return cycle_to(cycle, depth)
    for member in cycle:
        if member.padding == "attended":
            raise ValueError(
                'shift_layers="odd" needs padding="masked": padding="attended" reproduces releases whose layers are '
                "unshifted."
            )
        if any(b.shift for b in member.branches):
            raise ValueError(
                f'shift_layers="odd" shifts patterns that are not yet shifted, got {member}. Leave the shifts out, '
                'or use shift_layers="none".'
            )
    shifted = tuple(member.shifted(0.5, shift_below) for member in cycle)
    if shifted == cycle:
        raise ValueError(
            f'shift_layers="odd" would move no branch of {" or ".join(map(str, cycle))}: it takes finite segments of at '
            "least 2 tokens"
            + ("" if shift_below is None else f", below shift_below={shift_below}")
            + '. Use shift_layers="none".'
        )
    return tuple((shifted if i % 2 else cycle)[i % len(cycle)] for i in range(depth))


def plain_patterns(pattern: DilatedPattern | Sequence[DilatedPattern]) -> dict[str, Any] | list[dict[str, Any]]:
    """Return plain values for YAML, JSON and checkpoints; `read_patterns` reads them."""
    return pattern.to_dict() if isinstance(pattern, DilatedPattern) else [member.to_dict() for member in pattern]
