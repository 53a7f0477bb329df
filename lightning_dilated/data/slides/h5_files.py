"""Opening .h5 files of others: what they hold lies in them, and is as large as they say.

HDF5 follows links, virtual data sets and external storage to any file that the user can read, and gives rows that were
never written as zeros, as many as a header declares. Both are refused before a row is read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: bytes that a byte on disk may unpack to: deflate reaches 1,032 on zeros
MOST_PACKED = 1100
#: links to links that are followed
_LINKS = 16


def import_h5py() -> Any:
    """The module h5py; ImportError with what to install where it is missing."""
    try:
        import h5py
    except ImportError as error:
        raise ImportError(
            'reading and writing .h5 slides needs h5py: pip install "lightning-dilated[slides]"'
        ) from error
    return h5py


@contextmanager
def opened_h5(path: str) -> Iterator[Any]:
    """The open file. Raises ValueError, FileNotFoundError or PermissionError, naming it, for one that cannot be read."""
    h5py = import_h5py()
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (FileNotFoundError, PermissionError) as error:
        raise type(error)(f"{path} cannot be opened any more: {error}") from error
    except OSError as error:
        words = str(error)
        if "signature not found" in words:
            why = "it is not an HDF5 file, or empty: write it again"
        elif "truncated" in words:
            why = "it is truncated, as by a copy that was cut short: copy or write it again"
        elif "lock" in words:
            why = "another program has it open for writing: close that first"
        else:
            why = "it is damaged or cut short: copy or write it again"
        raise ValueError(f"{path} cannot be read: {why} ({words})") from error


def own_dataset(path: str, file: Any, name: str) -> Any:
    """What lies in the file under this name, None for nothing.

    Raises:
        ValueError: where that lies in another file: behind an external link, as a virtual data set or external storage.
    """
    if not _is_there(path, file, name):
        return None
    found = file.get(name)
    if getattr(found, "is_virtual", False):
        raise _elsewhere(path, name, "a virtual data set, whose rows lie in", found.virtual_sources()[0].file_name)
    if getattr(found, "external", None):
        raise _elsewhere(path, name, "kept in external storage, in", found.external[0][0])
    return found


def check_declared_size(path: str, array: Any, name: str) -> None:
    """Raise ValueError where a data set declares more than the file holds."""
    declared, size = math.prod(array.shape) * array.dtype.itemsize, os.path.getsize(path)
    text = f"{path}: {name!r} declares the shape {tuple(array.shape)}, {declared:,} bytes"
    if array.chunks is None:
        if declared > size or array.id.get_storage_size() < declared:
            raise ValueError(f"{text}, but the file of {size:,} bytes does not hold them: write it again")
        return
    needed = math.prod(-(-n // chunk) for n, chunk in zip(array.shape, array.chunks, strict=True))
    # the second first: counting many chunks takes a while
    if needed > size or declared > MOST_PACKED * size:
        raise ValueError(f"{text} in {needed:,} chunks, but the file has only {size:,} bytes: write it again")
    written = array.id.get_num_chunks()
    if written < needed:
        raise ValueError(
            f"{text} in {needed:,} chunks, of which only {written:,} were written, and the others would be read as zeros: "
            "extract this slide again"
        )


def _is_there(path: str, file: Any, name: str) -> bool:
    """Whether something lies under the name; ValueError for a way to it that leaves the file."""
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
            raise _elsewhere(path, name, "a link of a kind of its own, to", "somewhere") from error
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
