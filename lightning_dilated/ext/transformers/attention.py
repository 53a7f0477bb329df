"""The attention function that each layer of a transformers model calls.

Shape letters: B batch, N tokens (this rank's tokens if ranks share a sequence), H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_dilated.attention import dilated_attention
from lightning_dilated.ext.transformers.kinds import refuse_chunks, refuse_states
from lightning_dilated.ext.transformers.masks import SDPA, CachedStep, VisibleKeys
from lightning_dilated.ext.transformers.patterns import fixed_pattern, has_pattern, own_pattern
from lightning_dilated.ext.transformers.rotary import follows_length
from lightning_dilated.pattern import DilatedPattern, Window
from lightning_dilated.sequence.group import active_sequence

#: name of an attribute that marks a tensor of keys: the `DilatedCache` layer that the keys will be added to
CACHE = "dilated_cache"
EAGER = 'Load the model with attn_implementation="eager" for it.'
#: attention arguments that would change the result and are not supported
REFUSED = {
    "softcap": ("soft-capped scores (as Gemma 2 has them)", EAGER),
    "s_aux": ("attention sinks (as GPT-OSS has them)", EAGER),
    "sinks": ("attention sinks", EAGER),
    "head_mask": ("head masks", "Prune the heads, or leave head_mask out."),
    "layer_head_mask": ("head masks", "Prune the heads, or leave layer_head_mask out."),
    "position_bias": ("a bias of positions (as T5 and ALiBi have it)", SDPA),
    "attention_bias": ("a bias of the scores", SDPA),
    "block_indices": ("keys that are selected by index", EAGER),
    "indices": ("keys that are selected by index", EAGER),
}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return (out (B, N, H, D), None) for query (B, H, N, D), key and value (B, K, N, D), for AttentionInterface.

    Args:
        module: the attention layer; its config may hold patterns, see `set_pattern`.
        attention_mask: the result of `masks.visible_keys`.
        dropout, scaling, is_causal, sliding_window: the layer's options.
        position_ids, cu_seq_lens_q, cu_seq_lens_k: define the documents; positions must be global.

    Raises: ValueError for anything that would not be computed exactly, with the reason and a remedy.
    """
    _refuse(module, attention_mask, is_causal, options)
    if getattr(key, CACHE, None) is not None:
        _check_cache(module, key, attention_mask, sliding_window)
        return _decoded(module, query, key, value, attention_mask, dropout, scaling), None
    if isinstance(attention_mask, CachedStep):
        return _cached_step(module, query, key, value, attention_mask, dropout, scaling, is_causal, options)
    if attention_mask.follows:
        raise _not_from_cache(module)
    pattern = _pattern_of(module, query, key, attention_mask, sliding_window)
    documents = _documents(module, attention_mask, position_ids, _documents_of(cu_seq_lens_q, cu_seq_lens_k))
    padding = attention_mask.padding
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if padding is not None:
        q, k, v = map(padding.aligned, (q, k, v))
    numbers = {"scale": scaling, "dropout": dropout, "lengths": attention_mask.lengths, "cu_seqlens": documents}
    out = dilated_attention(q, k, v, pattern, causal=True, **numbers)
    return (out if padding is None else padding.restored(out)), None


def _pattern_of(
    module: nn.Module, query: Tensor, key: Tensor, mask: VisibleKeys, sliding_window: int | None
) -> DilatedPattern:
    pattern = own_pattern(module)
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"ring_dilated is self-attention, and {type(module).__name__} has {query.shape[2]} queries and {key.shape[2]} "
            f"keys, as cross attention has them. {SDPA}"
        )
    return pattern or fixed_pattern(module) or _own_attention(module, mask.window, sliding_window)


def _documents(
    module: nn.Module, mask: VisibleKeys, position_ids: Tensor | None, bounds: Tensor | None
) -> Tensor | None:
    """Return the global bounds of packed documents, from `known_documents` or else from positions and `bounds`."""
    if mask.known:
        return mask.bounds
    documents = mask.documents(position_ids, bounds)
    _check_model(module, documents)
    return documents


