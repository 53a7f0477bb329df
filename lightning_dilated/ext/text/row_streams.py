"""StreamedRows: rows of a batch packed from documents as they are read, and StreamedDataModule, which serves them.

Documents are encoded while training, so their lengths are known only where they are read. Reader i of S packs its own
documents into rows; row g of all is row g // S of reader g mod S. So rows depend neither on ranks nor on loader workers, of
R ranks each needs only S / R readers, and a number of rows says where training is.

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
from lightning_dilated.data.text.tokens import collate_documents
from lightning_dilated.ext.text.block_cache import cache_root, opened, private_folder
from lightning_dilated.ext.text.readers import Readers, open_readers
from lightning_dilated.ext.text.rows import checked_sources
from lightning_dilated.ext.text.store import next_tokens

#: (row, its place) -> (tokens, whether each is to be learned), or None for a row that is left out
Encode = Callable[[Any, str], tuple[np.ndarray, np.ndarray] | None]


class Position(NamedTuple):
    """Where a reader is: its pass, the document of that pass, and tokens of that document that are used up."""

    turn: int = 0
    number: int = 0
    offset: int = 0


class Document(NamedTuple):
    """Tokens and labels, and where they come from."""

    position: Position
    tokens: np.ndarray
    labels: np.ndarray


#: (row, where the next one begins)
Rows = Iterator[tuple[dict[str, torch.Tensor], Position]]
Pack = Callable[[Iterator[Document], int, int], Rows]


def filled(documents: Iterator[Document], size: int, offset: int = 0) -> Rows:
    """Rows of `size` tokens: a document that reaches over the end of a row goes on in the next, as a document of its own.

    The last row of all may be shorter.

    Args:
        offset: tokens of the first document that are left out.
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
    """Rows of whole documents, as many as make up to `size` tokens; a longer document is a row by itself."""
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
    """The rows that readers pack from their documents, from any position on.

    Args:
        readers: of the source.
        encode: makes a document of a source's row.
        pack: `filled` or `packed`.
        size: tokens of a row.
    """

    def __init__(self, readers: Readers, encode: Encode, pack: Pack, size: int) -> None:
        self.readers, self.encode, self.pack, self.size = readers, encode, pack, size

    def rows(self, reader: int, start: Position = Position(), endless: bool = True) -> Rows:  # noqa: B008
        """(row, where the next begins) from a position on; `endless` begins again where the source ends.

        Raises: ValueError where a whole pass has no document.
        """
        return self.pack(self._documents(reader, start, endless), self.size, start.offset)

    def _documents(self, reader: int, start: Position, endless: bool) -> Iterator[Document]:
        turn, first = start.turn, start.number
        while True:
            count = 0
            for number, (row, where) in enumerate(self.readers.rows(reader, first), first):
                if (encoded := self.encode(row, where)) is not None:
                    count += 1
                    yield Document(Position(turn, number), *next_tokens(*encoded, len(encoded[0])))
            if count == 0 and first == 0:
                raise ValueError(
                    f"reader {reader} of {self.readers.count} has no document that can be used: pass more data, lower "
                    "data.readers, or raise data.seq_len"
                )
            if not endless:
                return
            turn, first = turn + 1, 0


