"""Attention weights of tiles as a picture, and written into the slide's file.

Shape letters: N positions (tiles, and rows without a tile: a class token's, padding), T tiles of the file, H heads.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from lightning_dilated.data.slides.coordinates import check_coordinates, tile_cells
from lightning_dilated.data.slides.files import H5, SlideReader, import_h5py

#: more cells of a picture are taken for a mistake
MOST_CELLS = 10**8


def heat_map(weights: Any, coords: Any, tile_size: int = 256) -> np.ndarray:
    """One value a tile as a picture: grid[row, column] of the cell that covers pixels row * tile_size and on.

    Args:
        weights: (N,) such as `attention_weights(...)[0, :, 0].mean(0)`, the mean over heads of one query.
        coords: (N, 2) integer pixels, x and y; rows below 0 (a class token's, padding) are left out.
        tile_size: side of a tile in these pixels.

    Returns:
        (rows, columns) float64 from cell (0, 0) on, NaN where there is no tile. Where a few tiles share a cell, their sum.

    Raises:
        ValueError: for shapes that do not agree, or coordinates that `check_coordinates` refuses.
    """
    values, places = _plain(weights).astype(np.float64), _plain(coords)
    if values.ndim != 1 or places.shape != (len(values), 2):
        raise ValueError(
            f"heat_map needs weights (N,) and coords (N, 2), got {values.shape} and {places.shape}; take one query, one "
            "sample and one head, or their mean, first"
        )
    values, places = _tiles(values, places)
    check_coordinates(places, tile_size)
    if not len(values):
        raise ValueError("heat_map got no tile: every row of coords is below 0")
    columns, rows = tile_cells(places, tile_size).T
    shape = int(rows.max()) + 1, int(columns.max()) + 1
    if shape[0] * shape[1] > MOST_CELLS:
        raise ValueError(f"the heat map would have {shape[0]} x {shape[1]} cells: set a larger tile_size")
    grid = np.full(shape, np.nan)
    grid[rows, columns] = 0
    np.add.at(grid, (rows, columns), values)
    return grid


def write_attention(
    path: str | os.PathLike[str],
    weights: Any,
    coords: Any = None,
    *,
    name: str = "attention",
    features_name: str = "features",
    coords_name: str = "coords",
    overwrite: bool = False,
) -> None:
    """Add a dataset of attention weights to a slide's .h5 file, float32, a row for each tile in the file's order.

    Args:
        path: an .h5 slide with features (T, F) and coords (T, 2).
        weights: (N,) or (N, H), one row a position.
        coords: (N, 2) of the same positions, such as a batch's coords of one sample; they identify the tile of a row. Rows
            below 0 are left out, and tiles without a row get NaN. None: weights are the T tiles in the file's order,
            without a class token.
        name: of the dataset.
        features_name, coords_name: names of the slide's arrays.
        overwrite: replace a dataset of that name.

    Raises:
        ValueError: for shapes that do not agree, weights that are not finite, coordinates that the file lacks or has
            twice, a file that cannot be used, or a dataset that exists already.
        ImportError: where h5py is missing.
    """
    path = os.fspath(path)
    if not path.lower().endswith(H5):
        raise ValueError(f"{path}: attention is written to .h5 files; torch.save it next to a .pt slide yourself")
    if name in (features_name, coords_name):
        raise ValueError(f"name is {name!r}, which holds the slide itself: choose another")
    reader = SlideReader(features_name, coords_name)
    tiles = reader.inspect(path).tiles
    values = _plain(weights).astype(np.float32)
    if values.ndim not in (1, 2):
        raise ValueError(f"weights must be (N,) or (N, H), got {values.shape}; take one query and one sample first")
    if not np.isfinite(values).all():
        raise ValueError(f"weights of {path} are not all finite: nothing was written")
    if coords is not None:
        values = _in_file_order(path, values, _plain(coords), reader.read_coords(path))
    elif len(values) != tiles:
        token = ", as if with a class token: leave its row out" if len(values) == tiles + 1 else ""
        raise ValueError(f"{path} has {tiles} tiles, but weights have {len(values)} rows{token}, or give coords")
    with import_h5py().File(path, "r+") as file:
        if name in file:
            if not overwrite:
                raise ValueError(f"{path} holds {name!r} already: pass overwrite=True, or another name")
            del file[name]
        file.create_dataset(name, data=values)


def _in_file_order(path: str, values: np.ndarray, coords: np.ndarray, tiles: np.ndarray) -> np.ndarray:
    """(T, ...) with each row of `values` at the tile of its coordinates, NaN elsewhere."""
    if coords.shape != (len(values), 2):
        raise ValueError(f"coords must be ({len(values)}, 2), one for each weight; got {coords.shape}")
    values, coords = _tiles(values, coords)
    indices = {tuple(x): i for i, x in enumerate(tiles.tolist())}
    if len(indices) != len(tiles) or len({tuple(x) for x in coords.tolist()}) != len(coords):
        raise ValueError(
            f"{path}: coordinates occur twice, so they do not identify tiles: give weights in the file's order"
        )
    lost = [tuple(x) for x in coords.tolist() if tuple(x) not in indices]
    if lost:
        raise ValueError(
            f"{path} has no tile at {lost[0]} ({len(lost)} of {len(coords)} are missing): is it another slide?"
        )
    out = np.full((len(tiles), *values.shape[1:]), np.nan, dtype=values.dtype)
    out[[indices[tuple(x)] for x in coords.tolist()]] = values
    return out


def _tiles(values: np.ndarray, coords: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values, coords) without the rows of no tile."""
    real = (coords >= 0).all(1)
    return values[real], coords[real]


def _plain(x: Any) -> np.ndarray:
    if not isinstance(x, torch.Tensor):
        return np.asarray(x)
    x = x.detach().cpu()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()
