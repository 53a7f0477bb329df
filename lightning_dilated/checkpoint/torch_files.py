"""Files of torch.save from anywhere: read without running code, and without the memory that they merely declare."""

from __future__ import annotations

import importlib
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch
from torch import Tensor

_NAMED = re.compile(r"GLOBAL ([\w.]+)")
_CAUSE = re.compile(r"WeightsUnpickler error: (.{,200})")


def load_file(source: str | Path | IO[bytes], mapped: bool = False) -> Any:
    """What a file of torch.save holds: plain values, and tensors on the CPU.

    It is read with `weights_only=True`, whatever the environment says. Each tensor is compared with the size of the file.

    Args:
        source: a path, or an open file.
        mapped: leave the tensors of a path on disk until they are used.

    Raises:
        FileNotFoundError: for a path that is no regular file.
        UnpicklingError: for a file that names a class which torch does not let in; the message names the class.
        ValueError, RuntimeError, EOFError, and what else torch raises: for a file that is broken.
    """
    if isinstance(source, (str, Path)) and not Path(source).is_file():  # a pipe would be waited for
        raise FileNotFoundError(f"{source}: no such file.")
    size = _check_archive(source)
    try:
        stored = _load(source, mapped and zipfile.is_zipfile(source))  # torch before 1.6 wrote no archives
    except UnpicklingError as error:
        raise UnpicklingError(words_of(error)) from None
    check_sizes(stored, size)
    return stored


def _load(source: Any, mapped: bool) -> Any:
    try:
        return torch.load(source, weights_only=True, map_location="cpu", mmap=mapped)
    except UnpicklingError as error:
        if "torchao.optim" not in str(error):
            raise
    importlib.import_module("torchao.optim")  # registers its states of 8 bits with torch
    if not isinstance(source, (str, Path)):
        source.seek(0)
    return torch.load(source, weights_only=True, map_location="cpu", mmap=mapped)


def words_of(error: UnpicklingError) -> str:
    """The class that a file names, out of torch's page of advice (which is to let it run code)."""
    named, cause = _NAMED.search(str(error)), _CAUSE.search(str(error))
    if named is None:
        return cause[1].strip() if cause else "it is no file of torch.save"
    return (
        f"it names {named[1]}, which is no tensor and no plain value; it was not loaded. If you trust the file, pass the "
        "class to torch.serialization.add_safe_globals([...]) before"
    )


def _check_archive(source: Any) -> int:
    """The bytes of a file. torch.save compresses nothing, so an archive that would grow when it is read is refused."""
    if isinstance(source, (str, Path)):
        size = Path(source).stat().st_size
    else:
        size = source.seek(0, 2)
        source.seek(0)
    if zipfile.is_zipfile(source):
        try:
            with zipfile.ZipFile(source) as archive:
                inside = sum(entry.file_size for entry in archive.infolist())
        except (zipfile.BadZipFile, NotImplementedError):  # torch says what is wrong with it
            inside = 0
        if inside > size:
            raise ValueError(f"it declares {inside:,} bytes of contents, but has {size:,}")
    if not isinstance(source, (str, Path)):
        source.seek(0)
    return size


def check_sizes(stored: Any, size: int) -> None:
    """Raise ValueError for a tensor among nested values that declares more bytes than the `size` of its file.

    A stored tensor may be a view of one value with 10^12 rows; using it would ask for that memory.
    """
    todo, seen = [("it", stored)], set()
    while todo:
        name, value = todo.pop()
        if isinstance(value, Tensor):
            if type(value) in (Tensor, torch.nn.Parameter) and value.numel() * value.element_size() > size:
                raise ValueError(
                    f"{name} declares the shape {tuple(value.shape)}, but the whole file has {size:,} bytes"
                )
        elif isinstance(value, (Mapping, list, tuple, set)) and id(value) not in seen:
            seen.add(id(value))  # a file may hold a list that holds itself
            todo += [(str(k), v) for k, v in (value.items() if isinstance(value, Mapping) else enumerate(value))]
