"""RemoteFiles: list data files by URL (s3://, gs://, hf://, ...), look up each file once, and read ranges of bytes.

Blocks are fetched through fsspec and stored in a `BlockCache`. Nothing stays open between reads, so a RemoteFiles can
be pickled, and used in forked and in spawned processes.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
from torch.utils.data import get_worker_info

from lightning_dilated._validation import check_address
from lightning_dilated.data.opener import CACHE_GIB, is_url, scheme_of
from lightning_dilated.ext.text.block_cache import BlockCache, cache_root

#: number of bytes of a block, and the maximum number of blocks in one request
BLOCK = 1 << 20
RUN = 16
#: maximum number of blocks that a process holds in memory
HELD = 16
#: number of concurrent requests when many files are looked up
THREADS = 16
#: number of tries of a request, and seconds to wait before the second try; each further wait is twice as long
TRIES = 5
WAIT = 1.0
_MAGIC = re.compile(r"[*?\[]")
#: keys in fsspec's `info` that identify a file's content; `_TIMES` is the fallback
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "blob_id")
_TIMES = ("mtime", "LastModified", "last_modified", "created")
#: errors that a retry cannot fix
_FINAL = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    ImportError,
    TypeError,
    ValueError,
    NotImplementedError,
)
_NO_LOGIN = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
    "TokenRetrievalError",
)
#: packages to install for each scheme of URLs
_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "'lightning-dilated[s3]'"),
    **dict.fromkeys(("gs", "gcs"), "'lightning-dilated[gcs]'"),
    "hf": "'lightning-dilated[hub]'",
    **dict.fromkeys(("http", "https"), "aiohttp"),
}
_LOGIN = {
    **dict.fromkeys(("s3", "s3a"), "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket "
                    "set FSSPEC_S3_ANON=true"),
    **dict.fromkeys(("gs", "gcs"), "run `gcloud auth application-default login`; for a public bucket set "
                    "FSSPEC_GS_TOKEN=anon"),
    "hf": "run `hf auth login`, or set HF_TOKEN",
}  # fmt: skip

Result = TypeVar("Result")


class FileState(NamedTuple):
    """The size of a remote file in bytes, and the store's version of its content, such as an ETag."""

    size: int
    version: str


