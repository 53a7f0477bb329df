"""RecurrentState: what recurrent attention carries from one call to the next, of constant size.

Shape letters: S samples (or packed documents), K kv heads, D head dim, E value dim, m tokens of a memory segment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RecurrentState:
    """The memory of each sample, or of each packed document; `recurrent_attention(return_state=True)` makes one.

    Attributes:
        matrix: (S, K, D, E), fp32 (fp64 for float64 inputs).
        tokens: (S,) int64 on the CPU, how many tokens each has seen.
        normalizer: (S, K, D), the sum of the features of all keys in `matrix`; None for gated_delta.
        pending: what the open memory segment holds, which no token reads yet; None for gated_delta. Of linear the sums
            (S, K, D, E) and (S, K, D), of delta the features (S, K, m, D) and values (S, K, m, E) of its tokens, then zeros.
    """

    matrix: Tensor
    tokens: Tensor
    normalizer: Tensor | None = None
    pending: tuple[Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; they do not grow with the tokens."""
        return sum(x.numel() * x.element_size() for x in (*self.floating(), self.tokens))

    def floating(self) -> tuple[Tensor, ...]:
        """The tensors that carry gradients."""
        normalizer = () if self.normalizer is None else (self.normalizer,)
        return (self.matrix, *normalizer, *(self.pending or ()))

    def detach(self) -> RecurrentState:
        """The same numbers without a gradient to earlier calls (truncated back-propagation)."""
        return self._each(torch.Tensor.detach)

    def to(self, device: torch.device, dtype: torch.dtype) -> RecurrentState:
        """The same with another device and dtype; `tokens` stay as they are."""
        return self._each(lambda x: x.to(device, dtype))

    def _each(self, change: Callable[[Tensor], Tensor]) -> RecurrentState:
        matrix, *others = map(change, self.floating())
        normalizer, *pending = others or (None,)
        return RecurrentState(matrix, self.tokens, normalizer, (pending[0], pending[1]) if pending else None)


def empty_state(
    kind: str, segment: int, samples: int, shape: tuple[int, int, int], like: Tensor, dtype: torch.dtype
) -> RecurrentState:
    """The state before the first token; `shape` is (K, D, E), the device that of `like`."""
    heads, dim, values = shape
    zeros = lambda *size: torch.zeros(samples, heads, *size, device=like.device, dtype=dtype)  # noqa: E731
    tokens = torch.zeros(samples, dtype=torch.int64)
    if kind == "gated_delta":
        return RecurrentState(zeros(dim, values), tokens)
    sizes = ((dim, values), (dim,)) if kind == "linear" else ((segment, dim), (segment, values))
    return RecurrentState(zeros(dim, values), tokens, zeros(dim), (zeros(*sizes[0]), zeros(*sizes[1])))