class StreamedRows(Dataset):
    """Rows of an epoch by number, which are read in order; another order is right, and slow.

    Where each row begins is noted in `folder`, so that workers of a later epoch, and a run that goes on, need not encode
    again what was used up. Without notes they do.

    Args:
        source: of rows.
        epoch_rows: rows of an epoch; the next epoch goes on where it ends.
        folder: of the notes, one file a reader; they hold for this source only.
        identity: tells the source and all settings that rows depend on.
    """

    def __init__(self, source: PackedReaders, epoch_rows: int, folder: Path, identity: str) -> None:
        self.source, self.epoch_rows, self.folder, self.identity = source, epoch_rows, folder, identity
        self.seq_len, self.epoch = source.size, 0
        self._open: dict[int, tuple[int, Rows]] = {}  # of a reader, the next row's number and the rows from it on
        self._last: tuple[int, dict[str, torch.Tensor]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_last": None}

    def __len__(self) -> int:
        return self.epoch_rows

    def fingerprint(self) -> str:
        return self.identity

    def set_epoch(self, epoch: int) -> None:
        """Let row numbers count from the beginning of an epoch."""
        self.epoch = epoch

    def length_of(self, index: int) -> int:
        """N of a row, which is read. Raises: IndexError if there is none."""
        return len(self._row(index)["tokens"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """{"tokens": (N,) int64, "labels": (N,) int64, "cu_seqlens": (D + 1,) int32, "index": the row's number}."""
        return {**self._row(index), "index": index}

    def read_ranges(self, index: int, ranges: tuple[range, ...]) -> dict[str, Any]:
        """The row at some positions, with the bounds of its documents in the whole row."""
        return at_positions({**self._row(index), "index": index}, ranges)

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

    # -- notes -----------------------------------------------------------------------------------------------------------
    def _file(self, reader: int) -> Path:
        return self.folder / f"reader-{reader:05d}"

    def _note(self, reader: int, number: int, position: Position) -> None:
        """Write where row `number` begins. Processes that read the same rows write the same."""
        private_folder(self.folder, self.folder.parent)
        handle = opened(self._file(reader), self.folder.parent, os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(handle, np.array([1, *position], np.int64).tobytes(), number * 32)
        finally:
            os.close(handle)

    def _noted(self, reader: int, number: int) -> tuple[int, Position]:
        """(row, where it begins) of the last note of a row up to `number`."""
        try:
            with open(opened(self._file(reader), self.folder.parent), "rb") as file:
                notes = np.fromfile(file, np.int64)
        except FileNotFoundError:
            return 0, Position()
        notes = notes[: len(notes) // 4 * 4].reshape(-1, 4)[: number + 1]
        known = np.flatnonzero(notes[:, 0])
        return (0, Position()) if not len(known) else (int(known[-1]), Position(*notes[known[-1], 1:].tolist()))


class HeldRows(Dataset):
    """A few rows in memory, for validation."""

    def __init__(self, rows: list[dict[str, torch.Tensor]], identity: str) -> None:
        self.rows, self.identity = rows, identity

    def __len__(self) -> int:
        return len(self.rows)

    def fingerprint(self) -> str:
        return self.identity

    def length_of(self, index: int) -> int:
        return len(self.rows[index]["tokens"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.rows[index], "index": index}

    def read_ranges(self, index: int, ranges: tuple[range, ...]) -> dict[str, Any]:
        return at_positions(self[index], ranges)


def at_positions(row: dict[str, Any], ranges: tuple[range, ...]) -> dict[str, Any]:
    """A row at some positions only; bounds of documents stay those of the whole row."""
    parts = {name: [row[name][x.start : x.stop : x.step] for x in ranges] for name in ("tokens", "labels")}
    empty = torch.empty(0, dtype=torch.int64)
    return {**row, **{name: torch.cat([empty, *values]) for name, values in parts.items()}}


class StreamedDataModule(SplitDataModule):
    """Base of the DataModules that encode documents while training; a subclass defines `encoder` and `pack`.

    Batches are one row: tokens and labels (1, N) int64, cu_seqlens (D + 1,) int32 on the CPU, index (1,). Training has no
    end: where the source ends it begins again, so set `trainer.max_steps`. Documents come as they lie: shuffle them before.

    Args:
        paths: files (.jsonl, .json, .parquet), directories or globs of them, folders of `datasets.save_to_disk`; or the
            arguments of `datasets.load_dataset` as a mapping, {path: owner/name, split: train}, which is streamed.
        seq_len: the most tokens of a document.
        row_tokens: the most tokens of a row.
        readers: S, independent passes through the source; a multiple of the data-parallel ranks and of their loader workers.
            Rows depend on it. Best a number that divides the files.
        epoch_rows: rows of an epoch, a multiple of S; training goes on across epochs.
        val_paths, test_paths: of validation and of test; null does without.
        val_limit: the first so many rows of validation are used. They, and all rows of test, are kept in memory.
        num_workers, pin_memory: see `SplitDataModule`.
        cache_dir: folder of notes where rows begin; null is `streams` in the package's cache folder.
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
                f"data.epoch_rows is {epoch_rows}, which data.readers = {readers} does not divide: set it to "
                f"{-(-epoch_rows // readers) * readers}"
            )
        self.val_limit = integer(val_limit, "data.val_limit", 1)
        self.cache_dir = cache_dir
        self._parts: dict[str, Dataset] = {}
        self._checked = False

    # -- what a subclass defines ---------------------------------------------------------------------------------------
    def encoder(self) -> Encode:
        """What makes documents of rows; it is pickled, for workers."""
        raise TypeError(f"{type(self).__name__} must define encoder().")

    def settings(self) -> str:
        """All that documents depend on, but for the source."""
        raise TypeError(f"{type(self).__name__} must define settings().")

    # -- what SplitDataModule asks -------------------------------------------------------------------------------------
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
        share, rest = divmod(self.readers, replicas)
        if rest or share % max(1, self.num_workers):
            workers = f" with {self.num_workers} loader workers each" if self.num_workers else ""
            least = replicas * max(1, self.num_workers)
            raise ValueError(
                f"data.readers is {self.readers}, which {replicas} data-parallel ranks{workers} cannot divide among them: "
                f"set it to a multiple of {least}, such as {-(-self.readers // least) * least}, and data.epoch_rows to a "
                "multiple of that"
            )
        return super().train_dataloader()

    def describe(self) -> str:
        """One line: readers, and the sources."""
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
            return HeldRows([row for row, _ in first], f"{settings}, {source}")
        identity = f"{count} readers, {settings}, {source}"
        root = cache_root() / "streams" if self.cache_dir is None else Path(self.cache_dir).expanduser()
        digest = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        return StreamedRows(rows, self.epoch_rows, root / digest, identity)
