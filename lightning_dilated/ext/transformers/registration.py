"""The entry points for models of transformers: `register` for attention, `dilated_cache` for decoding."""

from __future__ import annotations

from typing import Any

from lightning_dilated.ext._compat.transformers import skip_documents_without_tokens
from lightning_dilated.ext.transformers.attention import attend
from lightning_dilated.ext.transformers.masks import visible_keys

#: the name to pass as `attn_implementation`
NAME = "ring_dilated"
#: the oldest supported release of transformers: major and minor number
OLDEST = (5, 24)


def register() -> None:
    """Let `from_pretrained` and `from_config` of transformers accept `attn_implementation="ring_dilated"`.

    With it, a model computes exactly its own attention, dense or in sliding windows, unless `set_pattern` gives it
    patterns. In an active `SequenceGroup`, ranks share the tokens of a sequence. A second call changes nothing.

    Raises:
        ModuleNotFoundError: if transformers is missing; the message names the extra that installs it.
        ImportError: for a release before `OLDEST`; its masks and caches have other methods.
    """
    try:
        import transformers
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ModuleNotFoundError(
            f"lightning_dilated.ext.transformers needs transformers {OLDEST[0]}.{OLDEST[1]} or newer: "
            f'pip install "lightning-dilated[transformers]". Importing it failed: {error}'
        ) from error
    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
        raise ImportError(
            f"lightning_dilated.ext.transformers needs transformers {OLDEST[0]}.{OLDEST[1]} or newer, and "
            f'{transformers.__version__} is installed: pip install "lightning-dilated[transformers]".'
        )
    skip_documents_without_tokens()
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, visible_keys)


def dilated_cache(config: Any, max_length: int | None = None) -> Any:
    """Return a new cache for `model.generate(tokens, cache=dilated_cache(model.config))`, or for calls of the model.

    The model must have `attn_implementation="ring_dilated"`; its layers may have patterns or their own attention.
    Decoded rows equal the rows of a forward over the whole sequence. The cache stores only rows that later tokens can
    see: the current segment or window, or all rows if a branch spans the sequence. Prompts may be padded on the left.

    Args:
        config: the model's config, or the model.
        max_length: maximum number of tokens of a sample; None: the cache grows.

    Returns:
        A `Cache` of transformers, with `nbytes`.

    Raises:
        ModuleNotFoundError: without transformers.
        TypeError: if `config` is neither a model nor a config.
        ValueError: for length-dependent rotary frequencies, and for layers that keep states or attend within chunks.
    """
    from lightning_dilated.ext.transformers.cache import DilatedCache  # imports transformers

    return DilatedCache(config, max_length)
