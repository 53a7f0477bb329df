"""The records of FASTA files, read by range after every letter was looked at once.

A record's bases are codes: A 0, C 1, G 2, T 3 (and U), N 4 (and every other IUPAC letter); lower case is the same.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_dilated.data.genome.files import default_cache, index, plain_file, stale
from lightning_dilated.data.stream import ByteStream

LETTERS = "ACGTN"
N_CODE = 4
_OTHER, _ILLEGAL = 5, 255
_CHUNK = 1 << 22


def _table() -> np.ndarray:
    table = np.full(256, _ILLEGAL, dtype=np.uint8)
    for letters, first in (("ACGTN", 0), ("U", 3)):
        for code, letter in enumerate(letters, first):
            table[[ord(letter), ord(letter.lower())]] = code
    table[[ord(x) for x in "RYSWKMBDHVryswkmbdhv"]] = _OTHER
    return table


_CODES = _table()


@dataclass
class Record:
    """One sequence of a file: its name and length in bases, and where its lines lie in the stream of all files."""

    file: str
    name: str
    length: int
    offset: int  # of its first base, in the stream
    line_bases: int
    line_bytes: int
    # found by the scan
    checksum: int = 0
    others: int = 0  # IUPAC letters that became N
    run_starts: np.ndarray | None = None  # of stretches of N, sorted; they may touch
    run_stops: np.ndarray | None = None

    def byte(self, base: int) -> int:
        """Where a base lies in the stream."""
        return self.offset + base // self.line_bases * self.line_bytes + base % self.line_bases

    @property
    def end(self) -> int:
        """The byte after the last base."""
        return self.byte(self.length - 1) + 1

    def unknown_before(self, positions: np.ndarray) -> np.ndarray:
        """How many N the record has before each of these positions: int64 of the same shape."""
        assert self.run_starts is not None and self.run_stops is not None
        total = np.concatenate([[0], np.cumsum(self.run_stops - self.run_starts)])
        runs = np.searchsorted(self.run_starts, positions, side="left")  # runs that begin before the position
        last_stop = np.concatenate([[0], self.run_stops])[runs]
        return total[runs] - np.maximum(0, last_stop - positions)


class Genome:
    """Records of FASTA files, read by range through memory maps; can be pickled and read in forked workers.

    Args:
        files: paths of FASTA files, plain or compressed by gzip.
        cache_dir: where compressed files are decompressed to, and the index of a file whose folder cannot be written.

    Raises: OSError or ValueError naming file, record and position.
    """

    def __init__(self, files: list[str], cache_dir: str | None = None) -> None:
        cache = Path(cache_dir).expanduser() if cache_dir else default_cache()
        plain = [plain_file(path, cache) for path in files]
        self.stream = ByteStream(plain)
        self.records: list[Record] = []
        begin = 0
        for path, given, size in zip(plain, files, self.stream.sizes, strict=True):
            found = [
                Record(given, name, length, begin + offset, bases, width)
                for name, length, offset, bases, width in index(path, given, cache)
            ]
            _scan(ByteStream([path]), found, begin)
            self.records += found
            begin += size
        _refuse_twice(self.records)

    @property
    def bytes_read(self) -> int:
        """Bytes of files read for bases, line ends included; those that the check looked at do not count."""
        return self.stream.bytes_read

    def read(self, number: int, start: int, stop: int) -> np.ndarray:
        """Bases [start, stop) of a record: (stop - start,) uint8 codes. Raises: IndexError outside the record."""
        record = self.records[number]
        if not 0 <= start <= stop <= record.length:
            raise IndexError(f"bases [{start}, {stop}) lie outside {record.name}, which has {record.length}")
        if start == stop:
            return np.empty(0, dtype=np.uint8)
        raw = self.stream.read(record.byte(start), record.byte(stop - 1) + 1)
        codes = _CODES[raw[_is_base(record, start, len(raw))]]
        if len(codes) != stop - start or codes.max(initial=0) == _ILLEGAL:
            raise ValueError(f"{record.file} changed since it was indexed: keep the data as it is while in use")
        return np.minimum(codes, N_CODE)

    def fingerprint(self) -> str:
        """A digest of the names and bases of all records."""
        words = repr([(r.name, r.length, r.checksum) for r in self.records])
        return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()


def _is_base(record: Record, start: int, count: int) -> np.ndarray:
    """Which of `count` bytes from base `start` on are bases, and not ends of lines."""
    return (np.arange(count) + start % record.line_bases) % record.line_bytes < record.line_bases


def _scan(stream: ByteStream, records: list[Record], begin: int) -> None:
    """Look at every base of a file that begins at byte `begin` of all; see that the index is that of the file."""
    before = begin
    for record in records:
        _check_between(stream, record, before - begin, record.offset - begin, record.name)
        before = record.end
        if before - begin > len(stream):
            raise stale(record.file, f"record {record.name!r}")
        _scan_record(stream, record, begin)
    _check_between(stream, records[-1], before - begin, len(stream), None)


def _scan_record(stream: ByteStream, record: Record, begin: int) -> None:
    starts, stops = [], []
    for base in range(0, record.length, _CHUNK):
        stop = min(base + _CHUNK, record.length)
        raw = stream.read(record.byte(base) - begin, record.byte(stop - 1) + 1 - begin)
        kept = _is_base(record, base, len(raw))
        codes = _CODES[raw[kept]]
        if not np.isin(raw[~kept], (10, 13)).all() or np.isin(raw[kept], (10, 13)).any():
            raise stale(record.file, f"record {record.name!r}")
        if codes.max() == _ILLEGAL:
            at = int(np.argmax(codes == _ILLEGAL))
            raise ValueError(
                f"{record.file}: the record {record.name!r} holds {chr(int(raw[kept][at]))!r} at base {base + at + 1:,} "
                "(counted from 1), which is no nucleotide (A C G T U N or another IUPAC letter): is it a protein or an "
                "alignment with gaps? Take it out of data.paths, or the letters out of the file"
            )
        record.others += int((codes == _OTHER).sum())
        codes = np.minimum(codes, N_CODE)
        record.checksum = zlib.crc32(codes.tobytes(), record.checksum)
        edges = np.diff(np.concatenate([[0], (codes == N_CODE).astype(np.int8), [0]]))
        starts.append(np.flatnonzero(edges == 1) + base)
        stops.append(np.flatnonzero(edges == -1) + base)
    record.run_starts, record.run_stops = np.concatenate(starts), np.concatenate(stops)


def _check_between(stream: ByteStream, record: Record, start: int, stop: int, name: str | None) -> None:
    """Between records lies one header, that of `name`; and after the last nothing."""
    if not 0 <= start <= stop <= len(stream) or stop - start > 1 << 20:
        raise stale(record.file, f"record {record.name!r}")
    lines = [line for line in stream.read(start, stop).tobytes().splitlines() if line.strip() and line[:1] != b";"]
    names = [line[1:].decode(errors="replace").split()[:1] if line[:1] == b">" else None for line in lines]
    if names != ([] if name is None else [[name]]):
        raise stale(record.file, f"record {record.name!r}")


def _refuse_twice(records: list[Record]) -> None:
    seen: dict[tuple[str, int, int], Record] = {}
    for record in records:
        before = seen.setdefault((record.name, record.length, record.checksum), record)
        if before is not record:
            raise ValueError(
                f"the record {record.name!r} is in {before.file} and again, base for base, in {record.file}, so a split "
                "could hold what another was trained on: leave one of the files out of data.paths"
            )
