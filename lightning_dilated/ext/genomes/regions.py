"""Regions of records: whole records, parts of them, or the regions of a BED file, each with a strand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_dilated.data.opener import FileOpener
from lightning_dilated.ext.genomes.files import Record, table_rows


class Region(NamedTuple):
    """Bases [start, stop) of the record with number `record`; `strand` is 1, -1, or 0 if either strand may be read."""

    record: int
    start: int
    stop: int
    strand: int = 0
    name: str = ""

    def within(self, start: int, stop: int) -> Region:
        """Return the part of the region in [start, stop), which may be empty."""
        low = min(max(self.start, start), self.stop)
        return self._replace(start=low, stop=max(low, min(self.stop, stop)))


def read_bed(path: str | Path, records: Sequence[Record], opener: FileOpener | None = None) -> list[Region]:
    """Read the regions of a BED file (or URL), plain or compressed by gzip, in file order.

    The columns are record, start (counted from 0), stop, and optionally name, score and strand (+, - or .), separated
    by tabs or blanks. Lines that begin with #, "track" or "browser" are skipped. `records` are the genome's records.

    Raises:
        FileNotFoundError, ValueError: for a file without regions; and, with the line's number, for an invalid line, an
            unknown record, or an end outside the record.
    """
    numbers: dict[str, list[int]] = {}
    for number, record in enumerate(records):
        numbers.setdefault(record.name, []).append(number)
    regions = []
    for number, fields in table_rows(path, "a BED file", 6, opener, blanks=True):
        if fields[0].partition(" ")[0] not in ("track", "browser"):
            regions.append(_region(f"{path}, line {number}", fields, numbers, records))
    if not regions:
        raise ValueError(f"{path} holds no region: a line of a BED file has a record, a start and a stop.")
    return regions


def _region(where: str, fields: list[str], numbers: Mapping[str, Sequence[int]], records: Sequence[Record]) -> Region:
    if len(fields) < 3:
        raise ValueError(f"{where} has {len(fields)} columns, but a region has at least 3: record, start and stop.")
    name, start, stop = fields[:3]
    if not all(x.isascii() and x.isdigit() for x in (start, stop)) or int(start) >= int(stop):
        raise ValueError(
            f"{where}: start and stop are {start!r} and {stop!r}; they must be numbers, counted from 0, with start < stop."
        )
    strand = fields[5].strip() if len(fields) > 5 else "."
    if strand not in ("+", "-", "."):
        raise ValueError(f"{where}: the strand is {strand!r}; it must be +, - or . (either).")
    matches = numbers.get(name, ())
    if len(matches) != 1:
        shown = ", ".join(list(numbers)[:8]) + (", ..." if len(numbers) > 8 else "")
        what = f"are {len(matches)} records" if matches else "is no record"
        raise ValueError(
            f"{where}: there {what} called {name!r} (a name is a header's first word). There are: {shown}."
        )
    length = records[matches[0]].length
    if int(stop) > length:
        raise ValueError(f"{where}: stop is {int(stop):,}, but {name} has {length:,} bases.")
    label = fields[3].strip() if len(fields) > 3 else ""
    return Region(matches[0], int(start), int(stop), {"+": 1, "-": -1, ".": 0}[strand], label)
