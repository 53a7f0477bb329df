"""Readers for files and folders of unknown origin, which run no code and do not trust declared sizes.

torch.distributed.checkpoint unpickles `.metadata`, and every entry that is not a tensor, in a way that may run code.
These readers run no code, and check the declared sizes and names against the files.
"""

from __future__ import annotations

import importlib
import io
import math
import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from pickle import UnpicklingError
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata as kinds
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from lightning_dilated._compat.torch import MemoryFormatEncoding, StorageInfo, set_nested, stored_layout
from lightning_dilated.checkpoint.ranks import reason

_NAMED = re.compile(r"GLOBAL ([\w.]+)")
_CAUSE = re.compile(r"WeightsUnpickler error: (.{,200})")


def load_file(source: str | Path | IO[bytes], mapped: bool = False, map_location: Any = "cpu") -> Any:
    """Return the contents of a file of torch.save: plain values, and tensors, which are on the CPU by default.

    The file is read with `weights_only=True`, regardless of the environment. No tensor may be larger than the file.

    Args:
        source: a path, or an open file.
        mapped: map a path's tensors into memory, so that they are read from disk only when they are used.
        map_location: as in torch.load.

    Raises:
        FileNotFoundError: for a path that is not a regular file.
        UnpicklingError: for a file that contains a class that torch does not allow; the error names the class.
        ValueError, RuntimeError, EOFError and other errors of torch: for a broken file.
    """
    if isinstance(source, (str, Path)) and not Path(source).is_file():  # reading a pipe would block
        raise FileNotFoundError(f"{source}: no such file.")
    size = _check_archive(source)
    mapped = mapped and zipfile.is_zipfile(source)  # files from before torch 1.6 are not archives
    try:
        stored = _load(source, mapped, map_location)
    except UnpicklingError as error:
        raise UnpicklingError(unpickling_message(error)) from None
    check_sizes(stored, size)
    return stored


def _load(source: Any, mapped: bool, map_location: Any) -> Any:
    try:
        return torch.load(source, weights_only=True, map_location=map_location, mmap=mapped)
    except UnpicklingError as error:
        if "torchao.optim" not in str(error):
            raise
    importlib.import_module("torchao.optim")  # registers its 8-bit states with torch
    if not isinstance(source, (str, Path)):
        source.seek(0)
    return torch.load(source, weights_only=True, map_location=map_location, mmap=mapped)


def unpickling_message(error: UnpicklingError) -> str:
    """Return a short message with the class that the file names, without torch's advice to let the file run code."""
    named, cause = _NAMED.search(str(error)), _CAUSE.search(str(error))
    if named is None:
        return cause[1].strip() if cause else "it is no file of torch.save"
    return (
        f"it names {named[1]}, which is no tensor and no plain value; it was not loaded. If you trust the file, pass the "
        "class to torch.serialization.add_safe_globals([...]) before"
    )


def _check_archive(source: Any) -> int:
    """Return the size of a file; refuse a compressed archive, because torch.save does not compress."""
    if isinstance(source, (str, Path)):
        size = Path(source).stat().st_size
    else:
        size = source.seek(0, 2)
        source.seek(0)
    if zipfile.is_zipfile(source):
        try:
            with zipfile.ZipFile(source) as archive:
                inside = sum(entry.file_size for entry in archive.infolist())
        except (zipfile.BadZipFile, NotImplementedError):  # torch will report the problem
            inside = 0
        if inside > size:
            raise ValueError(f"it declares {inside:,} bytes of contents, but has {size:,}")
    if not isinstance(source, (str, Path)):
        source.seek(0)
    return size


def check_sizes(stored: Any, size: int) -> None:
    """Raise ValueError if a tensor among nested values has more bytes than its file, which has `size` bytes.

    A stored tensor may be a view that expands one value to 10^12 rows, and operations on it would then need the memory.
    """
    todo, visited = [("it", stored)], set()
    while todo:
        name, value = todo.pop()
        if isinstance(value, Tensor):
            if type(value) in (Tensor, torch.nn.Parameter) and value.numel() * value.element_size() > size:
                raise ValueError(f"{name} declares the shape {tuple(value.shape)}, but the file has {size:,} bytes")
        elif isinstance(value, (Mapping, list, tuple, set)) and id(value) not in visited:
            visited.add(id(value))  # a list may contain itself
            todo += [(str(k), v) for k, v in (value.items() if isinstance(value, Mapping) else enumerate(value))]


