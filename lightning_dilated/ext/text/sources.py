"""Readers: independent passes through parts of a source, which can start at any row.

Shape letter: S readers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Protocol

from lightning.pytorch.utilities import rank_zero_info

from lightning_dilated.data.sampler import MARK
from lightning_dilated.ext.files.files import ByteStream, collect_files, paths_hint
from lightning_dilated.ext.text import records

#: number of rows per batch from a stream of `datasets`
_AT_ONCE = 16


class Readers(Protocol):
    """S readers of a source; row n of reader i is the same in every process."""

    count: int

    def rows(self, reader: int, start: int) -> Iterator[tuple[Any, str]]:
        """Yield the rows of one reader from its row `start` on, once, each with its location for errors."""
        ...


class NumberedReaders:
    """Readers of a source with numbered rows: reader i reads only the rows i, i + S, i + 2S, ..."""

    def __init__(self, rows: records.Rows, count: int, name: str) -> None:
        if len(rows) < count:
            raise ValueError(
                f"data.{name} has {len(rows):,} rows, but each of {count:,} readers needs at least one: lower "
                "data.readers, or pass more data"
            )
        self.table, self.count = rows, count

    def rows(self, reader: int, start: int) -> Iterator[tuple[Any, str]]:
        for number in range(reader + start * self.count, len(self.table), self.count):
            yield self.table[number], self.table.where(number)


class StreamReaders:
    """Readers of a streaming dataset of `datasets`.

    If S divides the number of its shards (such as files), each reader reads only its own shards. Otherwise reader i
    yields the rows i, i + S, i + 2S, ..., and skips the other rows after reading them.
    """

    def __init__(self, dataset: Any, count: int, name: str) -> None:
        self.dataset, self.count, self.name = dataset, count, name
        self.own_shards = dataset.num_shards % count == 0
        if not self.own_shards and count > 1:
            rank_zero_info(
                f"data: {name} has {dataset.num_shards:,} shards, which {count:,} readers cannot divide evenly, so "
                "each reader also reads the others' rows. Set data.readers to a number that divides the shards."
            )

    def rows(self, reader: int, start: int) -> Iterator[tuple[Any, str]]:
        if self.own_shards:
            part = self.dataset.shard(num_shards=self.count, index=reader)
            numbered = enumerate(_each(part.skip(start) if start else part), start)
            where = f" of reader {reader}" if self.count > 1 else ""
        else:
            strided = ((n, x) for n, x in enumerate(_each(self.dataset)) if n % self.count == reader)
            numbered, where = ((n, x) for n, x in strided if n // self.count >= start), ""
        for number, row in numbered:
            yield row, f"{self.name}, row {number:,}{where} (counted from 0)"


def _each(dataset: Any) -> Iterator[dict[str, Any]]:
    """Yield all rows of a streaming dataset. Its own `__iter__` would split the rows among a loader's workers."""
    for batch in dataset.iter(batch_size=_AT_ONCE):
        for values in zip(*batch.values(), strict=True):
            yield records.without_fillers(dict(zip(batch, values, strict=True)), dataset.features)


def open_readers(sources: list[str] | dict[str, Any], name: str, count: int) -> tuple[Readers, str]:
    """Return (S readers of `data.<name>`, fingerprint). JSON is read by number; Parquet and repositories are streamed.

    Raises: OSError or ValueError with the file and the remedy; ModuleNotFoundError if `datasets` is needed and missing.
    """
    if isinstance(sources, dict):
        saved = records.is_saved(str(sources["path"]))
        loaded = records.load(sources if saved else {**sources, "streaming": True}, name)
        about = f"{json.dumps(sources, sort_keys=True, default=str)} {getattr(loaded, 'split', None)}"
        splits = {k: v.num_examples for k, v in (loaded.info.splits or {}).items()}
        print_of = f"{about}{MARK}{sorted(splits.items())} {loaded.info.download_size}"
        if saved:
            return NumberedReaders(records.LoadedRows(loaded, str(sources["path"])), count, name), print_of
        return StreamReaders(loaded, count, str(sources["path"])), print_of
    saved_parts = [x for x in sources if records.is_saved(x)]
    files = collect_files(sources, None if saved_parts else records.SUFFIXES, paths_hint(name))
    digest = ByteStream(files)
    print_of = f"{digest.fingerprint()}{MARK}{digest.content()}"
    tables = [x for x in files if x.endswith(".parquet")]
    if not tables or saved_parts:
        return NumberedReaders(records.open_rows(sources, name), count, name), print_of
    if len(tables) < len(files):
        other = next(x for x in files if x not in tables)
        raise ValueError(
            f"data.{name} holds Parquet, which is read as a stream, and {other}, which is not: pass files of one kind"
        )
    return StreamReaders(records.load_parquet(tables, streaming=True), count, f"data.{name}"), print_of
