"""Cross-entropy of tokens over wide vocabularies: of the logits nothing wider than themselves is kept or goes back.

Shape letters: M tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_dilated.attention.tiles import only_once

#: labels with this value are left out of the loss
IGNORE = -100
#: logits of a tile: enough that adding up the gradient of the weights, tile after tile, takes little beside; and the fewest
#: tokens of one all the same
MOST, LEAST = 2**29, 1024


def loss_tile(tile: int | None, vocab: int) -> int | None:
    """Tokens whose logits are made at a time where other layers see `tile`, none of them all: fewer of a wide vocabulary."""
    return None if tile is None else min(tile, max(LEAST, MOST // vocab))


def token_nats(logits: Tensor, labels: Tensor) -> Tensor:
    """(M,) nats of labels (M,) by logits (M, V), at least fp32, 0 where the label is `IGNORE`.

    As `nn.functional.cross_entropy` of logits in fp32, but the gradient is made in the dtype of the logits: probabilities,
    and what the label's lacks of 1, which is taken from the loss itself and exact for likely tokens, too.

    Raises:
        IndexError, RuntimeError: for other labels outside of 0 to V - 1, as `gather` says it; for a double backward.
    """
    return _Nats.apply(logits, labels)


class _Nats(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        left_out = labels == IGNORE
        at = labels.masked_fill(left_out, 0)[:, None]
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
