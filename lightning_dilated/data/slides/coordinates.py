"""What looks wrong about the coordinates of a slide's tiles, before positions that are wrong reach a model unseen.

An encoder places a tile at the cell (floor(x / tile_size), floor(y / tile_size)). Coordinates in another unit, or of another
magnification than `tile_size`, give no error there: many tiles share a cell, or all lie too far apart.
Shape letters: N tiles of a slide.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lightning_dilated.pattern.branch import integer

#: tiles whose contours were cut on grids of their own share a few cells; below this share of unique ones the unit is wrong
UNIQUE = 0.9
#: distances between neighbours that are needed before they say that all tiles lie too far apart
ENOUGH = 16


def check_coordinates(
    coords: Any,
    tile_size: int = 256,
    grid: int | None = None,
    where: str = "coords",
    extent: tuple[int, int] | None = None,
) -> None:
    """Raise where `coordinate_faults` finds something.

    Args:
        coords, tile_size, grid, extent: as there.
        where: begins the error; name the slide.

    Raises:
        ValueError: with every fault and what to set.
    """
    faults = coordinate_faults(coords, tile_size, grid, extent)
    if faults:
        raise ValueError(f"{where}: {' '.join(faults)}")


def coordinate_faults(
    coords: Any, tile_size: int = 256, grid: int | None = None, extent: tuple[int, int] | None = None
) -> list[str]:
    """What looks wrong about coordinates, one sentence or two each; an empty list where nothing does.

    Args:
        coords: (N, 2) x and y of each tile's upper left corner in pixels; a tensor on any device, or an array. Real tiles
            only: the rows of a class token and of padding (-1, -1) are not to be among them.
        tile_size: side of a tile in the same pixels. TRIDENT's `patch_size_level0` is that for its level-0 coordinates.
        grid: n, where positions exist for n x n cells only.
        extent: (width, height) of the slide in the same pixels, where they are known.

    Raises:
        TypeError, ValueError: for a tile_size or grid that is no positive integer.
    """
    tile_size = integer(tile_size, "tile_size", 1)
    grid = None if grid is None else integer(grid, "grid", 1)
    values = coords.detach().cpu() if isinstance(coords, torch.Tensor) else np.asarray(coords)
    if values.ndim != 2 or values.shape[1] != 2:
        return [f"coordinates must be (N, 2), x and y of each tile; got shape {tuple(values.shape)}."]
    if isinstance(values, torch.Tensor):
        values = (values.double() if values.is_floating_point() else values.long()).numpy()
    faults = _not_integers(values, getattr(coords, "dtype", values.dtype))
    if faults or not len(values):
        return faults
    values = values.astype(np.int64)
    below = _negative(values)
    if below:
        return below
    outside = _outside(values, extent)
    if outside:
        return outside
    shared = _shared_cells(values, tile_size) or _same_place(values)
    beyond = [] if grid is None else grid_faults(values, tile_size, grid, sure=False)
    return [*shared, *_far_apart(values, tile_size), *beyond]


def comparable(coords: np.ndarray) -> bool:
    """Whether (N, 2) integer coordinates have enough neighbours to show a tile_size that is too small."""
    return len(_gaps(coords)) >= ENOUGH


def tile_cells(coords: np.ndarray, tile_size: int) -> np.ndarray:
    """(N, 2) int64 cells (column, row) of (N, 2) integer coordinates."""
    return np.floor_divide(coords.astype(np.int64), tile_size)


def tile_step(coords: np.ndarray) -> int | None:
    """The most common distance from a tile to the next in its row or column; None if no two tiles share one."""
    gaps = _gaps(coords)
    if not len(gaps):
        return None
    values, counts = np.unique(gaps, return_counts=True)
    return int(values[counts.argmax()])


def _gaps(coords: np.ndarray) -> np.ndarray:
    """Distances of neighbours along rows, then along columns, without those of tiles at one place."""
    found = []
    for along, across in ((coords[:, 0], coords[:, 1]), (coords[:, 1], coords[:, 0])):
        order = np.lexsort((along, across))
        step, other = np.diff(along[order]), np.diff(across[order])
        found.append(step[(other == 0) & (step > 0)])
    return np.concatenate(found)


def _not_integers(values: np.ndarray, dtype: Any) -> list[str]:
    if np.issubdtype(values.dtype, np.integer):
        return []
    name = str(dtype).removeprefix("torch.")
    if not np.issubdtype(values.dtype, np.floating):
        return [f"coordinates must be integers (pixels), got {name}."]
    text = f"coordinates must be integers (pixels), but these are {name}"
    broken = np.flatnonzero(~np.isfinite(values).all(1))
    if len(broken):
        return [f"{text} and not finite at tile {broken[0]} (float16 ends at 65504): write them as int64."]
    if len(values) and values.min() >= 0 and values.max() <= 1:
        return [f"{text} from 0 to 1, as if they were normalised: multiply them by the slide's size in pixels."]
    split = np.flatnonzero((values != np.floor(values)).any(1))
    if len(split):
        at = tuple(float(x) for x in values[split[0]])
        return [
            f"{text} with fractions, such as {at} at tile {split[0]}. They look like micrometres: divide by the slide's "
            "micrometres per pixel, round, and write them as int64."
        ]
    return [f"{text}: these are whole, so write them as int64 (above 2^11 float16, above 2^24 float32 loses pixels)."]


def _negative(values: np.ndarray) -> list[str]:
    below = np.flatnonzero((values < 0).any(1))
    if not len(below):
        return []
    return [
        f"{len(below):,} of {len(values):,} tiles have a negative coordinate, the first is tile {below[0]} at "
        f"{tuple(values[below[0]].tolist())}. Count pixels from the slide's upper left corner (rows of a class token or of "
        "padding are not tiles: leave them out)."
    ]


def _shared_cells(values: np.ndarray, tile_size: int) -> list[str]:
    cells, tiles = len(np.unique(tile_cells(values, tile_size), axis=0)), len(values)
    if cells >= UNIQUE * tiles:
        return []
    text = f"{tiles:,} tiles lie in only {cells:,} cells of tile_size={tile_size}, so tiles would share positions."
    places, step = len(np.unique(values, axis=0)), tile_step(values)
    if places < UNIQUE * tiles:
        return [f"{text} Only {places:,} of the coordinates differ: are tiles listed twice, or coordinates cut short?"]
    if step is None or step >= tile_size:
        return [f"{text} No regular grid of tiles is seen: are these x and y in pixels, of this slide?"]
    if step == 1:
        return [
            f"{text} Neighbours are 1 apart, so these look like tile numbers, not pixels: multiply them by the tile's side "
            "in pixels, or set tile_size=1."
        ]
    return [
        f"{text} Neighbours are {step} apart, {step / tile_size:.3g} of the tile_size, so these look like coordinates of "
        f"another magnification, of overlapping tiles, or in micrometres: set tile_size={step}."
    ]


def _same_place(values: np.ndarray) -> list[str]:
    """Several tiles at one place; of a regular grid none are."""
    order = np.lexsort(values.T)
    again = np.flatnonzero((np.diff(values[order], axis=0) == 0).all(1))
    if not len(again):
        return []
    first, second = sorted(int(x) for x in order[again[0] : again[0] + 2])
    place = tuple(values[first].tolist())
    return [
        f"tiles {first} and {second} both lie at {place}, and {len(again):,} of {len(values):,} tiles lie where another one "
        "does: remove those that are listed twice, or extract this slide again."
    ]


def _outside(values: np.ndarray, extent: tuple[int, int] | None) -> list[str]:
    """Tiles that begin beyond the slide."""
    if extent is None:
        return []
    beyond = np.flatnonzero((values >= np.array(extent)).any(1))
    if not len(beyond):
        return []
    tile = int(beyond[0])
    text = (
        f"{len(beyond):,} of {len(values):,} tiles begin outside of the slide, which is {extent[0]:,} pixels wide and "
        f"{extent[1]:,} high; the first is tile {tile} at {tuple(values[tile].tolist())}."
    )
    if (values < np.array(extent[::-1])).all():
        return [
            f"{text} With x and y swapped all tiles lie on it: write the coordinates as (x, y), as coords[:, ::-1]."
        ]
    return [f"{text} Are these coordinates of this slide, in pixels of its level 0?"]


def _far_apart(values: np.ndarray, tile_size: int) -> list[str]:
    gaps = _gaps(values)
    if len(gaps) < ENOUGH or gaps.min() < 1.5 * tile_size:
        return []
    step = tile_step(values)
    return [
        f"no two neighbours are closer than {gaps.min()}, with tile_size={tile_size}, so positions would be stretched by "
        f"{step / tile_size:.3g}. These look like coordinates of a finer level than the tile_size counts in (level 0 of a "
        f"slide that was read at a lower magnification): set tile_size={step}."
    ]


def grid_faults(coords: np.ndarray, tile_size: int, grid: int, sure: bool = True) -> list[str]:
    """What lies beyond n x n cells, as `coordinate_faults` says it; `sure`: the tile_size is known to be right."""
    cells = tile_cells(coords, tile_size)
    largest = cells.max(0)
    if largest.max() < grid:
        return []
    tile = int(np.flatnonzero((cells >= grid).any(1))[0])
    remedy = f"set a grid (model.grid) of at least {largest.max() + 1}"
    if not sure:
        remedy += ", or a larger tile_size if these are pixels of a finer level"
    return [
        f"the largest cell is (column {largest[0]}, row {largest[1]}), but positions exist for {grid} x {grid} cells of "
        f"{tile_size} pixels; tile {tile} at {tuple(coords[tile].tolist())} is the first beyond: {remedy}."
    ]
