"""Sums over tokens, computed in tiles together with their gradients; a cross-entropy that saves no probabilities.

Shape letters: B batch, N tokens, M tokens, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dilated._compat.torch import has_backward_hooks
from lightning_dilated._device import ASSUMED
from lightning_dilated.memory import token_chunks
from lightning_dilated.memory.recompute import forget_casts


def tiled_sum(run: Callable[..., Tensor], modules: Sequence[nn.Module], tile: int | None, *rows: Tensor) -> Tensor:
    """Return the sum of run(*rows) over all tokens, computed in tiles, and compute its gradients in the same pass.

    The backward only scales these gradients. Until then the gradients take the memory of the rows that require one, and
    of the weights in at least fp32. Modules with backward hooks run as in `tiled` instead, because the hooks would see
    gradients of the sum and not of the loss.

    Args:
        run: a function of rows (B, N, ...) that returns one number for each token, (B, N).
        modules, tile, rows: as in `tiled`, which also describes the errors.
    """
    if any(has_backward_hooks(m) for module in modules for m in module.modules()):
        return token_chunks.tiled(run, modules, tile, *rows).sum()
    step = token_chunks.step_of(tile, rows[0])
    if step >= rows[0].shape[1]:
        return run(*rows).sum()
    return _apply_sum(run, modules, step, *rows)


@torch.compiler.disable
def _apply_sum(run: Callable, modules: Sequence[nn.Module], step: int, *rows: Tensor) -> Tensor:
    token_chunks.check_whole(modules)
    leaves = token_chunks.trained(modules)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*rows, *leaves)):
        return _Summed.apply(run, step, len(rows), *rows, *leaves)
    return token_chunks.forward_tiles(run, step, rows).sum()


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, step, count, *tensors):
        rows, leaves = tensors[:count], tensors[count:]
        needed = ctx.needs_input_grad[3 : 3 + count]
        grads = [torch.empty_like(x) if needs else None for x, needs in zip(rows, needed, strict=True)]
        # saved-tensor hooks of a surrounding checkpoint or offload must not see tensors that only this call uses
        plain = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with torch.enable_grad(), plain:
            forget_casts()
            total, sums = token_chunks.tile_gradients(run, step, rows, leaves, grads)
        forget_casts()
        ctx.step, ctx.dtypes = step, [x.dtype for x in leaves]
        ctx.count = count
        ctx.save_for_backward(*grads, *sums)
        return total

    @staticmethod
    @token_chunks.only_once
    def backward(ctx, grad):
        saved = ctx.saved_tensors  # read only once, as a surrounding checkpoint requires
        grads, sums = saved[: ctx.count], saved[ctx.count :]
        grads = [None if x is None else _scaled(x, grad, ctx.step) for x in grads]
        sums = [None if x is None else (x * grad).to(dtype) for x, dtype in zip(sums, ctx.dtypes, strict=True)]
        return None, None, None, *grads, *sums


def _scaled(x: Tensor, by: Tensor, step: int) -> Tensor:
    """Return x (B, N, ...) times a number, without rounding the number to x's dtype."""
    out = torch.empty_like(x)
    for cut in token_chunks.cuts(x.shape[1], step):
        out[:, cut] = x[:, cut].to(torch.promote_types(x.dtype, by.dtype)) * by
    return out


#: the loss ignores labels with this value
IGNORE = -100
#: maximum number of logits (large, so that sums over tiles take little time) and minimum number of tokens in a tile
MOST, LEAST = 2**29, 1024
#: smallest vocabulary for which one compiled pass over the logits is faster than several eager passes
WIDE = 1024


def loss_tile(tile: int | None, vocab: int) -> int | None:
    """Return the number of tokens in a tile of logits: `tile`, or fewer for a wide vocabulary; None means all tokens."""
    return None if tile is None else min(tile, max(LEAST, MOST // vocab))


def token_nats(logits: Tensor, labels: Tensor, compiled: bool = False) -> Tensor:
    """Return the nats (M,) of labels (M,) for logits (M, V), in at least fp32; 0 if the label is `IGNORE`.

    The result equals `nn.functional.cross_entropy` of logits in fp32. The gradient is computed in the logits' dtype
    from probabilities. For the label it needs 1 - p, which is computed from the loss to be exact even if p is near 1.

    Args:
        compiled: on a GPU, if V is at least `WIDE`, compile forward and backward so that each reads the logits once.

    Raises:
        IndexError, RuntimeError: if a label is neither `IGNORE` nor in 0 to V - 1; RuntimeError for a double backward.
    """
    return (_FusedNats if _fuses(logits, compiled) else _Nats).apply(logits, labels)


def _fuses(logits: Tensor, compiled: bool) -> bool:
    wide = logits.shape[1] >= WIDE
    return compiled and wide and (logits.is_cuda or bool(ASSUMED)) and not torch.compiler.is_compiling()


def _places(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mask (M,) of ignored labels, and the labels as indices (M, 1), in which 0 replaces ignored labels."""
    left_out = labels == IGNORE
    return left_out, labels.masked_fill(left_out, 0)[:, None]


class _Nats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        left_out, at = _places(labels)
        wide = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        nats = wide.gather(1, at)[:, 0].neg_().masked_fill_(left_out, 0)
        # save a new tensor, because the caller may overwrite the result
        ctx.save_for_backward(logits, at, left_out, torch.expm1(-nats))
        return nats

    @staticmethod
    @token_chunks.only_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, at, left_out, lacking = ctx.saved_tensors
        grad = grad.masked_fill(left_out, 0)[:, None]
        # in fp16, small values would underflow before the loss scale multiplies them
        wide = torch.promote_types(logits.dtype, torch.float32)
        dtype = wide if logits.dtype == torch.float16 else logits.dtype
        with torch.autocast(logits.device.type, enabled=False):
            out = torch.softmax(logits, -1, dtype=dtype)
            out.scatter_(1, at, lacking[:, None].to(dtype))
            return out.mul_(grad).to(logits.dtype), None


class _FusedNats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        left_out, at = _places(labels)
        label = logits.gather(1, at)[:, 0]
        with torch.autocast(logits.device.type, enabled=False):
            top, total = _compiled(_sums)(logits.detach())  # one graph for training and validation
        nats = (total.log() + (top - label)).masked_fill_(left_out, 0)
        ctx.save_for_backward(logits, at, left_out, torch.expm1(-nats), top, total)
        return nats

    @staticmethod
    @token_chunks.only_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, at, left_out, lacking, top, total = ctx.saved_tensors
        grad = grad.masked_fill(left_out, 0)
        with torch.autocast(logits.device.type, enabled=False):
            out = _compiled(_softmax_times)(logits, top, grad / total)
        return out.scatter_(1, at, (lacking * grad)[:, None].to(out.dtype)), None


@functools.cache
def _compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function once. After too many recompiles, torch runs it uncompiled, which needs more memory."""
    return torch.compile(run)


def _sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row, and the sum of exp(logit - largest)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = wide.amax(-1)
    return top, (wide - top[:, None]).exp().sum(-1)


def _softmax_times(logits: Tensor, top: Tensor, by: Tensor) -> Tensor:
    """Return exp(logit - largest) times a number for each row."""
    return ((logits.to(top.dtype) - top[:, None]).exp() * by[:, None]).to(logits.dtype)
