"""Cross-entropy of tokens over wide vocabularies: of the logits nothing wider than themselves is kept or goes back.

Shape letters: M tokens, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_dilated.memory.token_chunks import only_once

#: labels with this value are left out of the loss
IGNORE = -100
#: logits of a tile: enough that adding up the gradient of the weights, tile after tile, takes little beside; and the fewest
#: tokens of one all the same
MOST, LEAST = 2**29, 1024
#: words from which on one pass over the logits gains more than calls of compiled code cost
WIDE = 1024


def loss_tile(tile: int | None, vocab: int) -> int | None:
    """Tokens whose logits are made at a time where other layers see `tile`, none of them all: fewer of a wide vocabulary."""
    return None if tile is None else min(tile, max(LEAST, MOST // vocab))


def token_nats(logits: Tensor, labels: Tensor, compiled: bool = False) -> Tensor:
    """(M,) nats of labels (M,) by logits (M, V), at least fp32, 0 where the label is `IGNORE`.

    As `nn.functional.cross_entropy` of logits in fp32, but the gradient is made in the dtype of the logits: probabilities,
    and what the label's lacks of 1, which is taken from the loss itself and exact for likely tokens, too.

    Args:
        compiled: on a GPU, and of `WIDE` vocabularies, one pass over the logits each way, by torch.compile.

    Raises:
        IndexError, RuntimeError: for other labels outside of 0 to V - 1, as `gather` says it; for a double backward.
    """
    return (_FusedNats if _fuses(logits, compiled) else _Nats).apply(logits, labels)


def _fuses(logits: Tensor, compiled: bool) -> bool:
    wide = logits.shape[1] >= WIDE
    return compiled and wide and logits.is_cuda and not torch.compiler.is_compiling()


def _places(labels: Tensor) -> tuple[Tensor, Tensor]:
    """(which are left out; (M, 1) places of all others)."""
    left_out = labels == IGNORE
    return left_out, labels.masked_fill(left_out, 0)[:, None]


class _Nats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        left_out, at = _places(labels)
        wide = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        nats = wide.gather(1, at)[:, 0].neg_().masked_fill_(left_out, 0)
        ctx.save_for_backward(logits, at, left_out, torch.expm1(-nats))  # no result, which the caller may write to
        return nats

    @staticmethod
    @only_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, at, left_out, lacking = ctx.saved_tensors
        grad = grad.masked_fill(left_out, 0)[:, None]
        # fp16 would lose what is small before a loss scale makes it larger
        wide = torch.promote_types(logits.dtype, torch.float32)
        dtype = wide if logits.dtype == torch.float16 else logits.dtype
        with torch.autocast(logits.device.type, enabled=False):
            made = torch.softmax(logits, -1, dtype=dtype)
            made.scatter_(1, at, lacking[:, None].to(dtype))
            return made.mul_(grad).to(logits.dtype), None


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
    @only_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, at, left_out, lacking, top, total = ctx.saved_tensors
        grad = grad.masked_fill(left_out, 0)
        with torch.autocast(logits.device.type, enabled=False):
            made = _compiled(_shares)(logits, top, grad / total)
        return made.scatter_(1, at, (lacking * grad)[:, None].to(made.dtype)), None


@functools.cache
def _compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    """Past torch's limit of graphs (of dtypes, of one token or none) it runs uncompiled: more memory, the same numbers."""
    return torch.compile(run)


def _sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row the largest logit, and the sum of exp(logit - largest)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top = wide.amax(-1)
    return top, (wide - top[:, None]).exp().sum(-1)


def _shares(logits: Tensor, top: Tensor, by: Tensor) -> Tensor:
    """exp(logit - largest) times a number of each row."""
    return ((logits.to(top.dtype) - top[:, None]).exp() * by[:, None]).to(logits.dtype)
