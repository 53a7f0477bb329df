"""StreamedRows: rows packed from documents as they are read, and StreamedDataModule, which serves them.

Documents are encoded during training, so their lengths are unknown in advance. Reader i of S packs its own documents
into rows; row g of all rows is row g // S of reader g mod S. Rows therefore depend neither on ranks nor on loader
workers, each of R ranks needs only S / R readers, and the number of used rows determines the position in training.

Shape letters: N tokens of a row, D documents of a row, S readers, R data-parallel ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_dilated._validation import integer, one_of
from lightning_dilated.data.module import SPLITS, SplitDataModule
from lightning_dilated.data.sampler import ResumableLoader
from lightning_dilated.ext.text.block_cache import cache_root, opened, private_folder
from lightning_dilated.ext.text.records import checked_sources
from lightning_dilated.ext.text.sources import Readers, open_readers
from lightning_dilated.ext.text.store import next_tokens
from lightning_dilated.ext.text.tokens import collate_documents

#: (row, its location) -> (tokens, True for each token to train on), or None to skip the row
Encode = Callable[[Any, str], tuple[np.ndarray, np.ndarray] | None]


class Position(NamedTuple):
    """The position of a reader: its pass, the document in that pass, and the number of used tokens of that document."""

    epoch_pass: int = 0
    number: int = 0
    offset: int = 0


class Document(NamedTuple):
    """Tokens and labels of a document, and its position."""

    position: Position
    tokens: np.ndarray
    labels: np.ndarray


#: (row, position of the next row)
Rows = Iterator[tuple[dict[str, torch.Tensor], Position]]
Pack = Callable[[Iterator[Document], int, int], Rows]


def filled(documents: Iterator[Document], size: int, offset: int = 0) -> Rows:
    """Yield rows of `size` tokens; a document that crosses the end of a row continues as a new document in the next.

    The last row may be shorter. `offset` is the number of tokens to skip in the first document.
    """
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    room, at = size, offset
    for position, tokens, labels in documents:
        while at < len(tokens):
            upto = min(len(tokens), at + room)
            parts.append((tokens[at:upto], labels[at:upto]))
            room, at = room - (upto - at), upto
            if room == 0:
                yield _row(parts), position._replace(offset=at)
                parts, room = [], size
        at = 0
    if parts:
        yield _row(parts), Position()


def packed(documents: Iterator[Document], size: int, offset: int = 0) -> Rows:
    """Yield rows of whole documents with at most `size` tokens; a longer document gets its own row."""
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    count = 0
    for position, tokens, labels in documents:
        if parts and count + len(tokens) > size:
            yield _row(parts), position
            parts, count = [], 0
        parts.append((tokens, labels))
        count += len(tokens)
    if parts:
        yield _row(parts), Position()


def _row(parts: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, torch.Tensor]:
    tokens, labels = (torch.from_numpy(np.concatenate(x)) for x in zip(*parts, strict=True))
    bounds = np.cumsum([0, *(len(x) for x, _ in parts)], dtype=np.int32)
    return {"tokens": tokens, "labels": labels, "cu_seqlens": torch.from_numpy(bounds)}


class PackedReaders:
    """Rows that each reader packs from its own documents; reading may start at any position.

    Args:
        readers: the readers of the source.
        encode: converts a row of the source to a document.
        pack: `filled` or `packed`.
        size: number of tokens of a row.
    """

    def __init__(self, readers: Readers, encode: Encode, pack: Pack, size: int) -> None:
        self.readers, self.encode, self.pack, self.size = readers, encode, pack, size

    def rows(self, reader: int, start: Position = Position(), endless: bool = True) -> Rows:  # noqa: B008
        """Yield each row from `start` on, and the next row's position; if `endless`, start over at the source's end.

        Raises: ValueError if a whole pass has no document.
        """
        return self.pack(self._documents(reader, start, endless), self.size, start.offset)

    def _documents(self, reader: int, start: Position, endless: bool) -> Iterator[Document]:
        epoch_pass, first = start.epoch_pass, start.number
        while True:
            count = 0
            for number, (row, where) in enumerate(self.readers.rows(reader, first), first):
                if (encoded := self.encode(row, where)) is not None:
                    count += 1
                    yield Document(Position(epoch_pass, number), *next_tokens(*encoded, len(encoded[0])))
            if count == 0 and first == 0:
                raise ValueError(
                    f"reader {reader} of {self.readers.count} has no document that can be used: pass more data, lower "
                    "data.readers, or raise data.seq_len"
                )
            if not endless:
                return
            epoch_pass, first = epoch_pass + 1, 0


class PackedRows(Dataset):
    """Packed rows by number."""

    #: identifies the source and all settings that rows depend on
    identity: str

    def _row(self, index: int) -> dict[str, torch.Tensor]:
        raise TypeError(f"{type(self).__name__} must define _row(index).")

    def fingerprint(self) -> str:
        return self.identity

    def length_of(self, index: int) -> int:
        """Read a row and return its number of tokens. Raises IndexError if there is no such row."""
        return len(self._row(index)["tokens"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return {"tokens": (N,) int64, "labels": (N,) int64, "cu_seqlens": (D + 1,) int32, "index": row number}."""
        return {**self._row(index), "index": index}

    def read_ranges(self, index: int, ranges: tuple[range, ...]) -> dict[str, Any]:
        """Return the tokens and labels of a row at `ranges`, with the bounds of its documents in the whole row."""
        row, empty = self[index], torch.empty(0, dtype=torch.int64)
        parts = {name: [row[name][x.start : x.stop : x.step] for x in ranges] for name in ("tokens", "labels")}
        return {**row, **{name: torch.cat([empty, *values]) for name, values in parts.items()}}


