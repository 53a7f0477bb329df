"""What planning asks of a stack of blocks: the attention of each, and the sizes of one.

Shape letters: E embedding dim, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

from lightning_dilated.pattern import DilatedPattern


class BlockAttention(NamedTuple):
    """The attention of a block.

    Attributes:
        num_heads, num_kv_heads, head_dim: H, K, D.
        dropout: of the attention weights, in training.
        engine: as the models take it.
    """

    pattern: DilatedPattern
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool
    dropout: float
    engine: str


class BlockSizes(NamedTuple):
    """Of a block.

    Attributes:
        dim, hidden: E, and features of the feed-forward.
        projection: parameters of the projections to q, k and v.
        feed_forward: parameters of the feed-forward.
        windows: whether windows of heads can attend one after another.
        tiles: whether its feed-forward can run in tiles of tokens.
        updated: the weight that an update is added to before it is multiplied with activations, in parameters, and those of
            the update; (0, 0) where there is none.
    """

    dim: int
    hidden: int
    projection: int
    feed_forward: int
    windows: bool = True
    tiles: bool = True
    updated: tuple[int, int] = (0, 0)
