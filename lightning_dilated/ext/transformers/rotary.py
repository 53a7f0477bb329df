"""Rotary positions: checks of options and lengths, and length-dependent frequencies for sequences that ranks share.

transformers derives the length from the positions that it gets, but a rank has only some of them. Hooks therefore
append the last position of the sequence to the rank's positions, and remove its angles from the result.

Shape letters: B batch, L tokens of this rank.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dilated._compat.torch import ThreadStack

#: kinds of `rope_parameters` with frequencies that depend on the sequence length
BY_LENGTH = ("dynamic", "longrope")
#: kinds in which `factor` is a ratio of lengths, unlike llama3 (Llama 3.1 has factor 8 for 16 times the tokens)
BY_RATIO = ("yarn", "longrope")
#: the last position of the current sequence, if `furthest_position` set it
_furthest = ThreadStack("furthest position")


def _each_parameters(config: Any) -> list[dict[str, Any]]:
    """Return the `rope_parameters` of a config, one for each kind of layer if they differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    inner = [x for x in parameters.values() if isinstance(x, dict)]
    return inner or [parameters]


def follows_length(config: Any) -> bool:
    """Return whether the rotary frequencies of a config depend on the sequence length."""
    return any(x.get("rope_type") in BY_LENGTH for x in _each_parameters(config))


def check_rope(config: Any) -> None:
    """Raise ValueError for rotary options that transformers only warns about, or rejects later as it builds a model."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for x in _each_parameters(config):
        kind, factor = x.get("rope_type", "default"), x.get("factor", 1.0)
        if kind not in (allowed := {"default", *ROPE_INIT_FUNCTIONS}):
            raise ValueError(f"rope_parameters has rope_type={kind!r}; it is one of {', '.join(sorted(allowed))}.")
        if factor is not None and (not isinstance(factor, (int, float)) or isinstance(factor, bool) or factor <= 0):
            raise ValueError(f"rope_parameters of rope_type {kind} needs a number above 0 as factor, got {factor!r}.")
        pairs = int(head_dim * x.get("partial_rotary_factor", 1.0)) // 2
        for name in ("short_factor", "long_factor"):
            if name in x and len(x[name]) != pairs:
                raise ValueError(
                    f"rope_parameters.{name} has {len(x[name])} numbers, but this model needs {pairs}, one for each pair of "
                    "rotated features of a head."
                )


def length_warning(config: Any, length: int) -> str | None:
    """Return a warning if a sequence exceeds the positions that a config was made for, else None."""
    text = config.get_text_config(decoder=True)
    most = getattr(text, "max_position_embeddings", None)
    stretched = min((x for x in _each_parameters(text) if _stretched_to(x)), key=_stretched_to, default=None)
    original: Any = most if stretched is None else stretched["original_max_position_embeddings"]
    if most is not None and length > most:
        return (
            f"a sequence of {length:,} tokens goes beyond max_position_embeddings={most} of {config.model_type}, which was "
            "not trained on later positions. Set model.config to {max_position_embeddings: "
            f"{length}, rope_parameters: {{...}}}}, with another rope_type (yarn, and a factor of "
            f"{_factor(length, original)} or more) or a larger rope_theta, and continue training at that length."
        )
    if stretched is not None and length > _stretched_to(stretched):
        lists = " (and long_factor to match)" if stretched["rope_type"] == "longrope" else ""
        return (
            f"a sequence of {length:,} tokens goes beyond the rotary scaling of {config.model_type}: rope_type "
            f"{stretched['rope_type']} with factor={stretched['factor']:g} and original_max_position_embeddings={original} "
            f"serves {_stretched_to(stretched):,} tokens. Set factor in model.config.rope_parameters to "
            f"{_factor(length, original)} or more{lists}, and continue training at that length."
        )
    return None


def _stretched_to(parameters: dict[str, Any]) -> int:
    """Return the number of tokens to which rotary parameters stretch positions, or 0 if they do not stretch them."""
    factor, original = parameters.get("factor"), parameters.get("original_max_position_embeddings")
    return round(factor * original) if parameters.get("rope_type") in BY_RATIO and factor and original else 0


def _factor(length: int, original: int) -> str:
    return f"{math.ceil(100 * length / original) / 100:.12g}"


@contextlib.contextmanager
def furthest_position(position: int) -> Iterator[None]:
    """Open a context in which decoders that `whole_lengths` prepared take `position` as the end of the sequence."""
    with _furthest.with_top(position):
        yield


def whole_lengths(decoder: nn.Module) -> None:
    """Make rotary layers that depend on the sequence length take it from `furthest_position`."""
    for module in decoder.modules():
        if hasattr(module, "rope_type") and follows_length(getattr(module, "config", None)):
            module.register_forward_pre_hook(_append, with_kwargs=True)
            module.register_forward_hook(_cut)


def _append(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Append the last position of the sequence to the arguments of a rotary layer."""
    if not _furthest.values:
        return None
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": _longer(kwargs["position_ids"])}
    return (args[0], _longer(args[1]), *args[2:]), kwargs


def _longer(positions: Tensor) -> Tensor:
    return torch.cat([positions, positions.new_full((len(positions), 1), _furthest.values[-1])], 1)


def _cut(module: nn.Module, args: tuple[Any, ...], angles: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """Remove the angles of the appended position from (cos, sin)."""
    return tuple(x[:, :-1] for x in angles) if _furthest.values else None
