"""dilated_cache: the cache that decoders with patterns decode with."""

from __future__ import annotations

from typing import Any


def dilated_cache(config: Any, max_length: int | None = None) -> Any:
    """A new cache for `model.generate(tokens, cache=dilated_cache(model.config))` of transformers, and for forwards.

    For models with `attn_implementation="ring_dilated"`, of patterns or their own attention: what is decoded with it equals
    the whole sequence's rows. It holds what later tokens can see: of a segment or window its rows, of a branch over the
    whole sequence every row. All samples are equally long: prompts have no padding.

    Args:
        config: the model's, or the model.
        max_length: most tokens of a sample; None: it grows.

    Returns:
        A `Cache` of transformers, with `nbytes`.

    Raises:
        ModuleNotFoundError: without transformers.
        TypeError: for what is neither model nor config.
        ValueError: for rotary frequencies that follow the length of a sequence, and layers that are not attention.
    """
    from lightning_dilated.integrations.transformers.cache import DilatedCache  # which imports transformers

    return DilatedCache(config, max_length)