class RemoteFiles:
    """Open files by URL.

    The state of a remote file is looked up once and pickled with this object. Later reads compare it with the current
    state and raise an error if the file has changed. A failing request is tried up to TRIES times.

    Args:
        cache_dir: folder of the blocks; None: `remote` in the package's cache folder (`cache_root`).
        cache_gib: maximum GiB of the blocks there; 0 stores none on disk.

    Raises: the methods raise the errors that `explained` returns.
    """

    def __init__(self, cache_dir: str | None = None, cache_gib: float = CACHE_GIB) -> None:
        limit = int(cache_gib * 2**30)
        folder = cache_root() / "remote" if cache_dir is None else Path(cache_dir).expanduser()
        self.cache = BlockCache(str(folder), limit)
        #: number of bytes that this copy of the object fetched from stores
        self.bytes_fetched = 0
        self._states: dict[str, FileState] = {}
        self._held: OrderedDict[str, bytes] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": OrderedDict(), "bytes_fetched": 0}

    # -- looking files up ----------------------------------------------------------------------------------------------
    def expand(self, url: str, suffixes: Sequence[str] | None, hint: str) -> list[str]:
        """Return the files of a URL: the file itself, a folder's files (ending in `suffixes`), or a glob's matches.

        Files are sorted by name; hidden files are left out, as in local folders.

        Raises: FileNotFoundError with a message that ends in `hint`; or another error that `explained` returns.
        """
        if _MAGIC.search(url) and scheme_of(url) not in ("http", "https"):
            files = self._retried(url, lambda: _globbed(url))
            if not files:
                raise FileNotFoundError(f"the glob {url} matches no file (** stands for any folders); {hint}")
        else:
            folder, files = self._retried(url, lambda: _listed(url))
            if folder and suffixes is not None:
                files = {x: y for x, y in files.items() if x.lower().endswith(tuple(s.lower() for s in suffixes))}
            if not files:
                expected = "no file" if suffixes is None else f"no file ending in {', '.join(suffixes)}"
                raise FileNotFoundError(f"the folder {url} holds {expected} (hidden ones are left out); {hint}")
        # use the state from a listing only if it has a content version, because listings may write times differently
        self._states |= {name: _state_of(name, x) for name, x in files.items() if any(x.get(y) for y in _VERSIONS)}
        return list(files)

    def look_up(self, paths: Iterable[str]) -> None:
        """Look up the states of all URLs that have not been looked up yet, several at a time."""
        unknown = [path for path in dict.fromkeys(paths) if is_url(path) and path not in self._states]
        if unknown:
            with ThreadPoolExecutor(THREADS) as pool:
                self._states |= dict(zip(unknown, pool.map(self._look_up, unknown), strict=True))

    def state(self, url: str) -> FileState:
        """Return the state that a file had when it was first looked up."""
        if url not in self._states:
            self._states[url] = self._look_up(url)
        return self._states[url]

    def exists(self, url: str) -> bool:
        """Look a file up and return whether it exists."""
        try:
            self.state(url)
        except FileNotFoundError:
            return False
        return True

    def size(self, url: str) -> int:
        """Return the size of a file in bytes."""
        return self.state(url).size

    def check_workers(self, num_workers: int) -> None:
        """Raise ValueError if loader workers would need files that exist only in the memory of this process."""
        for url in self._states:
            if num_workers and scheme_of(url) == "memory":
                raise ValueError(
                    f"{url} is in the memory of this process, which data.num_workers = {num_workers} loader processes "
                    "do not share: set data.num_workers to 0, or write the files to a disk or a store"
                )

    def _look_up(self, url: str) -> FileState:
        return self._retried(url, lambda: _state_of(url, _info(url)))

    # -- reading -------------------------------------------------------------------------------------------------------
    def open(self, url: str) -> BinaryIO:
        """Open a file for reading from its beginning; fetches only the blocks that are read."""
        return io.BufferedReader(RemoteFile(self, url), 1 << 16)  # type: ignore[return-value]

    def bytes_of(self, url: str) -> RemoteBytes:
        """Return a remote file as an array of bytes that reads slices on demand."""
        return RemoteBytes(self, url)

    def read(self, url: str, start: int, stop: int) -> np.ndarray:
        """Return bytes [start, stop) of a remote file as a new uint8 array. Raise the errors that `explained` raises."""
        out = np.empty(stop - start, dtype=np.uint8)
        for number, block in self._blocks(url, start // BLOCK, -(-stop // BLOCK)):
            begin = number * BLOCK
            low, high = max(start, begin), min(stop, begin + len(block))
            out[low - start : high - start] = np.frombuffer(block, np.uint8)[low - begin : high - begin]
        return out

    def pieces(self, ranges: Sequence[tuple[str, int, int]]) -> Iterator[bytes]:
        """Yield the bytes of short ranges (URL, start, stop), in order; fetch several at a time, without the cache."""
        with ThreadPoolExecutor(THREADS) as pool:
            yield from pool.map(lambda x: self._fetch(*x), ranges)

    def prefetch(self, paths: Iterable[str]) -> None:
        """Fetch the first and the last block of each URL into the cache, several at a time."""
        urls = [x for x in paths if is_url(x)]
        self.look_up(urls)
        ends = [(x, at) for x in urls if self.size(x) for at in {0, (self.size(x) - 1) // BLOCK}]
        if ends and self.cache.limit:
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(lambda x: self._block(*x), ends))

    def _blocks(self, url: str, first: int, last: int) -> Iterator[tuple[int, bytes]]:
        number = first
        while number < last:
            for block in self._stored(url, number, last):
                self._hold(self._key(url, number), block)
                yield number, block
                number += 1

    def _block(self, url: str, number: int) -> bytes:
        return self._stored(url, number, number + 1)[0]

    def _stored(self, url: str, number: int, last: int) -> list[bytes]:
        """Return [block] from memory or disk; or fetch the block and the missing blocks after it in one request."""
        key = self._key(url, number)
        block = self._held.get(key) or self.cache.get(key)
        if block is not None:
            return [block]
        with self.cache.fetching(key):
            block = self.cache.get(key)  # another process may have fetched it
            if block is not None:
                return [block]
            stop = number + 1
            while stop < min(last, number + RUN) and not self._has(self._key(url, stop)):
                stop += 1
            data = self._fetch(url, number * BLOCK, min(stop * BLOCK, self.state(url).size))
            blocks = [data[x : x + BLOCK] for x in range(0, len(data), BLOCK)]
            for offset, block in enumerate(blocks):
                self.cache.put(self._key(url, number + offset), block)
        return blocks

    def _has(self, key: str) -> bool:
        return key in self._held or self.cache.has(key)

    def _hold(self, key: str, block: bytes) -> None:
        self._held[key] = block
        self._held.move_to_end(key)
        if len(self._held) > HELD:
            self._held.popitem(last=False)

    def _key(self, url: str, number: int) -> str:
        return hashlib.blake2b(repr((url, *self.state(url), number, BLOCK)).encode(), digest_size=20).hexdigest()

    def _fetch(self, url: str, start: int, stop: int) -> bytes:
        """Return bytes of a file. Raises ValueError if its state has changed."""
        state = self.state(url)

        def request() -> bytes:
            fs, path = _filesystem(url)
            try:
                data = fs.cat_file(path, start=start, end=stop)
            except _FINAL:
                raise
            except Exception:
                _check_same(url, state)  # the read fails if the file has become shorter
                raise
            # check after the read, so that bytes of a newer version are never returned
            _check_same(url, state)
            if len(data) != stop - start:
                raise OSError(f"the store returned {len(data):,} bytes instead of {stop - start:,}")
            return data

        data = self._retried(url, request)
        self.bytes_fetched += len(data)
        return data

    def _retried(self, url: str, request: Callable[[], Result]) -> Result:
        """Return the result of a request after at most TRIES tries. Raises the errors that `explained` returns."""
        for attempt in itertools.count(1):
            try:
                return request()
            except Exception as error:  # every store has its own errors
                final = isinstance(error, _FINAL) or type(error).__name__ in _NO_LOGIN
                if final or attempt == TRIES:
                    raise explained(url, error) from error
            time.sleep(WAIT * 2 ** (attempt - 1))


class RemoteBytes:
    """A remote file as an array of bytes that reads slices on demand."""

    def __init__(self, files: RemoteFiles, url: str) -> None:
        self.files, self.url = files, url

    def __getitem__(self, at: slice) -> np.ndarray:
        return self.files.read(self.url, at.start, at.stop)


class RemoteFile(io.RawIOBase):
    """A seekable remote file; `error` stores the error of a failed read, because libraries may hide it."""

    def __init__(self, files: RemoteFiles, url: str) -> None:
        self.files, self.url, self.size = files, url, files.size(url)
        self.error: Exception | None = None
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise ValueError(f"position {base + offset} of {self.url} is before its beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        stop = min(self._at + len(view), self.size)
        count = max(0, stop - self._at)
        try:
            view[:count] = memoryview(self.files.read(self.url, self._at, stop)) if count else b""
        except Exception as error:
            self.error = error
            raise
        self._at += count
        return count


# -- the store ---------------------------------------------------------------------------------------------------------
def explained(url: str, error: Exception) -> Exception:
    """Convert the error of a store to the error to raise, with the URL, the cause and the remedy.

    The result is FileNotFoundError, PermissionError, ModuleNotFoundError (with the package to install), ValueError (for
    an unknown scheme or a changed file), or ConnectionError for anything that a later try may fix.
    """
    scheme, reason = scheme_of(url), " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, FileNotFoundError | IsADirectoryError):
        return FileNotFoundError(
            f"{url} is no file or folder of its store ({reason}): check the spelling of bucket and path; data that was "
            "looked up must stay while it is in use"
        )
    if isinstance(error, PermissionError) or type(error).__name__ in _NO_LOGIN:
        remedy = _LOGIN.get(scheme, "see the store's package for how to log in")
        return PermissionError(f"{url} may not be read by this user ({reason}): {remedy}")
    if isinstance(error, ImportError):
        package = _PACKAGES.get(scheme, "the package of this store")
        return ModuleNotFoundError(
            f"reading {url} needs a package that is not installed ({reason}): pip install {package}"
        )
    if isinstance(error, _FINAL):
        return error if url in reason else type(error)(f"{url} cannot be read: {reason}")
    return ConnectionError(
        f"{url} could not be read in {TRIES} tries ({type(error).__name__}: {reason}): check the network and the store, and "
        "resume from the last checkpoint"
    )


def _filesystem(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it. fsspec keeps one file system per process."""
    from fsspec.core import url_to_fs

    check_address(url)
    if scheme_of(url) == "memory" and get_worker_info() is not None:
        raise ValueError(f"{url} is in the memory of another process, not this worker's: set data.num_workers to 0")
    # no cached listings: a lookup must return the current state
    return url_to_fs(url, use_listings_cache=False)


def _info(url: str) -> dict[str, Any]:
    fs, path = _filesystem(url)
    info = fs.info(path)
    if info.get("type") == "directory":
        raise IsADirectoryError(f"{url} is a folder")
    return info


def _state_of(url: str, info: dict[str, Any]) -> FileState:
    if info.get("size") is None:
        raise ValueError(f"{url}: the server states no size, so the file cannot be read by range: copy it to a disk")
    version = next((str(info[name]) for name in (*_VERSIONS, *_TIMES) if info.get(name) is not None), "")
    return FileState(int(info["size"]), version)


def _check_same(url: str, state: FileState) -> None:
    now = _state_of(url, _info(url))
    if now != state:
        raise ValueError(
            f"{url} had {state.size} bytes when it was looked up ({state.version}) and has {now.size} now ({now.version}): "
            "keep the data unchanged while it is in use, and start again"
        )


def _listed(url: str) -> tuple[bool, dict[str, dict[str, Any]]]:
    """Return whether the URL is a folder, and {URL: `info`} of the files in it, or of the URL if that is a file."""
    fs, path = _filesystem(url)
    info = fs.info(path)
    if info.get("type") != "directory":
        return False, {_named(fs, path): info}
    return True, _visible(fs, path, fs.find(path, detail=True))


def _globbed(url: str) -> dict[str, dict[str, Any]]:
    fs, path = _filesystem(url)
    before = path[: _MAGIC.search(path).start()]  # type: ignore[union-attr]
    root, pattern = before.rpartition("/")[0], path[len(before.rpartition("/")[0]) :]
    listed = fs.glob(path, detail=True)
    if not listed and fs.isfile(path):  # the file's own name contains brackets
        return {_named(fs, path): fs.info(path)}
    return _visible(fs, root, listed, hidden="/." in pattern)


def _visible(fs: Any, root: str, listed: dict[str, Any], hidden: bool = False) -> dict[str, dict[str, Any]]:
    """Return the non-hidden files among `listed` entries below `root`, sorted."""
    files = {}
    for name in sorted(listed):
        parts = name[len(root) :].split("/")
        if listed[name].get("type") == "file" and (hidden or not any(part.startswith(".") for part in parts)):
            files[_named(fs, name)] = listed[name]
    return files


def _named(fs: Any, path: str) -> str:
    """Return the canonical URL of a path."""
    return path if is_url(path) else fs.unstrip_protocol(path)
