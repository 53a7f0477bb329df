"""One read-only byte stream over many files, read by range through a few memory maps at a time."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from lightning_dilated.data.files import files_digest


class ByteStream:
    """Files concatenated in the given order with nothing between them; empty files are left out.

    Only the files and bytes that a range touches are read. The object can be pickled: maps are opened where they are
    used. `bytes_read` counts the bytes returned by this copy of the object.

    Args:
        files: paths of regular files.
        max_open: how many files are kept mapped.

    Raises: FileNotFoundError or PermissionError from looking up a size, ValueError for max_open < 1.
    """

    def __init__(self, files: Sequence[str], max_open: int = 64) -> None:
        if max_open < 1:
            raise ValueError(f"max_open is {max_open}; at least one file must be kept open")
        sizes = [(str(file), os.stat(file).st_size) for file in files]
        self.files = [file for file, size in sizes if size > 0]
        self.sizes = [size for _, size in sizes if size > 0]
        self.max_open = max_open
        self.bytes_read = 0
        self._ends = np.cumsum(self.sizes, dtype=np.int64)
        self._maps: OrderedDict[int, np.memmap] = OrderedDict()
        self._content: str | None = None

    def __len__(self) -> int:
        """Total number of bytes."""
        return int(self._ends[-1]) if self.files else 0

    def fingerprint(self) -> str:
        """A digest of the files' names and sizes; where they lie does not count."""
        named = [(os.path.basename(file), size) for file, size in zip(self.files, self.sizes, strict=True)]
        return hashlib.blake2b(repr(named).encode(), digest_size=8).hexdigest()

    def content(self) -> str:
        """A digest of some blocks of the files (`content.files_digest`), as they were when it was first asked for."""
        if self._content is None:
            self._content = files_digest(self.files)
        return self._content

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_maps": OrderedDict()}

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read bytes [start, stop) into a new uint8 array of shape (stop - start,).

        Raises: IndexError outside the stream, ValueError if a touched file changed size since it was indexed,
        FileNotFoundError if it has gone.
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
        """Read [start, stop) in pieces of `size` + 1 bytes, each sharing its last byte with the next one's first.

        Every pair of neighbouring bytes of the range lies in exactly one piece.
        """
        for begin in range(start, stop - 1, size):
            yield self.read(begin, min(begin + size + 1, stop))

    def _map(self, index: int) -> np.memmap:
        file, size = self.files[index], self.sizes[index]
        try:
            now = os.stat(file).st_size
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{file} was removed or renamed after it was indexed: put it back") from error
        # reading a map past the end of a shortened file would kill the process
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
