"""register(): the attention of this package among those that transformers' models can take."""

from __future__ import annotations

from lightning_dilated.integrations.transformers.attention import attend
from lightning_dilated.integrations.transformers.masks import visible_keys

#: the name that `attn_implementation` takes
NAME = "ring_dilated"


def register() -> None:
    """Let `from_pretrained` and `from_config` of transformers take `attn_implementation="ring_dilated"`.

    Such a model computes its own attention, dense or by sliding windows, exactly; within an active `SequenceGroup` on
    tokens that ranks share. `set_pattern` gives its layers other patterns. A second call changes nothing.

    Raises:
        ModuleNotFoundError: without transformers, naming the extra that installs it.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ModuleNotFoundError(
            "lightning_dilated.integrations.transformers needs transformers 5: "
            f'pip install "lightning-dilated[transformers]". Importing it failed: {error}'
        ) from error
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, visible_keys)
