"""MemorySettings: which tensors training saves for the backward, and how much is computed at a time."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dilated._validation import flag, integer
from lightning_dilated.memory.offload import check_offload
from lightning_dilated.memory.recompute import check_policy

#: number of tiles that are projected together for a chunk of heads. A projection has fewer features than the
#: feed-forward and runs once for each chunk: for single tiles, the GPU would wait for kernel launches.
NARROW = 8


@dataclass(frozen=True)
class MemorySettings:
    """Settings to train a DilatedTransformer in less memory. Only `truncate` changes gradients.

    Attributes:
        policy: which tensors each block saves, one of `recompute.POLICIES`.
        every: with "block", save only the input of every n-th block. The backward recomputes a group of n blocks, and
            then each of its blocks.
        offload: how much of the saved block inputs to store in pinned host memory: a fraction if up to 1, else GiB.
        tile: number of tokens, in all samples together, that are computed at a time by a block's norm, feed-forward and
            residual, by the last norm, and by output projection and loss (`chunked_loss.loss_tile`); None means all. With
            head chunks, the projections to q, k and v and from the heads compute NARROW times this number at a time.
        head_chunks: number of chunks of heads; q, k and v are computed for one chunk after another.
        stream: number of tokens in a chunk of a sequence. The model computes the chunks forward one after another, then
            each again with its backward; the other settings apply to a chunk. Causal language models only.
        truncate: with `stream`, stop gradients at the boundaries of chunks, and compute each chunk once.

    Raises:
        ValueError: naming the setting; also for `every` or `offload` if the policy does not save block inputs.
    """

    policy: str = "none"
    every: int = 1
    offload: float = 0.0
    tile: int | None = None
    head_chunks: int = 1
    stream: int | None = None
    truncate: bool = False

    def __post_init__(self) -> None:
        check_policy(self.policy)
        check_offload(self.offload)
        integer(self.every, "every", 1)
        integer(self.head_chunks, "head_chunks", 1)
        for name in ("tile", "stream"):
            if getattr(self, name) is not None:
                integer(getattr(self, name), name, 1)
        if flag(self.truncate, "truncate") and self.stream is None:
            raise ValueError("truncate=True ends gradients at the bounds of a stream's chunks: it needs stream=TOKENS.")
        if self.every > 1 and self.policy != "block":
            raise ValueError(f'every={self.every} saves the inputs of groups of blocks: it needs policy="block".')
        if self.offload and self.policy == "none":
            raise ValueError(
                f'offload={self.offload:g} moves the block inputs that recomputation saves: it needs policy="block" or '
                '"attention-kept".'
            )

    @property
    def narrow_tile(self) -> int | None:
        """The number of tokens that are projected at a time with head chunks; None means all."""
        return None if self.tile is None else NARROW * self.tile

    @property
    def in_pieces(self) -> bool:
        """True if the parts of a block run separately, on tiles of tokens or chunks of heads."""
        return self.tile is not None or self.head_chunks > 1


def check_shared(chunk: int, layout: str, stream: int | None) -> None:
    """Raise ValueError unless ranks with this layout and `stream` share the model's chunks of `chunk` tokens."""
    if layout != "chunked":
        raise ValueError(
            f"stream={chunk} computes each sequence chunk by chunk, but with layout={layout!r} its ranks do not hold "
            "pieces of each chunk. Set layout='chunked', so that they share every chunk, or sequence_size=1, "
            "so that every rank streams sequences of its own, or leave stream out."
        )
    if stream != chunk:
        raise ValueError(
            f"the model streams chunks of {chunk} tokens, but its ranks share chunks of {stream}: set equal numbers."
        )
