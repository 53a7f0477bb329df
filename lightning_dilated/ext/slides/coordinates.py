"""Checks of slides before training: coordinates against the tile size, files against the csv, sizes.

An encoder places a tile at the cell (floor(x / tile_size), floor(y / tile_size)). It raises no error for coordinates in
another unit or at another magnification than `tile_size`: many tiles would share a cell, or be too far apart.

Shape letters: N tiles of a slide.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lightning_dilated._validation import integer
from lightning_dilated.ext.slides.files import H5, PT, EmptySlide, Slide, slide_name
from lightning_dilated.ext.slides.labels import Row

#: minimum ratio of cells to tiles: separate grids of tissue let a few tiles share a cell, but with a wrong unit many do
UNIQUE = 0.9
#: minimum number of distances between neighbours that is needed to judge the tile size
ENOUGH = 16


def check_coordinates(
    coords: Any,
    tile_size: int = 256,
    grid: int | None = None,
    where: str = "coords",
    extent: tuple[int, int] | None = None,
) -> None:
    """Raise if coordinates look wrong for tiles of this size.

    Args:
        coords: (N, 2) x and y of each tile's upper left corner in pixels; a tensor on any device, or an array. Real
            tiles only, without rows of a class token and of padding (-1, -1).
        tile_size: side of a tile in the same pixels, such as TRIDENT's `patch_size_level0` for its level-0 coordinates.
        grid: number of cells along an axis that have positions; None for no limit.
        where: prefix of the error; name the slide.
        extent: (width, height) of the slide in the same pixels, if known.

    Raises: ValueError with every fault and its remedy.
    """
    faults = coordinate_faults(coords, tile_size, grid, extent)
    if faults:
        raise ValueError(f"{where}: {' '.join(faults)}")


def coordinate_faults(
    coords: Any, tile_size: int = 256, grid: int | None = None, extent: tuple[int, int] | None = None
) -> list[str]:
    """Return a sentence for each fault that `check_coordinates` reports; its arguments are the same."""
    tile_size = integer(tile_size, "tile_size", 1)
    grid = None if grid is None else integer(grid, "grid", 1)
    values = coords.detach().cpu() if isinstance(coords, torch.Tensor) else np.asarray(coords)
    if values.ndim != 2 or values.shape[1] != 2:
        return [f"coordinates must be (N, 2), x and y of each tile; got shape {tuple(values.shape)}."]
    if isinstance(values, torch.Tensor):
        values = (values.double() if values.is_floating_point() else values.long()).numpy()
    fault = _not_integers(values, getattr(coords, "dtype", values.dtype))
    if fault or not len(values):
        return [fault] if fault else []
    values = values.astype(np.int64)
    fault = _negative(values) or _outside(values, extent)
    if fault:
        return [fault]
    faults = [_shared_cells(values, tile_size) or _same_place(values), _far_apart(values, tile_size)]
    if grid is not None:
        faults.append(grid_fault(values, tile_size, grid, tile_size_known=False))
    return [fault for fault in faults if fault]


def comparable(coords: np.ndarray) -> bool:
    """Return whether (N, 2) integer coordinates have enough neighbours to show a tile_size that is too small."""
    return len(_gaps(coords)) >= ENOUGH


def tile_cells(coords: np.ndarray, tile_size: int) -> np.ndarray:
    """Return cells (column, row), (N, 2) int64, of (N, 2) integer coordinates."""
    return np.floor_divide(coords.astype(np.int64), tile_size)


def tile_step(coords: np.ndarray) -> int | None:
    """Return the most common distance of neighbours in a row or column, or None if no row or column has two tiles."""
    gaps = _gaps(coords)
    if not len(gaps):
        return None
    values, counts = np.unique(gaps, return_counts=True)
    return int(values[counts.argmax()])


def _gaps(coords: np.ndarray) -> np.ndarray:
    """Return distances of neighbours along rows, then along columns; ignores tiles at the same place."""
    gaps = []
    for along, across in ((coords[:, 0], coords[:, 1]), (coords[:, 1], coords[:, 0])):
        order = np.lexsort((along, across))
        step, other = np.diff(along[order]), np.diff(across[order])
        gaps.append(step[(other == 0) & (step > 0)])
    return np.concatenate(gaps)


def _not_integers(values: np.ndarray, dtype: Any) -> str:
    if np.issubdtype(values.dtype, np.integer):
        return ""
    name = str(dtype).removeprefix("torch.")
    if not np.issubdtype(values.dtype, np.floating):
        return f"coordinates must be integers (pixels), got {name}."
    text = f"coordinates must be integers (pixels), but these are {name}"
    broken = np.flatnonzero(~np.isfinite(values).all(1))
    if len(broken):
        return f"{text} and not finite at tile {broken[0]} (float16 ends at 65504): write them as int64."
    if len(values) and values.min() >= 0 and values.max() <= 1:
        return f"{text} from 0 to 1, as if they were normalised: multiply them by the slide's size in pixels."
    split = np.flatnonzero((values != np.floor(values)).any(1))
    if len(split):
        point = tuple(float(x) for x in values[split[0]])
        return (
            f"{text} with fractions, such as {point} at tile {split[0]}. They look like micrometres: divide by the slide's "
            "micrometres per pixel, round, and write them as int64."
        )
    return f"{text}: these are whole, so write them as int64 (above 2^11 float16, above 2^24 float32 loses pixels)."


def _negative(values: np.ndarray) -> str:
    negative = np.flatnonzero((values < 0).any(1))
    if not len(negative):
        return ""
    return (
        f"{len(negative):,} of {len(values):,} tiles have a negative coordinate, the first is tile {negative[0]} at "
        f"{tuple(values[negative[0]].tolist())}. Count pixels from the slide's upper left corner (rows of a class token or "
        "of padding are not tiles: leave them out)."
    )


def _shared_cells(values: np.ndarray, tile_size: int) -> str:
    cells, tiles = len(np.unique(tile_cells(values, tile_size), axis=0)), len(values)
    if cells >= UNIQUE * tiles:
        return ""
    text = f"{tiles:,} tiles lie in only {cells:,} cells of tile_size={tile_size}, so tiles would share positions."
    places, step = len(np.unique(values, axis=0)), tile_step(values)
    if places < UNIQUE * tiles:
        return f"{text} Only {places:,} of the coordinates differ: are tiles listed twice, or coordinates cut short?"
    if step is None or step >= tile_size:
        return f"{text} No regular grid of tiles is seen: are these x and y in pixels, of this slide?"
    if step == 1:
        return (
            f"{text} Neighbours are 1 apart, so these look like tile numbers, not pixels: multiply them by the tile's side "
            "in pixels, or set tile_size=1."
        )
    return (
        f"{text} Neighbours are {step} apart, {step / tile_size:.3g} of the tile_size, so these look like coordinates of "
        f"another magnification, of overlapping tiles, or in micrometres: set tile_size={step}."
    )


def _same_place(values: np.ndarray) -> str:
    order = np.lexsort(values.T)
    repeated = np.flatnonzero((np.diff(values[order], axis=0) == 0).all(1))
    if not len(repeated):
        return ""
    first, second = sorted(int(x) for x in order[repeated[0] : repeated[0] + 2])
    place = tuple(values[first].tolist())
    return (
        f"tiles {first} and {second} both lie at {place}, and {len(repeated):,} of {len(values):,} tiles lie where another "
        "one does: remove those that are listed twice, or extract this slide again."
    )


def _outside(values: np.ndarray, extent: tuple[int, int] | None) -> str:
    if extent is None:
        return ""
    beyond = np.flatnonzero((values >= np.array(extent)).any(1))
    if not len(beyond):
        return ""
    tile = int(beyond[0])
    text = (
        f"{len(beyond):,} of {len(values):,} tiles begin outside of the slide, which is {extent[0]:,} pixels wide and "
        f"{extent[1]:,} high; the first is tile {tile} at {tuple(values[tile].tolist())}."
    )
    if (values < np.array(extent[::-1])).all():
        return f"{text} With x and y swapped all tiles lie on it: write the coordinates as (x, y), as coords[:, ::-1]."
    return f"{text} Are these coordinates of this slide, in pixels of its level 0?"


def _far_apart(values: np.ndarray, tile_size: int) -> str:
    gaps = _gaps(values)
    if len(gaps) < ENOUGH or gaps.min() < 1.5 * tile_size:
        return ""
    step = tile_step(values)
    return (
        f"no two neighbours are closer than {gaps.min()}, with tile_size={tile_size}, so positions would be stretched by "
        f"{step / tile_size:.3g}. These look like coordinates of a finer level than the tile_size counts in (level 0 of a "
        f"slide that was read at a lower magnification): set tile_size={step}."
    )


def overlap_fault(coords: np.ndarray, tile_size: int, slide: Slide) -> str:
    """Return a fault if a file states a side but no overlap, and most neighbours are not `tile_size` apart.

    CLAM writes such files if step_size is below patch_size. Cells of the stated side would then contain several tiles.
    """
    gaps = _gaps(coords)
    if slide.tile_size is None or slide.overlap_known or len(gaps) < ENOUGH:
        return ""
    step = tile_step(coords)
    regular = 2 * np.count_nonzero(gaps == step) >= len(gaps)
    if step is None or not regular or step == tile_size or min(step, tile_size) >= slide.tile_size:
        return ""
    return (
        f"neighbours are {step} apart, but tile_size={tile_size}. The tiles are {slide.tile_size} wide, and the file does "
        f"not state by how much they overlap: set data.tile_size and the model's tile_size to {step}."
    )


def grid_fault(coords: np.ndarray, tile_size: int, grid: int, tile_size_known: bool = True) -> str:
    cells = tile_cells(coords, tile_size)
    largest = cells.max(0)
    if largest.max() < grid:
        return ""
    tile = int(np.flatnonzero((cells >= grid).any(1))[0])
    remedy = f"set a grid (model.grid) of at least {largest.max() + 1}"
    if not tile_size_known:
        remedy += ", or a larger tile_size if these are pixels of a finer level"
    return (
        f"the largest cell is (column {largest[0]}, row {largest[1]}), but positions exist for {grid} x {grid} cells of "
        f"{tile_size} pixels; tile {tile} at {tuple(coords[tile].tolist())} is the first beyond: {remedy}."
    )


# -- files, the csv and sizes ------------------------------------------------------------------------------------------
#: maximum number of faults that one error lists
SHOWN = 5


@dataclass
class Inventory:
    """The slides of a SlideDataModule with their splits and labels, in one order.

    `labels` has a number or (time, event) for each slide. `groups` has the name of each slide's group, such as a
    patient. `by_column`: whether the splits are from the csv. `largest`: the largest coordinates (x, y) of each slide.
    """

    slides: list[Slide]
    splits: list[str]
    by_column: bool
    labels: list[Any] | None
    classes: list[str] | None
    groups: list[str]
    largest: list[tuple[int, int]] = field(default_factory=list)


def matched(
    files: dict[str, str], rows: list[Row] | None, csv: str, leave_out: bool
) -> tuple[list[str], list[Row] | None]:
    """Match files and rows, in the order of the files; unmatched ones raise an error, or are dropped with a warning."""
    if rows is None:
        return list(files.values()), None
    row_of = {row.slide: row for row in rows}
    faults = [f"{csv}, line {row.line}: no file is called {row.slide}" for row in rows if row.slide not in files]
    faults += [f"{path} has no line in {csv}" for name, path in files.items() if name not in row_of]
    names = [name for name in files if name in row_of]
    if faults and not leave_out:
        remedy = "correct names, data.paths or the csv, or set data.unmatched to 'leave_out'"
        raise ValueError(f"{_listed('slides lack a file or a label', faults)}\nTo go on, {remedy}")
    if not names:
        raise ValueError(f"no file of data.paths is named in {csv}; the first faults: {faults[0]}; {faults[-1]}")
    if faults:
        warnings.warn(_listed("slides are left out", faults), stacklevel=3)
    return [files[name] for name in names], [row_of[name] for name in names]


def inspected(
    inspect: Any, files: list[str], rows: list[Row] | None, leave_out: bool
) -> tuple[list[Slide], list[Row] | None]:
    """Return `inspect(path)` of each file, and its row. Empty slides are an error, or are dropped with a warning."""
    empty: list[str] = []

    def inspect_one(path: str) -> Slide | None:
        try:
            return inspect(path)
        except EmptySlide as error:
            if not leave_out:
                raise
            empty.append(str(error).split(":")[0])
            return None

    looked = each("slides cannot be used", inspect_one, files)
    if len(empty) == len(files):
        raise ValueError(f"none of the {len(files)} slides has a tile, the first is {files[0]}: extract them again")
    if empty:
        warnings.warn(_listed("slides without a tile are left out", empty), stacklevel=3)
    slides = [slide for slide in looked if slide is not None]
    if rows is not None:
        rows = [row for row, slide in zip(rows, looked, strict=True) if slide is not None]
    return slides, rows


def check_sizes(slides: list[Slide], max_tiles: int | None) -> None:
    """Raise ValueError if slides differ in F, or one has more than `max_tiles` tiles."""
    odd = next((s for s in slides if s.width != slides[0].width), None)
    if odd is not None:
        raise ValueError(
            f"{slides[0].path} has {slides[0].width} features a tile, but {odd.path} has {odd.width}: all slides "
            "must come from one tile encoder"
        )
    longest = max(slides, key=lambda s: s.tiles)
    if max_tiles is not None and longest.tiles > max_tiles:
        count = sum(s.tiles > max_tiles for s in slides)
        raise ValueError(
            f"{count} of {len(slides)} slides have more than data.max_tiles = {max_tiles} tiles; the longest is "
            f"{longest.path} with {longest.tiles}: raise data.max_tiles, or set data.over to 'sample'"
        )


def one_tile_size(slides: list[Slide], tile_size: int | None) -> int | None:
    """Return the tile side that the option or the slides state, or None. Raises ValueError if they disagree."""
    stated = {s.tile_size: s.path for s in reversed(slides) if s.tile_size}
    if tile_size is not None:
        # a smaller size is the distance of overlapping tiles, which `overlap_fault` compares with the coordinates
        unequal = [s for s in slides if s.tile_size not in (None, tile_size)]
        other = next((s for s in unequal if s.overlap_known or tile_size > (s.tile_size or 0)), None)
        if other is not None:
            raise ValueError(
                f"{other.path} states that its tiles are {other.tile_size} level-0 pixels wide, but data.tile_size is "
                f"{tile_size}: set it to {other.tile_size}, or to null"
            )
        return tile_size
    if len(stated) > 1:
        statements = ", ".join(f"{path} states {size}" for size, path in sorted(stated.items()))
        raise ValueError(
            f"slides have tiles of different level-0 widths ({statements}), so one model would place them differently: "
            "train on slides of one magnification, or cut the tiles again"
        )
    return next(iter(stated), None)


def by_name(paths: list[str]) -> dict[str, str]:
    """Return {slide: file}; raise ValueError for an unsupported file, or for two files with the same name."""
    files: dict[str, str] = {}
    for file in paths:
        if not file.lower().endswith((*H5, *PT)):
            raise ValueError(f"{file} is not a slide file: data.paths takes files ending in {', '.join((*H5, *PT))}")
        first = files.setdefault(slide_name(file), file)
        if first != file:
            raise ValueError(f"{first} and {file} are both slide {slide_name(file)!r}: leave one out of data.paths")
    return files


def each(what: str, function: Any, items: list[Any]) -> list[Any]:
    """Return [function(item) ...]; collect the ValueErrors of all items into one."""
    results, faults = [], []
    for item in items:
        try:
            results.append(function(item))
        except ValueError as error:
            faults.append(str(error))
    if faults:
        raise ValueError(faults[0] if len(faults) == 1 else _listed(what, faults))
    return results


def _listed(what: str, faults: list[str]) -> str:
    hidden = f"\nand {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return f"{len(faults)} {what}:\n" + "\n".join(faults[:SHOWN]) + hidden
