"""Random access to the rows of JSON Lines, JSON, Parquet, and `datasets` (an optional extra); a row is a mapping.

JSON needs no other library; all other formats that `datasets` loads need the extra.
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from lightning_dilated._validation import check_address
from lightning_dilated.ext.files.files import collect_files, path_list, paths_hint
from lightning_dilated.ext.text.tokenizer import whole_texts

SUFFIXES = [".jsonl", ".json", ".parquet"]
#: files by which a folder that `save_to_disk` wrote is recognized
_SAVED = ("dataset_info.json", "dataset_dict.json")
#: number of bytes that are read at a time to find line breaks
_BLOCK = 1 << 24
#: maximum number of bytes of a line of JSON Lines
LONGEST = 1 << 28


class Rows(Protocol):
    """Rows that are read by their number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Any: ...

    def where(self, number: int) -> str:
        """Return the location of a row, for errors."""
        ...

    def content(self) -> Iterator[bytes]:
        """Yield the content of all rows, for a digest."""
        ...


def library() -> ModuleType:
    """Import `datasets`. Raises a ModuleNotFoundError that names the extra."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
        raise ModuleNotFoundError(
            "Parquet, folders of save_to_disk and repositories are read with datasets: pip install "
            "'lightning-dilated[datasets]'. Files of JSON Lines need nothing more.",
            name="datasets",
        ) from None
    return datasets


def checked_sources(value: object, name: str) -> list[str] | dict[str, Any]:
    """Return `data.<name>` as a list of paths, or as arguments of `datasets.load_dataset`; reads no data.

    Raises: TypeError or ValueError with the option's name.
    """
    if not isinstance(value, Mapping):
        entries = path_list(value, f"data.{name}", paths_hint(name))
        if entries is None:
            raise TypeError(f"data.{name} is None; {paths_hint(name)}")
        return entries
    if not isinstance(value.get("path"), str) or not value["path"]:
        raise ValueError(
            f"data.{name} as a mapping holds the arguments of datasets.load_dataset, and needs `path`, such as "
            f"{{path: HuggingFaceH4/ultrachat_200k, split: train_sft}}; got {dict(value)}"
        )
    todo: list[Any] = [value]
    while todo:
        entry = todo.pop()
        check_address(entry)
        todo += entry.values() if isinstance(entry, Mapping) else entry if isinstance(entry, list | tuple) else ()
    return dict(value)


def open_rows(sources: list[str] | dict[str, Any], name: str) -> Rows:
    """Open the rows of `data.<name>`.

    Raises: OSError or ValueError with the file and the remedy; ModuleNotFoundError if `datasets` is needed and missing.
    """
    if isinstance(sources, dict):
        return LoadedRows(load(sources, name), str(sources["path"]))
    parts: list[Rows] = []
    for path in sources:
        if is_saved(path):
            parts.append(LoadedRows(load({"path": path}, name), path))
            continue
        files = collect_files([path], SUFFIXES, paths_hint(name))
        tables = [x for x in files if x.endswith(".parquet")]
        parts += [_json_rows(x) for x in files if not x.endswith(".parquet")]
        if tables:
            parts.append(LoadedRows(load_parquet(tables), ", ".join(tables)))
    rows = parts[0] if len(parts) == 1 else JoinedRows(parts)
    if not len(rows):
        raise ValueError(f"data.{name} {', '.join(sources)} holds no row; {paths_hint(name)}")
    return rows


def is_saved(path: str) -> bool:
    """Return whether a path is a folder that `save_to_disk` wrote."""
    return any(os.path.isfile(os.path.join(path, name)) for name in _SAVED)


def load(arguments: Mapping[str, Any], name: str) -> Any:
    """Load a dataset from a folder that `save_to_disk` wrote, or by calling `load_dataset` with `arguments`.

    Raises: ValueError for a missing or unknown split, and the errors that `datasets` raises.
    """
    datasets = library()
    path, split = str(arguments["path"]), arguments.get("split")
    options = {k: v for k, v in arguments.items() if k not in ("path", "split")}
    if is_saved(path):
        if set(options) - {"streaming"}:
            raise ValueError(
                f"data.{name}: {path} is a folder of save_to_disk, which takes `split` and `streaming` only; got "
                f"{sorted(options)}"
            )
        loaded = datasets.load_from_disk(path)
    else:
        loaded = datasets.load_dataset(path, **options, **({} if split is None else {"split": split}))
    if not isinstance(loaded, Mapping):
        if split is not None and is_saved(path):
            raise ValueError(f"data.{name}: {path} holds one dataset without splits: leave `split` out")
        return loaded
    if split is None and len(loaded) == 1:
        return next(iter(loaded.values()))
    if split not in loaded:
        lack = "choose a split" if split is None else f"there is no split {split!r}"
        raise ValueError(
            f"data.{name}: {lack} of {path}; it has {', '.join(loaded)}: set {{path: {path}, split: {next(iter(loaded))}}}"
        )
    return loaded[split]


def load_parquet(files: Sequence[str], streaming: bool = False) -> Any:
    """Load the rows of Parquet files, in order, as a dataset of `datasets`."""
    return library().load_dataset("parquet", data_files=list(files), split="train", streaming=streaming)


def without_fillers(value: Any, feature: Any) -> Any:
    """Remove the nulls that a table adds to a row for fields that only other rows have.

    Nulls in lists, and in values that a column stores as JSON, are kept because a table adds none there. `feature` is
    the value's type in `datasets`; None if unknown.
    """
    if isinstance(value, Mapping) and (feature is None or isinstance(feature, Mapping)):
        inner = {} if feature is None else feature
        return {k: without_fillers(x, inner.get(k)) for k, x in value.items() if x is not None}
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        return value if inner is None and feature is not None else [without_fillers(x, inner) for x in value]
    return value


def _json_rows(path: str) -> Rows:
    with open(path, "rb") as file:
        start = file.read(4096).lstrip()
    return JsonArray(path) if start.startswith(b"[") else JsonLines(path)


class JsonLines:
    """The non-empty lines of a file, each one a JSON value. One pass over the file finds the lines."""

    def __init__(self, path: str) -> None:
        self.path = path
        ends = [np.array([0], dtype=np.int64)]
        with open(path, "rb") as file:
            done = 0
            while block := file.read(_BLOCK):
                ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + done + 1)
                done += len(block)
        bounds = np.unique(np.concatenate([*ends, [done]]))
        self._starts, self._stops = bounds[:-1], bounds[1:]
        self._lines = np.arange(1, len(bounds))
        short = self._stops - self._starts <= 2  # perhaps empty: at most one character and a line break
        empty = [i for i in np.flatnonzero(short) if not self._read(int(i)).strip()]
        self._starts, self._stops, self._lines = (np.delete(x, empty) for x in (self._starts, self._stops, self._lines))

    def __len__(self) -> int:
        return len(self._starts)

    def _read(self, number: int) -> bytes:
        with open(self.path, "rb") as file:
            length = int(self._stops[number] - self._starts[number])
            if length > LONGEST:
                raise ValueError(
                    f"{self.where(number)} has {length:,} bytes, above the limit of {LONGEST:,}: divide the row"
                )
            file.seek(int(self._starts[number]))
            return file.read(length)

    def where(self, number: int) -> str:
        return f"{self.path}, line {int(self._lines[number]):,}"

    def __getitem__(self, number: int) -> Any:
        line = self._read(number)
        try:
            return whole_texts(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.where(number)} is not JSON ({error}): each line must be one JSON object, as in "
                '{"messages": [...]}'
            ) from None

    def content(self) -> Iterator[bytes]:
        with open(self.path, "rb") as file:
            while block := file.read(_BLOCK):
                yield block


class JsonArray:
    """The rows of a file with one JSON array, in memory."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._rows = whole_texts(json.loads(Path(path).read_bytes()))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} begins as a JSON array but is none ({error}): write it again, or as .jsonl, an object a line"
            ) from None

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Any:
        return self._rows[number]

    def where(self, number: int) -> str:
        return f"{self.path}, entry {number:,} (counted from 0)"

    def content(self) -> Iterator[bytes]:
        yield json.dumps(self._rows).encode()


