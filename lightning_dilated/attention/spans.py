"""Strided views of the rows of a block, without gathering or copying rows.

Shape letters: B batch, N tokens, H heads, D head dim; S segments, J heads of the block, n rows; G = B*S joined.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lightning_dilated.pattern.rows import Block


@dataclass(frozen=True)
class Span:
    """Documents of the same length: the tokens [start, start + length) of samples batch, ..., batch + batches - 1.

    On a shard, they may be a part of a document. The document has `whole` tokens (None means `length`), and the part
    begins at its token `offset`. Row i of the shard has the global position `origin` + i if it is in this span.
    """

    batch: int
    batches: int
    start: int
    length: int
    whole: int | None = None
    offset: int = 0
    origin: int = 0

    @property
    def document(self) -> int:
        """Return the number of tokens of the whole document."""
        return self.length if self.whole is None else self.whole

    @property
    def part(self) -> tuple[int, int] | None:
        """Return (start, stop) of the tokens in their document; None for a whole document."""
        return None if self.length == self.document else (self.offset, self.offset + self.length)


def spans(batch: int, seq_len: int, lengths: Tensor | None, cu_seqlens: Tensor | None) -> list[Span]:
    """Return the non-empty documents of a call; consecutive samples of equal length share a span."""
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        return [Span(0, 1, a, b - a) for a, b in itertools.pairwise(bounds) if b > a]
    documents: list[Span] = []
    for i, length in enumerate([seq_len] * batch if lengths is None else lengths.tolist()):
        if documents and documents[-1].length == length and documents[-1].batch + documents[-1].batches == i:
            documents[-1] = replace(documents[-1], batches=documents[-1].batches + 1)
        elif length:
            documents.append(Span(i, 1, 0, length))
    return documents


def folds(span: Span, block: Block, *tensors: Tensor) -> bool:
    """Return whether samples and segments of every (B, N, H, D) tensor fold into one axis."""
    if span.batches == 1 or block.segments == 1:
        return True
    return all(x.stride(0) == block.segments * block.segment_stride * x.stride(1) for x in tensors)


def joined(span: Span, block: Block, *tensors: Tensor) -> Iterator[Span]:
    """Yield the span if samples and segments of every tensor fold into one axis, else one span for each sample."""
    if folds(span, block, *tensors):
        yield span
        return
    for i in range(span.batches):
        yield replace(span, batch=span.batch + i, batches=1)


def _sides(block: Block, kv: bool) -> tuple[int, int, int, int]:
    """Return (first head, head step, first position, rows) of a block's queries or keys."""
    if not kv:
        return block.head, block.head_step, block.first, block.rows
    first, rows = block.keys or (block.first, block.rows)
    return block.kv_head, block.kv_head_step, first, rows


#: whether q, k, v have kv heads, and whether grad, q, k, v, out have them
_KV_HEADS = {3: (False, True, True), 5: (False, False, True, True, False)}


class RowViews:
    """Views of rows of (q, k, v), of (grad, q, k, v, out), or of other (B, N, H, D) tensors; `kv`: which have kv heads."""

    def __init__(self, tensors: Sequence[Tensor], kv: tuple[bool, ...] = ()) -> None:
        self.tensors, kv = tensors, kv or _KV_HEADS[len(tensors)]
        self._of_block = _geometries(tuple([(x.stride(), x.shape[3], x.storage_offset()) for x in tensors]), kv)

    def of(self, span: Span, block: Block) -> list[Tensor]:
        """Return (G, J, n, D) views with one axis for samples and segments; needs `folds`."""
        geometries = self._of_block(span, block)
        return [x.as_strided(*at) for x, at in zip(self.tensors, geometries, strict=True)]


@functools.lru_cache(maxsize=64)
def _geometries(tensors: tuple[tuple[tuple[int, ...], int, int], ...], kv: tuple[bool, ...]) -> Callable[..., Any]:
    """Return a cached function of a span and a block, because the computation takes longer than a short call."""
    return functools.lru_cache(maxsize=1024)(
        lambda span, block: [_row_geometry(*x, span, block, k) for x, k in zip(tensors, kv, strict=True)]
    )


def _row_geometry(
    strides: tuple[int, ...], dim: int, offset: int, span: Span, block: Block, kv: bool
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return (sizes, strides, offset) of a row view."""
    sb, sn, sh, sd = strides
    head, step, position, rows = _sides(block, kv)
    outer = block.segment_stride * sn if block.segments > 1 else sb
    sizes = span.batches * block.segments, block.heads, rows, dim
    first = offset + span.batch * sb + (span.start + position) * sn + head * sh
    return sizes, (outer, step * sh + block.position_step * sn, block.row_stride * sn, sd), first


def cell_view(x: Tensor, span: Span, block: Block, kv: bool = False) -> Tensor:
    """Return a (b, S, J, n, D) view of a (B, N, H, D) tensor, or (b, S, J, n) of (B, N, H), for any strides."""
    sb, sn, sh = x.stride()[:3]
    head, step, position, rows = _sides(block, kv)
    return x.as_strided(
        (span.batches, block.segments, block.heads, rows, *x.shape[3:]),
        (sb, block.segment_stride * sn, step * sh + block.position_step * sn, block.row_stride * sn, *x.stride()[3:]),
        x.storage_offset() + span.batch * sb + (span.start + position) * sn + head * sh,
    )


def add_rows(total: Tensor, part: Tensor, span: Span, block: Block, kv: bool = False) -> None:
    """Add a block's (G, J, n, D) part to its rows in `total` (B, N, H, D)."""
    cells = cell_view(total, span, block, kv)
    part = part.unflatten(0, (span.batches, block.segments))
    if kv and block.heads > 1 and block.kv_head_step == 0 and block.position_step == 0:
        # several query heads read the same kv rows, so the cells of these heads overlap in memory
        cells, part = cells[:, :, 0], part.sum(2, dtype=total.dtype)
    cells.add_(part)
