"""Files and folders of unknown origin, read without running code, and without allocating memory that they merely declare.

torch.distributed.checkpoint unpickles `.metadata`, and every entry that is no tensor, with a pickle that may run code.
The readers here run no code, and check sizes and names against the files.
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
    """Return what a file of torch.save holds: plain values, and tensors, on the CPU by default.

    The file is read with `weights_only=True`, whatever the environment says. No tensor may be larger than the file.

    Args:
        source: a path, or an open file.
        mapped: leave the tensors of a path on disk until they are used.
        map_location: as in torch.load.

    Raises:
        FileNotFoundError: for a path that is no regular file.
        UnpicklingError: for a file that names a class that torch does not allow, with the name of the class.
        ValueError, RuntimeError, EOFError and other errors of torch: for a broken file.
    """
    if isinstance(source, (str, Path)) and not Path(source).is_file():  # a pipe would block
        raise FileNotFoundError(f"{source}: no such file.")
    size = _check_archive(source)
    mapped = mapped and zipfile.is_zipfile(source)  # torch before 1.6 wrote no archives
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
    importlib.import_module("torchao.optim")  # registers its states of 8 bits with torch
    if not isinstance(source, (str, Path)):
        source.seek(0)
    return torch.load(source, weights_only=True, map_location=map_location, mmap=mapped)


def unpickling_message(error: UnpicklingError) -> str:
    """Return one line of torch's page of advice (it is to let the file run code) and the class that the file names."""
    named, cause = _NAMED.search(str(error)), _CAUSE.search(str(error))
    if named is None:
        return cause[1].strip() if cause else "it is no file of torch.save"
    return (
        f"it names {named[1]}, which is no tensor and no plain value; it was not loaded. If you trust the file, pass the "
        "class to torch.serialization.add_safe_globals([...]) before"
    )


def _check_archive(source: Any) -> int:
    """Return the size of a file. Refuse an archive that would grow when it is read: torch.save compresses nothing."""
    if isinstance(source, (str, Path)):
        size = Path(source).stat().st_size
    else:
        size = source.seek(0, 2)
        source.seek(0)
    if zipfile.is_zipfile(source):
        try:
            with zipfile.ZipFile(source) as archive:
                inside = sum(entry.file_size for entry in archive.infolist())
        except (zipfile.BadZipFile, NotImplementedError):  # torch reports the problem
            inside = 0
        if inside > size:
            raise ValueError(f"it declares {inside:,} bytes of contents, but has {size:,}")
    if not isinstance(source, (str, Path)):
        source.seek(0)
    return size


def check_sizes(stored: Any, size: int) -> None:
    """Raise ValueError for a tensor among nested values that declares more bytes than the `size` of its file.

    A stored tensor may be a view of one value with 10^12 rows; its use would allocate that memory.
    """
    todo, visited = [("it", stored)], set()
    while todo:
        name, value = todo.pop()
        if isinstance(value, Tensor):
            if type(value) in (Tensor, torch.nn.Parameter) and value.numel() * value.element_size() > size:
                raise ValueError(
                    f"{name} declares the shape {tuple(value.shape)}, but the whole file has {size:,} bytes"
                )
        elif isinstance(value, (Mapping, list, tuple, set)) and id(value) not in visited:
            visited.add(id(value))  # a file may hold a list that holds itself
            todo += [(str(k), v) for k, v in (value.items() if isinstance(value, Mapping) else enumerate(value))]


METADATA = ".metadata"
#: torch's warning if one rank writes or reads alone, which is intended here
ALONE = "torch.distributed is disabled, unavailable or uninitialized"
#: most elements of a byte: an optimizer's state of 4 bits is stored under the dtype that it represents
DENSEST = 2
#: the records of a `.metadata` file
_RECORDS = (
    *(Metadata, MetadataIndex, TensorStorageMetadata, kinds.BytesStorageMetadata, kinds.ChunkStorageMetadata),
    *(kinds.TensorProperties, kinds.StorageMeta, StorageInfo),
)