@dataclass
class LoadedRows:
    """The rows of a map-style dataset of `datasets`."""

    dataset: Any
    name: str

    def __post_init__(self) -> None:
        if not hasattr(self.dataset, "__getitem__"):
            raise ValueError(
                f"{self.name} is a streaming dataset, which has no rows by number: leave `streaming` out, or set "
                "data.streaming"
            )

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        return without_fillers(self.dataset[number], self.dataset.features)

    def where(self, number: int) -> str:
        return f"{self.name}, row {number:,} (counted from 0)"

    def content(self) -> Iterator[bytes]:
        for number in range(len(self)):
            yield json.dumps(self[number], sort_keys=True, default=repr).encode() + b"\n"


class JoinedRows:
    """Rows of several sources, one after another."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts = list(parts)
        self._ends = list(accumulate(len(x) for x in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def _place(self, number: int) -> tuple[Rows, int]:
        i = bisect.bisect_right(self._ends, number)
        return self.parts[i], number - (self._ends[i - 1] if i else 0)

    def __getitem__(self, number: int) -> Any:
        part, inside = self._place(number)
        return part[inside]

    def where(self, number: int) -> str:
        part, inside = self._place(number)
        return part.where(inside)

    def content(self) -> Iterator[bytes]:
        for part in self.parts:
            yield from part.content()
