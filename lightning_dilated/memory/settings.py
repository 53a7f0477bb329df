"""MemorySettings: the tensors that training saves for the backward, and the size of the parts computed at a time."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dilated._validation import flag, integer
from lightning_dilated.memory.offload import check_offload
from lightning_dilated.memory.recompute import check_policy

#: tiles that are projected together for a chunk of heads: a projection makes fewer features a token than the
#: feed-forward, and runs once a chunk, so that the GPU would wait for kernel launches with smaller pieces
NARROW = 8


@dataclass(frozen=True)
class MemorySettings:
    """Settings to train a DilatedTransformer in less memory. Only `truncate` changes gradients.

    Attributes:
        policy: what each block saves: one of `recompute.POLICIES`.
        every: with "block", save the input of every n-th block only. The backward recomputes a group of n blocks, then
            its blocks, one at a time.
        offload: share of the saved block inputs that wait in pinned host memory: a fraction (up to 1), or GiB (above 1).
        tile: tokens of all samples together that norm, feed-forward and residual compute at a time, and also last norm,
            output projection and loss (fewer for a wide vocabulary, see `chunked_loss.loss_tile`); None: all. With head
            chunks, NARROW times this number are projected at a time, to q, k and v and from the heads' outputs.
        head_chunks: number of chunks of heads; q, k and v are computed for one chunk after another.
        stream: tokens of a chunk of each sequence: the model computes one chunk after another forward, then each again
            with its backward; the other settings act on a chunk. Causal language models only.
        truncate: with `stream`: gradients end at the bounds of chunks, and each chunk is computed once.

    Raises:
        ValueError: naming the setting; also for `every` or `offload` with a policy that saves no block inputs.
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
        """Tokens that are projected at a time with head chunks."""
        return None if self.tile is None else NARROW * self.tile

    @property
    def in_pieces(self) -> bool:
        """True if parts of a block run separately, on chunks of its input."""
        return self.tile is not None or self.head_chunks > 1


def check_shared(chunk: int, layout: str, stream: int | None) -> None:
    """Raise unless ranks of this layout and stream share the chunks of `chunk` tokens that the model streams."""
    if layout != "chunked":
        raise ValueError(
            f"stream={chunk} computes each sequence chunk by chunk, and with layout={layout!r} the ranks that share it hold "
            "other parts than pieces of chunks. Set layout='chunked', so that they share every chunk, or sequence_size=1, "
            "so that every rank streams sequences of its own, or leave stream out."
        )
    if stream != chunk:
        raise ValueError(
            f"the model streams chunks of {chunk} tokens, and its ranks share chunks of {stream}: take one of them."
        )
