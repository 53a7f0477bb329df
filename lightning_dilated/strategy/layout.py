"""The layout of a run's shards where a strategy has `layout="auto"`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence.layout_choice import cheapest_layout


def layout_for(
    module: Any, tokens: int | None, ranks: int, exchange: str, stream: int | None, prices: Mapping[str, Any]
) -> str:
    """Return the layout that "auto" means for a module.

    It is "zigzag" only for a causal module that declares `takes_any_layout`, where zigzag costs less at its longest
    sequence. Streams and named exchanges keep "contiguous".

    Args:
        module: the LightningModule.
        tokens: N, the longest sequence; None where neither the model nor the data declare it.
        ranks: the ranks that share a sequence.
        exchange: of the strategy.
        stream: tokens of a chunk of a stream, or None.
        prices: `head_size` and the prices of `cheapest_layout`.
    """
    fixed = ranks == 1 or exchange != "auto" or stream is not None or not tokens
    if fixed or not getattr(module, "takes_any_layout", False) or not getattr(module, "causal", False):
        return "contiguous"
    patterns = module.patterns or (DilatedPattern.dense(),) * module.depth
    return cheapest_layout(patterns, tokens, module.num_heads, module.num_kv_heads, ranks=ranks, **prices)


def declared_length(module: Any, data: Any) -> int | None:
    """Return the tokens of the longest sequence: the DataModule's, else the model's; None for packed rows of documents."""
    if getattr(data, "pack_tokens", None) is not None:
        return None
    lengths = getattr(data, "seq_len", None), getattr(module, "max_seq_len", None)
    return next((x for x in lengths if isinstance(x, int)), None)
