"""Windows with engines that have no bands: blocks of `width` rows attend to themselves and to neighbouring blocks.

When causal, query i of a block sees keys 0 to i of its block, and keys i + 1 to w - 1 of the previous block. The second
part is causal attention with queries and keys in reverse order. When not causal, query i sees its whole block, too, and
keys 0 to i - 1 of the next block. The math engine computes all pairs with a row after the last full block.
Shape letters: G samples and segments, J heads, n rows, D head dim, w width.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_dilated.attention.backends.base import Band, Engine, Terms, merge
from lightning_dilated.attention.backends.math import MATH

#: narrowest window that is computed in blocks; the math engine is equally fast for narrower windows
NARROW = 16
#: maximum number of elements in the blocks of one call
AT_ONCE = 1 << 24


@functools.cache
def with_windows(engine: Engine) -> Engine:
    """Return an engine with `bands`: `engine` computes windows over several blocks, and math the other bands."""
    forward = functools.partial(_forward, engine)
    return replace(engine, forward=forward, backward=functools.partial(_backward, engine), bands=True)


@dataclass(frozen=True)
class _Rows:
    """Query rows or key rows of a piece.

    With `width` the rows are divided into blocks, and each block is computed as a sample. `inner` selects rows of each
    block (None means all), and `reverse` reverses their order.
    """

    rows: slice
    width: int = 0
    inner: slice | None = None
    reverse: bool = False

    def view(self, x: Tensor) -> Tensor:
        """Return a view of the rows of (G, J, n, ...): (G, blocks, J, rows, ...) for blocks, else (G, J, rows, ...)."""
        x = x[:, :, self.rows]
        if not self.width:
            return x
        blocks = x.unflatten(2, (-1, self.width))
        return (blocks if self.inner is None else blocks[:, :, :, self.inner]).transpose(1, 2)

    def take(self, x: Tensor) -> Tensor:
        """Return the rows of (G, J, n, ...) as an engine's input (G', J, rows, ...); blocks are samples."""
        if not self.width:
            return self.view(x)
        rows = self.view(x).flatten(0, 1)
        return rows.flip(2) if self.reverse else rows

    def placed(self, part: Tensor, like: Tensor) -> Tensor:
        """Return an engine's result in the order and shape of `like`, which is a `view`."""
        return (part.flip(2) if self.reverse else part).view(like.shape) if self.width else part


@dataclass(frozen=True)
class _Piece:
    """A rectangle of query rows and key rows; the math engine computes pieces with a band."""

    queries: _Rows
    keys: _Rows
    causal: bool = False
    band: Band | None = None

    def engine_of(self, engine: Engine, scale: float) -> tuple[Engine, Terms]:
        """Return the engine for the piece, and its terms."""
        return engine if self.band is None else MATH, Terms(self.causal, scale, None, self.band)


def _pieces(n: int, width: int, causal: bool, size: int) -> Iterator[_Piece]:
    """Yield pieces that contain all pairs of a window over n rows; `size`: elements of a row in all samples."""
    blocks = n // width
    step, end = max(1, AT_ONCE // (size * width)), blocks * width
    for first in range(0, blocks, step):
        rows = slice(first * width, min(first + step, blocks) * width)
        yield _Piece(_Rows(rows, width), _Rows(rows, width), causal)
        low, high = max(first, 1) * width, rows.stop
        if low < high and width > 1:
            later, earlier = slice(low, high), slice(low - width, high - width)
            first_rows, last_rows = slice(0, width - 1), slice(1, width)
            yield _Piece(_Rows(later, width, first_rows, True), _Rows(earlier, width, last_rows, True), True)
            if not causal:
                yield _Piece(_Rows(earlier, width, last_rows), _Rows(later, width, first_rows), True)
    if end < n:
        first, upper = end - width + 1, 0 if causal else width - 1
        yield _Piece(_Rows(slice(end, n)), _Rows(slice(first, n)), band=Band(0, width - 1 + upper))
        if not causal:
            yield _Piece(_Rows(slice(first, end)), _Rows(slice(end, n)), band=Band(-width, 0))


def _serves(q: Tensor, k: Tensor, band: Band) -> int:
    """Return the width of the window if the band is a window that can be computed in blocks; else 0."""
    width = 1 - band.lower
    window = q.shape[2] == k.shape[2] >= 2 * width and band.upper in (0, width - 1)
    return width if window and width >= NARROW else 0


def _forward(engine: Engine, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    if (band := terms.band) is None:
        return engine.forward(q, k, v, terms)
    if not (width := _serves(q, k, band)):
        return MATH.forward(q, k, v, terms)
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = q.new_zeros(q.shape, dtype=wide), q.new_full(q.shape[:3], -torch.inf, dtype=wide)
    for piece in _pieces(q.shape[2], width, band.upper == 0, q[:, :, 0].numel()):
        queries, keys, (piece_engine, piece_terms) = piece.queries, piece.keys, piece.engine_of(engine, terms.scale)
        part, part_lse = piece_engine.forward(queries.take(q), keys.take(k), keys.take(v), piece_terms)
        rows, rows_lse = queries.view(out), queries.view(lse)
        total, weight, part_weight = merge(rows_lse, queries.placed(part_lse, rows_lse))
        rows.mul_(weight[..., None]).addcmul_(queries.placed(part, rows).to(wide), part_weight[..., None])
        rows_lse.copy_(total)
    return out, lse


def _backward(
    engine: Engine, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    if (band := terms.band) is None:
        return engine.backward(grad, q, k, v, out, lse, terms)
    if not (width := _serves(q, k, band)):
        return MATH.backward(grad, q, k, v, out, lse, terms)
    wide = torch.promote_types(q.dtype, torch.float32)
    sums = tuple(torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    for piece in _pieces(q.shape[2], width, band.upper == 0, q[:, :, 0].numel()):
        queries, keys, (piece_engine, piece_terms) = piece.queries, piece.keys, piece.engine_of(engine, terms.scale)
        inputs = queries.take(grad), queries.take(q), keys.take(k), keys.take(v), queries.take(out)
        parts = piece_engine.backward(*inputs, queries.take(lse).contiguous(), piece_terms)
        for total, part, side in zip(sums, parts, (queries, keys, keys), strict=True):
            rows = side.view(total)
            rows += side.placed(part, rows).to(wide)
    return sums
