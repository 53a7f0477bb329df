"""Slide files (.h5 and .pt): their attributes, and the features and coordinates of chosen tiles.

A file is opened for each read and closed after it, so that no handle crosses a fork or is pickled.

Shape letters: T tiles of a slide, F features of a tile, n chosen tiles.
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dilated._validation import refuse_special
from lightning_dilated.data.opener import FileOpener, is_url
from lightning_dilated.ext.files.files import spread
from lightning_dilated.ext.text.remote import RemoteFile

# -- sizes in the attributes -------------------------------------------------------------------------------------------
# TRIDENT writes `patch_size_level0`, `level0_width` and `level0_height`, and `overlap` in the pixels of `patch_size`.
# CLAM writes `patch_size` and `downsampled_level_dim`, which count pixels of the level `patch_level`, and `downsample`,
# the number of level-0 pixels per pixel of that level. Coordinates of both programs count level-0 pixels.

#: number of pixels that no slide reaches; an attribute that is larger is not a size
_LARGEST = 1 << 31


def states_overlap(attributes: Mapping[str, Any]) -> bool:
    """Return whether the attributes state the overlap of tiles; CLAM's do not if step_size is below patch_size."""
    return all(name in attributes for name in ("patch_size_level0", "overlap", "patch_size"))


def tile_size_of(path: str, attributes: Mapping[str, Any]) -> int | None:
    """Return the side of a tile in level-0 pixels, less a stated overlap (`states_overlap`), or None if not stated.

    Raises: ValueError for an invalid attribute, with file and attribute.
    """
    if "patch_size_level0" in attributes:  # TRIDENT
        side = _whole(path, attributes, "patch_size_level0")
        if not states_overlap(attributes):
            return side
        size, overlap = _whole(path, attributes, "patch_size"), _numbers(path, attributes, "overlap", 1, least=0)[0]
        if overlap >= size:
            raise _wrong(path, attributes, "overlap", f"below the patch_size {size}")
        return side - round(overlap * side / size)
    if "patch_size" not in attributes or "patch_level" not in attributes:
        return None
    size = _whole(path, attributes, "patch_size")
    if _numbers(path, attributes, "patch_level", 1, least=0)[0] == 0:  # CLAM
        return size
    if "downsample" not in attributes:
        return None
    # CLAM rounds `downsample` down when it steps from tile to tile
    return size * int(_numbers(path, attributes, "downsample", 1, least=1)[0])


