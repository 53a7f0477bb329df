"""Regions of records: whole ones, shares of them, and those of a BED file, with the strand that each is read on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_dilated.data.opener import Opener
from lightning_dilated.ext.genomes.files import Record, table_rows


class Region(NamedTuple):
    """Bases [start, stop) of a record, by its number; `strand` is 1 or -1, or 0 where either may be read."""

    record: int
    start: int
    stop: int
    strand: int = 0
    name: str = ""

    def within(self, start: int, stop: int) -> Region:
        """The part of it in [start, stop), which may be empty."""
        low = min(max(self.start, start), self.stop)
        return self._replace(start=low, stop=max(low, min(self.stop, stop)))


def read_bed(path: str | Path, records: Sequence[Record], opener: Opener | None = None) -> list[Region]:
    """The regions of a BED file (or URL), plain or compressed by gzip, in its order.

    The columns are record, start (counted from 0), stop, and optionally name, score and strand (+, - or .), divided by tabs
    or blanks. Lines that begin with #, "track" or "browser" are left out.

    Args:
        records: of the genome.

    Raises:
        FileNotFoundError, ValueError: for a file without regions, a line that is none, an unknown record, or an end that
            lies outside of it, naming the line.
    """
    numbers: dict[str, list[int]] = {}
    for number, record in enumerate(records):
        numbers.setdefault(record.name, []).append(number)
    regions = []
    for number, fields in table_rows(path, "a BED file", 6, opener, blanks=True):
        if fields[0].partition(" ")[0] not in ("track", "browser"):
            regions.append(_region(f"{path}, line {number}", fields, numbers, records))
    if not regions:
        raise ValueError(f"{path} holds no region: a BED file has a line for each, record, start and stop.")
    return regions


def _region(where: str, fields: list[str], numbers: Mapping[str, Sequence[int]], records: Sequence[Record]) -> Region:
    if len(fields) < 3:
        raise ValueError(f"{where} has {len(fields)} columns, and a region has at least 3: record, start and stop.")
    name, start, stop = fields[:3]
    if not all(x.isascii() and x.isdigit() for x in (start, stop)) or int(start) >= int(stop):
        raise ValueError(
            f"{where}: start and stop are {start!r} and {stop!r}; they are numbers, counted from 0, and start is below stop."
        )
    strand = fields[5].strip() if len(fields) > 5 else "."
    if strand not in ("+", "-", "."):
        raise ValueError(f"{where}: the strand is {strand!r}; it is +, - or . (either).")
    found = numbers.get(name, ())
    if len(found) != 1:
        shown = ", ".join(list(numbers)[:8]) + (", ..." if len(numbers) > 8 else "")
        what = f"are {len(found)} records" if found else "is no record"
        raise ValueError(
            f"{where}: there {what} called {name!r} (a name is a header's first word). There are: {shown}."
        )
    length = records[found[0]].length
    if int(stop) > length:
        raise ValueError(f"{where}: stop is {int(stop):,}, and {name} has {length:,} bases.")
    label = fields[3].strip() if len(fields) > 3 else ""
    return Region(found[0], int(start), int(stop), {"+": 1, "-": -1, ".": 0}[strand], label)
