"""Store the state, of constant size, that recurrent attention passes from one call to the next.

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
    """The memory of each sample or packed document; `recurrent_attention(return_state=True)` returns it.

    Attributes:
        matrix: (S, K, D, E), fp32 (fp64 for float64 inputs).
        tokens: (S,) int64 on the CPU, the number of tokens that each sample has read.
        normalizer: (S, K, D), the sum of the features of all keys in `matrix`; None for gated_delta.
        pending: the open memory segment, which no token reads yet; None for gated_delta. For linear: its sums
            (S, K, D, E) and (S, K, D). For delta: features (S, K, m, D) and values (S, K, m, E), padded with 0.
    """

    matrix: Tensor
    tokens: Tensor
    normalizer: Tensor | None = None
    pending: tuple[Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; the size does not depend on the number of tokens."""
        return sum(x.numel() * x.element_size() for x in (*self.floating(), self.tokens))

    def floating(self) -> tuple[Tensor, ...]:
        """Return the tensors that carry gradients."""
        normalizer = () if self.normalizer is None else (self.normalizer,)
        return (self.matrix, *normalizer, *(self.pending or ()))

    def detach(self) -> RecurrentState:
        """Return the same state without a gradient to earlier calls (truncated back-propagation)."""
        return self._each(torch.Tensor.detach)

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> RecurrentState:
        """Return the same state on another device, and in another dtype unless it is None; `tokens` is unchanged."""
        return self._each(lambda x: x.to(device, dtype))

    def with_tensors(self, tensors: Sequence[Tensor]) -> RecurrentState:
        """Return a state with `tensors` in place of `floating()`, in the same order."""
        return self._from_tensors(tensors, self.tokens)

    def zeros(self) -> RecurrentState:
        """Return the state before the first token, with the same shapes."""
        return replace(self._each(torch.zeros_like), tokens=torch.zeros_like(self.tokens))

    def where(self, replaced: Sequence[bool], other: RecurrentState) -> RecurrentState:
        """Return this state with the samples of `other` where `replaced` (S,) is True."""
        flags = torch.tensor(replaced)
        if not flags.any():
            return self
        at = send(flags, self.matrix.device)
        pairs = zip(self.floating(), other.floating(), strict=True)
        chosen = [torch.where(at.view(-1, *[1] * (x.ndim - 1)), y, x) for x, y in pairs]
        return replace(self.with_tensors(chosen), tokens=torch.where(flags, other.tokens, self.tokens))

    def select(self, samples: Sequence[int] | Tensor) -> RecurrentState:
        """Return a copy with the samples at these indices, in this order."""
        index = torch.as_tensor(samples, dtype=torch.int64)
        at = send(index, self.matrix.device)
        return replace(self._each(lambda x: x.index_select(0, at)), tokens=self.tokens.index_select(0, index.cpu()))

    @classmethod
    def join(cls, states: Sequence[RecurrentState]) -> RecurrentState:
        """Concatenate the samples of several states."""
        joined = map(torch.cat, zip(*(s.floating() for s in states), strict=True))
        return cls._from_tensors(joined, torch.cat([s.tokens for s in states]))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a dict of tensors, for checkpoints."""
        return {"tensors": list(self.floating()), "tokens": self.tokens}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> RecurrentState:
        """Restore a state from its `state_dict`."""
        return cls._from_tensors(state["tensors"], state["tokens"])

    @classmethod
    def _from_tensors(cls, floating: Iterable[Tensor], tokens: Tensor) -> RecurrentState:
        matrix, *optional = floating
        normalizer, *pending = optional or (None,)
        return cls(matrix, tokens, normalizer, (pending[0], pending[1]) if pending else None)

    def _each(self, change: Callable[[Tensor], Tensor]) -> RecurrentState:
        return self._from_tensors(map(change, self.floating()), self.tokens)


def empty_state(
    kind: str, segment: int, samples: int, shape: tuple[int, int, int], like: Tensor, dtype: torch.dtype
) -> RecurrentState:
    """Return the state before the first token; `shape` is (K, D, E), and `like` is any tensor on the right device."""
    heads, dim, values = shape
    zeros = lambda *size: torch.zeros(samples, heads, *size, device=like.device, dtype=dtype)  # noqa: E731
    tokens = torch.zeros(samples, dtype=torch.int64)
    if kind == "gated_delta":
        return RecurrentState(zeros(dim, values), tokens)
    sizes = ((dim, values), (dim,)) if kind == "linear" else ((segment, dim), (segment, values))
    return RecurrentState(zeros(dim, values), tokens, zeros(dim), (zeros(*sizes[0]), zeros(*sizes[1])))
