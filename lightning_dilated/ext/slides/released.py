"""ReleasedModel: the blocks of torchscale's released encoders, which models of slides and images share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_dilated.models.transformer_model import TransformerModel
from lightning_dilated.pattern.layers import LayersLike


class ReleasedModel(TransformerModel):
    """A TransformerModel with the blocks of torchscale's released encoders: LayerNorm, GELU, sub-layer norms, no positions.

    Args:
        pattern: see `TransformerModel`.
        options: dim, depth, num_heads, ffn_dim, dropout, attention_dropout, drop_path, engine and those of training.
    """

    def __init__(self, pattern: Any, **options: Any) -> None:
        super().__init__(
            pattern=pattern, norm="layernorm", ffn="gelu", bias=True, sub_layernorm=True, position_encoding="none",
            num_kv_heads=None, rotary_base=None, max_seq_len=None, xpos_scale_base=512.0, kv_conv=None,
            recurrence=None, residual_dtype=None, shift_layers="none", shift_below=None, **options,
        )  # fmt: skip

    def _own_pattern(self, pattern: LayersLike | None, padding: str, replaced: Mapping[str, Any]) -> LayersLike | None:
        """The pattern in place of the release's, if there is one; to be called before `__init__`.

        Args:
            padding, replaced: arguments that the release's pattern would follow from.

        Raises:
            ValueError: where those are set too.
        """
        self.released_pattern = pattern is None
        both = [name for name, value in replaced.items() if value is not None]
        if pattern is not None and (both or padding != "masked"):
            raise ValueError(f"pattern takes the place of {' and '.join(both or ['padding'])}: leave one of them out.")
        return pattern
