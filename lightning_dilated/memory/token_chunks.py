"""Functions that treat each token alone, in tiles of the sequence and with explicit gradients.

What such a function makes on its way (the feed-forward's hidden features, the logits) exists for one tile at a time: nothing
is kept but its inputs, from which the backward computes each tile again. A parameter's gradient is summed over the tiles in
at least fp32 and returned once, so that hooks on it (of DDP and FSDP) run once.

Products of normed rows with some rows of a projection's weight, a tile of tokens at a time, and their gradients.

Written out and not left to autograd, which would compute each product again for its gradient, and go back through the norm
once for every window of heads.

Shape letters: B batch, N tokens, E embedding dim, R rows of a weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_dilated._compat.torch import hooks_paused
from lightning_dilated.attention.functional import AUTOCAST_DEVICES
from lightning_dilated.memory.recompute import Replay, forget_casts


def tiled(
    run: Callable[..., Tensor],
    modules: Sequence[nn.Module],
    tile: int | None,
    *rows: Tensor,
    unused: bool = False,
) -> Tensor:
    """run(*rows), computed in tiles of at most `tile` tokens of all samples together; None: at once.

    Args:
        run: takes tensors whose dims 0 and 1 are samples and tokens; each token's result must follow from that token alone.
        modules: whose parameters `run` uses; others get no gradient.
        tile: tokens.
        rows: (B, N, ...), such as hidden states and labels; those that require a gradient get one.
        unused: nothing will read the values of the result, which has the shape of the first of `rows`: they are left out.

    Raises:
        ValueError: where a module within has parameters that FSDP shards apart from the rest of the layer.
        RuntimeError: for a double backward.
    """
    step = step_of(tile, rows[0])
    if step >= rows[0].shape[1]:
        return run(*rows)
    return _apply(run, modules, step, unused, *rows)


def step_of(tile: int | None, x: Tensor) -> int:
    """Tokens of each sample in a tile."""
    return max(1, x.shape[1]) if tile is None else max(1, tile // max(1, x.shape[0]))


@torch.compiler.disable
def _apply(run: Callable, modules: Sequence[nn.Module], step: int, unused: bool, *rows: Tensor) -> Tensor:
    check_whole(modules)
    random = any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for of in modules for m in of.modules())
    return _Tiled.apply(run, modules, step, random, unused, len(rows), *rows, *trained(modules))


def check_whole(modules: Sequence[nn.Module]) -> None:
    """Raise where FSDP would gather weights within, which would be others than those that gradients are asked for, or has
    put tensors in their place that are nobody's parameters."""
    for m in (m for of in modules for m in of.modules()):
        if isinstance(m, FSDPModule):
            raise ValueError(
                f"{type(m).__name__} is sharded by itself, so its gradients would be lost in tiles (tile, head_chunks). "
                "Call fully_shard for the TransformerBlock and for the whole model only, not for layers within them."
            )
        if any(isinstance(x, Tensor) and x.requires_grad for x in vars(m).values()):
            raise ValueError(
                f"{type(m).__name__} holds weights that are no parameters, so their gradients would be lost in tiles (tile, "
                "head_chunks). Shard by fully_shard (FSDP2) and not by FullyShardedDataParallel."
            )


def weights(modules: Sequence[nn.Module]) -> dict[nn.Parameter, bool]:
    """Their parameters, and whether each gets a gradient."""
    return {p: p.requires_grad for m in modules for p in m.parameters()}