METADATA = ".metadata"
#: the warning that torch prints if one rank reads alone, as these readers do on purpose
ALONE = "torch.distributed is disabled, unavailable or uninitialized"
#: maximum number of elements in a byte of a file: a file declares a 4-bit state with the wider dtype it represents
DENSEST = 2
#: torch's classes for the records of a `.metadata` file
_RECORDS = (
    *(Metadata, MetadataIndex, TensorStorageMetadata, kinds.BytesStorageMetadata, kinds.ChunkStorageMetadata),
    *(kinds.TensorProperties, kinds.StorageMeta, StorageInfo),
)


def _allowed_names() -> dict[tuple[str, str], Any]:
    """Return {name that a `.metadata` file may use: its replacement}.

    Each file gets new subclasses of torch's classes, because a pickle may change the classes that it names.
    """
    records = {(c.__module__, c.__qualname__): type(c.__name__, (c,), {}) for c in _RECORDS}
    formats = MemoryFormatEncoding
    paths = {
        (module, f"{system}Path"): pure
        for module in ("pathlib", "pathlib._local")
        for system, pure in (("Posix", PurePosixPath), ("Windows", PureWindowsPath))
    }
    return {
        **records,
        **paths,
        (formats.__module__, formats.__qualname__): lambda value: formats(value),
        ("torch.serialization", "_get_layout"): lambda name: stored_layout(name),
        ("torch", "Size"): torch.Size,
        ("collections", "OrderedDict"): OrderedDict,
        ("builtins", "set"): set,
    }


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = _allowed_names()

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement for a name in the file, without importing anything."""
        if (module, name) in self._allowed:
            return self._allowed[module, name]
        kind = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(kind, (torch.dtype, torch.layout, torch.memory_format)):
            return kind
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs; it was not loaded")


def read_metadata(folder: Path) -> Metadata:
    """Read a folder's `.metadata`, and check it against the files.

    Raises:
        FileNotFoundError: if the folder has no `.metadata`.
        ValueError: if `.metadata` cannot be read, or does not match the files.
    """
    path = Path(folder) / METADATA
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no sharded checkpoint: it has no {METADATA}.")
    try:
        return _checked(_Unpickler(path.read_bytes()).load(), Path(folder))
    except Exception as error:  # a pickle of unknown origin may raise anything
        raise ValueError(f"{path} cannot be read ({reason(error)}). Use an earlier checkpoint.") from None


def _checked(stored: Any, folder: Path) -> Metadata:
    """Check the records against each other and against the files, and return copies made of plain values."""
    if not isinstance(stored, Metadata):
        raise ValueError(f"it holds {type(stored).__name__}, not the metadata of a checkpoint")
    entries = _entries(dict(stored.storage_data), folder)
    tensors = {_text(key): _described(key, about, entries) for key, about in stored.state_dict_metadata.items()}
    paths = None
    if stored.planner_data is not None:
        paths = {
            _text(key): tuple(x if type(x) is int else _text(x) for x in path)
            for key, path in stored.planner_data.items()
        }
    version = stored.version if isinstance(stored.version, str) else None
    return Metadata(tensors, paths, entries, kinds.StorageMeta(), version)


def _entries(stored: dict[Any, Any], folder: Path) -> dict[MetadataIndex, StorageInfo]:
    """Return {index: StorageInfo} of all tensor parts and other values, after checking that each is inside a file."""
    sizes: dict[str, int] = {}
    entries, listed = {}, 0
    for index, info in stored.items():
        name = _text(info.relative_path)
        if name not in sizes:
            sizes[name] = _file_size(folder, name)
        offset, length = _count(info.offset), _count(info.length)
        if offset + length > sizes[name]:
            raise ValueError(f"{index.fqn} ends at byte {offset + length:,} of {name}, which has {sizes[name]:,}")
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{index.fqn} is stored in a transformed way")
        listed += length
        place = None if index.offset is None else _shape(index.offset)
        hint = None if index.index is None else _count(index.index)
        entries[MetadataIndex(_text(index.fqn), place, hint)] = StorageInfo(name, offset, length)
    if listed > sum(sizes.values()):
        raise ValueError(f"it lists {listed:,} bytes in files of {sum(sizes.values()):,}")
    return entries


def _file_size(folder: Path, name: str) -> int:
    """Return a file's number of bytes; refuse a name with a folder in it, and anything that is no regular file."""
    if PurePosixPath(name).name != name or PureWindowsPath(name).name != name:
        raise ValueError(f"it names the file {name!r}, which is not in this folder")
    path = folder / name
    if not path.exists():
        raise ValueError(f"the file {name} is missing")
    if not path.is_file():
        raise ValueError(f"{name} is no regular file")
    return path.stat().st_size


