"""FileOpener opens data files by path or URL; the extension for remote files in `ext/` opens URLs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from lightning_dilated._extensions import hook
from lightning_dilated._validation import is_address, real, refuse_special, store_of

#: default size limit, in GiB, of the cache of remote blocks
CACHE_GIB = 20.0

is_url, scheme_of = is_address, store_of


def refuse_url(path: object, name: str) -> None:
    """Raise ValueError for a URL in an option that takes only local files."""
    if is_url(path):
        raise ValueError(f"{name} holds the URL {path}, but only files of this machine are read here: copy it first")


class FileOpener:
    """Opens files by path or URL. The code for URLs is imported when the first URL is opened.

    Args:
        cache_dir: folder for blocks of remote files; None: `remote` in the package's cache folder.
        cache_gib: size limit, in GiB, of the blocks in this folder; 0: do not store blocks on disk.

    Raises: TypeError or ValueError for a `cache_gib` that is not a number of at least 0. The methods raise OSError, and
    for URLs the errors of `RemoteFiles`.
    """

    def __init__(self, cache_dir: str | None = None, cache_gib: float = CACHE_GIB) -> None:
        self.cache_dir, self.cache_gib = cache_dir, real(cache_gib, "data.cache_gib", least=0)
        self._remote: Any = None

    @property
    def remote(self) -> Any:
        """The `RemoteFiles` that open URLs."""
        if self._remote is None:
            self._remote = hook("remote files")(self.cache_dir, self.cache_gib)
        return self._remote

    @property
    def bytes_fetched(self) -> int:
        """The number of bytes that this object, without its copies in workers, has fetched from remote stores."""
        return 0 if self._remote is None else self._remote.bytes_fetched

    def expand(self, url: str, suffixes: Sequence[str] | None, hint: str) -> list[str]:
        """Return the files of a URL; see `RemoteFiles.expand`."""
        return self.remote.expand(url, suffixes, hint)

    def look_up(self, paths: Iterable[str]) -> None:
        """Look up the sizes and versions of all URLs in `paths`, several at a time."""
        if urls := [path for path in paths if is_url(path)]:
            self.remote.look_up(urls)

    def size(self, path: str) -> int:
        """Return the number of bytes of a file."""
        return self.remote.state(path).size if is_url(path) else os.stat(path).st_size

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading; for a URL, fetch only the blocks that are read."""
        if is_url(path):
            return self.remote.open(path)
        refuse_special(path)
        return open(path, "rb")

    def bytes_of(self, url: str) -> Any:
        """Return a remote file as an array of bytes, which fetches its slices when they are read."""
        return self.remote.bytes_of(url)

    def pieces(self, ranges: Sequence[tuple[str, int, int]]) -> Iterator[bytes]:
        """Yield the bytes of short ranges (URL, start, stop) in order; several ranges are fetched at a time."""
        return self.remote.pieces(ranges) if ranges else iter(())

    def check_workers(self, num_workers: int) -> None:
        """Raise ValueError if workers could not read the opened URLs, because these need the memory of this process."""
        if self._remote is not None:
            self._remote.check_workers(num_workers)
