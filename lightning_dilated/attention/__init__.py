"""Dilated attention: the op, its oracle, its engines and the layers around it."""

from lightning_dilated.attention.functional import dilated_attention

__all__ = ["dilated_attention"]
