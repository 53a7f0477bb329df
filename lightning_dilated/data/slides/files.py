"""Reading slide files (.h5 and .pt): what a file holds, and the features and coordinates of chosen tiles.

A file is opened for each read and closed after it, so nothing that is open can cross a fork or be pickled.
Shape letters: T tiles of a slide, F features of a tile, n chosen tiles.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dilated.data.content import spread
from lightning_dilated.data.paths import refuse_special
from lightning_dilated.data.slides.attributes import extent_of, tile_size_of
from lightning_dilated.data.slides.h5_files import check_declared_size, opened_h5, own_dataset

H5 = (".h5", ".hdf5")
PT = (".pt", ".pth")
#: endings of images, which names of feature files and ids of a csv may carry or not
IMAGES = (".svs", ".tif", ".tiff", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vsi", ".czi")
#: rows of one read, so that what is converted and checked at a time stays small
BLOCK = 4096
#: rows at most this far apart are read together: a call costs as much as some rows
NEAR = 16
#: tiles of a slide that its fingerprint looks at
SAMPLED = 8


@dataclass(frozen=True)
class Slide:
    """What the head of a file says.

    `tile_size` is the side of a tile and `extent` the slide's (width, height), in level-0 pixels; None where not said.
    """

    path: str
    tiles: int
    width: int
    tile_size: int | None = None
    extent: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """As `slide_name`."""
        return slide_name(self.path)


def slide_name(path: str) -> str:
    """What a file and its line in a csv are matched by: the name without folders and endings of files and images."""
    name = os.path.basename(path)
    while True:
        ending = next((x for x in (*H5, *PT, *IMAGES) if name.lower().endswith(x) and len(name) > len(x)), "")
        if not ending:
            return name
        name = name[: -len(ending)]


class EmptySlide(ValueError):
    """A slide without a tile."""


class _Rows:
    """The rows of a stored (T, W) or (1, T, W) array."""

    def __init__(self, array: Any) -> None:
        self.array, self.boxed = array, len(array.shape) == 3
        self.count, self.width = (int(x) for x in array.shape[-2:])

    def read(self, start: int, stop: int) -> Tensor:
        """(stop - start, W), of signed integers or floats."""
        found = self.array[0, start:stop] if self.boxed else self.array[start:stop]
        if isinstance(found, Tensor):
            return found
        wanted = np.int64 if found.dtype.kind in "ui" else found.dtype.newbyteorder("=")
        return torch.from_numpy(np.ascontiguousarray(found, dtype=wanted))

    def pick(self, rows: np.ndarray) -> Tensor:
        """(n, W) of rising rows, in one read of all from the first to the last."""
        found = self.read(int(rows[0]), int(rows[-1]) + 1)
        return found if len(found) == len(rows) else found[torch.from_numpy(rows - rows[0])]


@dataclass(frozen=True)
class SlideReader:
    """Reads slides whose arrays are called so.

    Args:
        features: name of the (T, F) or (1, T, F) array; a .pt file may also hold that tensor alone.
        coords: name of the (T, 2) array of pixel coordinates; None for slides that are read without.
        dtype: of the features that are handed out.
    """

    features: str = "features"
    coords: str | None = "coords"
    dtype: torch.dtype = torch.float32

    def inspect(self, path: str) -> Slide:
        """Look at names, shapes and types, reading no row.

        Raises:
            EmptySlide: for a file without tiles.
            ValueError: for a file that cannot be used, with its path, what was found and what to change.
            ImportError: where h5py is needed and missing.
        """
        with self._opened(path) as (features, coords):
            for name, rows in ((self.features, features), (str(self.coords), coords)):
                if rows is not None and not isinstance(rows.array, Tensor):
                    check_declared_size(path, rows.array, name)
            left = {} if coords is None else getattr(coords.array, "attrs", {})
            return Slide(path, features.count, features.width, tile_size_of(path, left), extent_of(path, left))

    def read(self, path: str, rows: np.ndarray) -> tuple[Tensor, Tensor | None]:
        """Features (n, F) and coordinates (n, 2) int64 of the tiles `rows` (n,), in that order.

        No other tile is read, but for those between tiles that lie at most NEAR rows apart.

        Raises:
            ValueError: as `inspect`, and for a feature that is not finite, with the tile's number.
        """
        with self._opened(path) as (features, coords):
            values = torch.empty(len(rows), features.width, dtype=self.dtype)
            places = None if coords is None else torch.empty(len(rows), 2, dtype=torch.int64)
            for at in _runs(rows):
                values[at] = self._finite(path, features.pick(rows[at]), rows[at])
                if coords is not None:
                    places[at] = coords.pick(rows[at]).long()
        return values, places

    def read_coords(self, path: str) -> np.ndarray:
        """All coordinates, (T, 2) int64. Raises ValueError as `inspect`, or where they are read without."""
        with self._opened(path) as (_, coords):
            if coords is None:
                raise ValueError(f"{path} is read without coordinates: set data.coords_name to the array's name")
            return coords.read(0, coords.count).long().numpy()

    def digest(self, path: str) -> bytes:
        """A digest of the features and coordinates of SAMPLED tiles, the first and the last among them; of nothing else in
        the file, so that attention may be written into it."""
        digest = hashlib.blake2b(digest_size=16)
        with self._opened(path) as (features, coords):
            for rows in (features, coords):
                for tile in spread(rows.count, SAMPLED) if rows is not None else ():
                    digest.update(rows.read(tile, tile + 1).contiguous().view(torch.uint8).numpy().tobytes())
        return digest.digest()

    def _finite(self, path: str, values: Tensor, tiles: np.ndarray) -> Tensor:
        """The values of these tiles in the reader's dtype."""
        out = values.to(self.dtype)
        # one pass without a mask: in float64 the sum of finite terms of these types is finite
        if out.sum(dtype=torch.float64).isfinite():
            return out
        wrong = (~out.isfinite()).any(1).nonzero()
        if not len(wrong):
            return out
        row = int(wrong[0])
        tile, name = int(tiles[row]), str(self.dtype).removeprefix("torch.")
        if values[row].isfinite().all():
            largest = float(values[row].abs().max())
            remedy = "scale this slide's features"
            if self.dtype == torch.float16:
                remedy = "set data.feature_dtype to 'float32' or 'bfloat16'"
            raise ValueError(f"{path}: a feature of tile {tile} is {largest:.3g}, too large for {name}: {remedy}")
        kind = "NaN" if values[row].isnan().any() else "infinite"
        raise ValueError(
            f"{path}: tile {tile} has a feature that is {kind} in {self.features!r}: extract this slide's features "
            "again, or remove the tile from the file"
        )

    @contextmanager
    def _opened(self, path: str) -> Iterator[tuple[_Rows, _Rows | None]]:
        """(features, coords) of an open file, after all checks that need no row."""
        refuse_special(path)
        with opened_h5(path) if path.lower().endswith(H5) else _pt(path, self.features) as arrays:
            yield self._checked(path, arrays)

    def _checked(self, path: str, arrays: Any) -> tuple[_Rows, _Rows | None]:
        features = _array(path, arrays, self.features, "data.features_name")
        shape = tuple(features.shape)
        if not (len(shape) == 2 or (len(shape) == 3 and shape[0] == 1)):
            raise ValueError(
                f"{path}: {self.features!r} has shape {shape}, but it must be (tiles, features) or (1, tiles, features)"
            )
        if _kind(features) != "f":
            raise ValueError(f"{path}: {self.features!r} holds {features.dtype}, but features must be floating point")
        if 0 in shape:
            raise EmptySlide(
                f"{path}: the slide is empty, {self.features!r} has shape {shape}: remove the file, or set data.unmatched "
                "to 'leave_out'"
            )
        if self.coords is None:
            return _Rows(features), None
        remedy = "data.coords_name to the array of x and y (a SlideEncoder needs one; null does for models that do not)"
        coords = _array(path, arrays, self.coords, remedy)
        self._check_coords(path, coords, shape[-2])
        return _Rows(features), _Rows(coords)

    def _check_coords(self, path: str, coords: Any, tiles: int) -> None:
        shape, name = tuple(coords.shape), self.coords
        if len(shape) not in (2, 3) or shape[-1] != 2 or (len(shape) == 3 and shape[0] != 1):
            raise ValueError(f"{path}: {name!r} has shape {shape}, but it must be (tiles, 2), x and y of each tile")
        if _kind(coords) != "i":
            raise ValueError(
                f"{path}: {name!r} holds {coords.dtype}, but coordinates must be integers: pixels of the slide, not "
                "micrometres or shares of its size. Convert them, round, and write them as int64"
            )
        if shape[-2] != tiles:
            raise ValueError(
                f"{path}: {self.features!r} has {tiles} tiles and {name!r} has {shape[-2]}; each tile needs both: "
                "extract this slide again"
            )