def _described(key: Any, about: Any, entries: dict[MetadataIndex, StorageInfo]) -> Any:
    """Return the record of a tensor or another value; refuse a part with more elements than the files can hold."""
    if isinstance(about, kinds.BytesStorageMetadata):
        return kinds.BytesStorageMetadata()
    if not isinstance(about, TensorStorageMetadata) or not isinstance(about.properties.dtype, torch.dtype):
        raise ValueError(f"{key} is neither a tensor nor a value")
    shape, total, parts = _shape(about.size), 0, []
    for chunk in about.chunks:
        offsets, sizes = _shape(chunk.offsets), _shape(chunk.sizes)
        entry, elements = entries.get(MetadataIndex(key, offsets)), math.prod(sizes)
        available = 0 if entry is None else entry.length
        if elements > DENSEST * available:
            raise ValueError(f"{key} declares a part of {elements:,} elements, but the files hold {available:,} bytes")
        total += elements
        parts.append(kinds.ChunkStorageMetadata(offsets, sizes))
    if math.prod(shape) > total:
        raise ValueError(f"{key} declares the shape {tuple(shape)}, and its parts have {total:,} elements")
    return TensorStorageMetadata(kinds.TensorProperties(dtype=about.properties.dtype), shape, parts)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r:.60} stands where a name belongs")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.60} stands where a count belongs")
    return value


def _shape(value: Any) -> torch.Size:
    return torch.Size([_count(x) for x in value])


class Reader(dcp.FileSystemReader):
    """A variant of torch's reader that runs no code of the folder, and reads only regular files inside the folder."""

    failure: Exception | None = None  # why `.metadata` could not be read; torch 2.11 hides the reason

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read as the function `read_metadata` does."""
        try:
            metadata = read_metadata(Path(self.path))
        except Exception as error:
            self.failure = error
            raise
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, *args: Any, **kwargs: Any) -> Any:
        """Read tensors with `weights_only=True`, as torch does, but without torch's advice to set it to False."""
        try:
            return super().read_data(*args, **kwargs)
        except pickle.UnpicklingError as error:
            raise ValueError(f"an entry of a tensor: {unpickling_message(error)}") from None


class Planner(dcp.DefaultLoadPlanner):
    """A variant of torch's planner that reads all entries with `weights_only=True`, not only tensors."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Read a value, and store it under its name."""
        name = read_item.dest_index.fqn
        try:
            stored = load_file(value)
        except Exception as error:
            raise ValueError(f"the entry {name}: {reason(error)}") from None
        set_nested(self.original_state_dict, self.mappings[name], stored)


def load_into(state: dict[str, Any], folder: Path, alone: bool = False) -> None:
    """Fill a nested mapping with the values that a folder contains under the same names.

    Args:
        alone: True if only this rank reads; otherwise every rank must call this.

    Raises:
        FileNotFoundError, ValueError: on every rank, if files are missing or cannot be read.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=ALONE)
        reader = Reader(folder)
        _translated(reader, lambda: dcp.load(state, storage_reader=reader, planner=Planner(), no_dist=alone))


def _translated(reader: Reader, load: Callable[[], Any]) -> None:
    """Call `load`; turn CheckpointException, which is not an Exception, into a ValueError with folder and causes."""
    try:
        load()
    except CheckpointException as error:
        raise ValueError(
            f"{reader.path} cannot be loaded ({reason(reader.failure or error)}). Use an earlier checkpoint."
        ) from error
