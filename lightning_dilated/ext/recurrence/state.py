"""RecurrentState: what recurrent attention carries from one call to the next, of constant size.

Shape letters: S samples (or packed documents), K kv heads, D head dim, E value dim, m tokens of a memory segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_dilated._device import send


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

    def with_tensors(self, tensors: Sequence[Tensor]) -> RecurrentState:
        """The same with other tensors in place of `floating`'s, in their order."""
        return self._made(tensors, self.tokens)

    def zeros(self) -> RecurrentState:
        """The state before the first token, of the same shapes."""
        return replace(self._each(torch.zeros_like), tokens=torch.zeros_like(self.tokens))

    def where(self, replaced: Sequence[bool], other: RecurrentState) -> RecurrentState:
        """With the samples of `other` where `replaced` (S,) is true."""
        flags = torch.tensor(replaced)
        if not flags.any():
            return self
        at = send(flags, self.matrix.device)
        pairs = zip(self.floating(), other.floating(), strict=True)
        chosen = [torch.where(at.view(-1, *[1] * (x.ndim - 1)), y, x) for x, y in pairs]
        return replace(self.with_tensors(chosen), tokens=torch.where(flags, other.tokens, self.tokens))

    def select(self, samples: Sequence[int] | Tensor) -> RecurrentState:
        """The samples of these numbers, in their order, with tensors of their own."""
        index = torch.as_tensor(samples, dtype=torch.int64)
        at = send(index, self.matrix.device)
        return replace(self._each(lambda x: x.index_select(0, at)), tokens=self.tokens.index_select(0, index.cpu()))

    @classmethod
    def join(cls, states: Sequence[RecurrentState]) -> RecurrentState:
        """The samples of several states in their order."""
        joined = map(torch.cat, zip(*(s.floating() for s in states), strict=True))
        return cls._made(joined, torch.cat([s.tokens for s in states]))

    def state_dict(self) -> dict[str, Any]:
        """Tensors only, for checkpoints."""
        return {"tensors": list(self.floating()), "tokens": self.tokens}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> RecurrentState:
        """From a `state_dict`."""
        return cls._made(state["tensors"], state["tokens"])

    @classmethod
    def _made(cls, floating: Iterable[Tensor], tokens: Tensor) -> RecurrentState:
        matrix, *others = floating
        normalizer, *pending = others or (None,)
        return cls(matrix, tokens, normalizer, (pending[0], pending[1]) if pending else None)

    def _each(self, change: Callable[[Tensor], Tensor]) -> RecurrentState:
        return self._made(map(change, self.floating()), self.tokens)


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
