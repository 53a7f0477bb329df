"""Local and remote data files: lists of files, digests of their contents, and reads of byte ranges."""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from glob import glob
from typing import Any

import numpy as np

from lightning_dilated._validation import refuse_special
from lightning_dilated.data.opener import FileOpener, is_url, refuse_url

HINT = "pass existing files, directories or globs in data.paths, or leave it out to read Python's standard library"
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_MAGIC = frozenset("*?[")


def path_list(paths: object, name: str = "data.paths", hint: str = HINT) -> list[str] | None:
    """Return `paths` as a list of strings, or None if `paths` is None; do not access the disk.

    Raises: TypeError for entries that are not paths, ValueError for an empty list or path. Errors end with `hint`.
    """
    if paths is None:
        return None
    entries = list(paths) if isinstance(paths, list | tuple) else [paths]
    if not entries:
        raise ValueError(f"{name} is an empty list; {hint}")
    for entry in entries:
        if not isinstance(entry, str | os.PathLike):
            kind = type(entry).__name__
            raise TypeError(f"{name} holds {entry!r} ({kind}), but each entry must be a string; {hint}")
        if not os.fspath(entry):
            raise ValueError(f"{name} holds an empty string; {hint}")
    return [str(os.fspath(entry)) for entry in entries]


def file_suffixes(value: object, name: str) -> list[str] | None:
    """Return a list of file name endings, each with a leading dot, or None if `value` is None.

    Raises: TypeError if `value` is not a list of strings, ValueError if the list or an entry is empty.
    """
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{name} must be a list of file name endings such as ['.txt', '.md'], or null; got {value!r}.")
    if not value or not all(item.strip(".") for item in value):
        raise ValueError(
            f"{name} must hold at least one ending such as '.txt', or be null for all files; got {value!r}."
        )
    return [item if item.startswith(".") else f".{item}" for item in value]


def collect_files(
    paths: list[str] | None, suffixes: list[str] | None = None, hint: str = HINT, opener: FileOpener | None = None
) -> list[str]:
    """Return the regular files that `paths` refer to, without duplicates, in the order of the list.

    A directory means all its files (with `suffixes`: the files with these endings), sorted by relative path. A glob
    means the files that it matches, sorted. Names inside directories that start with "." are left out. None means the
    source files of Python's standard library, without its tests. URLs work the same way through `opener`.

    Raises: FileNotFoundError (missing path, no match, empty directory, dangling link), PermissionError (unreadable),
    ValueError (neither file nor directory, such as a fifo; a URL without an `opener`).
    """
    if paths is None:
        return _standard_library(suffixes or [".py"])
    files: dict[str, None] = {}
    for path in paths:
        if is_url(path):
            if opener is None:
                refuse_url(path, "the list of files")
            else:
                files |= dict.fromkeys(opener.expand(path, suffixes, hint))
            continue
        for file in _expand(os.path.expanduser(path), suffixes, hint):
            files.setdefault(os.path.abspath(file))
    for file in files:
        if not is_url(file) and not os.access(file, os.R_OK):
            raise PermissionError(f"{file} cannot be read by this user: change its permissions or leave it out")
    return list(files)


def paths_hint(name: str) -> str:
    return f"pass existing files, directories or globs in data.{name}"


def required_paths(paths: object, name: str) -> list[str]:
    """Return `paths` as a list of strings. Raises: TypeError or ValueError that names `data.<name>`."""
    entries = path_list(paths, f"data.{name}", paths_hint(name))
    if entries is None:
        raise TypeError(f"data.{name} is None; {paths_hint(name)}")
    return entries


def files_of(paths: list[str], name: str, suffixes: list[str], opener: FileOpener | None = None) -> list[str]:
    """Return the files of `data.<name>`; in directories, only those with `suffixes`. Raises: as in `collect_files`."""
    return collect_files(paths, suffixes, paths_hint(name), opener)


def name_list(value: object, name: str) -> list[str]:
    """Return a list of names from one name, a list of names or None. Raises: TypeError for other values."""
    entries = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, str) and entry for entry in entries):
        raise TypeError(f"data.{name} must be a name, a list of names, or null; got {value!r}.")
    return list(entries)


def _standard_library(suffixes: list[str]) -> list[str]:
    root = sysconfig.get_paths()["stdlib"]
    files = []
    if os.path.isdir(root):
        names = _walk(root, skipped=_STDLIB_SKIPPED)
        # some distributions contain links to missing files outside of this folder
        files = [os.path.join(root, name) for name in names if os.path.isfile(os.path.join(root, name))]
    files = [file for file in files if file.endswith(tuple(suffixes))]
    if not files:
        raise FileNotFoundError(
            f"Python's standard library has no source files in {root}: pass files, directories or globs in data.paths"
        )
    return files


