"""Descriptions of blocks for planning: BlockAttention and BlockSizes.

Shape letters: E embedding dim, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

from lightning_dilated.pattern import DilatedPattern


class BlockAttention(NamedTuple):
    """The attention of a block.

    Attributes:
        num_heads, num_kv_heads, head_dim: H, K, D.
        dropout: probability for attention weights in training.
        engine: the model's argument `engine`.
    """

    pattern: DilatedPattern
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    dropout: float
    engine: str


class BlockSizes(NamedTuple):
    """The sizes of a block.

    Attributes:
        dim, hidden: E, and the hidden features of the feed-forward.
        projection: number of parameters of the projections to q, k and v.
        feed_forward: number of parameters of the feed-forward.
        windows: whether the block's heads can attend in groups, one after another.
        tiles: whether the feed-forward can run in tiles of tokens.
        updated: the number of parameters of a weight, and of the update (such as LoRA's) that is added to it before
            the product; (0, 0) without an update.
    """

    dim: int
    hidden: int
    projection: int
    feed_forward: int
    windows: bool = True
    tiles: bool = True
    updated: tuple[int, int] = (0, 0)