def extent_of(path: str, attributes: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return a lower bound (width, height) of the slide in level-0 pixels, or None if the attributes lack it.

    Raises: the errors that `tile_size_of` raises.
    """
    if "level0_width" in attributes and "level0_height" in attributes:  # TRIDENT
        return _whole(path, attributes, "level0_width"), _whole(path, attributes, "level0_height")
    if "downsampled_level_dim" not in attributes or "downsample" not in attributes:
        return None
    size = _numbers(path, attributes, "downsampled_level_dim", 2)  # CLAM
    factor = _numbers(path, attributes, "downsample", 1)[0]
    width, height = (
        math.ceil((x + 1) * factor) if factor > 1 else math.ceil(x) for x in size
    )  # CLAM rounds the sizes of levels down
    return width, height


def _whole(path: str, attributes: Mapping[str, Any], name: str) -> int:
    (value,) = _numbers(path, attributes, name, 1)
    if value != round(value):
        raise _wrong(path, attributes, name, "a whole number of pixels")
    return int(value)


def _numbers(path: str, attributes: Mapping[str, Any], name: str, count: int, least: float = 1e-6) -> list[float]:
    """Return the first `count` numbers of an attribute, each at least `least`."""
    what = "a number of pixels" if count == 1 else f"{count} numbers of pixels"
    try:
        values = np.asarray(attributes[name])
        numbers = [float(x) for x in values.reshape(-1)[:count]]
    except (TypeError, ValueError, OSError) as error:
        raise _wrong(path, attributes, name, what) from error
    if len(numbers) < count or values.size > 4 or not all(math.isfinite(x) and least <= x < _LARGEST for x in numbers):
        raise _wrong(path, attributes, name, what)
    return numbers


def _wrong(path: str, attributes: Mapping[str, Any], name: str, what: str) -> ValueError:
    try:
        value = " ".join(repr(attributes[name]).split())[:80]
    except (TypeError, ValueError, OSError):
        value = "unreadable"
    return ValueError(
        f"{path}: the attribute {name!r} of the coordinates is {value}, but it must be {what}: correct it, or delete it "
        "from the file and set data.tile_size"
    )


# -- HDF5 files from other people --------------------------------------------------------------------------------------
# HDF5 follows links, virtual data sets and external storage to any file that the user can read, and returns zeros for
# rows that were never written, up to the number in a header. Both are refused before a row is read.

#: maximum number of bytes that a byte on disk may unpack to: deflate reaches 1,032 on zeros
LARGEST_RATIO = 1100
#: maximum number of links that are followed
_LINKS = 16


def import_h5py() -> Any:
    """Import h5py; ModuleNotFoundError names the extra to install."""
    try:
        import h5py
    except ImportError as error:
        raise ModuleNotFoundError(
            'reading and writing .h5 slides needs h5py: pip install "lightning-dilated[slides]"'
        ) from error
    return h5py


@contextmanager
def opened_h5(path: str, opener: FileOpener | None = None) -> Iterator[Any]:
    """Open an .h5 file; a URL is fetched by range.

    Raises: ValueError, FileNotFoundError or PermissionError with the path, if it cannot be read.
    """
    h5py = import_h5py()
    if is_url(path):
        with _h5_of_url(h5py, path, opener or FileOpener()) as file:
            yield file
        return
    refuse_special(path)
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (FileNotFoundError, PermissionError) as error:
        raise type(error)(f"{path} cannot be opened any more: {error}") from error
    except OSError as error:
        raise _unreadable(path, error) from error


@contextmanager
def _h5_of_url(h5py: Any, path: str, opener: FileOpener) -> Iterator[Any]:
    source = RemoteFile(opener.remote, path)
    try:
        with h5py.File(source, "r") as file:
            yield file
    except Exception as error:
        store_error, source.error = source.error, None
        if store_error is None:
            if isinstance(error, OSError):
                raise _unreadable(path, error) from error
            raise
        # the traceback's frames keep the file open; if HDF5 closed it after the end of Python, the process would crash
        for x in (error, store_error):
            traceback.clear_frames(x.__traceback__)
        if store_error is error:
            raise
        raise store_error from error  # HDF5 would raise its own error instead


#: {words in an HDF5 error: the cause and the remedy}
_REASONS = {
    "signature not found": "it is not an HDF5 file, or empty: write it again",
    "truncated": "it is truncated, as by a copy that was cut short: copy or write it again",
    "lock": "another program has it open for writing: close that first",
}


def _unreadable(path: str, error: OSError) -> ValueError:
    reasons = [reason for words, reason in _REASONS.items() if words in str(error)]
    why = reasons[0] if reasons else "it is damaged or cut short: copy or write it again"
    return ValueError(f"{path} cannot be read: {why} ({error})")


def local_dataset(path: str, file: Any, name: str) -> Any:
    """Return the object of this name in the file, or None.

    Raises: ValueError if it is stored in another file: an external link, a virtual data set or external storage.
    """
    if not _is_there(path, file, name):
        return None
    item = file.get(name)
    if getattr(item, "is_virtual", False):
        raise _elsewhere(path, name, "a virtual data set, whose rows lie in", item.virtual_sources()[0].file_name)
    if getattr(item, "external", None):
        raise _elsewhere(path, name, "kept in external storage, in", item.external[0][0])
    return item


def check_declared_size(path: str, array: Any, name: str, size: int) -> None:
    """Raise ValueError if a data set declares more than a file of `size` bytes can hold."""
    declared = math.prod(array.shape) * array.dtype.itemsize
    text = f"{path}: {name!r} declares the shape {tuple(array.shape)}, {declared:,} bytes"
    if array.chunks is None:
        if declared > size or array.id.get_storage_size() < declared:
            raise ValueError(f"{text}, but the file of {size:,} bytes does not hold them: write it again")
        return
    needed = math.prod(-(-n // chunk) for n, chunk in zip(array.shape, array.chunks, strict=True))
    # check before counting chunks, which is slow for many
    if needed > size or declared > LARGEST_RATIO * size:
        raise ValueError(f"{text} in {needed:,} chunks, but the file has only {size:,} bytes: write it again")
    written = array.id.get_num_chunks()
    if written < needed:
        raise ValueError(
            f"{text} in {needed:,} chunks, of which only {written:,} were written, and the others would be read as zeros: "
            "extract this slide again"
        )


def _is_there(path: str, file: Any, name: str) -> bool:
    """Return whether the file has an object of this name; raise ValueError for a link that leaves the file."""
    h5py = import_h5py()
    group, parts, links = file, _parts(name), 0
    while parts:
        part = parts.pop(0)
        # `part in group` would follow links
        if not isinstance(group, h5py.Group) or not group.id.links.exists(part.encode()):
            return False
        try:
            link = group.get(part, getlink=True)
        except TypeError as error:
            raise _elsewhere(path, name, "a user-defined link to", "another place") from error
        if isinstance(link, h5py.ExternalLink):
            raise _elsewhere(path, name, "an external link to", link.filename)
        if isinstance(link, h5py.SoftLink):
            links += 1
            if links > _LINKS:
                raise ValueError(f"{path}: {name!r} is a link that leads nowhere: write the data set itself")
            group = file if link.path.startswith("/") else group
            parts = _parts(link.path) + parts
            continue
        group = group[part]
    return True


def _parts(name: str) -> list[str]:
    return [x for x in name.split("/") if x not in ("", ".")]


def _elsewhere(path: str, name: str, how: str, file: Any) -> ValueError:
    return ValueError(
        f"{path}: {name!r} is {how} {file}: only data in the file itself is read. Copy it in, as "
        "`h5repack` and h5py's file.copy do"
    )


# -- slides ------------------------------------------------------------------------------------------------------------
H5 = (".h5", ".hdf5")
PT = (".pt", ".pth")
#: suffixes of images, which names of feature files and ids of a csv may include
IMAGES = (".svs", ".tif", ".tiff", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vsi", ".czi")
#: maximum number of rows of one read, to bound the memory of conversion and checks
BLOCK = 4096
#: rows at most this far apart are read together, because a call costs as much as reading a few rows
NEAR = 16
#: number of tiles of a slide that its fingerprint reads
SAMPLED = 8


@dataclass(frozen=True)
class Slide:
    """The header of a file.

    `tile_size` is the side of a tile and `extent` the slide's (width, height), in level-0 pixels; None if not stated.
    Without `overlap_known`, tiles may be closer than `tile_size`.
    """

    path: str
    tiles: int
    width: int
    tile_size: int | None = None
    extent: tuple[int, int] | None = None
    overlap_known: bool = True

    @property
    def name(self) -> str:
        return slide_name(self.path)


def slide_name(path: str) -> str:
    """Return the name that matches a file with its csv line: without folders and suffixes of files and images."""
    name = os.path.basename(path)
    while True:
        suffix = next((x for x in (*H5, *PT, *IMAGES) if name.lower().endswith(x) and len(name) > len(x)), "")
        if not suffix:
            return name
        name = name[: -len(suffix)]


class EmptySlide(ValueError):
    """A slide without a tile."""


class _Rows:
    """The rows of a stored (T, W) or (1, T, W) array."""

    def __init__(self, array: Any) -> None:
        self.array, self.boxed = array, len(array.shape) == 3
        self.count, self.width = (int(x) for x in array.shape[-2:])

    def read(self, start: int, stop: int) -> Tensor:
        """Return (stop - start, W) signed integers or floats."""
        rows = self.array[0, start:stop] if self.boxed else self.array[start:stop]
        if isinstance(rows, Tensor):
            return rows
        dtype = np.int64 if rows.dtype.kind in "ui" else rows.dtype.newbyteorder("=")
        return torch.from_numpy(np.ascontiguousarray(rows, dtype=dtype))

    def pick(self, rows: np.ndarray) -> Tensor:
        """Return the n rows with these increasing numbers, (n, W), in one read from the first to the last."""
        block = self.read(int(rows[0]), int(rows[-1]) + 1)
        return block if len(block) == len(rows) else block[torch.from_numpy(rows - rows[0])]


@dataclass(frozen=True)
class SlideReader:
    """Reads slides.

    Args:
        features: name of the (T, F) or (1, T, F) array; a .pt file may also hold that tensor alone.
        coords: name of the (T, 2) array of pixel coordinates; None reads slides without coordinates.
        dtype: dtype of the returned features.
        opener: opens the files, by path or URL.
    """

    features: str = "features"
    coords: str | None = "coords"
    dtype: torch.dtype = torch.float32
    # excluded from repr: a fingerprint does not depend on how files are opened
    opener: FileOpener = field(default_factory=FileOpener, repr=False, compare=False)

    def inspect(self, path: str) -> Slide:
        """Read names, shapes and types, but no rows.

        Raises:
            EmptySlide: for a file without tiles.
            ValueError: for an unusable file, with its path, the fault and the remedy.
            ImportError: if h5py is needed and missing.
        """
        with self._opened(path) as (features, coords):
            for name, rows in ((self.features, features), (str(self.coords), coords)):
                if rows is not None and not isinstance(rows.array, Tensor):
                    check_declared_size(path, rows.array, name, self.opener.size(path))
            attributes = {} if coords is None else getattr(coords.array, "attrs", {})
            sizes = tile_size_of(path, attributes), extent_of(path, attributes), states_overlap(attributes)
            return Slide(path, features.count, features.width, *sizes)

    def read(self, path: str, rows: np.ndarray) -> tuple[Tensor, Tensor | None]:
        """Return features (n, F) and coordinates (n, 2) int64 of the tiles `rows` (n,), in that order.

        No other tile is read, except tiles between two that are at most NEAR rows apart.

        Raises: the errors of `inspect`, and ValueError for a feature that is not finite, with the tile's number.
        """
        with self._opened(path) as (features, coords):
            values = torch.empty(len(rows), features.width, dtype=self.dtype)
            places = None if coords is None else torch.empty(len(rows), 2, dtype=torch.int64)
            for chosen in _runs(rows):
                values[chosen] = self._finite(path, features.pick(rows[chosen]), rows[chosen])
                if coords is not None:
                    places[chosen] = coords.pick(rows[chosen]).long()
        return values, places

    def read_coords(self, path: str) -> np.ndarray:
        """Return all coordinates, (T, 2) int64. Raises the errors of `inspect`, and ValueError without `coords`."""
        with self._opened(path) as (_, coords):
            if coords is None:
                raise ValueError(f"{path} is read without coordinates: set data.coords_name to the array's name")
            return coords.read(0, coords.count).long().numpy()

    def digest(self, path: str) -> bytes:
        """Return a digest of the features and coordinates of SAMPLED tiles, including the first and the last.

        Writing attention into the file does not change the digest. For a URL the digest is of the store's version of
        the content, such as an ETag, so that thousands of slides need not be read.
        """
        digest = hashlib.blake2b(digest_size=16)
        if is_url(path):
            digest.update(repr(self.opener.remote.state(path)).encode())
            return digest.digest()
        with self._opened(path) as (features, coords):
            for rows in (features, coords):
                for tile in spread(rows.count, SAMPLED) if rows is not None else ():
                    digest.update(rows.read(tile, tile + 1).contiguous().view(torch.uint8).numpy().tobytes())
        return digest.digest()

    def _finite(self, path: str, values: Tensor, tiles: np.ndarray) -> Tensor:
        """Return the values of these tiles in the reader's dtype. Raises ValueError if one is not finite."""
        out = values.to(self.dtype)
        # check by a sum, which needs no mask: in float64, finite values of these types have a finite sum
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
        """Yield the features and coords of an open file, after all checks that do not read a row."""
        refuse_special(path)
        opened = opened_h5(path, self.opener) if path.lower().endswith(H5) else _pt(path, self.features, self.opener)
        with opened as arrays:
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
        remedy = "data.coords_name to the array of x and y, or to null for a model without positions (no SlideEncoder)"
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
    """Return "f" for floating point, "i" for integers, else another letter."""
    if isinstance(array, Tensor):
        plain = not (array.is_complex() or array.dtype == torch.bool)
        return "f" if array.is_floating_point() else "i" if plain else "?"
    return {"u": "i"}.get(array.dtype.kind, array.dtype.kind)


def _runs(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield indices into `rows` that are read together: steps of at most NEAR, over at most BLOCK rows of the file."""
    order = np.argsort(rows, kind="stable")
    for run in np.split(order, np.flatnonzero(np.diff(rows[order]) > NEAR) + 1):
        if len(run):
            span = (rows[run] - rows[run[0]]) // BLOCK
            yield from np.split(run, np.flatnonzero(np.diff(span)) + 1)


def _array(path: str, arrays: Any, name: str, option: str) -> Any:
    array = arrays.get(name) if isinstance(arrays, dict) else local_dataset(path, arrays, name)
    if array is None:
        names = ", ".join(sorted(map(str, arrays.keys()))) or "nothing"
        raise ValueError(f"{path} has no {name!r}; it holds {names}: set {option}")
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise ValueError(f"{path}: {name!r} is a {type(array).__name__}, not an array: set {option}")
    if isinstance(array, Tensor):
        _check_stored(path, array, name)
        return array.detach()
    if not hasattr(array, "chunks"):
        raise ValueError(f"{path}: {name!r} is a {type(array).__name__}: save it as a torch tensor")
    return array


def _check_stored(path: str, tensor: Tensor, name: str) -> None:
    """Raise ValueError if the file does not contain all values of a tensor."""
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    if not plain or tensor.is_nested:
        kind = str(tensor.layout).removeprefix("torch.") if tensor.layout != torch.strided else tensor.device.type
        kind = "quantized" if tensor.is_quantized else kind
        raise ValueError(
            f"{path}: {name!r} is a {kind} tensor: save it as an ordinary tensor, by .to_dense() or .dequantize()"
        )
    stored = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.numel() > stored:
        raise ValueError(
            f"{path}: {name!r} declares the shape {tuple(tensor.shape)}, but the file holds only {stored:,} of its "
            f"{tensor.numel():,} values (an expanded view): extract this slide again, or save tensor.clone()"
        )


@contextmanager
def _pt(path: str, features: str, opener: FileOpener) -> Iterator[dict[str, Any]]:
    """Yield the tensors of a file, memory-mapped if its format allows; a URL is read whole."""
    refuse_special(path)
    try:
        try:
            if is_url(path):
                stored = torch.load(opener.open(path), map_location="cpu", weights_only=True)
            else:
                stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            stored = torch.load(path, map_location="cpu", weights_only=True)  # written by torch before 1.6
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is not a file of plain tensors; nothing else is loaded (weights_only): "
            f"torch.save a tensor, or a dict of tensors ({_first_line(error)})"
        ) from error
    except (RuntimeError, EOFError, ValueError) as error:
        raise ValueError(f"{path} is not a torch file, or cut short: write it again ({_first_line(error)})") from error
    if isinstance(stored, Tensor):
        stored = {features: stored}
    if not isinstance(stored, dict):
        raise ValueError(f"{path} holds a {type(stored).__name__}, but it must be a tensor or a dict of tensors")
    yield stored


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
