"""Contexts add rows to a layer's input: rows of other ranks, or earlier rows from a stream or a cache.

A layer takes a `LayerContext`, or None for a whole sequence. torch.compile traces the op, so the op takes only strings
and tensors, and finds a `Context` by its name.
Shape letters: B batch, N tokens of a call, L tokens of this rank, E embedding dim, H heads, K kv heads, D head dim.
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_dilated.attention.spec import CallSpec

if TYPE_CHECKING:
    from lightning_dilated.attention.modules import MultiheadDilatedAttention
    from lightning_dilated.attention.resolve import Resolved

#: name of the context for calls on several ranks
RANKS = "ranks"
_contexts: weakref.WeakValueDictionary[str, Context] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class OpCall(NamedTuple):
    """A call of the op with a context, before it is resolved.

    Attributes:
        key: cache key for a resolved call.
        q, k: (B, L, H, D) and (B, L, K, D).
        documents: `lengths` and `cu_seqlens` of the whole sequence, on the CPU.
        place: (2,) int64 on the CPU: the number of the layer, and a number that the context defines (a stream's chunk).
            None means that the caller is not a layer of a stack.
        seed: seed of attention dropout.
        number: in a backward, the number of the forward's call.
        backward: whether the call is a backward.
    """

    key: tuple[Any, ...]
    spec: CallSpec
    q: Tensor
    k: Tensor
    documents: tuple[Tensor | None, Tensor | None]
    place: Tensor | None
    seed: int
    number: Tensor | None
    backward: bool


class Context(ABC):
    """Base class of contexts of the op. The op finds a context by its `name` as long as the object exists.

    A context for causal layers also defines `neighbours`, which the layers' convolutions call; see `Stream`.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name or f"context-{next(_numbers)}"
        _contexts[self.name] = self

    @abstractmethod
    def resolve(self, call: OpCall) -> tuple[Resolved, int]:
        """Return the `Resolved` of a call on this rank, and the dropout seed that all ranks use."""

    @abstractmethod
    def pairs(
        self, spec: CallSpec, q: Tensor, k: Tensor, documents: tuple[Tensor | None, Tensor | None], place: Tensor | None
    ) -> int:
        """Return the number of (query, key) pairs in all samples of a call with q (B, L, H, D) and k (B, L, K, D)."""


def find_context(name: str) -> Any:
    """Return the context with a name.

    Raises:
        ValueError: if no context has this name.
    """
    context = _contexts.get(name)
    if context is None:
        raise ValueError(f"no context of this process has the name {name!r}: keep the model until the backward has run")
    return context


class LayerContext(Protocol):
    """A context of one layer. A cache also has `length` and `token_positions`, which rotary tables need."""

    def heads(
        self,
        layer: MultiheadDilatedAttention,
        query: Tensor,
        positions: Any,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """Return the outputs (B, N, H, D) of a layer's heads for `query` (B, N, E); other arguments as in `forward`."""


@dataclass(frozen=True)
class LayerPlace:
    """A layer's place in a `Context` of the op.

    Attributes:
        context: name of the context.
        place: (2,) int64 on the CPU, see `OpCall`; a tensor, so that compiled layers share a graph.
        seed: seed of attention dropout, () int64 on the CPU; None without dropout.
        shared: whether all ranks of the active `SequenceGroup` compute the call.
        whole: whether the call fills a chunk.
        seq_len: number of tokens of the sequence; None: it is not known, because later calls continue it.
    """

    context: str
    place: Tensor
    seed: Tensor | None = None
    shared: bool = False
    whole: bool = False
    seq_len: int | None = None

    def heads(
        self,
        layer: MultiheadDilatedAttention,
        query: Tensor,
        positions: Any,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        causal: bool,
    ) -> Tensor:
        """Return the outputs of a layer's heads. The op calls the context."""
        return layer.heads(query, positions, lengths, cu_seqlens, causal, self)

    def of_part(self, part: int) -> LayerPlace:
        """Return the place of a mixer's convolution. Its number, -1 - layer - 2**20 part, is no layer's number."""
        layer, chunk = self.place.unbind()
        return replace(self, place=torch.stack([-1 - layer - (part << 20), chunk]))
