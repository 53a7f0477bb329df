"""Images as sequences of patches, and a learned table of positions resized to other grids as LongViT does.

Shape letters: B images, C channels, H x W pixels, P side of a patch in pixels, N patches, L patches of this rank, S side of
the table in cells, E embedding dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lightning_dilated._device import send

#: added to the resized side before it is divided by the table's, so that rounding never loses a cell (as in DINO)
NUDGE = 0.1


def image_patches(images: Tensor, patch_size: int) -> tuple[Tensor, Tensor]:
    """`patches` and `grid` of a LongViT's batch, for a sequence on several ranks.

    Args:
        images: (B, C, H, W); H and W multiples of P.
        patch_size: P.

    Returns:
        (B, N, C P P), patches row by row from the upper left, each in the order channel, row, column; and (B, 2) int64,
        rows and columns of patches.

    Raises:
        ValueError: for another shape.
    """
    if not isinstance(images, Tensor) or images.ndim != 4:
        shape = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"images must be a tensor (images, channels, height, width), got {shape}.")
    batch, _, height, width = images.shape
    if height % patch_size or width % patch_size or not height or not width:
        raise ValueError(
            f"an image of {height} x {width} pixels is not made of whole patches of {patch_size} x {patch_size}: crop or "
            f"pad it to {_near(height, patch_size)} x {_near(width, patch_size)}."
        )
    cut = images.unfold(2, patch_size, patch_size).unfold(3, patch_size, patch_size)  # (B, C, rows, columns, P, P)
    grid = torch.tensor([[height // patch_size, width // patch_size]]).expand(batch, 2).clone()
    return cut.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2), grid


def _near(pixels: int, patch_size: int) -> int:
    return max(1, round(pixels / patch_size)) * patch_size


def cubic_weights(cells: int, wanted: int, factor: float | None = None) -> Tensor:
    """(wanted, S) fp32: the weight of each cell of an axis in each cell of the resized axis (torch's bicubic).

    Args:
        cells: S.
        wanted: cells of the resized axis.
        factor: the scale that coordinates are divided by, if it is not exactly wanted / S.
    """
    scale = {"size": (wanted, 1)} if factor is None else {"scale_factor": (factor, 1.0)}
    units = torch.eye(cells, device="cpu")[None, :, :, None]  # a channel for each cell, resized along the height alone
    return nn.functional.interpolate(units, mode="bicubic", align_corners=False, **scale)[0, :, :, 0].T


def resized_table(table: Tensor, side: int) -> Tensor:
    """A table (1, S S, E) resized to `side` x `side` cells, at least fp32, as for fine-tuning a release on larger images."""
    cells = math.isqrt(table.shape[1])
    wide = table.to(torch.promote_types(table.dtype, torch.float32))
    by = cubic_weights(cells, side).to(wide)
    return torch.einsum("ri,ije,cj->rce", by, wide[0].view(cells, cells, -1), by).flatten(0, 1)[None]


def table_positions(table: Tensor, rows: int, columns: int, positions: Tensor) -> Tensor:
    """(L, E) in at least fp32: the position embeddings of patches of a `rows` x `columns` image.

    For a grid other than the table's they are interpolated (bicubic) at each call, for the needed rows of patches only.

    Args:
        table: (1, S S, E).
        positions: (L,) int64 on the CPU, row * columns + column; those past the image are padding and get any row.
    """
    cells = math.isqrt(table.shape[1])
    if not len(positions):
        return table[0, :0]
    needed, index = places(positions, rows, columns, cells)
    if rows == columns == cells:
        return _take(table[0], index)
    with torch.autocast(table.device.type, enabled=False):
        wide = table[0].to(torch.promote_types(table.dtype, torch.float32)).view(cells, cells, -1)
        down = cubic_weights(cells, rows, (rows + NUDGE) / cells)[needed].to(wide.dtype)
        along = cubic_weights(cells, columns, (columns + NUDGE) / cells).to(wide.dtype)
        resized = torch.einsum("ri,ije,cj->rce", send(down, wide.device), wide, send(along, wide.device)).flatten(0, 1)
    return _take(resized, index)


def places(positions: Tensor, rows: int, columns: int, cells: int) -> tuple[slice | Tensor, slice | Tensor]:
    """(rows of patches that hold the positions (L,) of a `rows` x `columns` image; index of each position among the patches
    of these rows), as slices where they are consecutive. All rows, where the table's `cells` x `cells` are this grid.

    Reads values, on the CPU.
    """
    positions = positions.clamp(max=rows * columns - 1)
    if rows == columns == cells:
        return slice(0, rows), _counting(positions)
    needed, nth = torch.unique(positions // columns, return_inverse=True)
    return _counting(needed), _counting(nth * columns + positions % columns)


def _counting(index: Tensor) -> slice | Tensor:
    first = int(index[0])
    counts = torch.equal(index, torch.arange(first, first + len(index)))
    return slice(first, first + len(index)) if counts else index


def _take(rows: Tensor, index: slice | Tensor) -> Tensor:
    """rows[index]; a view where the index is a slice."""
    return rows[index] if isinstance(index, slice) else rows.index_select(0, send(index, rows.device))
