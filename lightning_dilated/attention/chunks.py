"""Attention over some of the heads at a time, so that q, k and v of all heads, and their gradients, never exist together.

Kept for the backward are the input (before its norm), the output of all heads, the log-sum-exp and the rows received; q, k
and v of a window of heads are projected again when its backward comes.
Shape letters: B batch, N tokens, E embedding dim, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_dilated.attention.replay import Replay
from lightning_dilated.attention.tiles import backward_tiles, check_whole, forward_tiles, read_again, step_of, trained
from lightning_dilated.pattern.branch import integer
from lightning_dilated.sequence.exchange.heads import windows


@dataclass(frozen=True)
class HeadChunks:
    """Which heads are attended with together.

    Args:
        heads, kv_heads, head_dim: H, K, D.
        chunks: windows of heads, of whole groups of query heads that share a kv head.

    Raises:
        ValueError: for more chunks than kv heads.
    """

    heads: int
    kv_heads: int
    head_dim: int
    chunks: int

    def __post_init__(self) -> None:
        if integer(self.chunks, "head_chunks", 1) > self.kv_heads:
            raise ValueError(
                f"head_chunks={self.chunks} must be at most the {self.kv_heads} kv heads, whose query heads stay together."
            )

    @property
    def windows(self) -> list[tuple[int, int]]:
        """(first, stop) query heads of each."""
        return windows(self.heads, self.kv_heads, self.chunks)

    def rows(self, window: tuple[int, int]) -> list[slice]:
        """Rows of the joint projection's weight that make q, k and v of a window."""
        group, dim = self.heads // self.kv_heads, self.head_dim
        first, stop = window
        kv = [(self.heads + i * self.kv_heads) * dim for i in range(2)]
        return [
            slice(first * dim, stop * dim),
            *(slice(at + first // group * dim, at + stop // group * dim) for at in kv),
        ]


@dataclass(frozen=True)
class Pieces:
    """What attention in windows of heads is made of.

    Attributes:
        project: of (x, weight rows, bias rows, *tables), each (B, N, ...) of the same tokens, q (B, N, h, D), k and v.
        modules: whose parameters `project` reads, besides weight and bias.
        arguments: of (q, k, v, window=...) q, k, v and the op's other arguments, see `functional.op_arguments`.
        tile: tokens of all samples that `project` gets at a time; None: all.
    """

    project: Callable[..., tuple[Tensor, Tensor, Tensor]]
    modules: tuple[nn.Module, ...]
    arguments: Callable[..., tuple[Tensor, Tensor, Tensor, tuple[Any, ...]]]
    tile: int | None = None


@torch.compiler.disable
def attend_in_chunks(
    chunks: HeadChunks, pieces: Pieces, x: Tensor, weight: Tensor, bias: Tensor | None, *tables: Tensor
) -> Tensor:
    """The heads' output (B, N, H, D) of an input x (B, N, E) whose q, k and v are `project`'s of rows of weight and bias."""
    check_whole(pieces.modules)
    return _Chunked.apply(chunks, pieces, len(tables), x, weight, bias, *tables, *trained(pieces.modules))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, chunks, pieces, count, x, weight, bias, *more):
        ctx.chunks, ctx.pieces, ctx.replay, ctx.count = chunks, pieces, Replay(x), count
        state = torch.get_rng_state()  # one seed for all windows: masks are keyed by the head
        out, kept, ctx.rest = None, [], []
        for window in chunks.windows:
            torch.set_rng_state(state)
            q, k, v = _projected(chunks, pieces, window, x, weight, bias, more[:count])
            q, k, v, rest = pieces.arguments(q, k, v, window=(window[0], chunks.heads, chunks.kv_heads))
            rest = *rest[:-2], any(ctx.needs_input_grad), rest[-1]
            part, *saved = torch.ops.lightning_dilated.attention(q, k, v, *rest)
            del q, k, v
            if out is None:
                out = part.new_empty(*part.shape[:2], chunks.heads, chunks.head_dim)
            out[:, :, slice(*window)] = part
            kept += saved
            ctx.rest.append(rest)
        ctx.save_for_backward(x, weight, bias, out, *kept, *more)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, bias, out, *kept = ctx.saved_tensors
        chunks, pieces = ctx.chunks, ctx.pieces
        count = 3 * len(chunks.windows)
        tables = kept[count : count + ctx.count]
        parameters = read_again(pieces.modules, len(kept) - count - ctx.count)
        totals = [torch.empty_like(y) if y is not None else None for y in (weight, bias)]
        wide = [torch.promote_types(p.dtype, torch.float32) for p in parameters]
        dx, sums = torch.empty_like(x), [torch.zeros_like(p, dtype=w) for p, w in zip(parameters, wide, strict=True)]
        for i, window in enumerate(chunks.windows):
            with ctx.replay.again(grad=False):
                made = _projected(chunks, pieces, window, x, weight, bias, tables)
            mine = slice(*window)
            grads = _backward(grad[:, :, mine], made, out[:, :, mine], kept[3 * i : 3 * i + 3], ctx.rest[i])
            del made
            rows = chunks.rows(window)
            own = [y if y is None else _rows(y, rows).detach().requires_grad_() for y in (weight, bias)]
            leaves = [y for y in own if y is not None]
            run = lambda x, *tables, own=own: pieces.project(x, *own, *tables)  # noqa: E731
            nones = [None] * len(tables)
            with ctx.replay.again():
                found = backward_tiles(
                    run, step_of(pieces.tile, x), (x, *tables), [*leaves, *parameters], grads, [dx, *nones], i > 0
                )
            for total, part in zip(totals, found[: len(leaves)], strict=False):
                _put(total, rows, part)
            sums = [a.add_(b) for a, b in zip(sums, found[len(leaves) :], strict=True)]
        sums = [total.to(p.dtype) for total, p in zip(sums, parameters, strict=True)]
        return None, None, None, dx, *totals, *[None] * ctx.count, *sums


def _projected(
    chunks: HeadChunks,
    pieces: Pieces,
    window: tuple[int, int],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tables: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a window."""
    own = [_rows(y, chunks.rows(window)) for y in (weight, bias)]
    step = step_of(pieces.tile, x)
    return forward_tiles(lambda x, *tables: pieces.project(x, *own, *tables), step, (x, *tables))


def _rows(x: Tensor | None, rows: list[slice]) -> Tensor | None:
    return None if x is None else torch.cat([x[r] for r in rows])


def _put(total: Tensor, rows: list[slice], part: Tensor) -> None:
    """Each row belongs to one window."""
    for r, some in zip(rows, part.split([r.stop - r.start for r in rows]), strict=True):
        total[r] = some


def _backward(
    grad: Tensor, made: tuple[Tensor, ...], out: Tensor, kept: list[Tensor], rest: tuple[Any, ...]
) -> list[Tensor]:
    """dq, dk, dv in the dtypes of q, k and v as they were projected."""
    lse, received, number = kept
    lengths, cu_seqlens, seed, *more, sequence, needs_grad, window = rest
    dtype = out.dtype
    some = (received, number) if sequence else (None, None)
    inputs = (y.detach().to(dtype) for y in made)
    found = torch.ops.lightning_dilated.attention_backward(
        grad.to(dtype), *inputs, out, lse, *some, lengths, cu_seqlens, seed, *more, sequence, needs_grad, window
    )
    return [g.to(y.dtype) for g, y in zip(found, made, strict=True)]
