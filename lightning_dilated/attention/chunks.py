"""Attention over some of the heads at a time, so that q, k and v of all heads, and their gradients, never exist together.

Kept for the backward are the input, the output of all heads, the log-sum-exp and the rows received; q, k and v of a window
of heads are projected again when its backward comes.
Shape letters: B batch, N tokens, E embedding dim, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dilated.attention.replay import Replay
from lightning_dilated.pattern.branch import integer
from lightning_dilated.sequence.exchange.heads import windows

#: (x, weight rows, bias rows) to q (B, N, h, D), k and v of a window of heads
Project = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]
#: (q, k, v, window) to q, k, v and the op's other arguments, see `functional.op_arguments`
Arguments = Callable[..., tuple[Tensor, Tensor, Tensor, tuple[Any, ...]]]


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


@torch.compiler.disable
def attend_in_chunks(
    chunks: HeadChunks, project: Project, arguments: Arguments, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """The heads' output (B, N, H, D) of an input x (B, N, E) whose q, k and v are `project`'s of rows of weight and bias."""
    return _Chunked.apply(chunks, project, arguments, x, weight, bias)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, chunks, project, arguments, x, weight, bias):
        ctx.chunks, ctx.project, ctx.replay = chunks, project, Replay(x)
        seed = torch.get_rng_state()  # one mask for all windows: it is keyed by the head
        out, kept, ctx.rest = None, [], []
        for window in chunks.windows:
            torch.set_rng_state(seed)
            q, k, v = project(x, _rows(weight, chunks.rows(window)), _rows(bias, chunks.rows(window)))
            q, k, v, rest = arguments(q, k, v, window=(window[0], chunks.heads, chunks.kv_heads))
            rest = *rest[:-2], any(ctx.needs_input_grad), rest[-1]
            part, *saved = torch.ops.lightning_dilated.attention(q, k, v, *rest)
            if out is None:
                out = part.new_empty(*part.shape[:2], chunks.heads, chunks.head_dim)
            out[:, :, slice(*window)] = part
            kept += saved
            ctx.rest.append(rest)
        ctx.save_for_backward(x, weight, bias, out, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, bias, out, *kept = ctx.saved_tensors
        totals = [torch.empty_like(y) if y is not None else None for y in (weight, bias)]
        dx = None
        for i, window in enumerate(ctx.chunks.windows):
            rows = ctx.chunks.rows(window)
            leaves = [x.detach(), _rows(weight, rows), _rows(bias, rows)]
            leaves = [y if y is None else y.detach().requires_grad_() for y in leaves]
            with ctx.replay.again():
                made = ctx.project(*leaves)
            mine = slice(*window)
            grads = _backward(grad[:, :, mine], made, out[:, :, mine], kept[3 * i : 3 * i + 3], ctx.rest[i])
            given = [y for y in leaves if y is not None]
            found = torch.autograd.grad(made, given, grads)
            del made, grads
            dx = found[0] if dx is None else dx.add_(found[0])
            for total, part in zip(totals, found[1:], strict=False):
                _put(total, rows, part)
        return None, None, None, dx, *totals


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
