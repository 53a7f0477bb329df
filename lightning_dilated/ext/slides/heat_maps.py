"""Attention weights of tiles as a grid, as a PNG over the slide's thumbnail, or written into the slide's file.

Shape letters: N positions (tiles, class token, padding), T tiles of the file, H heads.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from lightning_dilated._validation import one_of, refuse_special
from lightning_dilated.data.opener import refuse_url
from lightning_dilated.ext.slides.coordinates import check_coordinates, tile_cells
from lightning_dilated.ext.slides.files import H5, SlideReader, import_h5py

#: maximum number of cells of a picture; more raise an error, because they are probably a mistake
MOST_CELLS = 10**8


def heat_map(weights: Any, coords: Any, tile_size: int = 256) -> np.ndarray:
    """Return a picture with one value per tile; grid[row, column] covers pixels from (row, column) * tile_size on.

    Args:
        weights: (N,) such as `encoder.attention_map(...)[0]`, or `attention_weights(...)[0, :, 0].mean(0)` of other
            models.
        coords: (N, 2) integer pixels, x and y; rows below 0 (class token, padding) are left out.
        tile_size: side of a tile in these pixels.

    Returns:
        (rows, columns) float64 from cell (0, 0) on, NaN without a tile. Tiles that share a cell are summed.

    Raises: ValueError for shapes that do not agree, or coordinates that `check_coordinates` refuses.
    """
    values, places = _tile_weights("heat_map", weights, coords, tile_size)
    columns, rows = tile_cells(places, tile_size).T
    shape = int(rows.max()) + 1, int(columns.max()) + 1
    if shape[0] * shape[1] > MOST_CELLS:
        raise ValueError(f"the heat map would have {shape[0]} x {shape[1]} cells: set a larger tile_size")
    grid = np.full(shape, np.nan)
    grid[rows, columns] = 0
    np.add.at(grid, (rows, columns), values)
    return grid


#: without a thumbnail: maximum number of pixels of a picture's longer side, and of a tile's side
LONGEST, LARGEST_TILE = 2048, 16
#: maximum difference between the proportions of a thumbnail and of the slide
PROPORTION = 0.05
COLOURS, OPACITY = "inferno", 0.6


def write_heat_map(
    path: str | os.PathLike[str],
    weights: Any,
    coords: Any,
    tile_size: int = 256,
    *,
    thumbnail: str | os.PathLike[str] | None = None,
    slide_size: tuple[int, int] | None = None,
    scale: str = "rank",
) -> None:
    """Write a PNG of attention weights: a coloured square per tile, dark for small and bright for large weights.

    Args:
        path: path of the picture.
        weights: (N,), as in `heat_map`.
        coords: (N, 2) integer pixels, x and y; rows below 0 are left out.
        tile_size: side of a tile in these pixels.
        thumbnail: a picture of the whole slide, on which tiles are drawn half transparent; None: a white background.
        slide_size: (width, height) of the slide in the pixels of coords; needed with a thumbnail.
        scale: "rank" colours by the share of tiles with less weight, which shows differences even if weights are
            skewed; "linear" from the smallest weight to the largest.

    Raises:
        ValueError: as in `heat_map`; for a thumbnail without `slide_size`, or with proportions unlike the slide's.
        FileNotFoundError: for a missing thumbnail.
    """
    from matplotlib import colormaps
    from PIL import Image

    one_of(scale, "scale", ("rank", "linear"))
    values, places = _tile_weights("write_heat_map", weights, coords, tile_size)
    order = values.argsort(kind="stable")
    if thumbnail is None:
        zoom = min(LARGEST_TILE / tile_size, LONGEST / (places.max() + tile_size))
        picture, factors, opacity = None, np.array([zoom, zoom]), 1.0
    else:
        picture = np.array(_open_thumbnail(thumbnail))
        factors, opacity = _factors(thumbnail, picture.shape[:2], slide_size), OPACITY
    starts = np.floor(places * factors).astype(int)
    stops = np.maximum(np.floor((places + tile_size) * factors).astype(int), starts + 1)
    canvas = np.full((*stops.max(0)[::-1], 3), 255, np.uint8) if picture is None else picture
    colours = 255 * colormaps[COLOURS](_shares(values, scale))[:, :3]
    ground = canvas.copy()
    for i in order:  # draw the largest last, because tiles may share a pixel
        at = slice(starts[i, 1], stops[i, 1]), slice(starts[i, 0], stops[i, 0])
        canvas[at] = np.round(opacity * colours[i] + (1 - opacity) * ground[at])
    Image.fromarray(canvas).save(os.fspath(path), format="PNG")


def _shares(values: np.ndarray, scale: str) -> np.ndarray:
    """Return each value's place in the range of colours, (N,) from 0 to 1; equal values get the same place."""
    if scale == "linear":
        return (values - values.min()) / (np.ptp(values) or 1.0)
    distinct, number, counts = np.unique(values, return_inverse=True, return_counts=True)
    below = np.cumsum(counts) - counts
    return below[number] / max(1, below[-1]) if len(distinct) > 1 else np.zeros(len(values))


