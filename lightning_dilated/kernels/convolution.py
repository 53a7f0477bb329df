"""ShortConvolution's sums over neighbouring tokens, y_p = x_p + sum over taps i of w_i x_(p - left + i), and their gradients.

A program takes a tile of tokens times channels. It reads the tile once for each tap, one row further each time: all but the
first come from cache. Products are summed in fp32, with weights rounded to the dtype of the rows.
Shape letters: B batch, N tokens, C channels of a part, W taps, P programs along the tokens of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dilated import kernels

#: elements of a tile, its most tokens and channels, and warps
ELEMENTS, TOKENS, CHANNELS, WARPS = 4096, 256, 128, 4


@dataclass(frozen=True)
class Neighbours:
    """Which neighbours a token sees.

    Attributes:
        left: tokens before it.
        documents: (N,) int32, the number of each token's document, and B is 1; None: no documents.
        lengths: (B,) integers, tokens of each right-padded sample, which do not see the padding; None: no padding.
    """

    left: int
    documents: Tensor | None = None
    lengths: Tensor | None = None

    def arguments(self, stand_in: Tensor) -> tuple[tuple[Tensor, Tensor], dict[str, object]]:
        """(tensors, constants) of a kernel; `stand_in` is not read."""
        tensors = [stand_in if x is None else x for x in (self.documents, self.lengths)]
        constants = {"LEFT": self.left, "PACKED": self.documents is not None, "PADDED": self.lengths is not None}
        return (tensors[0], tensors[1]), constants


@triton.jit
def _pairs(reader, source, reader_document, source_document, end, tokens, PACKED: tl.constexpr, PADDED: tl.constexpr):
    """Whether each reader sees its source, of which one lies within the sequence."""
    seen = (reader >= 0) & (reader < tokens) & (source >= 0) & (source < tokens)
    if PACKED:
        seen &= reader_document == source_document
    if PADDED:
        seen &= (reader >= end) | (source < end)
    return seen


@triton.jit
def _document(documents, p, tokens, PACKED: tl.constexpr):
    """The numbers of the tokens' documents, -1 beyond the sequence; without documents what is not read."""
    if PACKED:
        return tl.load(documents + p, mask=(p >= 0) & (p < tokens), other=-1)
    return p


@triton.jit
def _length(lengths, sample, tokens, PADDED: tl.constexpr):
    if PADDED:
        return tl.load(lengths + sample).to(tl.int32)
    return tokens


@triton.jit
def _weights(weight, w_sw, w_sc, i, c, channels, KIND: tl.constexpr):
    """(CHANNELS,) of a tap, rounded to the dtype of the rows."""
    return tl.load(weight + i * w_sw + c * w_sc, mask=c < channels, other=0.0).to(KIND).to(tl.float32)


@triton.jit
def _rows(x, p, x_sn, c, mask):
    """(TOKENS, CHANNELS) of the rows p, 0 outside of the mask."""
    return tl.load(x + p.to(tl.int64)[:, None] * x_sn + c[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "programs"])
