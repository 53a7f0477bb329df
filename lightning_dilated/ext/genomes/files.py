"""FASTA files, local or by URL: decompressed once into a cache folder, indexed, scanned once, and then read by range.

Bases are codes, see `bases`.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import hashlib
import io
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from lightning_dilated._validation import refuse_special
from lightning_dilated.data.opener import FileOpener, is_url
from lightning_dilated.ext.files.files import ByteStream
from lightning_dilated.ext.genomes.bases import CODES, ILLEGAL, N_CODE, OTHER
from lightning_dilated.ext.text.block_cache import cache_root, locked, private_folder, within

#: maximum ratio of unpacked to packed bytes (gzip reaches 1,032), and number of bytes that are always allowed
MOST_PACKED = 100
SMALL = 1 << 24
#: maximum number of characters of a line of a VCF or BED file
LONGEST = 1 << 26


def default_cache() -> Path:
    """Return the folder of genomes in the package's cache folder (`cache_root`)."""
    return cache_root() / "genomes"


def plain_file(path: str, cache: Path, opener: FileOpener | None = None) -> str:
    """Return the file's path, or the path of a plain copy in `cache`, made once for each path, size and time of change.

    Files that are compressed, have a byte order mark, or have lines that end in CR alone are copied, because they
    cannot be read by range; lines of the copy end in LF. For a URL, the content's version replaces the time.

    Raises: ValueError for an empty file, a file that gzip cannot read to its end, or a file that unpacks to more than
        MOST_PACKED times its size (above SMALL bytes).
    """
    opener = opener or FileOpener()
    if opener.size(path) == 0:
        raise ValueError(f"{path} is empty: fetch it again or leave it out of data.paths")
    with opener.open(path) as file:
        first = file.read(1 << 16)
    packed = first[:2] == b"\x1f\x8b"
    if not packed and not _is_unclean(first):
        if path.endswith((".gz", ".bgz", ".bz2", ".zip")):
            raise ValueError(
                f"{path} is not compressed by gzip, though its name suggests it: rename it, or compress it by gzip"
            )
        return path
    target = _cached(path, cache, ".fa", opener)
    if within(target, cache).exists():
        return str(target)
    with locked(Path(f"{target}.lock"), cache):
        if not within(target, cache).exists():  # another process may have written the file meanwhile
            _decompress(path, target, opener, packed)
            rank_zero_info(f"{path} was {'decompressed to' if packed else 'copied, with line ends of LF, to'} {target}")
    return str(target)


def _is_unclean(first: bytes) -> bool:
    """Return whether the beginning of a file has a byte order mark, or lines that end in CR alone."""
    return first.startswith(codecs.BOM_UTF8) or b"\r" in first[:-1].replace(b"\r\n", b"")


