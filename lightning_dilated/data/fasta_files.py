"""FASTA files on disk: gzip undone once in a cache folder, and the index by which a plain file is read by range."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info


def default_cache() -> Path:
    """The folder lightning_dilated/genomes in the user's cache ($XDG_CACHE_HOME, or ~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_dilated" / "genomes"


def plain_file(path: str, cache: Path) -> str:
    """The file itself, or where its content lies decompressed in `cache`, once for each path, size and time of change.

    Raises: ValueError for an empty file or one that gzip cannot read to its end.
    """
    if os.path.getsize(path) == 0:
        raise ValueError(f"{path} is empty: fetch it again or leave it out of data.paths")
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    if not packed:
        if path.endswith((".gz", ".bgz", ".bz2", ".zip")):
            raise ValueError(
                f"{path} is not compressed by gzip, though its name ends so: rename it, or compress it by gzip"
            )
        return path
    target = _cached(path, cache, ".fa")
    if target.exists():
        return str(target)
    with _lock(target):
        if not target.exists():  # else another process made it meanwhile
            _decompress(path, target)
            rank_zero_info(f"{path} was decompressed to {target}")
    return str(target)


def _decompress(path: str, target: Path) -> None:
    part = target.with_suffix(f".{os.getpid()}.part")
    try:
        with gzip.open(path, "rb") as source, open(part, "wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
        if part.stat().st_size == 0:
            raise ValueError(f"{path} is empty once decompressed: fetch it again or leave it out of data.paths")
        os.replace(part, target)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        done = part.stat().st_size if part.exists() else 0
        raise ValueError(
            f"{path} cannot be decompressed ({error}), after {done:,} bytes of text: it was cut off or "
            "damaged; fetch it again"
        ) from error
    finally:
        part.unlink(missing_ok=True)


def _cached(path: str, cache: Path, suffix: str) -> Path:
    state = os.stat(path)
    words = repr((os.path.abspath(path), state.st_size, state.st_mtime_ns))
    return cache / f"{Path(path).name}.{hashlib.blake2b(words.encode(), digest_size=6).hexdigest()}{suffix}"


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    """One process of this machine at a time makes `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # not on Windows; all write the same, and each puts its own in place whole
        yield
        return
    with open(f"{target}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def index(path: str, given: str, cache: Path) -> list[tuple[str, int, int, int, int]]:
    """(name, bases, byte of the first, bases a line, bytes a line) of every record, by a .fai as samtools writes it.

    An index beside the file is used if it is not older; else it is made there, or in `cache` where that cannot be written.

    Raises: ImportError without pyfaidx, ValueError for what is no FASTA, naming `given`.
    """
    try:
        import pyfaidx
    except ImportError as error:
        raise ImportError("FASTA files are read with pyfaidx: pip install 'lightning-dilated[genomes]'") from error
    beside = Path(f"{path}.fai")
    fresh = beside.exists() and beside.stat().st_mtime >= os.path.getmtime(path)
    target = beside if fresh or os.access(beside.parent, os.W_OK) else _cached(path, cache, ".fai")
    part = Path(f"{target}.{os.getpid()}.part")  # no other process may read half an index
    try:
        if not fresh and (target == beside or not target.exists()):
            target.parent.mkdir(parents=True, exist_ok=True)
            pyfaidx.Faidx(path, indexname=str(part)).close()
            os.replace(part, target)
    except (pyfaidx.FastaIndexingError, ValueError) as error:
        raise ValueError(f"{given} is no FASTA file that can be read by range. {_reason(error)}") from error
    finally:
        part.unlink(missing_ok=True)
    try:
        with pyfaidx.Faidx(path, indexname=str(target), build_index=False) as found:
            records = [(name, r.rlen, r.offset, r.lenc, r.lenb) for name, r in found.index.items()]
    except ValueError as error:
        if "Duplicate key" in str(error):  # in an index of somebody else's
            raise ValueError(f"{given} is no FASTA file that can be read by range. {_reason(error)}") from error
        raise stale(given, str(error)) from error
    if not records:
        raise stale(given, "no record")
    for name, length, *_ in records:
        if length == 0:
            raise ValueError(f"{given}: the record {name!r} is empty: remove its header line, or fetch the file again")
    return records


def _reason(error: Exception) -> str:
    text = str(error)
    if isinstance(error, UnicodeDecodeError):
        return "It is not text: name FASTA files (plain, or compressed by gzip)."
    if "Duplicate key" in text:
        return f"{text.replace('Duplicate key', 'Two records have the name')}: rename one, or leave one out."
    if "consistent" in text:
        return (
            f"{text} All lines of a record but the last must be equally long: wrap it anew, as `seqkit seq -w 60` does."
        )
    return f"{text} Each record begins with a line >NAME."


def stale(file: str, what: str) -> ValueError:
    """The error about an index that is not that of its file."""
    return ValueError(
        f"the index (.fai) of {file} does not fit the file ({what}), so bases would be read from wrong places: remove the "
        ".fai beside the file (or in data.cache_dir) and start again"
    )
