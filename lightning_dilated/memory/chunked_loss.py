"""The sum over all tokens of a function that treats each token alone, in tiles, with gradients that are made with it.

Shape letters: B batch, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_dilated.memory.rng_state import forget_casts
from lightning_dilated.memory.token_chunks import (
    added,
    check_whole,
    cuts,
    forward_tiles,
    gradients_of,
    only_once,
    piece_of,
    step_of,
    tiled,
    trained,
)


def tiled_sum(run: Callable[..., Tensor], modules: Sequence[nn.Module], tile: int | None, *rows: Tensor) -> Tensor:
    """The sum of run(*rows) over all tokens, as `tiled` computes it; its gradients are made with it, tile by tile.

    So nothing is computed again in the backward, which only multiplies them. Until then they are held: as much as the rows
    that get one, and the weights in at least fp32. Modules whose backward is hooked run as in `tiled`, since hooks would see
    gradients of the sum and not those of what is made of it.

    Args:
        run: one number a token, (B, N) of rows (B, N, ...).
        modules, tile, rows: as of `tiled`.

    Raises:
        ValueError, RuntimeError: as `tiled`.
    """
    if any(m._backward_hooks or m._backward_pre_hooks for of in modules for m in of.modules()):
        return tiled(run, modules, tile, *rows).sum()
    step = step_of(tile, rows[0])
    if step >= rows[0].shape[1]:
        return run(*rows).sum()
    return _apply_sum(run, modules, step, *rows)


@torch.compiler.disable
def _apply_sum(run: Callable, modules: Sequence[nn.Module], step: int, *rows: Tensor) -> Tensor:
    check_whole(modules)
    leaves = trained(modules)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*rows, *leaves)):
        return _Summed.apply(run, step, len(rows), *rows, *leaves)
    return forward_tiles(run, step, rows).sum()


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, step, count, *tensors):
        rows, leaves = tensors[:count], tensors[count:]
        wanted = ctx.needs_input_grad[3 : 3 + count]
        made = [torch.empty_like(x) if want else None for x, want in zip(rows, wanted, strict=True)]
        # hooks of a checkpoint around all this, or of an offload, are not for what is made and used here
        plain = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with torch.enable_grad(), plain:
            forget_casts()
            total, sums = sum_tiles(run, step, rows, leaves, made)
        forget_casts()
        ctx.step, ctx.dtypes = step, [x.dtype for x in leaves]
        ctx.count = count
        ctx.save_for_backward(*made, *sums)
        return total

    @staticmethod
    @only_once
    def backward(ctx, grad):
        saved = ctx.saved_tensors  # once: a checkpoint around hands each out a single time
        made, sums = saved[: ctx.count], saved[ctx.count :]
        found = [None if x is None else _scaled(x, grad, ctx.step) for x in made]
        sums = [None if x is None else (x * grad).to(dtype) for x, dtype in zip(sums, ctx.dtypes, strict=True)]
        return None, None, None, *found, *sums


def _scaled(x: Tensor, by: Tensor, step: int) -> Tensor:
    """x (B, N, ...) times a number that is not rounded to x's dtype before."""
    out = torch.empty_like(x)
    for cut in cuts(x.shape[1], step):
        out[:, cut] = x[:, cut].to(torch.promote_types(x.dtype, by.dtype)) * by
    return out


def sum_tiles(
    run: Callable[..., Tensor],
    step: int,
    rows: Sequence[Tensor],
    leaves: Sequence[Tensor],
    made: Sequence[Tensor | None],
) -> tuple[Tensor, list[Tensor | None]]:
    """(the sum of run(*rows), its gradients by the leaves, in at least fp32); as `backward_tiles`."""
    sums: list[Tensor | None] = [None] * len(leaves)
    whole = None
    for cut in cuts(rows[0].shape[1], step):
        pieces, out = piece_of(run, cut, rows, made)
        whole = added(whole, out.detach().sum())
        parts = gradients_of(out, cut, pieces, leaves, torch.ones_like(out), made)
        del pieces, out
        sums = [added(total, part) for total, part in zip(sums, parts, strict=True)]
        del parts
    return whole, sums
