"""Rotary positions of decoders whose frequencies follow the length of a sequence ("dynamic" and "longrope"), on ranks.

transformers takes the length from the positions that it is given, which on ranks are a part of them. The furthest position
of the whole is therefore appended to those of a rank, and its angles are removed again.

Shape letters: B batch, L tokens of this rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

#: kinds of `rope_parameters` whose frequencies follow the length
BY_LENGTH = ("dynamic", "longrope")
#: the furthest position of the sequence that is computed, where a caller knows it
_furthest: list[int] = []


def follows_length(config: Any) -> bool:
    """Whether rotary frequencies of a config follow the length of a sequence."""
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [parameters, *(x for x in parameters.values() if isinstance(x, dict))]
    return any(x.get("rope_type") in BY_LENGTH for x in each)


@contextlib.contextmanager
def furthest_position(position: int) -> Iterator[None]:
    """Within, decoders that `whole_lengths` was called for take the frequencies of a sequence with this last position."""
    _furthest.append(position)
    try:
        yield
    finally:
        _furthest.pop()


def whole_lengths(decoder: nn.Module) -> None:
    """Let rotary layers of a decoder whose frequencies follow the length take that of `furthest_position`."""
    for module in decoder.modules():
        if hasattr(module, "rope_type") and follows_length(getattr(module, "config", None)):
            module.register_forward_pre_hook(_append, with_kwargs=True)
            module.register_forward_hook(_cut)


def _append(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a rotary layer, with one position more."""
    if not _furthest:
        return None
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": _longer(kwargs["position_ids"])}
    return (args[0], _longer(args[1]), *args[2:]), kwargs


def _longer(positions: Tensor) -> Tensor:
    """(B, L + 1) of (B, L)."""
    return torch.cat([positions, positions.new_full((len(positions), 1), _furthest[-1])], 1)


def _cut(module: nn.Module, args: tuple[Any, ...], angles: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """(cos, sin) (B, L, ...) of the positions that were given."""
    return tuple(x[:, :-1] for x in angles) if _furthest else None