class StreamedRows(PackedRows):
    """The rows of an epoch by number. Rows should be read in order; any other order is correct but slow.

    The position of each row is recorded in `folder`, so that workers of a later epoch, and a resumed run, need not
    encode used documents again.

    Args:
        source: the source of rows.
        epoch_rows: number of rows of an epoch; the next epoch continues with the rows after them.
        folder: folder of the recorded positions, one file per reader; valid for this source only.
        identity: see `PackedRows`.
    """

    def __init__(self, source: PackedReaders, epoch_rows: int, folder: Path, identity: str) -> None:
        self.source, self.epoch_rows, self.folder, self.identity = source, epoch_rows, folder, identity
        self.seq_len, self.epoch = source.size, 0
        self._open: dict[int, tuple[int, Rows]] = {}  # reader -> (number of the next row, rows from there on)
        self._last: tuple[int, dict[str, torch.Tensor]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_last": None}

    def __len__(self) -> int:
        return self.epoch_rows

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; row numbers then count from its beginning."""
        self.epoch = epoch

    def _row(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} was asked for, but an epoch has {len(self)}")
        place = self.epoch * self.epoch_rows + index
        if self._last is None or self._last[0] != place:
            number, reader = divmod(place, self.source.readers.count)
            self._last = place, self._read(reader, number)
        return self._last[1]

    def _read(self, reader: int, number: int) -> dict[str, torch.Tensor]:
        at, rows = self._open.pop(reader, (number + 1, None))
        noted, position = self._noted(reader, number)
        if rows is None or at > number or noted > at:
            at, rows = noted, self.source.rows(reader, position)
        while True:
            row, following = next(rows)
            at += 1
            self._note(reader, at, following)
            if at > number:
                self._open[reader] = at, rows
                return row

    # -- recorded positions --------------------------------------------------------------------------------------------
    def _file(self, reader: int) -> Path:
        return self.folder / f"reader-{reader:05d}"

    def _note(self, reader: int, number: int, position: Position) -> None:
        """Write the position of row `number`. Processes that read the same rows write the same bytes."""
        private_folder(self.folder, self.folder.parent)
        handle = opened(self._file(reader), self.folder.parent, os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(handle, np.array([1, *position], np.int64).tobytes(), number * 32)
        finally:
            os.close(handle)

    def _noted(self, reader: int, number: int) -> tuple[int, Position]:
        """Return (number, position) of the last row up to `number` with a recorded position."""
        try:
            with open(opened(self._file(reader), self.folder.parent), "rb") as file:
                notes = np.fromfile(file, np.int64)
        except FileNotFoundError:
            return 0, Position()
        notes = notes[: len(notes) // 4 * 4].reshape(-1, 4)[: number + 1]
        known = np.flatnonzero(notes[:, 0])
        return (0, Position()) if not len(known) else (int(known[-1]), Position(*notes[known[-1], 1:].tolist()))


class InMemoryRows(PackedRows):
    """A few rows in memory, for validation."""

    def __init__(self, rows: list[dict[str, torch.Tensor]], identity: str) -> None:
        self.rows, self.identity = rows, identity

    def __len__(self) -> int:
        return len(self.rows)

    def _row(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


class StreamedDataModule(SplitDataModule):
    """Base of DataModules that encode documents during training; a subclass defines `encoder`, `settings` and `pack`.

    A batch is one row: tokens and labels (1, N) int64, cu_seqlens (D + 1,) int32 on the CPU, index (1,). The source
    starts over at its end, so set `trainer.max_steps`. Documents are read in file order, so shuffle the files first.

    Args:
        paths: files (.jsonl, .json, .parquet), directories or globs, folders that `datasets.save_to_disk` wrote; or the
            arguments of `datasets.load_dataset` as a mapping, {path: owner/name, split: train}, to stream a data set.
        seq_len: maximum number of tokens of a document.
        row_tokens: maximum number of tokens of a row.
        readers: S, number of independent readers of the source; a multiple of the number of loader workers of all
            data-parallel ranks. Rows depend on S. An S that divides the number of files is fastest.
        epoch_rows: number of rows of an epoch, a multiple of S; each epoch continues where the previous one ended.
        val_paths, test_paths: data for validation and for test; null for none.
        val_limit: maximum number of validation rows, taken from the start. Validation and test rows stay in memory.
        num_workers, pin_memory: see `SplitDataModule`.
        cache_dir: folder of the recorded positions; null is `streams` in the package's cache folder.
    """

    shuffles = False
    collate = staticmethod(collate_documents)
    pack: Pack

    def __init__(
        self,
        paths: str | list[str] | dict[str, Any],
        seq_len: int,
        row_tokens: int,
        readers: int,
        epoch_rows: int,
        val_paths: str | list[str] | dict[str, Any] | None,
        test_paths: str | list[str] | dict[str, Any] | None,
        val_limit: int,
        num_workers: int,
        pin_memory: bool | None,
        cache_dir: str | None,
    ) -> None:
        super().__init__(1, 0, num_workers, pin_memory)
        self.seq_len, self.row_tokens = integer(seq_len, "data.seq_len", 2), row_tokens
        options = {"paths": paths, "val_paths": val_paths, "test_paths": test_paths}
        self.paths = {x: checked_sources(p, x) for x, p in options.items() if x == "paths" or p is not None}
        self.readers = integer(readers, "data.readers", 1)
        self.epoch_rows = integer(epoch_rows, "data.epoch_rows", 1)
        if epoch_rows % readers:
            raise ValueError(
                f"data.epoch_rows is {epoch_rows}, not a multiple of data.readers = {readers}: set it to "
                f"{-(-epoch_rows // readers) * readers}"
            )
        self.val_limit = integer(val_limit, "data.val_limit", 1)
        self.cache_dir = cache_dir
        self._parts: dict[str, Dataset] = {}
        self._checked = False

    # -- methods that a subclass defines -------------------------------------------------------------------------------
    def encoder(self) -> Encode:
        """Return the function that makes documents from rows; it is pickled for workers."""
        raise TypeError(f"{type(self).__name__} must define encoder().")

    def settings(self) -> str:
        """Return a string of all settings that determine the documents, except the source."""
        raise TypeError(f"{type(self).__name__} must define settings().")

    # -- methods of SplitDataModule ------------------------------------------------------------------------------------
    def check(self) -> None:
        """Open the sources and read the first row of each. Raises: OSError, ValueError or ModuleNotFoundError."""
        if self._checked:
            return
        for split in SPLITS:
            if self.wanted(split) is None:
                first = self.dataset(split)[0]
                assert len(first["tokens"]) > 0
        self._checked = True

    def dataset(self, split: str) -> Dataset:
        one_of(split, "split", SPLITS)
        if split not in self._parts:
            self._parts[split] = self._opened(split)
        return self._parts[split]

    def wanted(self, split: str) -> str | None:
        return None if split == "train" or f"{split}_paths" in self.paths else f"data.{split}_paths is not set; set it"

    def train_dataloader(self) -> ResumableLoader:
        _, replicas = self._replica()
        share, remainder = divmod(self.readers, replicas)
        if remainder or share % max(1, self.num_workers):
            workers = f" with {self.num_workers} loader workers each" if self.num_workers else ""
            least = replicas * max(1, self.num_workers)
            raise ValueError(
                f"data.readers is {self.readers}, which {replicas} data-parallel ranks{workers} cannot divide evenly: set "
                f"it to a multiple of {least}, such as {-(-self.readers // least) * least}, and data.epoch_rows to a "
                "multiple of the new data.readers"
            )
        return super().train_dataloader()

    def describe(self) -> str:
        """Return one line with the numbers of readers, of tokens of a row, and of rows for validation and test."""
        counts = ", ".join(f"{len(self.dataset(x)):,} rows of {x}" for x in SPLITS[1:] if self.wanted(x) is None)  # type: ignore[arg-type]
        return f"{self.readers:,} readers, rows of up to {self.row_tokens:,} tokens{'; ' if counts else ''}{counts}"

    def too_few(self, count: int, needed: int, replicas: int) -> str:
        return (
            f"data.epoch_rows is {count}, but {replicas} data-parallel ranks take one row each: set it to a multiple of "
            f"{needed}"
        )

    def _opened(self, split: str) -> Dataset:
        name = "paths" if split == "train" else f"{split}_paths"
        count = self.readers if split == "train" else 1
        readers, source = open_readers(self.paths[name], name, count)
        rows = PackedReaders(readers, self.encoder(), type(self).pack, self.row_tokens)
        settings = f"{self.settings()}, rows of {self.row_tokens}"
        if split != "train":
            first = itertools.islice(rows.rows(0, endless=False), self.val_limit if split == "val" else None)
            return InMemoryRows([row for row, _ in first], f"{settings}, {source}")
        identity = f"{count} readers, {settings}, {source}"
        root = cache_root() / "streams" if self.cache_dir is None else Path(self.cache_dir).expanduser()
        digest = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        return StreamedRows(rows, self.epoch_rows, root / digest, identity)
