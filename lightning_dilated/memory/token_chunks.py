"""Functions that compute each token alone, run in tiles of tokens with explicit gradients.

Intermediate results (the feed-forward's hidden features, the logits) exist for one tile at a time: only the inputs are
saved, and the backward computes each tile again. A parameter's gradient is summed over the tiles in at least fp32 and
returned once, so that its hooks (of DDP and FSDP) run once. Products with rows of a projection's weight have their own
backward, because autograd would repeat each product, and repeat the norm's backward for every chunk of heads.

Shape letters: B batch, N tokens, E embedding dim, R rows of a weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_dilated._compat.torch import hooks_paused
from lightning_dilated.attention.functional import AUTOCAST_DEVICES
from lightning_dilated.memory.recompute import ForwardContext, forget_casts


def tiled(
    run: Callable[..., Tensor], modules: Sequence[nn.Module], tile: int | None, *rows: Tensor, unused: bool = False
) -> Tensor:
    """Return run(*rows), computed in tiles of tokens.

    Args:
        run: a function of tensors with samples in dim 0 and tokens in dim 1; it must compute each token alone.
        modules: modules with the parameters that `run` uses; other parameters get no gradient.
        tile: maximum number of tokens in a tile, in all samples together; None: one tile.
        rows: (B, N, ...), such as hidden states and labels; the result's gradient reaches rows that require gradients.
        unused: return a tensor without values, in the shape of `rows[0]`, because the result will not be read.

    Raises:
        ValueError: if FSDP shards a module within a layer separately from the rest of the layer.
        RuntimeError: for a double backward.
    """
    step = step_of(tile, rows[0])
    if step >= rows[0].shape[1]:
        return run(*rows)
    return _apply(run, modules, step, unused, *rows)


def step_of(tile: int | None, x: Tensor) -> int:
    """Return how many tokens of each sample are in a tile; `tile` is the number in all samples, None for no tiles."""
    return max(1, x.shape[1]) if tile is None else max(1, tile // max(1, x.shape[0]))


@torch.compiler.disable
def _apply(run: Callable, modules: Sequence[nn.Module], step: int, unused: bool, *rows: Tensor) -> Tensor:
    check_whole(modules)
    random = any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for module in modules for m in module.modules())
    return _Tiled.apply(run, modules, step, random, unused, len(rows), *rows, *trained(modules))


def check_whole(modules: Sequence[nn.Module]) -> None:
    """Raise ValueError if gradients would be lost: FSDP shards an inner module, or has replaced its parameters."""
    for m in (m for module in modules for m in module.modules()):
        if isinstance(m, FSDPModule):
            raise ValueError(
                f"{type(m).__name__} is sharded separately, so its gradients would be lost in tiles (tile, "
                "head_chunks). Call fully_shard only for TransformerBlocks and the model, not for layers within blocks."
            )
        if any(isinstance(x, Tensor) and x.requires_grad for x in vars(m).values()):
            raise ValueError(
                f"{type(m).__name__} has weights that are not parameters, so their gradients would be lost in tiles "
                "(tile, head_chunks). Shard by fully_shard (FSDP2) and not by FullyShardedDataParallel."
            )


def weights(modules: Sequence[nn.Module]) -> dict[nn.Parameter, bool]:
    """Return {parameter: whether it is trained} for all parameters of the modules."""
    return {p: p.requires_grad for m in modules for p in m.parameters()}


def trained(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the trained parameters of the modules, without duplicates."""
    return [p for p, is_trained in weights(modules).items() if is_trained]


def check_same_parameters(modules: Sequence[nn.Module], before: dict[nn.Parameter, bool]) -> list[nn.Parameter]:
    """Return the trained parameters in the backward, after checking that they are the forward's parameters.

    Args:
        before: `weights` in the forward; FSDP may have freed their values since, but not replaced the objects.

    Raises:
        RuntimeError: if the modules have other parameters, or train other parameters, than in the forward.
    """
    leaves, now = trained(modules), weights(modules)
    count = sum(before.values())
    if len(leaves) != count or any(now[p] != was_trained for p, was_trained in before.items() if p in now):
        raise RuntimeError(
            f"{count} parameters were trained in the forward, but not the same {len(leaves)} in its backward. Freeze "
            "or unfreeze none in between; with tile or head_chunks shard by fully_shard (FSDP2) and not by "
            "FullyShardedDataParallel."
        )
    if now.keys() != before.keys():
        raise RuntimeError(
            "with tile or head_chunks the backward computes parts of the forward again, but the modules have other "
            "parameters now. If torch.func.functional_call replaced them, run the backward within that call (return "
            "gradients from it), or leave out tile and head_chunks."
        )
    return leaves


def only_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a Function's backward refuse a double backward, which would miss gradients computed inside the backward."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this loss, and functions that run in tiles (tile, head_chunks), have no double backward: their "
                "gradient cannot be differentiated again. Leave out create_graph=True."
            )
        return backward(ctx, *grads)

    return run


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, modules, step, random, unused, count, *tensors):
        ctx.run, ctx.modules, ctx.step, ctx.count = run, modules, step, count
        ctx.context, ctx.weights = ForwardContext(tensors[0], random), weights(modules)
        ctx.save_for_backward(*tensors)
        if unused:
            return tensors[0].new_empty(()).expand(tensors[0].shape)
        return forward_tiles(run, step, tensors[:count])

    @staticmethod
    @only_once
    def backward(ctx, grad):
        saved = ctx.saved_tensors  # raises an error if a tensor was changed in place
        rows = saved[: ctx.count]
        needed = ctx.needs_input_grad[6 : 6 + ctx.count]
        parameters = check_same_parameters(ctx.modules, ctx.weights)
        grads = [torch.empty_like(x) if needs else None for x, needs in zip(rows, needed, strict=True)]
        with ctx.context.again():
            sums = backward_tiles(ctx.run, ctx.step, rows, parameters, grad, grads)
        return *[None] * 6, *grads, *sums


