"""FASTA files on disk: gzip undone once in a cache folder, and the index by which a plain file is read by range."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info

from lightning_dilated.data.paths import refuse_special

#: most bytes that a compressed byte may unpack to, and bytes of text that any file may have: gzip itself reaches 1,032
MOST_PACKED = 100
SMALL = 1 << 24


def default_cache() -> Path:
    """The folder lightning_dilated/genomes in the user's cache ($XDG_CACHE_HOME, or ~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_dilated" / "genomes"


def plain_file(path: str, cache: Path) -> str:
    """The file itself, or where its content lies decompressed in `cache`, once for each path, size and time of change.

    Raises: ValueError for an empty file, one that gzip cannot read to its end, or one that unpacks to more than MOST_PACKED
        times its size (above SMALL bytes).
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
    limit = max(SMALL, MOST_PACKED * os.path.getsize(path))
    done = 0
    with _part_of(target) as part:
        try:
            with gzip.open(path, "rb") as source, open(part, "wb") as out:
                while block := source.read(1 << 20):
                    done += len(block)
                    if done > limit:
                        raise ValueError(
                            f"{path} unpacks to more than {MOST_PACKED} times its {os.path.getsize(path):,} bytes, where "
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
    """A file to write before it is moved to `target`, in a folder beside that only this user can look into."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".lightning_dilated_") as folder:
        yield Path(folder) / target.name


def private_folder(folder: Path) -> None:
    """Make a folder and its parents, those that are missing for this user only. Raises: OSError, naming it."""
    for path in (*reversed(folder.parents), folder):
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError as error:
            raise FileExistsError(
                f"data.cache_dir {folder}: {path} is no folder; name another in data.cache_dir"
            ) from error
        except (PermissionError, OSError) as error:
            if not path.is_dir():
                raise type(error)(
                    error.errno, f"data.cache_dir {folder} cannot be made; name another in data.cache_dir", str(path)
                ) from error


def _cached(path: str, cache: Path, suffix: str) -> Path:
    state = os.stat(path)
    words = repr((os.path.abspath(path), state.st_size, state.st_mtime_ns))
    return cache / f"{Path(path).name}.{hashlib.blake2b(words.encode(), digest_size=6).hexdigest()}{suffix}"


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    """One process of this machine at a time makes `target`."""
    private_folder(target.parent)
    try:
        import fcntl
    except ImportError:  # not on Windows; all write the same, and each puts its own in place whole
        yield
        return
    # a link that somebody put there is not followed, and nothing is cut short
    lock = os.open(f"{target}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def index(path: str, given: str, cache: Path) -> list[tuple[str, int, int, int, int]]:
    """(name, bases, byte of the first, bases a line, bytes a line) of every record, by a .fai as samtools writes it.

    An index beside the file is used if it is not older; else it is made there, or in `cache` where that cannot be written.

    Raises: ImportError without pyfaidx, ValueError for what is no FASTA, naming `given`.
    """
    try:
        import pyfaidx
    except ImportError as error:
        raise ImportError("FASTA files are read with pyfaidx: pip install 'lightning-dilated[genomes]'") from error
    target = _index_file(path, given, cache)
    try:
        with pyfaidx.Faidx(path, indexname=str(target), build_index=False) as found:
            records = [(name, r.rlen, r.offset, r.lenc, r.lenb) for name, r in found.index.items()]
    except ValueError as error:
        if "Duplicate key" in str(error):  # in an index of somebody else's
            raise ValueError(f"{given} is no FASTA file that can be read by range. {_reason(error)}") from error
        raise stale(given, str(error)) from error
    except (pyfaidx.FastaIndexingError, OSError) as error:
        raise stale(given, str(error)) from error
    if not records:
        raise stale(given, "no record")
    size = os.path.getsize(path)
    for name, length, offset, line_bases, line_bytes in records:
        if length == 0:
            raise ValueError(f"{given}: the record {name!r} is empty: remove its header line, or fetch the file again")
        if not (0 < length <= size and 0 <= offset < size and 0 < line_bases <= line_bytes <= size + 2):
            raise stale(given, f"record {name!r} of {length} bases, {line_bases} in a line of {line_bytes} bytes")
    return records


def _index_file(path: str, given: str, cache: Path) -> Path:
    """Where the index of a file lies, made where it is missing or older than the file."""
    import pyfaidx

    beside = Path(f"{path}.fai")
    refuse_special(str(beside))
    fresh = beside.exists() and beside.stat().st_mtime >= os.path.getmtime(path)
    if fresh and not beside.is_file():
        raise stale(given, f"{beside} is no file")
    target = beside if fresh or os.access(beside.parent, os.W_OK) else _cached(path, cache, ".fai")
    if fresh or (target != beside and target.exists()):
        return target
    if target != beside:
        private_folder(target.parent)
    try:
        with _part_of(target) as part:  # no other process may read half an index
            pyfaidx.Faidx(path, indexname=str(part)).close()
            os.replace(part, target)
    except (pyfaidx.FastaIndexingError, ValueError) as error:
        raise ValueError(f"{given} is no FASTA file that can be read by range. {_reason(error)}") from error
    return target


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
