"""A sum over neighbouring tokens, y_p = x_p + sum over taps i of w_i x_(p - left + i), and its gradients.

A program computes a tile of tokens times channels. It reads the tile once for each tap, one row further each time;
after the first read, the rows come from cache. Products are summed in fp32, with weights rounded to the dtype of the
rows. Tensors of the taps are collected in tuples that + extends, because Triton has no lists or starred expressions.
Shape letters: B batch, N tokens, C channels of a part, W taps, P programs along the tokens of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_dilated import kernels


@dataclass(frozen=True)
class Tile:
    """Sizes of a program's tile, powers of two.

    Attributes:
        elements: tokens times channels.
        channels: maximum number of channels.
        warps: number of warps of a program. More warps than the channels need hide the time of reading weights.
        stages: number of tiles that a backward program has in flight: tiles that it prefetches, and the current tile.
    """

    elements: int
    channels: int
    warps: int
    stages: int = 1

    def sizes(self, channels: int, tokens: int) -> dict[str, int]:
        """Return a kernel's constants for rows of `channels` channels and tiles of at most `tokens` tokens."""
        width = min(self.channels, triton.next_power_of_2(channels))
        return {"TOKENS": min(tokens, self.elements // width), "CHANNELS": width, "num_warps": self.warps}


#: tiles with 16 elements per thread in the forward, and 8 in the backward, which keeps a sum per tap and element
FORWARD, BACKWARD = Tile(4096, 128, 8), Tile(1024, 64, 4, 2)
#: maximum number of tokens of a tile
TOKENS = 256


@dataclass(frozen=True)
class Neighbours:
    """The neighbours that a token reads.

    Attributes:
        left: number of tokens before it.
        documents: (B or 1, N) int32, the index of each token's document; None: no documents.
        lengths: (B,) number of tokens of each right-padded sample; these tokens do not read padding. None: no padding.
    """

    left: int
    documents: Tensor | None = None
    lengths: Tensor | None = None

    def arguments(self, x: Tensor) -> tuple[tuple[Tensor | int, ...], dict[str, object]]:
        """Return a kernel's arguments (tensors and stride) and constants; x (B, N, C) replaces missing tensors."""
        documents, lengths = (x if y is None else y for y in (self.documents, self.lengths))
        stride = 0 if len(documents) == 1 else documents.stride(0)
        constants = {"LEFT": self.left, "PACKED": self.documents is not None, "PADDED": self.lengths is not None}
        return (documents, stride, lengths), constants


@triton.jit
def _pairs(reader, source, reader_document, source_document, end, tokens, PACKED: tl.constexpr, PADDED: tl.constexpr):
    """Return whether each reader reads its source; False if one of them is outside the sequence."""
    visible = (reader >= 0) & (reader < tokens) & (source >= 0) & (source < tokens)
    if PACKED:
        visible &= reader_document == source_document
    if PADDED:
        visible &= (reader >= end) | (source < end)
    return visible


@triton.jit
def _document(documents, p, tokens, PACKED: tl.constexpr):
    """Return the index of each token's document, -1 outside the sequence; a placeholder if there are no documents."""
    if PACKED:
        return tl.load(documents + p, mask=(p >= 0) & (p < tokens), other=-1)
    return p


@triton.jit
def _length(lengths, sample, tokens, PADDED: tl.constexpr):
    if PADDED:
        return tl.load(lengths + sample).to(tl.int32)
    return tokens


@triton.jit
def _weights(weight, w_sw, w_sc, c, channels, TAPS: tl.constexpr, KIND: tl.constexpr):
    """Return the weight of each tap, (1, CHANNELS), rounded to the dtype of the rows."""
    every = ()
    for i in tl.static_range(TAPS):
        tap = tl.load(weight + i * w_sw + c * w_sc, mask=c < channels, other=0.0)
        every = every + (tap.to(KIND).to(tl.float32)[None, :],)  # noqa: RUF005
    return every


@triton.jit
def _zeros(TAPS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr):
    every = ()
    for _ in tl.static_range(TAPS):
        every = every + (tl.zeros([TOKENS, CHANNELS], tl.float32),)  # noqa: RUF005
    return every


@triton.jit
def _rows(x, p, x_sn, c, mask):
    """Load the rows p, (TOKENS, CHANNELS); 0 outside the mask."""
    return tl.load(x + p.to(tl.int64)[:, None] * x_sn + c[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "programs", "first", "count"])
def _forward(
    y, x, x_sb, x_sn, weight, w_sw, w_sc, documents, d_sb, lengths, tokens, programs, channels,
    first, count,
    TAPS: tl.constexpr, LEFT: tl.constexpr, PACKED: tl.constexpr, PADDED: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(channels, CHANNELS)
    at = tl.program_id(0) // blocks
    sample = (at // programs).to(tl.int64)
    p = at % programs * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    documents += sample * d_sb
    x += sample * x_sb
    y += (sample * count - first) * channels
    inside = (p < tokens)[:, None] & (c < channels)[None, :]
    stored = ((p >= first) & (p < first + count))[:, None]
    w = _weights(weight, w_sw, w_sc, c, channels, TAPS, x.dtype.element_ty)
    center = _rows(x, p, x_sn, c, inside)
    total = center
    document, end = _document(documents, p, tokens, PACKED), _length(lengths, sample, tokens, PADDED)
    for i in tl.static_range(TAPS):
        if i == LEFT:
            row = center
        else:
            source = p + (i - LEFT)
            of_source = _document(documents, source, tokens, PACKED)
            visible = _pairs(p, source, document, of_source, end, tokens, PACKED, PADDED)
            row = _rows(x, source, x_sn, c, visible[:, None] & (c < channels)[None, :])
        total += w[i] * row
    tl.store(y + p.to(tl.int64)[:, None] * channels + c[None, :], total.to(y.dtype.element_ty), mask=inside & stored)


@triton.jit(do_not_specialize=["tokens", "programs"])
def _backward(
    dx, sums, s_sp, s_sw, grad, g_sb, g_sn, x, x_sb, x_sn, weight, w_sw, w_sc, documents, d_sb, lengths,
    tokens, programs, channels,
    TAPS: tl.constexpr, LEFT: tl.constexpr, PACKED: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add to each token's gradient the gradients of the tokens that read it; the taps run in the opposite order."""
    blocks = tl.cdiv(channels, CHANNELS)
    at = (tl.program_id(0) // blocks).to(tl.int64)
    sample, first = at // programs, (tl.program_id(0) // blocks % programs) * ROWS
    c = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    end = _length(lengths, sample, tokens, PADDED)
    documents += sample * d_sb
    x += sample * x_sb
    grad += sample * g_sb
    dx += sample * tokens * channels
    w = _weights(weight, w_sw, w_sc, c, channels, TAPS, x.dtype.element_ty)
    products = _zeros(TAPS, TOKENS, CHANNELS)
    for start in tl.range(first, tl.minimum(first + ROWS, tokens), TOKENS, num_stages=STAGES):
        p = start + tl.arange(0, TOKENS)
        inside = (p < tokens)[:, None] & (c < channels)[None, :]
        row, center = _rows(x, p, x_sn, c, inside), _rows(grad, p, g_sn, c, inside)
        total = center
        document = _document(documents, p, tokens, PACKED)
        added = ()
        for i in tl.static_range(TAPS):
            if i == LEFT:
                part = center
            else:
                reader = p + (LEFT - i)
                of_reader = _document(documents, reader, tokens, PACKED)
                visible = _pairs(reader, p, of_reader, document, end, tokens, PACKED, PADDED)
                part = _rows(grad, reader, g_sn, c, visible[:, None] & (c < channels)[None, :])
            total += w[i] * part
            added = added + (products[i] + row * part,)  # noqa: RUF005
        products = added
        tl.store(dx + p.to(tl.int64)[:, None] * channels + c[None, :], total.to(dx.dtype.element_ty), mask=inside)
    for i in tl.static_range(TAPS):
        tl.store(sums + at * s_sp + i * s_sw + c, tl.sum(products[i], 0), mask=c < channels)


def forward(x: Tensor, weight: Tensor, neighbours: Neighbours, around: tuple[int, int] = (0, 0)) -> Tensor:
    """Return y (B, n, C), contiguous, from x (B, N, C) with stride 1 along C, and weight (W, C).

    Args:
        around: numbers of rows at the start and at the end of x that have no row in y; n is N minus both numbers.
    """
    count = x.shape[1] - sum(around)
    y, sizes = x.new_empty(x.shape[0], count, x.shape[2]), FORWARD.sizes(x.shape[2], TOKENS)
    programs = triton.cdiv(x.shape[1], sizes["TOKENS"])
    if y.numel():
        tensors, constants = neighbours.arguments(x)
        with kernels.on(x.device):
            _forward[(len(x) * programs * triton.cdiv(x.shape[2], sizes["CHANNELS"]),)](
                y, x, *x.stride()[:2], weight, *weight.stride(), *tensors, x.shape[1], programs, x.shape[2],
                around[0], count, TAPS=len(weight), **constants, **sizes,
            )  # fmt: skip
    return y


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    neighbours: Neighbours,
    sums: Tensor,
    rows: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return dx (B, N, C), contiguous, from y's gradient and x (B, N, C) with stride 1 along C, and weight (W, C).

    Args:
        sums: (B P, W, C) fp32, stride 1 along C; receives parts of weight's gradient, which is their sum over B P.
        rows: number of tokens per program, a power of two; a sample has P = ceil(N / rows) programs.
        dtype: dtype of dx; None: x's.
    """
    dx, sizes = x.new_empty(x.shape, dtype=dtype), BACKWARD.sizes(x.shape[2], rows)
    if dx.numel():
        tensors, constants = neighbours.arguments(x)
        with kernels.on(x.device):
            _backward[(len(sums) * triton.cdiv(x.shape[2], sizes["CHANNELS"]),)](
                dx, sums, *sums.stride()[:2], grad, *grad.stride()[:2], x, *x.stride()[:2], weight, *weight.stride(),
                *tensors, x.shape[1], len(sums) // len(x), x.shape[2],
                TAPS=len(weight), ROWS=rows, STAGES=BACKWARD.stages, **constants, **sizes,
            )  # fmt: skip
    return dx
