"""Attention in chunks of heads, one after another: q, k, v and their gradients exist for only one chunk at a time.

The forward saves the input before its norm, the output of all heads, the log-sum-exp and the rows received from other
ranks. The backward projects the input to q, k and v again, for each chunk of heads.
Shape letters: B batch, N tokens, E embedding dim, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_dilated._validation import integer
from lightning_dilated.attention.op import to_save
from lightning_dilated.attention.rotary import RotaryTable
from lightning_dilated.memory.recompute import ForwardContext
from lightning_dilated.memory.token_chunks import (
    backward_tiles,
    check_same_parameters,
    check_whole,
    products,
    products_backward,
    products_dtype,
    step_of,
    trained,
    weights,
)
from lightning_dilated.sequence.exchange.all_to_all import windows


@dataclass(frozen=True)
class HeadChunks:
    """The division of heads into chunks; each chunk is a window (first, stop) of query heads.

    Args:
        heads, kv_heads, head_dim: H, K, D.
        chunks: number of chunks; query heads that share a kv head are in the same chunk.
        unrotated: indices of the kv heads without positions.

    Raises:
        ValueError: for more chunks than kv heads.
    """

    heads: int
    kv_heads: int
    head_dim: int
    chunks: int
    unrotated: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if integer(self.chunks, "head_chunks", 1) > self.kv_heads:
            raise ValueError(
                f"head_chunks={self.chunks} must be at most the {self.kv_heads} kv heads, whose query heads stay together."
            )

    @property
    def windows(self) -> list[tuple[int, int]]:
        """The window (first, stop) of each chunk's query heads."""
        return windows(self.heads, self.kv_heads, self.chunks)

    def table(self, window: tuple[int, int], tables: Sequence[Tensor]) -> RotaryTable:
        """Return the rotary table of a chunk."""
        first, stop = (head * self.kv_heads // self.heads for head in window)
        return RotaryTable.of_rows(tables, tuple(head - first for head in self.unrotated if first <= head < stop))

    def rows(self, window: tuple[int, int]) -> list[slice]:
        """Return the rows of the joint projection's weight for a chunk's q, k and v."""
        group, dim = self.heads // self.kv_heads, self.head_dim
        first, stop = window
        kv = [(self.heads + i * self.kv_heads) * dim for i in range(2)]
        return [
            slice(first * dim, stop * dim),
            *(slice(at + first // group * dim, at + stop // group * dim) for at in kv),
        ]


@dataclass(frozen=True)
class AttentionParts:
    """The functions that attention in chunks of heads calls.

    Attributes:
        norm: a function (x, dtype) that returns the normalized x in this dtype; it must compute each token alone.
        modules: modules with the parameters that `norm` reads.
        arguments: a function (q, k, v, window=..., needs_grad=...) that returns the op's arguments (`op_arguments`).
        tile: number of tokens, in all samples together, that are normalized and projected at a time; None means all.
    """

    norm: Callable[[Tensor, torch.dtype], Tensor]
    modules: tuple[nn.Module, ...]
    arguments: Callable[..., tuple[Any, ...]]
    tile: int | None = None


@torch.compiler.disable
def attend_in_chunks(
    chunks: HeadChunks, parts: AttentionParts, x: Tensor, weight: Tensor, bias: Tensor | None, *tables: Tensor
) -> Tensor:
    """Return the heads' output (B, N, H, D) for x (B, N, E) before its norm; `tables` is `RotaryTable.rows()`."""
    check_whole(parts.modules)
    return _Chunked.apply(chunks, parts, len(tables), x, weight, bias, *tables, *trained(parts.modules))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, chunks, pieces, count, x, weight, bias, *tensors):
        ctx.chunks, ctx.parts, ctx.context, ctx.count = chunks, pieces, ForwardContext(x), count
        ctx.weights = weights(pieces.modules)
        state = torch.get_rng_state()  # one seed for all windows: dropout masks also depend on the head
        out, kept_rows, ctx.options = None, [], []
        projection = ctx.projection = _Projection(chunks, pieces, products_dtype(x, weight), step_of(pieces.tile, x))
        for window in chunks.windows:
            torch.set_rng_state(state)
            q, k, v = projection.forward(window, x, weight, bias, tensors[:count])
            heads = window[0], chunks.heads, chunks.kv_heads
            arguments = pieces.arguments(q, k, v, window=heads, needs_grad=any(ctx.needs_input_grad))
            part, *saved = torch.ops.lightning_dilated.attention(*arguments)
            ctx.options.append(arguments[3:])
            del q, k, v, arguments
            if out is None:
                out = part.new_empty(*part.shape[:2], chunks.heads, chunks.head_dim)
            out[:, :, slice(*window)] = part
            kept_rows += saved
        ctx.save_for_backward(x, weight, bias, out, *kept_rows, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, bias, out, *saved = ctx.saved_tensors
        chunks, parts, projection = ctx.chunks, ctx.parts, ctx.projection
        count = 3 * len(chunks.windows)
        tables = saved[count : count + ctx.count]
        parameters = check_same_parameters(parts.modules, ctx.weights)
        needs_x, *needs = ctx.needs_input_grad[3:6]
        totals = [torch.empty_like(y) if needed else None for y, needed in zip((weight, bias), needs, strict=True)]
        # sum of the chunks' gradients with respect to the normed rows
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x or parameters else None
        for i, window in enumerate(chunks.windows):
            with ctx.context.again(grad=False):
                qkv = projection.forward(window, x, weight, bias, tables)
            heads = slice(*window)
            grads = _backward(grad[:, :, heads], qkv, out[:, :, heads], saved[3 * i : 3 * i + 3], ctx.options[i])
            del qkv
            with ctx.context.again(grad=False):
                projection.backward(window, grads, x, weight, tables, totals, dx, i > 0)
            del grads
        norm = lambda x: parts.norm(x, projection.dtype).to(dx.dtype)  # noqa: E731
        grad_x, sums = dx if needs_x else None, []
        if dx is not None:
            with ctx.context.again():
                sums = backward_tiles(norm, projection.step, (x,), parameters, dx, [grad_x])
        return None, None, None, grad_x, *totals, *[None] * ctx.count, *sums


@dataclass(frozen=True)
class _Projection:
    """The projection of x (B, N, E) to q, k and v of a chunk of heads, and its backward."""

    chunks: HeadChunks
    parts: AttentionParts
    dtype: torch.dtype
    step: int

    def _groups(self, window: tuple[int, int], rotary: bool) -> list[list[slice]]:
        """Return slices of the weight's rows in groups, one for each product; if rotated, q and k share a product."""
        q, k, v = self.chunks.rows(window)
        return [[q, k], [v]] if rotary else [[q], [k], [v]]

    def _norm(self, x: Tensor) -> Tensor:
        return self.parts.norm(x, self.dtype)

    def _grouped(self, y: Tensor | None, groups: list[list[slice]]) -> list[Tensor | None]:
        """Return the rows of a weight or bias in each group."""
        return [None if y is None else torch.cat([y[rows] for rows in group]).to(self.dtype) for group in groups]

    def forward(
        self, window: tuple[int, int], x: Tensor, weight: Tensor, bias: Tensor | None, tables: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return q (B, N, h, D), k and v (B, N, k, D)."""
        groups = self._groups(window, bool(tables))
        flat = products(self._norm, x, self._grouped(weight, groups), self._grouped(bias, groups), self.step)
        heads = [y.unflatten(-1, (-1, self.chunks.head_dim)) for y in flat]
        if not tables:
            return tuple(heads)
        return *self.chunks.table(window, tables).split(heads[0], window[1] - window[0]), heads[1]

    def backward(
        self,
        window: tuple[int, int],
        grads: list[Tensor],
        x: Tensor,
        weight: Tensor,
        tables: Sequence[Tensor],
        totals: list[Tensor | None],
        dx: Tensor | None,
        add: bool,
    ) -> None:
        """Write gradients of weight and bias to `totals`, and of the normed rows to `dx`, unless a target is None.

        Args:
            grads: gradients of q, k and v; the list is emptied to free them early.
            add: True if `dx` already contains the sum over earlier chunks.
        """
        groups = self._groups(window, bool(tables))
        if tables:
            dq, dk = grads[0], grads.pop(1)
            grads[0] = self.chunks.table(window, tables).split_backward(dq, dk)
            del dq, dk
        flat = [y.flatten(2) for y in grads]
        grads.clear()
        rows, trained = self._grouped(weight, groups), totals[0] is not None
        sums = products_backward(self._norm, x, rows, flat, dx, self.step, add, trained)
        for group, grad, part in zip(groups, flat, sums, strict=True):
            if part is not None:
                _put(totals[0], group, part)
            if totals[1] is not None:
                _put(totals[1], group, grad.sum((0, 1), dtype=torch.promote_types(self.dtype, torch.float32)))


def _put(total: Tensor, rows: list[slice], part: Tensor) -> None:
    """Write the gradient of a chunk's rows to `total`; each row belongs to only one chunk."""
    for target, values in zip(rows, part.split([r.stop - r.start for r in rows]), strict=True):
        total[target] = values


def _backward(
    grad: Tensor, qkv: tuple[Tensor, ...], out: Tensor, saved: list[Tensor], options: tuple[Any, ...]
) -> list[Tensor]:
    """Return dq, dk and dv in the dtypes of the projected q, k and v."""
    lse, *received = saved
    dtype, spec = out.dtype, options[3]
    inputs = (y.detach().to(dtype) for y in qkv)
    grads = torch.ops.lightning_dilated.attention_backward(
        grad.to(dtype), *inputs, out, lse, *to_save(received, spec), *options
    )
    return [g.to(y.dtype) for g, y in zip(grads, qkv, strict=True)]
