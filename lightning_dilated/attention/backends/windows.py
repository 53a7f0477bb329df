"""Windows by engines that have no bands: blocks of `width` rows, each with its own keys and with its neighbours'.

Within a block the window is ordinary causal attention. Of the block before, row a sees the keys after a: turned round, that
is causal attention, too. Where attention is not causal a block sees itself whole, and of the block after, row a the keys
before a. What whole blocks leave over is left to the math engine.
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
class _Rows:
    """Rows of the queries, or of the keys, of a piece.

    With `width` they are whole blocks, each computed as a sample; `inner` are the rows of each block, None: all.
    """

    rows: slice
    width: int = 0
    inner: slice | None = None
    turned: bool = False

    def view(self, x: Tensor) -> Tensor:
        """A view of the rows of (G, J, n, ...): (G, blocks, J, rows, ...) of blocks, else (G, J, rows, ...)."""
        x = x[:, :, self.rows]
        if not self.width:
            return x
        blocks = x.unflatten(2, (-1, self.width))
        return (blocks if self.inner is None else blocks[:, :, :, self.inner]).transpose(1, 2)

    def take(self, x: Tensor) -> Tensor:
        """The rows as an engine takes them."""
        if not self.width:
            return self.view(x)
        rows = self.view(x).flatten(0, 1)
        return rows.flip(2) if self.turned else rows

    def placed(self, part: Tensor, like: Tensor) -> Tensor:
        """An engine's result in the order and shape of `like`, a view."""
        return (part.flip(2) if self.turned else part).view(like.shape) if self.width else part


@dataclass(frozen=True)
class _Piece:
    """A rectangle of rows, and how it is computed; the math engine computes those with a band."""

    queries: _Rows
    keys: _Rows
    causal: bool = False
    band: Band | None = None

    def of(self, engine: Engine, scale: float) -> tuple[Engine, Terms]:
        """The engine of the piece, and its terms."""
        return engine if self.band is None else MATH, Terms(self.causal, scale, None, self.band)


def _pieces(n: int, width: int, causal: bool, size: int) -> Iterator[_Piece]:
    """All pairs of a window over n rows, each once; `size` elements of a row in all samples and heads."""
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
    """The width of a window that is computed by blocks; 0 for other bands."""
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
        queries, keys, (run, of_piece) = piece.queries, piece.keys, piece.of(engine, terms.scale)
        part, part_lse = run.forward(queries.take(q), keys.take(k), keys.take(v), of_piece)
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
        queries, keys, (run, of_piece) = piece.queries, piece.keys, piece.of(engine, terms.scale)
        inputs = queries.take(grad), queries.take(q), keys.take(k), keys.take(v), queries.take(out)
        parts = run.backward(*inputs, queries.take(lse).contiguous(), of_piece)
        for total, part, side in zip(sums, parts, (queries, keys, keys), strict=True):
            rows = side.view(total)
            rows += side.placed(part, rows).to(wide)
    return sums