def _clean(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the text without a byte order mark, and with line ends of LF."""
    begin, left = codecs.BOM_UTF8, b""
    for block in blocks:
        block = left + block.removeprefix(begin)
        left, begin = (b"\r" if block.endswith(b"\r") else b""), b""  # the LF after this CR may begin the next block
        yield block.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    yield left.replace(b"\r", b"\n")


def table_rows(
    path: str | Path, what: str, columns: int, opener: FileOpener | None = None, blanks: bool = False
) -> Iterator[tuple[int, list[str]]]:
    """Yield each line's number, from 1, and first `columns` fields, of a text file or URL, plain or compressed by gzip.

    A byte order mark, empty lines and lines that begin with # are skipped. Lines end in LF, CR or both.

    Args:
        what: kind of the file, for errors.
        blanks: whether blanks separate the fields of a line without a tab; otherwise only tabs do.

    Raises:
        FileNotFoundError, ValueError: for a file that is missing or cannot be decompressed; with the line's number, for
            a line of more than `LONGEST` characters, or a field that is not UTF-8; for fields of more than MOST_PACKED
            times the size of a packed file (above SMALL characters).
    """
    refuse_special(str(path))
    opener, number, fields = opener or FileOpener(), 0, 0
    limit = max(SMALL, MOST_PACKED * opener.size(str(path)))
    with opener.open(str(path)) as file:
        packed = file.read(2) == b"\x1f\x8b"
    try:
        # bytes that are not UTF-8 matter only in the fields that are read
        with (
            opener.open(str(path)) as raw,
            gzip.open(raw, "rb") if packed else raw as unpacked,
            io.TextIOWrapper(unpacked, encoding="utf-8-sig", errors="surrogateescape") as lines,
        ):
            while line := lines.readline(LONGEST + 1):
                number += 1
                if len(line) > LONGEST:
                    raise ValueError(
                        f"{path}, line {number:,} has more than {LONGEST:,} characters, too long for {what}: is it the "
                        "right file?"
                    )
                row = _fields(line.rstrip("\n"), columns, blanks)
                if row and not line.startswith("#"):
                    fields += sum(map(len, row))
                    if fields > limit:
                        raise ValueError(
                            f"{path} unpacks to more than {MOST_PACKED} times its size: is it the right file? If so, unpack "
                            "it yourself, as by `gunzip -k`, and name the plain file"
                        )
                    "".join(row).encode()
                    yield number, row
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be decompressed ({error}): it was cut off or damaged.") from None
    except UnicodeEncodeError:
        raise ValueError(
            f"{path} is not text (line {number:,} is not UTF-8): name {what}, plain or compressed by gzip."
        ) from None


def _fields(line: str, columns: int, blanks: bool) -> list[str]:
    if not line.strip():
        return []
    return (line.split(None, columns) if blanks and "\t" not in line else line.split("\t", columns))[:columns]


def _decompress(path: str, target: Path, opener: FileOpener, packed: bool = True) -> None:
    size = opener.size(path)
    limit = max(SMALL, MOST_PACKED * size)
    done = 0
    with _part_of(target) as part:
        try:
            with opener.open(path) as raw, gzip.open(raw, "rb") if packed else raw as source, open(part, "wb") as out:
                for block in _clean(iter(partial(source.read, 1 << 20), b"")):
                    done += len(block)
                    if done > limit:
                        raise ValueError(
                            f"{path} unpacks to more than {MOST_PACKED} times its {size:,} bytes, where "
                            "genomes unpack to about 4 times: is it the right file? If so, unpack it yourself, as by "
                            "`gunzip -k`, and name the plain file"
                        )
                    out.write(block)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"{path} cannot be decompressed ({error}), after {done:,} bytes of text: it was cut off or "
                "damaged; fetch it again"
            ) from error
        if done == 0:
            raise ValueError(f"{path} is empty once decompressed: fetch it again or leave it out of data.paths")
        os.replace(part, target)


@contextlib.contextmanager
def _part_of(target: Path) -> Iterator[Path]:
    """Yield a temporary path for writing before a move to `target`, in a folder that only this user can read."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".lightning_dilated_") as folder:
        yield Path(folder) / target.name


def _cached(path: str, cache: Path, suffix: str, opener: FileOpener, version: object = None) -> Path:
    if is_url(path):
        key = repr((path, opener.remote.state(path), version))
    else:
        state = os.stat(path)
        key = repr((os.path.abspath(path), state.st_size, state.st_mtime_ns))
    return cache / f"{Path(path).name}.{hashlib.blake2b(key.encode(), digest_size=6).hexdigest()}{suffix}"


# -- the index ---------------------------------------------------------------------------------------------------------
def read_index(
    path: str, source: str, cache: Path, opener: FileOpener | None = None
) -> list[tuple[str, int, int, int, int]]:
    """Return name, number of bases, byte of the first base, bases per line and bytes per line of each record of a .fai.

    An index next to the file is used unless it is older than the file. Otherwise an index is written there, or into
    `cache` if that fails. For a URL, the index next to it is copied into `cache`, or a new index is written there.

    Raises: ModuleNotFoundError without pyfaidx, ValueError for a file that is not FASTA, with `source`.
    """
    try:
        import pyfaidx
    except ImportError as error:
        message = "FASTA files are read with pyfaidx: pip install 'lightning-dilated[genomes]'"
        raise ModuleNotFoundError(message) from error
    opener = opener or FileOpener()
    target, file = _index_file(path, source, cache, opener), _fasta(path, opener)
    try:
        with pyfaidx.Faidx(file, indexname=str(target), build_index=False) as faidx:
            records = [(name, r.rlen, r.offset, r.lenc, r.lenb) for name, r in faidx.index.items()]
    except ValueError as error:
        if "Duplicate key" in str(error):  # the error is about an existing index
            raise ValueError(f"{source} is not a FASTA file that can be read by range. {_reason(error)}") from error
        raise stale(source, str(error)) from error
    except (pyfaidx.FastaIndexingError, OSError) as error:
        raise stale(source, str(error)) from error
    if not records:
        raise stale(source, "no record")
    size = opener.size(path)
    for name, length, offset, line_bases, line_bytes in records:
        if length == 0:
            raise ValueError(f"{source}: the record {name!r} is empty: remove its header line, or fetch the file again")
        if not (0 < length <= size and 0 <= offset < size and 0 < line_bases <= line_bytes <= size + 2):
            raise stale(source, f"record {name!r} of {length} bases, {line_bases} in a line of {line_bytes} bytes")
    return records


def _index_file(path: str, source: str, cache: Path, opener: FileOpener) -> Path:
    """Return the path of a file's index; writes it if it is missing or older than the file."""
    if is_url(path):
        return _index_of_url(path, cache, opener)
    neighbour = Path(f"{path}.fai")
    refuse_special(str(neighbour))
    fresh = neighbour.exists() and neighbour.stat().st_mtime >= os.path.getmtime(path)
    if fresh and not neighbour.is_file():
        raise stale(source, f"{neighbour} is no file")
    target = neighbour if fresh or os.access(neighbour.parent, os.W_OK) else _cached(path, cache, ".fai", opener)
    if fresh or (target != neighbour and within(target, cache).exists()):
        return target
    if target != neighbour:
        private_folder(target.parent)
    _write_index(path, source, target, opener)
    return target


def _index_of_url(path: str, cache: Path, opener: FileOpener) -> Path:
    """Return the path in `cache` of a URL's index: a copy of the index next to the URL, or a new one."""
    neighbour = f"{path}.fai"
    exists = opener.remote.exists(neighbour)
    target = _cached(path, cache, ".fai", opener, opener.remote.state(neighbour) if exists else None)
    with locked(Path(f"{target}.lock"), cache):
        if within(target, cache).exists():
            return target
        if not exists:
            _write_index(path, path, target, opener)
            return target
        with _part_of(target) as part:
            with opener.open(neighbour) as source, open(part, "wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
            os.replace(part, target)
    return target


def _write_index(path: str, source: str, target: Path, opener: FileOpener) -> None:
    import pyfaidx

    try:
        with _part_of(target) as part:  # no other process may read half an index
            pyfaidx.Faidx(_fasta(path, opener), indexname=str(part)).close()
            os.replace(part, target)
    except (pyfaidx.FastaIndexingError, ValueError) as error:
        raise ValueError(f"{source} is not a FASTA file that can be read by range. {_reason(error)}") from error


def _fasta(path: str, opener: FileOpener) -> Any:
    """Return the file for pyfaidx: the path, or for a URL an fsspec OpenFile that reads through the opener."""
    if not is_url(path):
        return path
    from fsspec.core import OpenFile

    class Fasta(OpenFile):
        def open(self) -> Any:
            return opener.open(path)

    class Times:
        """Gives file and index the same time, so that pyfaidx accepts the index, which does belong to the file."""

        def stat(self, path: str) -> dict[str, float]:
            return {"mtime": 0.0}

    return Fasta(Times(), path)


def _reason(error: Exception) -> str:
    text = str(error)
    if isinstance(error, UnicodeDecodeError):
        return "It is not text: name FASTA files (plain, or compressed by gzip)."
    if "Duplicate key" in text:
        return f"{text.replace('Duplicate key', 'Two records have the name')}: rename one, or leave one out."
    if "consistent" in text:
        return f"{text} All lines of a record but the last must be equally long: wrap it again, as `seqkit seq -w 60` does."
    return f"{text} Each record begins with a line >NAME."


def stale(file: str, what: str) -> ValueError:
    """Return the error for an index that does not fit its file."""
    return ValueError(
        f"the index (.fai) of {file} does not fit the file ({what}), so bases would be read from wrong places: remove the "
        ".fai next to the file (or in data.cache_dir) and start again"
    )


# -- records -----------------------------------------------------------------------------------------------------------
_CHUNK = 1 << 22


@dataclass
class Record:
    """One sequence of a file: its name, its length in bases, and the layout of its lines in the stream of all files."""

    file: str
    name: str
    length: int
    offset: int  # position of its first base in the stream, in bytes
    line_bases: int
    line_bytes: int
    # set by the scan
    checksum: int = 0
    others: int = 0  # number of IUPAC letters that became N
    run_starts: np.ndarray | None = None  # bounds of runs of N, sorted; two runs may be adjacent
    run_stops: np.ndarray | None = None

    def byte(self, base: int) -> int:
        """Return the position of a base in the stream."""
        return self.offset + base // self.line_bases * self.line_bytes + base % self.line_bases

    @property
    def end(self) -> int:
        """The byte after the last base."""
        return self.byte(self.length - 1) + 1

    def unknown_before(self, positions: np.ndarray) -> np.ndarray:
        """Return the number of N before each of these positions: int64 of the same shape."""
        assert self.run_starts is not None and self.run_stops is not None
        total = np.concatenate([[0], np.cumsum(self.run_stops - self.run_starts)])
        runs = np.searchsorted(self.run_starts, positions, side="left")  # runs that begin before the position
        last_stop = np.concatenate([[0], self.run_stops])[runs]
        return total[runs] - np.maximum(0, last_stop - positions)


class Genome:
    """Records of FASTA files, read by range through memory maps; can be pickled and read in forked workers.

    Args:
        files: paths or URLs of FASTA files, plain or compressed by gzip.
        cache_dir: folder for decompressed files, and for indexes of files in folders that cannot be written.
        opener: reads the URLs; None makes a new one.

    Raises: OSError or ValueError with file, record and position.
    """

    def __init__(self, files: list[str], cache_dir: str | None = None, opener: FileOpener | None = None) -> None:
        cache = Path(cache_dir).expanduser() if cache_dir else default_cache()
        opener = opener or FileOpener(cache_dir)
        opener.look_up(files)
        plain = [plain_file(path, cache, opener) for path in files]
        self.stream = ByteStream(plain, opener=opener)
        self.records: list[Record] = []
        begin = 0
        for path, source, size in zip(plain, files, self.stream.sizes, strict=True):
            records = [
                Record(source, name, length, begin + offset, bases, width)
                for name, length, offset, bases, width in read_index(path, source, cache, opener)
            ]
            _scan(ByteStream([path], opener=opener), records, begin)
            self.records += records
            begin += size
        _refuse_twice(self.records)

    @property
    def bytes_read(self) -> int:
        """Number of bytes that were read from the files after the scan, including line ends."""
        return self.stream.bytes_read

    def read(self, number: int, start: int, stop: int) -> np.ndarray:
        """Return bases [start, stop) of a record: (stop - start,) uint8 codes.

        Raises:
            IndexError: for bases outside the record.
            ValueError: if the file has changed since it was indexed.
        """
        return np.minimum(CODES[self.letters(number, start, stop)], N_CODE)

    def letters(self, number: int, start: int, stop: int) -> np.ndarray:
        """Return the characters of bases [start, stop) in the file: (stop - start,) uint8.

        Raises:
            IndexError: for bases outside the record.
            ValueError: if the file changed since it was indexed.
        """
        record = self.records[number]
        if not 0 <= start <= stop <= record.length:
            raise IndexError(f"bases [{start}, {stop}) lie outside {record.name}, which has {record.length}")
        if start == stop:
            return np.empty(0, dtype=np.uint8)
        raw = self.stream.read(record.byte(start), record.byte(stop - 1) + 1)
        letters = raw[_is_base(record, start, len(raw))]
        if len(letters) != stop - start or CODES[letters].max(initial=0) == ILLEGAL:
            raise ValueError(f"{record.file} changed since it was indexed: keep the data unchanged while it is in use")
        return letters

    def fingerprint(self) -> str:
        """Return a digest of the names and bases of all records."""
        identity = repr([(r.name, r.length, r.checksum) for r in self.records])
        return hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()


def _is_base(record: Record, start: int, count: int) -> np.ndarray:
    """Return a mask of `count` bytes from base `start` on: True for bases, False for ends of lines."""
    return (np.arange(count) + start % record.line_bases) % record.line_bytes < record.line_bases


def _scan(stream: ByteStream, records: list[Record], begin: int) -> None:
    """Read every base of a file that begins at byte `begin` of the stream; check that the index fits the file."""
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
        is_base = _is_base(record, base, len(raw))
        codes = CODES[raw[is_base]]
        if not np.isin(raw[~is_base], (10, 13)).all() or np.isin(raw[is_base], (10, 13)).any():
            raise stale(record.file, f"record {record.name!r}")
        if codes.max() == ILLEGAL:
            index = int(np.argmax(codes == ILLEGAL))
            raise ValueError(
                f"{record.file}: the record {record.name!r} holds {chr(int(raw[is_base][index]))!r} at base "
                f"{base + index + 1:,} (counted from 1), which is not a nucleotide (A C G T U N or another IUPAC letter): "
                "is it a protein or an alignment with gaps? Take it out of data.paths, or the letters out of the file"
            )
        record.others += int((codes == OTHER).sum())
        codes = np.minimum(codes, N_CODE)
        record.checksum = zlib.crc32(codes.tobytes(), record.checksum)
        edges = np.diff(np.concatenate([[0], (codes == N_CODE).astype(np.int8), [0]]))
        starts.append(np.flatnonzero(edges == 1) + base)
        stops.append(np.flatnonzero(edges == -1) + base)
    record.run_starts, record.run_stops = np.concatenate(starts), np.concatenate(stops)


def _check_between(stream: ByteStream, record: Record, start: int, stop: int, name: str | None) -> None:
    """Check that bytes [start, stop) hold only a header with this `name`, or if it is None (at the end), no header."""
    if not 0 <= start <= stop <= len(stream) or stop - start > 1 << 20:
        raise stale(record.file, f"record {record.name!r}")
    lines = [line for line in stream.read(start, stop).tobytes().splitlines() if line.strip() and line[:1] != b";"]
    names = [line[1:].decode(errors="replace").split()[:1] if line[:1] == b">" else None for line in lines]
    if names != ([] if name is None else [[name]]):
        raise stale(record.file, f"record {record.name!r}")


def _refuse_twice(records: list[Record]) -> None:
    records_by_content: dict[tuple[str, int, int], Record] = {}
    for record in records:
        first = records_by_content.setdefault((record.name, record.length, record.checksum), record)
        if first is not record:
            raise ValueError(
                f"the record {record.name!r} is in {first.file} and again, base for base, in {record.file}, so its bases "
                "could be in two splits: leave one of the files out of data.paths"
            )