def _open_thumbnail(path: str | os.PathLike[str]) -> Any:
    from PIL import Image, UnidentifiedImageError

    refuse_special(path)
    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    except FileNotFoundError:
        raise FileNotFoundError(f"thumbnail {os.fspath(path)}: no such file") from None
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError) as error:
        raise ValueError(f"thumbnail {os.fspath(path)} cannot be read as a picture ({error}): make it again") from error


def _factors(path: Any, shape: tuple[int, int], slide_size: tuple[int, int] | None) -> np.ndarray:
    """Return thumbnail pixels per slide pixel along x and y, (2,)."""
    if slide_size is None:
        raise ValueError(
            f"thumbnail {os.fspath(path)} needs the slide's size, which the slide's file does not state: give slide_size, "
            "width and height in the pixels of coords, or leave the thumbnail out"
        )
    factors = np.array(shape[::-1]) / np.array(slide_size)
    if abs(factors[0] / factors[1] - 1) > PROPORTION:
        raise ValueError(
            f"thumbnail {os.fspath(path)} has {shape[1]} x {shape[0]} pixels, but the slide has {slide_size[0]} x "
            f"{slide_size[1]}, other proportions: is it rotated, or a picture of another slide?"
        )
    return factors


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
        weights: (N,) or (N, H), one row per position.
        coords: (N, 2) of the same positions, such as a sample's coords in a batch; they identify the tile of a row.
            Rows below 0 are left out, and tiles without a row get NaN. None: the rows are the T tiles in the file's
            order, without a class token.
        name: name of the dataset.
        features_name, coords_name: names of the slide's arrays.
        overwrite: replace a dataset of that name.

    Raises:
        ValueError: for shapes that do not agree, weights that are not finite, coordinates that the file lacks or has
            twice, an unusable file, or a dataset that exists.
        ImportError: if h5py is missing.
    """
    path = os.fspath(path)
    refuse_url(path, "path")
    if not path.lower().endswith(H5):
        raise ValueError(f"{path}: attention is written to .h5 files only; for a .pt slide, torch.save it separately")
    if name in (features_name, coords_name):
        raise ValueError(f"name is {name!r}, which is an array of the slide itself: choose another")
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
    """Return (T, ...) with each row of `values` at the tile of its coordinates, NaN elsewhere."""
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
            f"{path} has no tile at {lost[0]} ({len(lost)} of {len(coords)} are missing): are the weights of another slide?"
        )
    out = np.full((len(tiles), *values.shape[1:]), np.nan, dtype=values.dtype)
    out[[indices[tuple(x)] for x in coords.tolist()]] = values
    return out


def _tile_weights(name: str, weights: Any, coords: Any, tile_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Check rows and return (values (T,) float64, coords (T, 2)) of the tiles; errors name the function `name`."""
    values, places = _plain(weights).astype(np.float64), _plain(coords)
    if values.ndim != 1 or places.shape != (len(values), 2):
        raise ValueError(
            f"{name} needs weights (N,) and coords (N, 2), got {values.shape} and {places.shape}; take one query, one "
            "sample and one head, or their mean, first"
        )
    values, places = _tiles(values, places)
    check_coordinates(places, tile_size)
    if not len(values):
        raise ValueError(f"{name} got no tile: every row of coords is below 0")
    return values, places


def _tiles(values: np.ndarray, coords: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Remove rows that are not tiles from (values, coords)."""
    real = (coords >= 0).all(1)
    return values[real], coords[real]


def _plain(x: Any) -> np.ndarray:
    if not isinstance(x, torch.Tensor):
        return np.asarray(x)
    x = x.detach().cpu()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()