def _kind(array: Any) -> str:
    """ "f" for floating point, "i" for integers, else another letter."""
    if isinstance(array, Tensor):
        plain = not (array.is_complex() or array.dtype == torch.bool)
        return "f" if array.is_floating_point() else "i" if plain else "?"
    return {"u": "i"}.get(array.dtype.kind, array.dtype.kind)


def _runs(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Places `at` in `rows` that are read together: rows[at] rises by at most NEAR, over at most BLOCK rows of the file."""
    order = np.argsort(rows, kind="stable")
    for run in np.split(order, np.flatnonzero(np.diff(rows[order]) > NEAR) + 1):
        if len(run):
            span = (rows[run] - rows[run[0]]) // BLOCK
            yield from np.split(run, np.flatnonzero(np.diff(span)) + 1)


def _array(path: str, arrays: Any, name: str, option: str) -> Any:
    """The array of that name in an h5 file or a mapping."""
    found = arrays.get(name) if isinstance(arrays, dict) else own_dataset(path, arrays, name)
    if found is None:
        there = ", ".join(sorted(map(str, arrays.keys()))) or "nothing"
        raise ValueError(f"{path} has no {name!r}; it holds {there}: set {option}")
    if not hasattr(found, "shape") or not hasattr(found, "dtype"):
        raise ValueError(f"{path}: {name!r} is a {type(found).__name__}, not an array: set {option}")
    if isinstance(found, Tensor):
        _check_stored(path, found, name)
        return found.detach()
    if not hasattr(found, "chunks"):
        raise ValueError(f"{path}: {name!r} is a {type(found).__name__}: save it as a torch tensor")
    return found


def _check_stored(path: str, tensor: Tensor, name: str) -> None:
    """Raise ValueError for a tensor whose values are not all in the file."""
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not plain or tensor.is_nested:
        kind = str(tensor.layout).removeprefix("torch.") if tensor.layout != torch.strided else tensor.device.type
        kind = "quantized" if tensor.is_quantized else kind
        raise ValueError(
            f"{path}: {name!r} is a {kind} tensor: save an ordinary one, as of .to_dense() or .dequantize()"
        )
    stored = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.numel() > stored:
        raise ValueError(
            f"{path}: {name!r} declares the shape {tuple(tensor.shape)}, but the file holds only {stored:,} of its "
            f"{tensor.numel():,} values (an expanded view): extract this slide again, or save tensor.clone()"
        )


@contextmanager
def _pt(path: str, features: str) -> Iterator[dict[str, Any]]:
    """The tensors of a file, mapped to memory where its format allows that, so that only rows that are used are read."""
    try:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            found = torch.load(path, map_location="cpu", weights_only=True)  # written by torch before 1.6
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is no file of plain tensors, which alone are loaded (weights_only): "
            f"torch.save a tensor, or a dict of tensors ({_first_line(error)})"
        ) from error
    except (RuntimeError, EOFError, ValueError) as error:
        raise ValueError(f"{path} is no torch file, or cut short: write it again ({_first_line(error)})") from error
    if isinstance(found, Tensor):
        found = {features: found}
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, but it must be a tensor or a dict of tensors")
    yield found


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
