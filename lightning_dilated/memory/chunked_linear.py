"""Products of normed rows with some rows of a projection's weight, a tile of tokens at a time, and their gradients.

Written out and not left to autograd, which would compute each product again for its gradient, and go back through the norm
once for every window of heads.
Shape letters: B batch, N tokens, E embedding dim, R rows of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_dilated.attention.functional import AUTOCAST_DEVICES
from lightning_dilated.memory.token_chunks import cuts


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