def _allowed_names() -> dict[tuple[str, str], Any]:
    """Return {name that a `.metadata` file may use: its replacement}.

    Classes are derived from torch's anew for each file, because a pickle may change the classes that it names.
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
        """Return the replacement of a name in the file; nothing is imported."""
        if (module, name) in self._allowed:
            return self._allowed[module, name]
        kind = getattr(torch, name, None) if module == "torch" and name.isidentifier() else None
        if isinstance(kind, (torch.dtype, torch.layout, torch.memory_format)):
            return kind
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs; it was not loaded")


def read_metadata(folder: Path) -> Metadata:
    """Read the `.metadata` of a folder, and check it against the files.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it cannot be read, or does not fit the files.
    """
    path = Path(folder) / METADATA
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no sharded checkpoint: it has no {METADATA}.")
    try:
        return _checked(_Unpickler(path.read_bytes()).load(), Path(folder))
    except Exception as error:  # a pickle of unknown origin may raise anything
        raise ValueError(f"{path} cannot be read ({reason(error)}). Use an earlier checkpoint.") from None


def _checked(stored: Any, folder: Path) -> Metadata:
    """Return the same records, made anew from plain values that are consistent with each other and with the files."""
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
    """Return the place of each part of a tensor and of each value; it must be inside a regular file of the folder."""
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
    """Return the bytes of a file; refuse a name with a folder in it, a pipe or a device."""
    if PurePosixPath(name).name != name or PureWindowsPath(name).name != name:
        raise ValueError(f"it names the file {name!r}, which is not in this folder")
    path = folder / name
    if not path.exists():
        raise ValueError(f"the file {name} is missing")
    if not path.is_file():
        raise ValueError(f"{name} is no regular file")
    return path.stat().st_size


def _described(key: Any, about: Any, entries: dict[MetadataIndex, StorageInfo]) -> Any:
    """Return the record of a tensor or of another value; refuse a part that declares more than the files hold."""
    if isinstance(about, kinds.BytesStorageMetadata):
        return kinds.BytesStorageMetadata()
    if not isinstance(about, TensorStorageMetadata) or not isinstance(about.properties.dtype, torch.dtype):
        raise ValueError(f"{key} is neither a tensor nor a value")
    shape, total, parts = _shape(about.size), 0, []
    for chunk in about.chunks:
        offsets, sizes = _shape(chunk.offsets), _shape(chunk.sizes)
        entry, elements = entries.get(MetadataIndex(key, offsets)), math.prod(sizes)
        there = 0 if entry is None else entry.length
        if elements > DENSEST * there:
            raise ValueError(
                f"{key} declares a part of {elements:,} elements, and the files hold {there:,} bytes of it"
            )
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
    """torch's reader, but it runs no code that the folder names, and reads only regular files inside the folder."""

    failure: Exception | None = None  # why `.metadata` could not be read; torch 2.11 reports that it is None

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
        """Read tensors with `weights_only=True`, as torch does, but without its advice to set that to False."""
        try:
            return super().read_data(*args, **kwargs)
        except pickle.UnpicklingError as error:
            raise ValueError(f"an entry of a tensor: {unpickling_message(error)}") from None


class Planner(dcp.DefaultLoadPlanner):
    """torch's planner, but it reads entries that are no tensors with `weights_only=True`."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Put a value under its name."""
        name = read_item.dest_index.fqn
        try:
            stored = load_file(value)
        except Exception as error:
            raise ValueError(f"the entry {name}: {reason(error)}") from None
        set_nested(self.original_state_dict, self.mappings[name], stored)


def load_into(state: dict[str, Any], folder: Path, alone: bool = False) -> None:
    """Fill a nested mapping with the values that a folder holds under the same names.

    Args:
        alone: True if this rank reads alone; otherwise all ranks call.

    Raises:
        FileNotFoundError, ValueError: on every rank, if files are missing or cannot be read.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=ALONE)
        reader = Reader(folder)
        _translated(reader, lambda: dcp.load(state, storage_reader=reader, planner=Planner(), no_dist=alone))


def _translated(reader: Reader, load: Callable[[], Any]) -> None:
    """Call `load`; turn CheckpointException, which is no Exception, into an error that names folder and causes."""
    try:
        load()
    except CheckpointException as error:
        raise ValueError(
            f"{reader.path} cannot be loaded ({reason(reader.failure or error)}). Use an earlier checkpoint."
        ) from error
