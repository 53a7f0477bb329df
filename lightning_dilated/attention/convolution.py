"""ShortConvolution: a token and a few of its neighbours, channel by channel, within documents and on any number of ranks.

One rank computes by plain operations of torch, which torch.compile fuses; several by an op of its own, since the rows of
other ranks come in between.
Shape letters: B batch, L tokens of this rank, C channels, W taps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dilated._device import send
from lightning_dilated._validation import integer
from lightning_dilated.sequence.group import SequenceGroup, active_sequence, find_sequence
from lightning_dilated.sequence.halo import HaloRoute, halo_route, halo_wire

NAME = "lightning_dilated::short_convolution"


class ShortConvolution(nn.Module):
    """y_p = x_p + the sum over taps of weight_i x_(p - left + i), a weight a channel and tap; the identity at the start.

    Neighbours in other documents, and beyond the sequence, count 0. Based (arXiv 2402.18668) and Canon layers (arXiv
    2512.17351) give attention such a step, with which a token knows what stands before it.

    Args:
        channels: C.
        taps: W, at least 2.
        causal: a token sees itself and the W - 1 before it; else (W - 1) // 2 before it and the others after it.
    """

    def __init__(self, channels: int, taps: int, causal: bool, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.taps, self.causal = integer(taps, "kv_conv", 2), causal
        self.right = 0 if causal else taps - 1 - (taps - 1) // 2
        self.weight = nn.Parameter(torch.zeros(taps, channels, device=device, dtype=dtype))

    def forward(self, x: Tensor, lengths: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """(B, L, C) to (B, L, C), within an active `SequenceGroup` of its ranks.

        Args:
            lengths: (B,) on the CPU, the real tokens of each right-padded sample.
            cu_seqlens: (documents + 1,) on the CPU, bounds of documents packed into one sample.
        """
        group, weight = active_sequence(), self.weight.to(x.dtype)
        lengths = None if self.causal else lengths  # padding on the right is seen by nobody before it
        if group is not None:
            grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
            return torch.ops.lightning_dilated.short_convolution(
                x, weight, lengths, cu_seqlens, self.right, group.name, grad
            )[0]
        left = self.taps - 1 - self.right
        near = _near(range(x.shape[1]), left, self.right, lengths, cu_seqlens, x.device)
        return _convolved(nn.functional.pad(x, (0, 0, left, self.right)), weight, left, near)

    def continued(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Causal, for new tokens (B, n, C) behind `before` (B, W - 1, C), None at the start.

        Returns:
            (B, n, C), and the last W - 1 rows of x for the next call.
        """
        before = x.new_zeros(x.shape[0], self.taps - 1, x.shape[2]) if before is None else before
        rows = torch.cat([before, x], 1)
        return _convolved(rows, self.weight.to(x.dtype), self.taps - 1, None), rows[:, x.shape[1] :]

    def extra_repr(self) -> str:
        """Sizes."""
        return f"channels={self.weight.shape[1]}, taps={self.taps}, causal={self.causal}"


def _near(
    positions: range, left: int, right: int, lengths: Tensor | None, cu_seqlens: Tensor | None, device: torch.device
) -> Tensor | None:
    """(B or 1, n, W) bool: whether the neighbour belongs to the token's document or sample; None where all do."""
    if lengths is None and cu_seqlens is None:
        return None
    at = torch.arange(positions.start, positions.stop, device=device)
    offset = torch.arange(-left, right + 1, device=device)
    seen = at[:, None] + offset
    if cu_seqlens is None:
        end = send(lengths, device)[:, None, None]
        return (at[:, None] >= end) | (seen < end)
    bounds = send(cu_seqlens, device).to(torch.int64)
    # bounds that are no bounds are refused by the attention that follows: no index here may leave them
    document = torch.searchsorted(bounds, at, right=True).clamp(max=len(bounds) - 1)[:, None]
    return ((seen >= bounds[document - 1]) & (seen < bounds[document]))[None]


def _convolved(rows: Tensor, weight: Tensor, left: int, near: Tensor | None) -> Tensor:
    """(B, n, C) from (B, left + n + right, C)."""
    n = rows.shape[1] - len(weight) + 1
    y = rows[:, left : left + n]
    for i, w in enumerate(weight):
        part = rows[:, i : i + n] * w
        y = y + (part if near is None else torch.where(near[..., i : i + 1], part, 0))
    return y


