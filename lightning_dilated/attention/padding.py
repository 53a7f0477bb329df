"""Padding masks of torch's own layers, read as lengths.

Shape letters: B batch, N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def lengths_of(mask: Tensor, shape: torch.Size) -> Tensor:
    """(B,) lengths from a right-padded key padding mask (B, N): bool with True at padding, or float with -inf there.

    Raises:
        ValueError: for another shape, other values, or padding that is not all on the right.
    """
    if mask.shape != shape:
        raise ValueError(f"key_padding_mask must be (B, N) = {tuple(shape)}, got {tuple(mask.shape)}.")
    pad = mask
    if mask.is_floating_point():
        pad = mask == -torch.inf
        if not bool((pad | (mask == 0)).all()):
            raise ValueError("a floating key_padding_mask may hold 0 and -inf only; a bias on keys is not offered.")
    elif mask.dtype != torch.bool:
        raise ValueError(f"key_padding_mask must be bool (True at padding) or floating, got {mask.dtype}.")
    if bool((pad[:, :-1] & ~pad[:, 1:]).any()):
        raise ValueError(
            "key_padding_mask has real tokens after padding: only padding on the right is offered. "
            "Move the padding to the end, or pack the pieces with cu_seqlens."
        )
    return (~pad).sum(1)