def cuts(length: int, step: int) -> Iterator[slice]:
    """Yield slices of `step` tokens in the profiler range "tiles"; for an empty shard yield one empty slice."""
    with torch.profiler.record_function("tiles"):
        yield from (slice(at, min(at + step, length)) for at in range(0, max(1, length), step))


def forward_tiles(run: Callable[..., Tensor], step: int, rows: Sequence[Tensor]) -> Tensor:
    """Return run(*rows), (B, N, ...), computed `step` tokens at a time."""
    out = None
    rows = [x.detach() for x in rows]  # module hooks expect a graph if tensors require a gradient
    for cut in cuts(rows[0].shape[1], step):
        part = run(*(x[:, cut] for x in rows))
        if out is None:
            out = part.new_empty((part.shape[0], rows[0].shape[1], *part.shape[2:]))
        out[:, cut] = part
        del part
    forget_casts()
    return out


def tile_gradients(
    run: Callable[..., Tensor],
    step: int,
    rows: Sequence[Tensor],
    leaves: Sequence[Tensor],
    into: Sequence[Tensor | None],
    grad: Tensor | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Compute the gradients of run(*rows), tile by tile; call this with gradients enabled.

    Args:
        leaves: trained parameters that `run` reads.
        into: for each of `rows`, the tensor to write its gradient to, or None.
        grad: gradient of the result; may be overwritten. None: compute gradients of the sum.

    Returns:
        The sum of run(*rows) (None if `grad` is given), and each leaf's gradient in at least fp32 (None if not read).
    """
    sums: list[Tensor | None] = [None] * len(leaves)
    whole = None
    for cut in cuts(rows[0].shape[1], step):
        tile = [x[:, cut] for x in rows]
        tile = [x if grads is None else x.detach().requires_grad_() for x, grads in zip(tile, into, strict=True)]
        out = run(*(x.view_as(x) for x in tile))  # views, because module hooks fail on leaves in a backward
        if grad is None:
            whole = added(whole, out.detach().sum())
        inputs = [x for x, target in zip(tile, into, strict=True) if target is not None]
        out_grad = torch.ones_like(out) if grad is None else grad[:, cut]
        with hooks_paused(leaves):  # autograd calls the hooks later, with the sum over tiles
            parts = torch.autograd.grad(out, [*inputs, *leaves], out_grad, allow_unused=True)
        _write(parts, [x for x in into if x is not None], cut)
        parts = parts[len(inputs) :]
        del tile, out, inputs, out_grad
        sums = [added(total, part) for total, part in zip(sums, parts, strict=True)]
        del parts
    return whole, sums


def _write(parts: Sequence[Tensor | None], into: Sequence[Tensor], cut: slice) -> None:
    for target, part in zip(into, parts, strict=False):
        target[:, cut] = 0 if part is None else part


def backward_tiles(
    run: Callable[..., Tensor],
    step: int,
    rows: Sequence[Tensor],
    leaves: Sequence[Tensor],
    grad: Tensor,
    into: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Return the leaves' gradients from `tile_gradients` in the leaves' dtypes."""
    _, sums = tile_gradients(run, step, rows, leaves, into, grad)
    return [x if x is None else x.to(leaf.dtype) for x, leaf in zip(sums, leaves, strict=True)]


def added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Add `part` to `total` in place, in at least fp32, and return the sum; None counts as 0."""
    if part is None:
        return total
    part = part.to(torch.promote_types(part.dtype, torch.float32))
    return part if total is None else total.add_(part)


def products_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of `nn.functional.linear`: autocast's dtype, else (or for float64) the weight's dtype."""
    kind = x.device.type
    if kind in AUTOCAST_DEVICES and torch.is_autocast_enabled(kind) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return weight.dtype


def products(
    normed: Callable[[Tensor], Tensor], x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], step: int
) -> list[Tensor]:
    """Return normed(x) times each weight (R, E) plus its bias (R,): a list of (B, N, R) in the weights' dtype."""
    outputs = [w.new_empty(*x.shape[:2], len(w)) for w in weights]
    for cut in cuts(x.shape[1], step):
        rows = normed(x[:, cut].detach())
        for into, w, b in zip(outputs, weights, biases, strict=True):
            for sample, out in zip(rows, into[:, cut], strict=True):
                torch.mm(sample, w.t(), out=out) if b is None else torch.addmm(b, sample, w.t(), out=out)
        del rows
    return outputs


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
    """Return the weights' gradients in at least fp32; write the gradient of the normed rows to `into`.

    Args:
        grads: gradient (B, N, R) of each product.
        into: (B, N, E), any dtype; the gradient replaces its values, or is added to them if `add`. None: not needed.
        trained: whether the weights are trained; if not, their gradients are None.
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
        rows = None  # free the rows before the next tile's rows are computed
    return sums


def _multiply(grad: Tensor, weight: Tensor, into: Tensor, add: bool) -> None:
    """Write grad times weight to `into`, or add it to `into` if `add` is True."""
    if into.dtype != weight.dtype:
        part = grad @ weight
        into.add_(part) if add else into.copy_(part)
    elif add:
        torch.addmm(into, grad, weight, out=into)  # FLOP counters do not count addmm_
    else:
        torch.mm(grad, weight, out=into)
