"""The choice of a run's shard layout for strategies with `layout="auto"`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence.layout_choice import cheapest_layout

#: methods that may compute token positions: a subclass that redefines one may assume contiguous shards
POSITIONED = "build forward loss_terms token_losses training_step validation_step test_step predict_step"


def layout_for(
    module: Any, tokens: int | None, ranks: int, exchange: str, stream: int | None, prices: Mapping[str, Any]
) -> str:
    """Return the layout that "auto" means for a module.

    The layout is "zigzag" only for a causal module that declares `takes_any_layout`, its heads and its patterns, and
    only if zigzag costs less for the longest sequence. It is "contiguous" for streams, for a named exchange, and
    for a memory limit, because memory depends on the batch size and head dimension, unknown before the first call.

    Args:
        module: the LightningModule.
        tokens: N, the length of the longest sequence; None if neither the model nor the data declare it.
        ranks: number of ranks that share a sequence.
        exchange: the strategy's option.
        stream: number of tokens in a chunk of a stream; None without streams.
        prices: keyword arguments of `cheapest_layout`, including `exchange_memory`, the limit in bytes or None.
    """
    fixed = ranks == 1 or exchange != "auto" or stream is not None or prices["exchange_memory"]
    if fixed or not tokens or not takes_any_layout(module) or not getattr(module, "causal", False):
        return "contiguous"
    dense = (DilatedPattern.dense(),) * getattr(module, "depth", 0)
    patterns = getattr(module, "patterns", ()) or getattr(module, "own_patterns", dense)
    if not patterns:
        return "contiguous"
    return cheapest_layout(
        patterns, tokens, module.num_heads, getattr(module, "num_kv_heads", None), ranks=ranks, **prices
    )


def takes_any_layout(module: Any) -> bool:
    """Return `takes_any_layout`; False if a user's class redefines a method in `POSITIONED` but not this attribute."""
    for owner in type(module).__mro__:
        if "takes_any_layout" in vars(owner):
            return bool(owner.takes_any_layout)
        if vars(owner).keys() & set(POSITIONED.split()) and not owner.__module__.startswith("lightning_dilated."):
            return False
    return False


def declared_length(module: Any, data: Any) -> int | None:
    """Return the longest sequence length that the data or else the model declares; None for packed documents."""
    if getattr(data, "pack_tokens", None) is not None:
        return None
    lengths = getattr(data, "seq_len", None), getattr(module, "max_seq_len", None)
    return next((x for x in lengths if isinstance(x, int)), None)