def _refuse(module: nn.Module, mask: Any, is_causal: bool | None, options: dict[str, Any]) -> None:
    for name, (what, remedy) in REFUSED.items():
        if options.get(name) is not None:
            raise ValueError(f"ring_dilated does not compute {what}, and {type(module).__name__} has {name}. {remedy}")
    if options.get("output_attentions"):
        raise ValueError(
            f"ring_dilated does not compute the attention weights that output_attentions=True asks for. {EAGER}"
        )
    if getattr(module, "is_cross_attention", False):
        raise ValueError(f"ring_dilated is self-attention, and {type(module).__name__} is cross attention. {SDPA}")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(f"ring_dilated is causal, and {type(module).__name__} is not (is_causal=False). {SDPA}")
    if isinstance(mask, Tensor):
        raise ValueError(
            f"ring_dilated takes no mask of shape {tuple(mask.shape)}, because a mask of all pairs of tokens "
            "grows with N^2. For padding, pass attention_mask (B, N), with ones followed by zeros. For documents, pass "
            "cu_seq_lens_q, or position_ids that restart at each document."
        )
    if not isinstance(mask, (VisibleKeys, CachedStep)):
        raise ValueError(
            f"{type(module).__name__} got no mask of transformers' create_causal_mask ({mask!r}), so it is unknown what its "
            f"tokens see. {SDPA}"
        )


def _check_model(module: nn.Module, documents: Tensor | None) -> None:
    """Raise if rotary frequencies or layers need the whole of a shared sequence, or if layers would mix documents."""
    group, config = active_sequence(), getattr(module, "config", None)
    shared = group is not None and group.ranks > 1
    if shared and follows_length(config):
        raise ValueError(
            f"rotary frequencies of {type(module).__name__} depend on the sequence length (rope_type dynamic or longrope), "
            "but each rank has only a part of the sequence. Train with HFCausalLM, or take another rope_type, such as yarn."
        )
    if shared or documents is not None:
        refuse_states(config)


def _own_attention(module: nn.Module, masked: int | None, layer: int | None) -> DilatedPattern:
    refuse_chunks(getattr(module, "config", None), getattr(module, "layer_idx", None))
    if layer is not None and layer != masked:
        raise ValueError(
            f"{type(module).__name__} has sliding_window={layer}, but its mask has {masked}, and only one can be right. "
            f"{SDPA}"
        )
    return DilatedPattern.dense() if masked is None else DilatedPattern([Window(masked)])


def _documents_of(queries: Tensor | None, keys: Tensor | None) -> Tensor | None:
    """Return the documents' bounds; raise if bounds of queries and keys differ."""
    if queries is None or keys is None or keys is queries:
        return keys if queries is None else queries
    if queries.shape != keys.shape or not bool((queries == keys).all()):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k differ, as in cross attention. Give equal ones.")
    return queries


def _check_cache(module: nn.Module, key: Tensor, mask: Any, sliding_window: int | None) -> None:
    """Raise if a layer of a `DilatedCache` does not belong to this attention layer."""
    layer = getattr(key, CACHE)
    if layer.get_seq_length() + key.shape[2] != layer.handed:
        raise _not_from_cache(module)
    if layer.rows.length or not isinstance(mask, VisibleKeys):
        return
    pattern = own_pattern(module) or fixed_pattern(module) or _own_attention(module, mask.window, sliding_window)
    if pattern != layer.rows.pattern:
        raise ValueError(
            f"the DilatedCache was made for {layer.rows.pattern}, but {type(module).__name__} attends by {pattern}. Make a "
            "cache by dilated_cache(model.config), after set_pattern."
        )


def _not_from_cache(module: nn.Module) -> ValueError:
    return ValueError(
        f"{type(module).__name__} attends to keys of another layer, or to new keys alone, which a DilatedCache does not "
        "support. Pass use_cache=False; layers with their own attention take transformers' cache."
    )


def _decoded(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float, scaling: float | None
) -> Tensor:
    """Add n new tokens to a `DilatedCache` and return their outputs (B, n, H, D)."""
    group = active_sequence()
    if group is not None and group.ranks > 1:
        raise ValueError(
            "a DilatedCache serves one rank, but ranks share this sequence: generate outside of the SequenceGroup."
        )
    if dropout:
        raise ValueError(
            f"a cache serves inference, and {type(module).__name__} has dropout={dropout}: call model.eval()."
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return getattr(key, CACHE).attend(q, k, v, getattr(mask, "padding", None), scaling).to(query.dtype)


def _cached_step(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: CachedStep,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    options: dict[str, Any],
) -> tuple[Tensor, None]:
    """Attend to a cache of transformers with transformers' "sdpa"."""
    if has_pattern(module):
        raise ValueError(
            f"{type(module).__name__} has a pattern, but transformers' own caches serve only layers without a pattern. "
            "Pass cache=ld.integrations.transformers.dilated_cache(model.config) to generate, or "
            "use_cache=False; HFCausalLM.generate makes this cache automatically."
        )
    from transformers import AttentionInterface

    sdpa = AttentionInterface()["sdpa"]
    return sdpa(module, query, key, value, step.mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **options)