def _expand(path: str, suffixes: list[str] | None, hint: str) -> list[str]:
    try:
        mode = os.stat(path).st_mode
    except PermissionError as error:
        raise PermissionError(f"{path} cannot be reached by this user: change permissions or leave it out") from error
    except (OSError, ValueError) as error:
        if _MAGIC.intersection(path):
            return _expand_glob(path, hint)
        raise FileNotFoundError(f"{path} does not exist; {hint}") from error
    if stat.S_ISDIR(mode):
        return _expand_directory(path, suffixes, hint)
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is neither a regular file nor a directory (a fifo, socket or device?); {hint}")
    return [path]


def _expand_directory(root: str, suffixes: list[str] | None, hint: str) -> list[str]:
    names = [
        name for name in _walk(root) if suffixes is None or name.lower().endswith(tuple(x.lower() for x in suffixes))
    ]
    files = []
    for name in names:
        file = os.path.join(root, name)
        if os.path.isfile(file):
            files.append(file)
        elif not os.path.exists(file):
            raise FileNotFoundError(
                f"{file} is a link to a file that does not exist, or to itself: correct or remove the link"
            )
        elif suffixes is not None:  # refuse special files with these endings, ignore others
            refuse_special(file)
    if not files:
        expected = "no regular files" if suffixes is None else f"no regular files ending in {', '.join(suffixes)}"
        raise FileNotFoundError(f"the directory {root} holds {expected} (hidden ones are left out); {hint}")
    return files


def _expand_glob(pattern: str, hint: str) -> list[str]:
    """Return the files that a glob matches; `**` matches any number of directories and stops at loops of links."""
    parts = pattern.replace(os.sep, "/").split("/")
    if "**" in parts:
        cut = parts.index("**")
        prefix = "/".join(parts[:cut]) + "/" if cut else ""
        roots = sorted(glob(prefix)) if prefix else [""]
        tail = [part for part in parts[cut:] if part]
        files = [root + name for root in roots for name in _walk(root or ".") if _matches(name.split("/"), tail)]
    else:
        files = sorted(glob(pattern))
    files = [file for file in files if os.path.isfile(file)]
    if not files:
        raise FileNotFoundError(f"the glob {pattern} matches no regular file (** stands for any directories); {hint}")
    return files


def _matches(names: list[str], pattern: list[str]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        if len(pattern) == 1:
            return True
        return any(_matches(names[skip:], pattern[1:]) for skip in range(len(names)))
    return bool(names) and fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


def _walk(root: str, skipped: frozenset[str] = frozenset()) -> list[str]:
    """Return sorted relative names (with "/") of all entries below `root`, without directories and hidden names."""
    return sorted(_walk_into(root, "", skipped, set()))


def _walk_into(folder: str, prefix: str, skipped: frozenset[str], visited: set[tuple[int, int]]) -> Iterator[str]:
    status = os.stat(folder)
    # links to directories are followed, but each directory is visited once, so that a loop of links ends
    if (status.st_dev, status.st_ino) in visited:
        return
    visited.add((status.st_dev, status.st_ino))
    try:
        with os.scandir(folder) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    except PermissionError as error:
        raise PermissionError(f"{folder} cannot be listed by this user: change permissions or leave it out") from error
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if not _is_directory(entry):
            yield prefix + entry.name
        elif entry.name not in skipped:
            yield from _walk_into(entry.path, f"{prefix}{entry.name}/", skipped, visited)


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a loop of links
        return False


# -- digests: a resumed run detects changed content in files with equal names and sizes --------------------------------
#: bytes in a block, and number of blocks read from a file: the first, the last and others evenly between them
BLOCK = 4096
BLOCKS = 8
#: maximum number of files that are read: the first, the last and others evenly between them
FILES = 4096


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `count`: the first, the last and others evenly between them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64)).tolist() if count else []


def files_digest(files: Sequence[str], opener: FileOpener | None = None) -> str:
    """Return a digest of BLOCKS blocks of BLOCK bytes from each of at most FILES files, independent of the machine.

    A file of up to 32 KiB is read whole. In a larger file, a change between the blocks is not detected.

    Raises: OSError for a missing file.
    """
    digest = hashlib.blake2b(digest_size=8)
    chosen, opener = [files[index] for index in spread(len(files), FILES)], opener or FileOpener()
    urls = [file for file in chosen if is_url(file)]
    opener.look_up(urls)
    sizes = {url: opener.size(url) for url in urls}
    ranges = [(url, x, min(x + BLOCK, sizes[url])) for url in urls for x in block_starts(sizes[url])]
    pieces = opener.pieces(ranges)
    for path in chosen:
        if path in sizes:
            for _ in block_starts(sizes[path]):
                digest.update(next(pieces))
            continue
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            for start in block_starts(size):
                file.seek(start)
                digest.update(file.read(BLOCK))
    return digest.hexdigest()


