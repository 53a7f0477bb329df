"""set_pattern: dilated patterns for the layers of a model of transformers, kept in its config.

Shape letters: H query heads, K kv heads.
"""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from lightning_dilated._validation import integer
from lightning_dilated.ext.transformers.kinds import SLIDING, layer_kind, refuse_chunks, refuse_other_code
from lightning_dilated.pattern import DilatedPattern, Window
from lightning_dilated.pattern.layers import LayersLike, plain_patterns, read_patterns

#: the entry of a config that holds the patterns
ENTRY = "dilated_pattern"


def set_pattern(model: Any, pattern: LayersLike | None) -> None:
    """Let the layers of a model attend by other patterns than its own; weights stay as they are.

    The patterns replace dense and sliding attention alike. They are stored in the config as plain values, under
    `dilated_pattern`, and so are saved and loaded with it. A model with another `attn_implementation` does not read them.

    Args:
        model: a model of transformers, or a config that models will be made of.
        pattern: a `DilatedPattern` for all layers; a list, whose members layers 0, 1, ... take in turns;
            {"hybrid": options} as of `DilatedPattern.hybrid`; None: the model's own attention again.

    Raises:
        TypeError: for what is neither model nor config.
        TypeError, ValueError: for other patterns, or such as do not fit the model's heads and layers.
    """
    config = text_config(model)
    if isinstance(model, nn.Module):
        refuse_other_code(model)
    if pattern is None:
        if hasattr(config, ENTRY):
            delattr(config, ENTRY)
        return
    depth, heads = (integer(getattr(config, n), n, 1) for n in ("num_hidden_layers", "num_attention_heads"))
    kv_heads = getattr(config, "num_key_value_heads", None)
    patterns = plain_patterns(read_patterns(pattern, depth, heads, kv_heads))
    setattr(config, ENTRY, patterns if isinstance(patterns, list) else [patterns])


def text_config(model: Any, caller: str = "set_pattern") -> Any:
    """The config that the attention layers of a model hold. Raises: TypeError for no model, and no decoder."""
    config = getattr(model, "config", model)
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"{caller} takes a model or a config of transformers, got {type(model).__name__}.")
    config = config.get_text_config(decoder=True)
    missing = [n for n in ("num_hidden_layers", "num_attention_heads") if not hasattr(config, n)]
    if missing:
        raise TypeError(
            f"{caller} needs a decoder whose config has {' and '.join(missing)}; {type(config).__name__} has not."
        )
    return config


def layer_pattern(config: Any, layer: int) -> DilatedPattern:
    """What a layer of a config attends by: the pattern of `set_pattern`, or the model's own, dense or a sliding window.

    Raises:
        ValueError: for a layer that attends within chunks.
    """
    if patterns := getattr(config, ENTRY, None):
        return DilatedPattern.decode(json.dumps(patterns[layer % len(patterns)]))
    refuse_chunks(config, layer)
    window = getattr(config, "sliding_window", None) if layer_kind(config, layer) in (None, SLIDING) else None
    return DilatedPattern.dense() if window is None else DilatedPattern([Window(window)])


#: the attribute of an attention layer that holds its pattern, where it is compiled
FIXED = "compiled_pattern"


def fix_patterns(layers: Any, config: Any) -> None:
    """Let attention layers hold their patterns, which torch.compile cannot read from a config."""
    patterns = dict.fromkeys(layer_pattern(config, i) for i in range(len(layers)))
    objects = {x: x for x in patterns}  # layers with equal ones share an object, and so a graph
    for i, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx") and hasattr(module, "is_causal"):
                setattr(module, FIXED, objects[layer_pattern(config, i)])


def fixed_pattern(module: Any) -> DilatedPattern | None:
    """The pattern that `fix_patterns` gave an attention layer, if it gave one."""
    return getattr(module, FIXED, None)


def has_pattern(module: Any) -> bool:
    """Whether `set_pattern` gave the model of an attention layer a pattern."""
    return bool(getattr(getattr(module, "config", None), ENTRY, None))


def own_pattern(module: Any) -> DilatedPattern | None:
    """The pattern that `set_pattern` gave an attention layer, if it gave one.

    Raises:
        ValueError: for a layer that does not know its number, where layers have several patterns.
    """
    if fixed_pattern(module) is not None:
        return None
    patterns = getattr(getattr(module, "config", None), ENTRY, None)
    if not patterns:
        return None
    layer = 0 if len(patterns) == 1 else getattr(module, "layer_idx", None)
    if layer is None:
        raise ValueError(
            f"{type(module).__name__} has no layer_idx, so which of {len(patterns)} patterns it takes is unknown. Give "
            "set_pattern one pattern for all layers."
        )
    return DilatedPattern.decode(json.dumps(patterns[layer % len(patterns)]))
