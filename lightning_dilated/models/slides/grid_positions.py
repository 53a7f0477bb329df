"""Where a tile lies on its slide: coordinates checked and turned into cells, and the fixed 2-D sin-cos embedding of cells.

Shape letters: B batch, N rows (tiles and the class token's row), E embedding dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_dilated.pattern.branch import integer

#: coordinates of a row that is no tile: the class token's, and padding's
BLANK = -1
_EXACT = {torch.float32: 2**24, torch.float64: 2**53}


class GridPositions(nn.Module):
    """The sin-cos table of a `grid` x `grid` slide (as ViT-MAE, arXiv 2111.06377), row by row and without storing it.

    A cell (x, y) gets [sin(y w), cos(y w), sin(x w), cos(x w)] with w = 10000^(-4 i / E), i < E / 4: the row
    1 + x grid + y of a released GigaPath table. It has no parameters and no state.
    """

    def __init__(self, dim: int, grid: int) -> None:
        super().__init__()
        self.dim, self.grid = integer(dim, "dim", 1), integer(grid, "grid", 1)
        if dim % 4:
            raise ValueError(f"dim must be a multiple of 4 for a 2-D sin-cos embedding, got {dim}.")
        self._axes: dict[torch.device, Tensor] = {}

    def axis(self, device: torch.device) -> Tensor:
        """(grid, E / 2) fp32: the embedding of one coordinate, taken in fp64."""
        if device not in self._axes:
            quarter = torch.arange(self.dim // 4, dtype=torch.float64, device="cpu") / (self.dim / 4)
            angle = torch.arange(self.grid, dtype=torch.float64, device="cpu")[:, None] / 10000**quarter
            self._axes[device] = torch.cat([angle.sin(), angle.cos()], 1).float().to(device)
        return self._axes[device]

    def forward(self, cells: Tensor) -> Tensor:
        """(B, N, E) fp32 from cells (B, N, 2), integers in [0, grid)."""
        axis = self.axis(cells.device)
        return torch.cat([axis[cells[..., 1]], axis[cells[..., 0]]], -1)


def check_coords(coords: Tensor, counted: Tensor, tile_size: int, grid: int) -> None:
    """Raise where coordinates would silently give wrong positions.

    Args:
        coords: (B, N, 2), x and y of a tile's upper left corner in pixels of the magnification the tiles were cut at.
        counted: (B, N) bool, the rows that are tiles.
        tile_size: pixels of a tile.
        grid: cells along an axis.

    Raises:
        TypeError, ValueError: for half precision, fractions, negative values or cells outside of the grid.
    """
    if coords.dtype in (torch.float16, torch.bfloat16):
        raise TypeError(f"coords are {coords.dtype}, which rounds pixels above 2,048: keep them int64.")
    if coords.is_complex() or coords.dtype == torch.bool:
        raise TypeError(f"coords must be integers (int64), got {coords.dtype}.")
    shown = _filled(coords, counted)
    if coords.is_floating_point() and not bool(((shown == shown.floor()) & (shown.abs() < _EXACT[coords.dtype])).all()):
        raise ValueError(
            f"coords hold fractions, NaN or values too large for {coords.dtype}: they must be whole pixels. Coordinates in "
            "micrometres or in fractions of the slide have to be converted first: (coords / unit).round().long()."
        )
    if not coords.numel():
        return
    low, high = (int(x) for x in torch.stack([shown.amin(), shown.amax()]).tolist())
    if low < 0:
        raise ValueError(f"coords must not be negative for a tile, got {low}: shift the slide's corner to (0, 0).")
    if high // tile_size >= grid:
        raise ValueError(
            f"a tile lies at {high}, cell {high // tile_size} of {tile_size} pixels, but the positions have {grid} cells "
            f"along an axis (0 to {grid - 1}). If tiles are {tile_size} pixels wide, set the model's grid to at least "
            f"{high // tile_size + 1}. Else set tile_size to their width in the pixels that coords count, at least "
            f"{high // grid + 1} here (level-0 coordinates of tiles cut at another level need the width at level 0), or "
            "scale coords to the level of the tiles."
        )


def cells_of(coords: Tensor, counted: Tensor, tile_size: int) -> Tensor:
    """(B, N, 2) int64 cells of tiles; (0, 0) for rows that are none."""
    return torch.div(_filled(coords, counted), tile_size, rounding_mode="floor").long()


def _filled(coords: Tensor, counted: Tensor) -> Tensor:
    """Coordinates with 0 in rows that are no tiles; int64 where they are integers, as torch computes with few others."""
    return (coords if coords.is_floating_point() else coords.long()).masked_fill(~counted[..., None], 0)
