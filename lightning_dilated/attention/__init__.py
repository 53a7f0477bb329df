"""Dilated attention: the op, its oracle, its engines and the layers around it."""

from lightning_dilated.attention.functional import dilated_attention
from lightning_dilated.attention.modules import DilatedAttention, MultiheadDilatedAttention
from lightning_dilated.ext.evaluation.attention_weights import attention_weights

__all__ = ["DilatedAttention", "MultiheadDilatedAttention", "attention_weights", "dilated_attention"]
