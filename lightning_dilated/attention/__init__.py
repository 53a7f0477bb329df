"""Dilated attention: the op, its oracle, its engines and its layers."""

from typing import TYPE_CHECKING

from lightning_dilated._extensions import lazy_names
from lightning_dilated.attention import ranks  # noqa: F401 - registers the context for calls on several ranks
from lightning_dilated.attention.functional import dilated_attention
from lightning_dilated.attention.modules import DilatedAttention, MultiheadDilatedAttention

if TYPE_CHECKING:
    from lightning_dilated.ext.evaluation.attention_weights import attention_weights
    from lightning_dilated.ext.hashed.functional import hashed_attention

__getattr__, __dir__ = lazy_names(__name__)

__all__ = [
    "DilatedAttention", "MultiheadDilatedAttention", "attention_weights", "dilated_attention", "hashed_attention",
]  # fmt: skip
