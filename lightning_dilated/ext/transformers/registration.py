"""What models of transformers take of this package: their attention, by `register`, and a cache, by `dilated_cache`."""

from __future__ import annotations

from typing import Any

from lightning_dilated.ext._compat.transformers import look_for_documents_in_tokens_only
from lightning_dilated.ext.transformers.attention import attend
from lightning_dilated.ext.transformers.masks import visible_keys

#: the name that `attn_implementation` takes
NAME = "ring_dilated"
#: the oldest release that is served: major and minor number
OLDEST = (5, 24)


def register() -> None:
    """Let `from_pretrained` and `from_config` of transformers take `attn_implementation="ring_dilated"`.

    Such a model computes its own attention, dense or by sliding windows, exactly; within an active `SequenceGroup` on
    tokens that ranks share. `set_pattern` gives its layers other patterns. A second call changes nothing.

    Raises:
        ModuleNotFoundError: without transformers, naming the extra that installs it.
        ImportError: with a release before `OLDEST`, whose masks and caches have other methods.
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
    look_for_documents_in_tokens_only()
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, visible_keys)


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
    from lightning_dilated.ext.transformers.cache import DilatedCache  # which imports transformers

    return DilatedCache(config, max_length)