def trained(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Their parameters that get gradients, each once."""
    return [p for p, gets in weights(modules).items() if gets]


def read_again(modules: Sequence[nn.Module], before: dict[nn.Parameter, bool]) -> list[nn.Parameter]:
    """`trained` in the backward, where the pieces run again and read what the modules hold by then.

    Args:
        before: `weights` in the forward; they may have been away since, as FSDP's are, but are the same objects.

    Raises:
        RuntimeError: where others are read, or others are trained, than in the forward.
    """
    found, now = trained(modules), weights(modules)
    count = sum(before.values())
    if len(found) != count or any(now[p] != gets for p, gets in before.items() if p in now):
        raise RuntimeError(
            f"{count} parameters were trained in the forward, and not the same {len(found)} are in its backward. Freeze or "
            "thaw none in between; with tile or head_chunks shard by fully_shard (FSDP2) and not by "
            "FullyShardedDataParallel."
        )
    if now.keys() != before.keys():
        raise RuntimeError(
            "with tile or head_chunks the backward computes parts of the forward again, and the modules hold other "
            "parameters by now. Where torch.func.functional_call put them there, run the backward within that call (return "
            "gradients from it), or leave out tile and head_chunks."
        )
    return found


def only_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A Function's backward that says so where its result is to be differentiated again: that would leave out all within."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this loss, or what runs in tiles (tile, head_chunks), has no double backward: its gradient was asked to be "
                "differentiated again. Leave out create_graph=True."
            )
        return backward(ctx, *grads)

    return run


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, modules, step, random, unused, count, *tensors):
        ctx.run, ctx.modules, ctx.step, ctx.count = run, modules, step, count
        ctx.replay, ctx.weights = Replay(tensors[0], random), weights(modules)
        ctx.save_for_backward(*tensors)
        if unused:
            return tensors[0].new_empty(()).expand(tensors[0].shape)
        return forward_tiles(run, step, tensors[:count])

    @staticmethod
    @only_once
    def backward(ctx, grad):
        saved = ctx.saved_tensors  # raises if one was changed in place
        rows = saved[: ctx.count]
        wanted = ctx.needs_input_grad[6 : 6 + ctx.count]
        parameters = read_again(ctx.modules, ctx.weights)
        made = [torch.empty_like(x) if want else None for x, want in zip(rows, wanted, strict=True)]
        with ctx.replay.again():
            sums = backward_tiles(ctx.run, ctx.step, rows, parameters, grad, made)
        return *[None] * 6, *made, *sums


def cuts(length: int, step: int) -> list[slice]:
    """Slices of `step` tokens; of none, one (an empty shard): the results still need their shapes."""
    return [slice(at, min(at + step, length)) for at in range(0, max(1, length), step)]


def forward_tiles(run: Callable[..., Tensor], step: int, rows: Sequence[Tensor]) -> Tensor:
    """run(*rows), a tensor (B, N, ...), `step` tokens at a time."""
    made = None
    rows = [x.detach() for x in rows]  # hooks of modules look for a graph behind what requires a gradient
    for cut in cuts(rows[0].shape[1], step):
        part = run(*(x[:, cut] for x in rows))
        if made is None:
            made = part.new_empty((part.shape[0], rows[0].shape[1], *part.shape[2:]))
        made[:, cut] = part
        del part
    forget_casts()
    return made


def backward_tiles(
    run: Callable[..., Tensor],
    step: int,
    rows: Sequence[Tensor],
    leaves: Sequence[Tensor],
    grad: Tensor,
    made: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of run(*rows) from that of its result; to be called with gradients enabled.

    Args:
        leaves: what else `run` reads and is trained.
        made: for each of `rows` where its gradient is written, or None; `grad` may be written over.

    Returns:
        the gradients of `leaves`, in their dtypes; None for those that were not read.
    """
    sums: list[Tensor | None] = [None] * len(leaves)
    for cut in cuts(rows[0].shape[1], step):
        pieces, out = piece_of(run, cut, rows, made)
        parts = gradients_of(out, cut, pieces, leaves, grad[:, cut], made)
        del pieces, out
        sums = [added(total, part) for total, part in zip(sums, parts, strict=True)]
        del parts
    return [x if x is None else x.to(leaf.dtype) for x, leaf in zip(sums, leaves, strict=True)]


def piece_of(
    run: Callable[..., Tensor], cut: slice, rows: Sequence[Tensor], made: Sequence[Tensor | None]
) -> tuple[list[Tensor], Tensor]:
    """(the tile of rows, of which those in `made` ask for gradients; what is run of it)."""
    pieces = [x[:, cut] for x in rows]
    pieces = [p if into is None else p.detach().requires_grad_() for p, into in zip(pieces, made, strict=True)]
    # views: hooks of modules do not work on leaves within a backward
    return pieces, run(*(p.view_as(p) for p in pieces))


def gradients_of(
    out: Tensor,
    cut: slice,
    pieces: Sequence[Tensor],
    leaves: Sequence[Tensor],
    grad: Tensor,
    made: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Of the leaves; those of the pieces are written into `made`."""
    asked = [p for p, into in zip(pieces, made, strict=True) if into is not None]
    with hooks_paused(leaves):  # they are for the gradient of all tiles, with which autograd calls them
        found = torch.autograd.grad(out, [*asked, *leaves], grad, allow_unused=True)
    for into, part in zip((x for x in made if x is not None), found, strict=False):
        into[:, cut] = 0 if part is None else part
    return found[len(asked) :]


def added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Their sum in at least fp32, in place of the first; None is nothing."""
    if part is None:
        return total
    part = part.to(torch.promote_types(part.dtype, torch.float32))
    return part if total is None else total.add_(part)


def products_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """In which `nn.functional.linear` would multiply: autocast's, but float64 stays; the weight's without autocast."""
    kind = x.device.type
    if kind in AUTOCAST_DEVICES and torch.is_autocast_enabled(kind) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return weight.dtype


def products(
    normed: Callable[[Tensor], Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    step: int,
) -> list[Tensor]:
    """normed(x) times each of the weights (R, E), plus its bias (R,): (B, N, R) each, of the weights' dtype."""
    made = [w.new_empty(*x.shape[:2], len(w)) for w in weights]
    for cut in cuts(x.shape[1], step):
        rows = normed(x[:, cut].detach())
        for into, w, b in zip(made, weights, biases, strict=True):
            for sample, out in zip(rows, into[:, cut], strict=True):
                torch.mm(sample, w.t(), out=out) if b is None else torch.addmm(b, sample, w.t(), out=out)
        del rows
    return made


def products_backward(
    normed: Callable[[Tensor], Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    into: Tensor | None,
    step: int,
    add: bool,
    trained: bool = True,
) -> list[Tensor | None]:
    """Gradients of the weights, at least fp32; that of the normed rows is written into (with `add`: added to) `into`.

    Args:
        grads: (B, N, R) of each product.
        into: (B, N, E) of any dtype; None: nobody asks for it.
        trained: whether the weights are; else their gradients are None.
    """
    wide = torch.promote_types(weights[0].dtype, torch.float32)
    sums = [torch.zeros_like(w, dtype=wide) if trained else None for w in weights]
    for cut in cuts(x.shape[1], step):
        rows = normed(x[:, cut].detach()) if trained else None
        for i in range(len(x)):
            for j, (w, grad) in enumerate(zip(weights, grads, strict=True)):
                if trained:
                    sums[j].add_(grad[i, cut].t() @ rows[i])
                if into is not None:
                    _multiply(grad[i, cut], w, into[i, cut], add or j > 0)
        rows = None  # before the next tile's are made
    return sums


def _multiply(grad: Tensor, weight: Tensor, into: Tensor, add: bool) -> None:
    """grad times weight, into or onto `into`."""
    if into.dtype != weight.dtype:
        part = grad @ weight
        into.add_(part) if add else into.copy_(part)
    elif add:
        torch.addmm(into, grad, weight, out=into)  # FLOP counters do not know addmm_
    else:
        torch.mm(grad, weight, out=into)
