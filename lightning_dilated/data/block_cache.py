"""BlockCache: a folder of blocks of remote files, bounded, that all processes of a machine share.

fsspec's caches on disk have no bound, and processes that share one do not see each other's entries.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: names the one folder of the package's caches
VARIABLE = "LIGHTNING_DILATED_CACHE"
#: share of the limit that stays when blocks leave, so that they leave many at a time
STAYS = 0.9
#: bytes of the checksum at the end of a block's file
_CHECKSUM = 4
#: locks of processes that fetch; two blocks may share one
_LOCKS = 1024
#: seconds after which a file that nobody moved into its place is one of a process that ended
_ABANDONED = 3600


def cache_root() -> Path:
    """The folder of the package's caches: $LIGHTNING_DILATED_CACHE, or lightning-dilated in $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get(VARIABLE)
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-dilated"


def private_folder(folder: Path) -> None:
    """Make a folder and its parents, those that are missing for this user only. Raises: OSError, naming it."""
    for path in (*reversed(folder.parents), folder):
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError as error:
            raise FileExistsError(
                f"data.cache_dir {folder}: {path} is not a folder; name another in data.cache_dir"
            ) from error
        except (PermissionError, OSError) as error:
            if not path.is_dir():
                raise type(error)(
                    error.errno, f"data.cache_dir {folder} cannot be made; name another in data.cache_dir", str(path)
                ) from error


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """One process or thread of this machine at a time; `file` is made, in a folder that may be made too."""
    private_folder(file.parent)
    try:
        import fcntl
    except ImportError:  # Windows: files are written whole and replaced atomically
        yield
        return
    # does not follow a link that someone put there, and truncates nothing
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@dataclass(frozen=True)
class BlockCache:
    """Blocks by key. Those that were not used for longest leave where a new one would make the folder larger than `limit`.

    A block's file appears whole (it is moved into its place) and ends in a checksum, without which it counts as missing.

    Args:
        folder: of the blocks; made when the first is put.
        limit: bytes of all blocks; 0 keeps none. Processes whose limits differ each keep to their own.
    """

    folder: str
    limit: int

    def get(self, key: str) -> bytes | None:
        """The block, or None. It counts as used now."""
        path = self._path(key)
        try:
            stored = path.read_bytes()
        except OSError:
            return None
        data, checksum = stored[:-_CHECKSUM], stored[-_CHECKSUM:]
        if zlib.crc32(data).to_bytes(_CHECKSUM, "big") != checksum:
            path.unlink(missing_ok=True)  # as after a power failure
            return None
        with contextlib.suppress(OSError):  # another process may just have removed it
            os.utime(path)
        return data

    def has(self, key: str) -> bool:
        return self.limit > 0 and self._path(key).exists()

    def put(self, key: str, data: bytes) -> None:
        """Keep a block. Where the disk cannot take it, a warning says so once, and nothing is kept."""
        if len(data) + _CHECKSUM > self.limit:
            return
        target = self._path(key)
        private_folder(target.parent)
        part = target.with_name(f"{target.name}.{os.getpid()}.{time.monotonic_ns()}.part")
        try:
            part.write_bytes(data + zlib.crc32(data).to_bytes(_CHECKSUM, "big"))
            with locked(Path(self.folder) / "lock"):
                self._place(part, target)
        except OSError as error:
            warnings.warn(
                f"{self.folder} cannot keep blocks of remote files ({error}), so they are fetched again each time: free "
                "space there, or name another folder in data.cache_dir",
                stacklevel=2,
            )
        finally:
            part.unlink(missing_ok=True)

    @contextlib.contextmanager
    def fetching(self, key: str) -> Iterator[None]:
        """Held by the process that fetches a block, so that others wait for it and do not fetch it too."""
        if self.limit == 0:
            yield
            return
        number = int(hashlib.blake2b(key.encode(), digest_size=4).hexdigest(), 16) % _LOCKS
        with locked(Path(self.folder) / "locks" / str(number)):
            yield

    def _path(self, key: str) -> Path:
        return Path(self.folder) / "blocks" / key[:2] / key

    def _place(self, part: Path, target: Path) -> None:
        """Move a written block into its place, after others have left; called under the folder's lock."""
        if target.exists():
            return
        counter, size = Path(self.folder) / "bytes", part.stat().st_size
        try:
            total = int(counter.read_text())
        except (OSError, ValueError):
            total = self._shrink(self.limit - size)
        if total + size > self.limit:
            total = self._shrink(min(int(self.limit * STAYS), self.limit - size))
        # counted before it is there: a process that ends in between leaves a count that is too high, never too low
        counter.write_text(str(total + size))
        os.replace(part, target)

    def _shrink(self, most: int) -> int:
        """Remove the blocks that were not used for longest, down to `most` bytes; the bytes that are left."""
        files, now = [], time.time()
        for folder in os.scandir(Path(self.folder) / "blocks"):
            for entry in os.scandir(folder.path):
                with contextlib.suppress(FileNotFoundError):  # a part that its process has just moved or removed
                    state = entry.stat()
                    if not entry.name.endswith(".part"):
                        files.append((state.st_mtime_ns, state.st_size, entry.path))
                    elif now - state.st_mtime > _ABANDONED:
                        os.unlink(entry.path)
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= most:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
        return total
