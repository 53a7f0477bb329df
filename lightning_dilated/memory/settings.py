"""MemorySettings: what training keeps until the backward, and how much of a layer is computed at a time."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dilated._validation import integer
from lightning_dilated.memory.offload import check_offload
from lightning_dilated.memory.recompute import check_policy

#: tiles of the projections of a window of heads, which hold less a token than the feed-forward and come once a window:
#: were they smaller, a GPU would wait for the host that launches them
NARROW = 8


@dataclass(frozen=True)
class MemorySettings:
    """How a DilatedTransformer trains in less memory; gradients are the same with all of them.

    Attributes:
        policy: what each block keeps, one of `recompute.POLICIES`.
        every: with "block", only the input of every so-many-th block is kept; a group of them is computed again, then its
            blocks, one at a time.
        offload: of the kept block inputs, a fraction (up to 1) or as many as fit into so many GiB (above 1) wait in pinned
            host memory.
        tile: tokens, of all samples together, of which norm, feed-forward and residual, and last norm, output projection and
            loss, are computed at a time (loss of a wide vocabulary: fewer, see `token_loss.loss_tile`); None: all. With head
            chunks, NARROW times as many are projected to q, k and v, and from the heads' outputs, at a time.
        head_chunks: windows of heads whose q, k and v are made one after another.

    Raises:
        ValueError: when made, naming the setting; for `every` or `offload` with a policy that keeps no block inputs only.
    """

    policy: str = "none"
    every: int = 1
    offload: float = 0.0
    tile: int | None = None
    head_chunks: int = 1

    def __post_init__(self) -> None:
        check_policy(self.policy)
        check_offload(self.offload)
        integer(self.every, "every", 1)
        integer(self.head_chunks, "head_chunks", 1)
        if self.tile is not None:
            integer(self.tile, "tile", 1)
        if self.every > 1 and self.policy != "block":
            raise ValueError(f'every={self.every} keeps the inputs of groups of blocks: it needs policy="block".')
        if self.offload and self.policy == "none":
            raise ValueError(
                f'offload={self.offload:g} moves the block inputs that recomputation keeps: it needs policy="block" or '
                '"attention-kept".'
            )

    @property
    def narrow_tile(self) -> int | None:
        """Tokens of the projections around attention in windows of heads."""
        return None if self.tile is None else NARROW * self.tile

    @property
    def in_pieces(self) -> bool:
        """Whether a block is no longer one function of its whole input."""
        return self.tile is not None or self.head_chunks > 1