def _gradients(grad: Tensor, rows: Tensor, weight: Tensor, left: int, near: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of the rows (B, left + n + right, C) and of the weight (W, C), at least fp32."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    n, grad = grad.shape[1], grad.to(wide)
    d_rows, d_weight = torch.zeros_like(rows, dtype=wide), torch.empty_like(weight, dtype=wide)
    d_rows[:, left : left + n] = grad
    for i, w in enumerate(weight):
        some = grad if near is None else torch.where(near[..., i : i + 1], grad, 0)
        d_rows[:, i : i + n] += some * w
        d_weight[i] = (some * rows[:, i : i + n]).sum((0, 1))
    return d_rows, d_weight


def _route(
    group: SequenceGroup,
    x: Tensor,
    weight: Tensor,
    right: int,
    documents: tuple[Tensor | None, ...],
    grad: bool,
    turn: Any,
) -> tuple[HaloRoute, int]:
    """The route of the call and its number, once all ranks agreed on it."""
    short = [None if t is None else hashlib.blake2b(t.numpy().tobytes(), digest_size=8).hexdigest() for t in documents]
    facts = {
        "call": "kv_conv",
        "pass": "forward" if turn is None else "backward",
        "batch": x.shape[0],
        "dtype": x.dtype,
    }
    facts |= {"taps and channels": tuple(weight.shape), "right": right, "requires grad": grad}
    facts |= {"lengths, cu_seqlens (digests)": short}
    agreed = group.agree(facts, x.shape[1], 0, turn, later=grad)
    shard = group.shard(agreed.seq_len)
    return halo_route(shard, group.rank, len(weight) - 1 - right, right), agreed.number


def _stretches(
    route: HaloRoute, x: Tensor, halo: Tensor, documents: tuple[Tensor | None, ...]
) -> Iterator[tuple[Tensor, Tensor | None, slice]]:
    """(rows with their halo, which neighbours count, local tokens) of each stretch."""
    start = 0
    for held, rows in zip(route.chunks, route.surround(x, halo), strict=True):
        yield rows, _near(held, route.left, route.right, *documents, x.device), slice(start, start + len(held))
        start += len(held)


def _flat(x: Tensor) -> Tensor:
    """(L, B C) of (B, L, C)."""
    return x.movedim(1, 0).reshape(x.shape[1], x.shape[0] * x.shape[2])


@torch.library.custom_op(NAME, mutates_args=())
def short_convolution(
    x: Tensor,
    weight: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    right: int,
    sequence: str,
    grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y (B, L, C), halo (rows, B, C), number of the call) on the ranks of the group named `sequence`."""
    group, documents = find_sequence(sequence), (lengths, cu_seqlens)
    route, number = _route(group, x, weight, right, documents, grad, None)
    halo = route.fetch(_flat(x), halo_wire(group, group.forward_traffic)).view(route.rows, x.shape[0], x.shape[2])
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for rows, near, mine in _stretches(route, x, halo, documents):
        y[:, mine] = _convolved(rows, weight, route.left, near)
    return y, halo, torch.tensor(number, dtype=torch.int64, device="cpu")


@short_convolution.register_fake
def _(x, weight, lengths, cu_seqlens, right, sequence, grad):
    halo = x.new_empty((torch.library.get_ctx().new_dynamic_size(), x.shape[0], x.shape[2]))
    number = torch.empty((), dtype=torch.int64, device="cpu")
    return torch.empty_like(x, memory_format=torch.contiguous_format), halo, number


@torch.library.custom_op(NAME + "_backward", mutates_args=())
def short_convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    halo: Tensor,
    number: Tensor,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    right: int,
    sequence: str,
    needs_grad: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of x, and of weight by this rank's tokens."""
    group, documents = find_sequence(sequence), (lengths, cu_seqlens)
    route, _ = _route(group, x, weight, right, documents, needs_grad, f"backward of call {int(number)}")
    wide = torch.promote_types(x.dtype, torch.float32)
    dx, d_weight = torch.empty_like(x, dtype=wide), torch.zeros_like(weight, dtype=wide)
    around = []
    for rows, near, mine in _stretches(route, x, halo, documents):
        d_rows, part = _gradients(grad[:, mine], rows, weight, route.left, near)
        d_weight += part
        before, dx[:, mine], after = d_rows.split([route.left, mine.stop - mine.start, route.right], 1)
        around += [_flat(before), _flat(after)]
    d_halo, total = torch.cat([_flat(dx)[:0], *around]), _flat(dx)
    route.give_back(d_halo, total, halo_wire(group, group.backward_traffic))
    dx = total.view(x.shape[1], x.shape[0], x.shape[2]).movedim(0, 1)
    return dx.to(x.dtype).contiguous(), d_weight.to(weight.dtype)


@short_convolution_backward.register_fake
def _(grad, x, weight, *rest):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, weight))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, lengths, cu_seqlens, *ctx.rest = inputs
    ctx.save_for_backward(x, weight, *output[1:], lengths, cu_seqlens)


def _backward(ctx: Any, grad: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    gradients = torch.ops.lightning_dilated.short_convolution_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return *gradients, *[None] * 5


short_convolution.register_autograd(_backward, setup_context=_setup)
