"""What the layers of a decoder are: attention that this package computes, or something that it would get wrong.

A config says the kind of each layer in `layer_types`. The attention of a decoder is this package's only where the code of
the decoder takes it from transformers' attention interface; other code takes any name and computes its own.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
#: kinds of layers that see other tokens by attention alone, or not at all
_ATTENTION_ALONE = {"full_attention", SLIDING, CHUNKED, "mlp", "moe"}
#: what modeling files of transformers import to call the attention that a model was loaded with
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"


def layer_kind(config: Any, layer: int | None) -> str | None:
    """The kind of a layer; None where the config does not say it."""
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
    """Kinds of layers that hand tokens on by other means than attention."""
    return sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION_ALONE)


def refuse_states(config: Any) -> None:
    """Raise ValueError for a decoder whose layers hand tokens on by other means than attention, such as a state or filters.

    They run from the first token of a row to the last: documents would see each other, and each rank would begin anew.
    """
    if others := other_kinds(config):
        raise ValueError(
            f"layers of {config.model_type} are of the kind {', '.join(others)}, which hands tokens on by other means than "
            "attention: packed documents would see each other, and on ranks that share a sequence each would begin anew. "
            "Train with one document a row (data.pack_tokens: 1), and without ranks that share it (strategy "
            "sequence_size: 1)."
        )


def refuse_without_heads(config: Any) -> None:
    """Raise ValueError for the config of a model that is no decoder with attention."""
    missing = [name for name in ("num_hidden_layers", "num_attention_heads") if not hasattr(config, name)]
    if missing:
        raise ValueError(
            f"{type(config).__name__} has no {' and no '.join(missing)}, so it is no decoder with attention. Take another "
            "model, such as Llama, Qwen, Mistral, Gemma 3 or Phi."
        )


def refuse_other_code(decoder: nn.Module) -> None:
    """Raise ValueError for a decoder whose code does not take its attention from transformers' interface."""
    modules = (sys.modules.get(type(module).__module__) for module in decoder.modules())
    if not any(hasattr(module, _INTERFACE) for module in modules):
        raise other_code(type(decoder).__name__)


def other_code(name: str) -> ValueError:
    """The error for a decoder of this name that computes its own attention."""
    return ValueError(
        f"{name} computes its attention by code of its own, not by transformers' attention interface, so ring_dilated would "
        "be ignored. Take another model, such as Llama, Qwen, Mistral, Gemma 3 or Phi."
    )
