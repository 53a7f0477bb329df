"""Kinds of decoder layers: layers with attention that this package computes, and layers that it refuses.

A config lists the kind of each layer in `layer_types`. This package computes the attention only if the decoder's code
calls transformers' attention interface; other code accepts any attention name but computes its own attention.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
#: kinds of layers in which a token reads other tokens only by attention, or not at all
_ATTENTION_ALONE = {"full_attention", SLIDING, CHUNKED, "mlp", "moe"}
#: name that modeling files of transformers import to call the chosen attention
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"


def layer_kind(config: Any, layer: int | None) -> str | None:
    """Return the kind of a layer, or None if the config does not list it."""
    kinds = getattr(config, "layer_types", None)
    return None if kinds is None or layer is None or layer >= len(kinds) else kinds[layer]


def refuse_chunks(config: Any, layer: int | None) -> None:
    """Raise ValueError for a layer that attends within chunks of tokens."""
    if layer_kind(config, layer) == CHUNKED:
        raise ValueError(
            f"layer {layer} of this model attends within chunks of tokens, as Llama 4 does, which ring_dilated does not "
            'compute. Load the model with attn_implementation="sdpa", or give its layers a pattern by set_pattern.'
        )


def other_kinds(config: Any) -> list[str]:
    """Return the kinds of layers that mix tokens by means other than attention."""
    return sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION_ALONE)


def refuse_states(config: Any) -> None:
    """Raise ValueError for a decoder with layers that mix tokens by a state or a filter instead of attention.

    These layers run over a whole row: packed documents would see each other, and each rank would start without a state.
    """
    if kinds := other_kinds(config):
        raise ValueError(
            f"layers of {config.model_type} are of the kind {', '.join(kinds)}, which mixes tokens by other means than "
            "attention: packed documents would see each other, and each rank that shares a sequence would start with an "
            "empty state. Train with one document a row (data.pack_tokens: 1), and with one rank a sequence (strategy "
            "sequence_size: 1)."
        )


def refuse_without_heads(config: Any) -> None:
    """Raise ValueError unless a config belongs to a decoder with attention."""
    missing = [name for name in ("num_hidden_layers", "num_attention_heads") if not hasattr(config, name)]
    if missing:
        raise ValueError(
            f"{type(config).__name__} has no {' and no '.join(missing)}, so it is no decoder with attention. Take another "
            "model, such as Llama, Qwen, Mistral, Gemma 3 or Phi."
        )


def refuse_other_code(decoder: nn.Module) -> None:
    """Raise ValueError for a decoder that does not call transformers' attention interface."""
    modules = (sys.modules.get(type(module).__module__) for module in decoder.modules())
    if not any(hasattr(module, _INTERFACE) for module in modules):
        raise other_code(type(decoder).__name__)


def other_code(name: str) -> ValueError:
    """Return the error for a decoder class that computes its own attention."""
    return ValueError(
        f"{name} computes its attention by code of its own, not by transformers' attention interface, so ring_dilated would "
        "be ignored. Take another model, such as Llama, Qwen, Mistral, Gemma 3 or Phi."
    )
