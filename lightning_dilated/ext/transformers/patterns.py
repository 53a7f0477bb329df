"""set_pattern: dilated patterns for the layers of a model of transformers, stored in its config.

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
    """Replace the attention patterns of a model's layers; weights do not change.

    The patterns replace both dense and sliding attention. The config stores them as plain values under
    `dilated_pattern`, so they are saved and loaded with it. A model with another `attn_implementation` ignores them.

    Args:
        model: a model of transformers, or a config from which models will be built.
        pattern: a `DilatedPattern` for all layers; a list, which layers 0, 1, ... cycle through;
            {"hybrid": options}, with options of `DilatedPattern.hybrid`; None: the model's own attention.

    Raises:
        TypeError: if `model` is neither a model nor a config.
        TypeError, ValueError: for patterns that are invalid or do not fit, and for a model with attention of its own.
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
    """Return the config of a model's attention layers. Raises TypeError if `model` is not a decoder or config."""
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
    """Return the pattern of a layer: from `set_pattern`, or the model's own dense attention or sliding window.

    Raises: ValueError for a layer that attends within chunks.
    """
    if patterns := getattr(config, ENTRY, None):
        return DilatedPattern.decode(json.dumps(patterns[layer % len(patterns)]))
    refuse_chunks(config, layer)
    window = getattr(config, "sliding_window", None) if layer_kind(config, layer) in (None, SLIDING) else None
    return DilatedPattern.dense() if window is None else DilatedPattern([Window(window)])


#: name of the attribute that holds the pattern of a compiled attention layer
FIXED = "compiled_pattern"


def fix_patterns(layers: Any, config: Any) -> None:
    """Store patterns in the attention layers, because torch.compile cannot read them from a config."""
    patterns = dict.fromkeys(layer_pattern(config, i) for i in range(len(layers)))
    objects = {x: x for x in patterns}  # layers with equal patterns share one object, so they share a graph
    for i, layer in enumerate(layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx") and hasattr(module, "is_causal"):
                setattr(module, FIXED, objects[layer_pattern(config, i)])


def fixed_pattern(module: Any) -> DilatedPattern | None:
    """Return the pattern that `fix_patterns` stored in an attention layer, or None."""
    return getattr(module, FIXED, None)


def has_pattern(module: Any) -> bool:
    """Return whether `set_pattern` set a pattern in the config of a module."""
    return bool(getattr(getattr(module, "config", None), ENTRY, None))


def own_pattern(module: Any) -> DilatedPattern | None:
    """Return an attention layer's pattern from `set_pattern`; None if there is none or the layer has a `fixed_pattern`.

    Raises: ValueError for a layer without `layer_idx` if there are several patterns.
    """
    if fixed_pattern(module) is not None:
        return None
    patterns = getattr(getattr(module, "config", None), ENTRY, None)
    if not patterns:
        return None
    layer = 0 if len(patterns) == 1 else getattr(module, "layer_idx", None)
    if layer is None:
        raise ValueError(
            f"{type(module).__name__} has no layer_idx, so it is unknown which of {len(patterns)} patterns it takes. Give "
            "set_pattern one pattern for all layers."
        )
    return DilatedPattern.decode(json.dumps(patterns[layer % len(patterns)]))
