"""Windows by engines that have no bands: blocks of `width` rows, each with its own keys and with its neighbours'.

Within a block the window is ordinary causal attention. Of the block before, row a sees the keys after a: turned round, that
is causal attention, too. Where attention is not causal a block sees itself whole, and of the block after, row a the keys
before a. What whole blocks leave over is left to the math engine.
Shape letters: G samples and segments, J heads, n rows, D head dim, w width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_dilated.attention.backends.base import Band, Engine, merge
from lightning_dilated.attention.backends.math import MATH
from lightning_dilated.attention.dropout import PairDropout

#: narrower windows are as fast by the math engine
NARROW = 16
#: elements of a tensor whose blocks are computed at once
AT_ONCE = 1 << 24


@functools.cache
def with_windows(engine: Engine) -> Engine:
    """The engine with `bands`: windows over at least two blocks are its own work, other bands that of the math engine."""
    forward = functools.partial(_forward, engine)
    return replace(engine, forward=forward, backward=functools.partial(_backward, engine), bands=True)


@dataclass(frozen=True)
class _Piece:
    """A rectangle of rows: queries, keys, how they are computed, and whether both are turned round.

    With `width` the slices are of whole blocks, which are computed as so many samples, and `queries_in` and `keys_in` are
    the rows of each block; None: all.
    """

    queries: slice
    keys: slice
    causal: bool = False
    band: Band | None = None
    width: int = 0
    queries_in: slice | None = None
    keys_in: slice | None = None
    turned: bool = False

    def _view(self, x: Tensor, rows: slice, inner: slice | None) -> Tensor:
        x = x[:, :, rows]
        if not self.width:
            return x
        blocks = x.unflatten(2, (-1, self.width))
        return (blocks if inner is None else blocks[:, :, :, inner]).transpose(1, 2)

    def _take(self, x: Tensor, rows: slice, inner: slice | None) -> Tensor:
        view = self._view(x, rows, inner)
        if not self.width:
            return view
        return view.flatten(0, 1).flip(2) if self.turned else view.flatten(0, 1)

    def of_queries(self, x: Tensor) -> Tensor:
        """The piece's rows of a (G, J, n, ...) tensor of queries."""
        return self._take(x, self.queries, self.queries_in)

    def of_keys(self, x: Tensor) -> Tensor:
        """The same of keys."""
        return self._take(x, self.keys, self.keys_in)

    def query_view(self, x: Tensor) -> Tensor:
        """A view of the rows of queries, (G, blocks, J, rows, ...) of blocks, else (G, J, rows, ...)."""
        return self._view(x, self.queries, self.queries_in)

    def key_view(self, x: Tensor) -> Tensor:
        """The same of keys."""
        return self._view(x, self.keys, self.keys_in)

    def placed(self, part: Tensor, like: Tensor) -> Tensor:
        """A result in the shape of a view, as the rows lie there."""
        return (part.flip(2) if self.turned else part).view(like.shape) if self.width else part


def _pieces(n: int, width: int, causal: bool, size: int) -> Iterator[_Piece]:
    """All pairs of a window over n rows, each once; `size` elements of a row in all samples and heads."""
    blocks = n // width
    step, end = max(1, AT_ONCE // (size * width)), blocks * width
    for first in range(0, blocks, step):
        rows = slice(first * width, min(first + step, blocks) * width)
        yield _Piece(rows, rows, causal, width=width)
        low, high = max(first, 1) * width, rows.stop
        if low < high and width > 1:
            later, earlier = slice(low, high), slice(low - width, high - width)
            inner = slice(0, width - 1), slice(1, width)
            yield _Piece(later, earlier, True, None, width, *inner, turned=True)
            if not causal:
                yield _Piece(earlier, later, True, None, width, *inner[::-1])
    if end < n:
        first, upper = end - width + 1, 0 if causal else width - 1
        yield _Piece(slice(end, n), slice(first, n), band=Band(0, width - 1 + upper))
        if not causal:
            yield _Piece(slice(first, end), slice(end, n), band=Band(-width, 0))


def _serves(q: Tensor, k: Tensor, band: Band) -> int:
    """The width of a window that is computed by blocks; 0 for other bands."""
    width = 1 - band.lower
    window = q.shape[2] == k.shape[2] >= 2 * width and band.upper in (0, width - 1)
    return width if window and width >= NARROW else 0


def _forward(
    engine: Engine,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    dropout: PairDropout | None,
    band: Band | None = None,
) -> tuple[Tensor, Tensor]:
    """See `Engine`."""
    if band is None:
        return engine.forward(q, k, v, causal, scale, dropout)
    if not (width := _serves(q, k, band)):
        return MATH.forward(q, k, v, causal, scale, dropout, band)
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = q.new_zeros(q.shape, dtype=wide), q.new_full(q.shape[:3], -torch.inf, dtype=wide)
    for piece in _pieces(q.shape[2], width, band.upper == 0, q[:, :, 0].numel()):
        inputs = piece.of_queries(q), piece.of_keys(k), piece.of_keys(v)
        part, part_lse = _run(engine, piece).forward(*inputs, piece.causal, scale, None, *_last(piece))
        rows, rows_lse = piece.query_view(out), piece.query_view(lse)
        total, weight, part_weight = merge(rows_lse, piece.placed(part_lse, rows_lse))
        rows.mul_(weight[..., None]).addcmul_(piece.placed(part, rows).to(wide), part_weight[..., None])
        rows_lse.copy_(total)
    return out, lse


def _backward(
    engine: Engine, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float,
    dropout: PairDropout | None, band: Band | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `Engine`."""
    if band is None:
        return engine.backward(grad, q, k, v, out, lse, causal, scale, dropout)
    if not (width := _serves(q, k, band)):
        return MATH.backward(grad, q, k, v, out, lse, causal, scale, dropout, band)
    wide = torch.promote_types(q.dtype, torch.float32)
    sums = tuple(torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    for piece in _pieces(q.shape[2], width, band.upper == 0, q[:, :, 0].numel()):
        of = _each(piece.of_queries, (grad, q)), _each(piece.of_keys, (k, v)), _each(piece.of_queries, (out, lse))
        inputs = (*of[0], *of[1], of[2][0], of[2][1].contiguous())
        parts = _run(engine, piece).backward(*inputs, piece.causal, scale, None, *_last(piece))
        for total, part, view in zip(sums, parts, (piece.query_view, piece.key_view, piece.key_view), strict=True):
            rows = view(total)
            rows += piece.placed(part, rows).to(wide)
    return sums


def _each(take: Callable[[Tensor], Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(map(take, tensors))


def _run(engine: Engine, piece: _Piece) -> Engine:
    """The engine of a piece."""
    return engine if piece.band is None else MATH


def _last(piece: _Piece) -> tuple[Band, ...]:
    """What that engine takes as last arguments."""
    return () if piece.band is None else (piece.band,)
