"""register(): the attention of this package among those that transformers' models can take."""

from __future__ import annotations

from lightning_dilated._compat.transformers import look_for_documents_in_tokens_only
from lightning_dilated.integrations.transformers.attention import attend
from lightning_dilated.integrations.transformers.masks import visible_keys

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
            f"lightning_dilated.integrations.transformers needs transformers {OLDEST[0]}.{OLDEST[1]} or newer: "
            f'pip install "lightning-dilated[transformers]". Importing it failed: {error}'
        ) from error
    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
        raise ImportError(
            f"lightning_dilated.integrations.transformers needs transformers {OLDEST[0]}.{OLDEST[1]} or newer, and "
            f'{transformers.__version__} is installed: pip install "lightning-dilated[transformers]".'
        )
    look_for_documents_in_tokens_only()
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, visible_keys)
