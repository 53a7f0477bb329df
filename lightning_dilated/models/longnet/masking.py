"""Which tokens a masked language model hides, and what it sees in their place: a hash of sample and global position.

Nothing depends on ranks, workers, devices or the order of calls, so that every rank knows its own part of one mask.
Shape letters: B batch, L tokens of this rank, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dilated._device import send
from lightning_dilated.attention.dropout import START, fold

_WORDS = 2**32
#: what a hash is for
_BEGIN, _CHOOSE, _TREAT, _REPLACE = range(4)


def sample_numbers(index: object) -> Tensor:
    """A batch's `index`, the samples' numbers, as a tensor. Raises: TypeError where they are no integers."""
    found = torch.as_tensor(index)
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise TypeError(
            f"index must hold integers, each sample's number, got {found.dtype}: numbers that round to the same one would "
            "share a mask. Let the dataset return an int."
        )
    return found


@dataclass(frozen=True)
class Masking:
    """BERT's masking (arXiv 1810.04805, section 3.1), of whole stretches as SpanBERT's (arXiv 1907.10529).

    The sequence falls into stretches of geometric length, `span` tokens in the mean; each is chosen as a whole with
    probability `fraction`. A chosen stretch keeps its tokens with probability `keep`, gets random ones with `random`, and
    `mask_token` otherwise. With span 1 every token is a stretch of its own.

    Args:
        fraction: in (0, 1).
        span: tokens, at least 1; masked runs are span / (1 - fraction) long in the mean, as chosen stretches may touch.
        keep, random: at least 0, at most 1 together.
        mask_token: its id.
        vocab_size: V; random tokens are drawn from these but for `never`.
        never: tokens that are never chosen, such as a genome's N.
        seed: of the hash.

    Raises:
        ValueError: naming the model's argument.
    """

    fraction: float
    span: float
    keep: float
    random: float
    mask_token: int
    vocab_size: int
    never: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name, x in (
            ("mask_fraction", self.fraction),
            ("keep_fraction", self.keep),
            ("random_fraction", self.random),
        ):
            if isinstance(x, bool) or not isinstance(x, (int, float)) or not 0 <= x <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {x!r}.")
        if not 0 < self.fraction < 1:
            raise ValueError(f"mask_fraction must be above 0 and below 1, got {self.fraction!r}.")
        if self.keep + self.random > 1:
            raise ValueError(
                f"keep_fraction={self.keep} and random_fraction={self.random} add up to more than 1: they are shares of "
                "the masked tokens."
            )
        if isinstance(self.span, bool) or not isinstance(self.span, (int, float)) or not 1 <= self.span < math.inf:
            raise ValueError(f"mask_span must be a number of tokens, at least 1, got {self.span!r}.")
        if len(self.drawn) == 0:
            raise ValueError(f"ignore_tokens={list(self.never)} leaves none of the {self.vocab_size} tokens to mask.")

    @property
    def drawn(self) -> list[int]:
        """The tokens that random ones are drawn from."""
        return [x for x in range(self.vocab_size) if x not in self.never]

    @property
    def block(self) -> int:
        """Every multiple of so many positions begins a stretch, so that a rank need not look further back than that."""
        return 1 << max(10, math.ceil(math.log2(1024 * self.span)))

    def apply(
        self, tokens: Tensor, stream: tuple[int, int], index: Tensor, positions: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(what the model sees, which tokens it has to find): (B, L) int64 and (B, L) bool.

        Args:
            tokens: (B, L) int64.
            stream: two numbers that tell uses of one sample apart, such as (1, training step).
            index: (B,) integers, the samples' numbers.
            positions: (L,) int64, global; best on the CPU, where what stretches they lie in is found without waiting.
            lengths: (B,) tokens of each sample; those beyond are padding and never chosen.
        """
        device = tokens.device
        index = send(index.to(torch.int64), device)
        row = fold(torch.full((), START, dtype=torch.int64, device=device), self.seed, *stream, index[:, None])
        begin = self._stretches(row, positions)
        positions = send(positions, device)
        chosen = fold(row, _CHOOSE, begin) < round(self.fraction * _WORDS)
        for token in self.never:
            chosen = chosen & (tokens != token)
        if lengths is not None:
            chosen = chosen & (positions < send(torch.as_tensor(lengths), device)[:, None])
        treat = fold(row, _TREAT, begin)
        kept = treat < round(self.keep * _WORDS)
        random = ~kept & (treat < round((self.keep + self.random) * _WORDS))
        drawn = send(torch.tensor(self.drawn), device)
        other = drawn[(fold(row, _REPLACE, positions) * len(drawn)) >> 32]
        seen = torch.where(random, other, torch.full_like(tokens, self.mask_token))
        return torch.where(chosen & ~kept, seen, tokens), chosen

    def _stretches(self, row: Tensor, positions: Tensor) -> Tensor:
        """The position that each token's stretch begins at, (B, L)."""
        if self.span == 1:
            return send(positions, row.device).expand(len(row), -1)
        found = torch.unique(positions // self.block, return_inverse=True)
        blocks, which, within = (send(x, row.device) for x in (*found, positions % self.block))
        place = torch.arange(self.block, device=row.device)
        at = blocks[:, None] * self.block + place
        begins = (fold(row[:, :, None], _BEGIN, at) < round(_WORDS / self.span)) | (place == 0)
        return torch.where(begins, at, -1).cummax(-1).values[:, which, within]
