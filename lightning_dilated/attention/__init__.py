"""Dilated attention: the op, its oracle, its engines and the layers around it."""

from lightning_dilated.attention.functional import dilated_attention
from lightning_dilated.attention.layers import DilatedAttention, MultiheadDilatedAttention

__all__ = ["DilatedAttention", "MultiheadDilatedAttention", "dilated_attention"]