def block_starts(size: int) -> list[int]:
    """Return the positions of the blocks of a file of `size` bytes."""
    if size <= BLOCK * BLOCKS:
        return list(range(0, size, BLOCK))
    return np.linspace(0, size - BLOCK, BLOCKS).astype(np.int64).tolist()


# -- bytes by range --------------------------------------------------------------------------------------------------
class ByteStream:
    """The bytes of files, concatenated in the given order without separators; empty files are left out.

    Only the requested range of bytes is read. The object can be pickled: each process maps files again. `bytes_read`
    counts the bytes that this copy of the object has returned.

    Args:
        files: paths of regular files, or URLs.
        max_open: maximum number of files that are mapped at a time.
        opener: the object that reads URLs; None: a new one.

    Raises: FileNotFoundError or PermissionError if a file's size cannot be looked up, ValueError for max_open < 1.
    """

    def __init__(self, files: Sequence[str], max_open: int = 64, opener: FileOpener | None = None) -> None:
        if max_open < 1:
            raise ValueError(f"max_open is {max_open}; at least one file must be kept open")
        self.opener = opener or FileOpener()
        self.opener.look_up(map(str, files))
        sizes = [(str(file), self.opener.size(str(file))) for file in files]
        self.files = [file for file, size in sizes if size > 0]
        self.sizes = [size for _, size in sizes if size > 0]
        self.max_open = max_open
        self.bytes_read = 0
        self._ends = np.cumsum(self.sizes, dtype=np.int64)
        self._maps: OrderedDict[int, np.memmap] = OrderedDict()
        self._content: str | None = None

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.files else 0

    def fingerprint(self) -> str:
        """Return a digest of the files' names and sizes, without their folders."""
        named = [(os.path.basename(file), size) for file, size in zip(self.files, self.sizes, strict=True)]
        return hashlib.blake2b(repr(named).encode(), digest_size=8).hexdigest()

    def content(self) -> str:
        """Return a digest of some blocks of the files (`files_digest`); it is computed only once."""
        if self._content is None:
            self._content = files_digest(self.files, self.opener)
        return self._content

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_maps": OrderedDict()}

    def where(self, position: int) -> tuple[str, int]:
        """Return the file of a byte of the stream, and the byte's position in this file."""
        index = int(np.searchsorted(self._ends, position, side="right"))
        return self.files[index], position - int(self._ends[index]) + self.sizes[index]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read bytes [start, stop) into a new uint8 array of shape (stop - start,).

        Raises: IndexError for bytes outside the stream. ValueError if a file's size has changed since it was looked up,
        FileNotFoundError if the file was removed.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"byte range [{start}, {stop}) lies outside the stream of {len(self)} bytes")
        out = np.empty(stop - start, dtype=np.uint8)
        done = start
        while done < stop:
            index = int(np.searchsorted(self._ends, done, side="right"))
            begin = int(self._ends[index]) - self.sizes[index]
            upto = min(stop, begin + self.sizes[index])
            out[done - start : upto - start] = self._map(index)[done - begin : upto - begin]
            done = upto
        self.bytes_read += stop - start
        return out

    def chunks(self, start: int, stop: int, size: int) -> Iterator[np.ndarray]:
        """Yield [start, stop) in pieces of `size` + 1 bytes; the last byte of a piece is the first byte of the next.

        So every pair of neighbouring bytes of the range is in exactly one piece.
        """
        for begin in range(start, stop - 1, size):
            yield self.read(begin, min(begin + size + 1, stop))

    def _map(self, index: int) -> Any:
        file, size = self.files[index], self.sizes[index]
        if is_url(file):
            return self.opener.bytes_of(file)
        try:
            now = os.stat(file).st_size
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{file} was removed or renamed after it was indexed: put it back") from error
        # if a mapped file became shorter, a read past its end would kill the process
        if now != size:
            raise ValueError(
                f"{file} had {size} bytes when it was indexed and has {now} now: "
                "keep the data unchanged while it is in use, and start again"
            )
        if index not in self._maps:
            if len(self._maps) >= self.max_open:
                self._maps.popitem(last=False)
            self._maps[index] = np.memmap(file, dtype=np.uint8, mode="r", shape=(size,))
        self._maps.move_to_end(index)
        return self._maps[index]
