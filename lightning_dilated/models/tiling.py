"""Layers that treat each token alone, in tiles of the sequence and with explicit gradients.

What such a layer makes on its way (the feed-forward's hidden features, the logits) exists for one tile at a time: nothing is
kept but the input, from which the backward computes each tile again. A parameter's gradient is summed over the tiles in at
least fp32 and returned once, so that hooks on it (of DDP and FSDP) run once.
Shape letters: B batch, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_dilated.attention.replay import Replay
from lightning_dilated.models.recompute import result_is_unused


def tiled(
    run: Callable[..., Tensor],
    modules: Sequence[nn.Module],
    tile: int | None,
    x: Tensor,
    *rows: Tensor,
    last: bool = False,
) -> Tensor:
    """run(x, *rows), computed in tiles of at most `tile` tokens of all samples together; None: at once.

    Args:
        run: takes tensors whose dims 0 and 1 are samples and tokens; each token's result must follow from that token alone.
        modules: whose parameters `run` uses; others get no gradient.
        tile: tokens.
        x: (B, N, ...), the only one that gets a gradient.
        rows: further tensors (B, N, ...), such as labels.
        last: nothing uses the result in the recomputation of a checkpointed piece, see `recompute.result_is_unused`.

    Double backward: RuntimeError.
    """
    step = x.shape[1] if tile is None else max(1, tile // max(1, x.shape[0]))
    if step >= x.shape[1]:
        return run(x, *rows)
    return _apply(run, modules, step, last and result_is_unused(), x, *rows)


@torch.compiler.disable
def _apply(run: Callable, modules: Sequence[nn.Module], step: int, unused: bool, x: Tensor, *rows: Tensor) -> Tensor:
    random = any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for of in modules for m in of.modules())
    return _Tiled.apply(run, modules, step, random, unused, rows, x, *_trained(modules))


def _trained(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [p for p in dict.fromkeys(p for m in modules for p in m.parameters()) if p.requires_grad]


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, modules, step, random, unused, rows, x, *parameters):
        ctx.run, ctx.modules, ctx.step, ctx.replay = run, modules, step, Replay(x, random)
        ctx.save_for_backward(x, *rows, *parameters)
        if unused:
            return x.new_empty(()).expand(x.shape)
        out = None
        for cut in _cuts(x, step):
            part = run(*(y[:, cut] for y in (x, *rows)))
            if out is None:
                out = part.new_empty((x.shape[0], x.shape[1], *part.shape[2:]))
            out[:, cut] = part
            del part
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, *rest = ctx.saved_tensors  # raises if one was changed in place
        parameters = _trained(ctx.modules)  # those that `run` reads now
        rows = rest[: len(rest) - len(parameters)]
        totals: list[Tensor | None] = [None] * len(parameters)
        dx = torch.empty_like(x) if ctx.needs_input_grad[6] else None
        with ctx.replay.again():
            for cut in _cuts(x, ctx.step):
                leaf = x[:, cut].detach().requires_grad_()
                out = ctx.run(leaf, *(y[:, cut] for y in rows))
                found = torch.autograd.grad(out, [leaf, *parameters], grad[:, cut], allow_unused=True)
                del out
                if dx is not None:
                    dx[:, cut] = found[0]
                totals = [_added(total, part) for total, part in zip(totals, found[1:], strict=True)]
        sums = [total if total is None else total.to(p.dtype) for total, p in zip(totals, parameters, strict=True)]
        return *[None] * 6, dx, *sums


def _cuts(x: Tensor, step: int) -> list[slice]:
    return [slice(at, min(at + step, x.shape[1])) for at in range(0, x.shape[1], step)]


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if part is None:
        return total
    part = part.to(torch.promote_types(part.dtype, torch.float32))
    return part if total is None else total.add_(part)