def _forward(
    y, x, x_sb, x_sn, weight, w_sw, w_sc, documents, lengths, tokens, programs, channels,
    TAPS: tl.constexpr, LEFT: tl.constexpr, PACKED: tl.constexpr, PADDED: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(channels, CHANNELS)
    at = tl.program_id(0) // blocks
    sample = (at // programs).to(tl.int64)
    p = at % programs * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    x += sample * x_sb
    y += sample * tokens * channels
    inside = (p < tokens)[:, None] & (c < channels)[None, :]
    own = _rows(x, p, x_sn, c, inside)
    total = own
    document, end = _document(documents, p, tokens, PACKED), _length(lengths, sample, tokens, PADDED)
    for i in tl.static_range(TAPS):
        if i == LEFT:
            row = own
        else:
            source = p + (i - LEFT)
            of_source = _document(documents, source, tokens, PACKED)
            seen = _pairs(p, source, document, of_source, end, tokens, PACKED, PADDED)
            row = _rows(x, source, x_sn, c, seen[:, None] & (c < channels)[None, :])
        total += _weights(weight, w_sw, w_sc, i, c, channels, x.dtype.element_ty)[None, :] * row
    tl.store(y + p.to(tl.int64)[:, None] * channels + c[None, :], total.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "programs"])
def _backward(
    dx, sums, s_sp, s_sw, grad, g_sb, g_sn, x, x_sb, x_sn, weight, w_sw, w_sc, documents, lengths,
    tokens, programs, channels,
    TAPS: tl.constexpr, BLOCK_TAPS: tl.constexpr, LEFT: tl.constexpr, PACKED: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A token gets gradients from those that see it, which are as many as it sees, in the opposite order."""
    blocks = tl.cdiv(channels, CHANNELS)
    at = (tl.program_id(0) // blocks).to(tl.int64)
    sample, first = at // programs, (tl.program_id(0) // blocks % programs) * ROWS
    c = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    tap, end = tl.arange(0, BLOCK_TAPS), _length(lengths, sample, tokens, PADDED)
    x += sample * x_sb
    grad += sample * g_sb
    dx += sample * tokens * channels
    products = tl.zeros([BLOCK_TAPS, CHANNELS], tl.float32)
    for start in tl.range(first, tl.minimum(first + ROWS, tokens), TOKENS):
        p = start + tl.arange(0, TOKENS)
        inside = (p < tokens)[:, None] & (c < channels)[None, :]
        row, own = _rows(x, p, x_sn, c, inside), _rows(grad, p, g_sn, c, inside)
        total = own
        document = _document(documents, p, tokens, PACKED)
        for i in tl.static_range(TAPS):
            if i == LEFT:
                part = own
            else:
                reader = p + (LEFT - i)
                of_reader = _document(documents, reader, tokens, PACKED)
                seen = _pairs(reader, p, of_reader, document, end, tokens, PACKED, PADDED)
                part = _rows(grad, reader, g_sn, c, seen[:, None] & (c < channels)[None, :])
            total += _weights(weight, w_sw, w_sc, i, c, channels, x.dtype.element_ty)[None, :] * part
            products += tl.where((tap == i)[:, None], tl.sum(row * part, 0)[None, :], 0.0)
        tl.store(dx + p.to(tl.int64)[:, None] * channels + c[None, :], total.to(dx.dtype.element_ty), mask=inside)
    to = sums + at * s_sp + tap[:, None] * s_sw + c[None, :]
    tl.store(to, products, mask=(tap < TAPS)[:, None] & (c < channels)[None, :])


def _tile(channels: int, tokens: int = TOKENS) -> dict[str, int]:
    """Sizes of a tile of at most `tokens`, and its warps."""
    width = min(CHANNELS, triton.next_power_of_2(channels))
    return {"TOKENS": min(tokens, ELEMENTS // width), "CHANNELS": width, "num_warps": WARPS}


def forward(x: Tensor, weight: Tensor, neighbours: Neighbours) -> Tensor:
    """y (B, N, C), contiguous, of x (B, N, C), 1 along C, and weight (W, C)."""
    y, sizes = torch.empty_like(x, memory_format=torch.contiguous_format), _tile(x.shape[2])
    programs = triton.cdiv(x.shape[1], sizes["TOKENS"])
    if y.numel():
        tensors, constants = neighbours.arguments(x)
        with kernels.on(x.device):
            _forward[(len(x) * programs * triton.cdiv(x.shape[2], sizes["CHANNELS"]),)](
                y, x, *x.stride()[:2], weight, *weight.stride(), *tensors, x.shape[1], programs, x.shape[2],
                TAPS=len(weight), **constants, **sizes,
            )  # fmt: skip
    return y


def backward(grad: Tensor, x: Tensor, weight: Tensor, neighbours: Neighbours, sums: Tensor, rows: int) -> Tensor:
    """dx (B, N, C), contiguous, from the gradient of y and x, both (B, N, C) and 1 along C, and weight (W, C).

    Args:
        sums: (B P, W, C) fp32, 1 along C, into which parts of the gradient of weight are written: it is their sum over B P.
        rows: tokens of a program, of which there are P = ceil(N / rows) a sample; a power of two.
    """
    dx, sizes = torch.empty_like(x, memory_format=torch.contiguous_format), _tile(x.shape[2], rows)
    if dx.numel():
        tensors, constants = neighbours.arguments(x)
        with kernels.on(x.device):
            _backward[(len(sums) * triton.cdiv(x.shape[2], sizes["CHANNELS"]),)](
                dx, sums, *sums.stride()[:2], grad, *grad.stride()[:2], x, *x.stride()[:2], weight, *weight.stride(),
                *tensors, x.shape[1], len(sums) // len(x), x.shape[2],
                TAPS=len(weight), BLOCK_TAPS=triton.next_power_of_2(len(weight)), ROWS=rows, **constants, **sizes,
            )  # fmt: skip
    return dx
