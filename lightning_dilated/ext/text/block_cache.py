"""BlockCache: a bounded folder of blocks of remote files, shared by all processes of a machine.

fsspec's caches on disk have no bound, and processes that share one do not see each other's entries.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
import time
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: environment variable that names the folder of all the package's caches
VARIABLE = "LIGHTNING_DILATED_CACHE"
#: evict down to this share of the limit, so that evictions come in batches
STAYS = 0.9
#: number of bytes of the checksum at the end of a block's file
_CHECKSUM = 4
#: number of lock files for fetches; several blocks may share a lock file
_LOCKS = 1024
#: number of seconds after which a temporary file is taken to be left behind by a dead process
_ABANDONED = 3600


def cache_root() -> Path:
    """Return the root of caches: $LIGHTNING_DILATED_CACHE, or lightning-dilated in $XDG_CACHE_HOME or ~/.cache."""
    folder = os.environ.get(VARIABLE)
    if folder:
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning-dilated"


def within(path: Path, root: Path) -> Path:
    """Return `path`, which is `root` or inside it, after checking that no link is followed below `root`.

    The user chooses `root`, which may be reached through links. Its contents may belong to another user.

    Raises: OSError if the path, or a folder between it and `root`, is a link, or neither a file nor a folder.
    """
    for step in (*reversed(path.parents), path):
        if step != root and step.is_relative_to(root):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                mode = step.lstat().st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    kind = "a symbolic link" if stat.S_ISLNK(mode) else "neither a file nor a folder"
                    raise OSError(
                        errno.ELOOP,
                        f"{kind} in a cache folder, which is not followed: remove it, or name another folder in "
                        "data.cache_dir",
                        str(step),
                    )
    return path


def opened(path: Path, root: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file in a cache folder and return its descriptor. Raises the errors that `within` raises."""
    # do not follow a link, or wait for a fifo, that appears after the check
    extra = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    handle = os.open(within(path, root), flags | extra, 0o600)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is no regular file: remove it or name another folder in data.cache_dir", str(path))
    return handle


def read_bytes(path: Path, root: Path) -> bytes:
    """Return the contents of a file in a cache folder. Raises the errors that `within` raises."""
    with open(opened(path, root), "rb") as file:
        return file.read()


def write_part(path: Path, root: Path, data: bytes) -> Path:
    """Write data next to its destination, under an unpredictable name. Raises the errors that `within` raises."""
    part = within(path.parent, root) / f"{path.name}.{secrets.token_hex(8)}.part"
    with open(part, "xb") as file:  # x creates the file and follows no link
        file.write(data)
    return part


def private_folder(folder: Path, root: Path | None = None) -> None:
    """Make a folder and its missing parents, accessible to this user only.

    `root` is the cache folder that contains it, for `within`. Raises OSError with the path.
    """
    if root is not None:
        within(folder, root)
    for path in (*reversed(folder.parents), folder):
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError as error:
            raise FileExistsError(
                f"data.cache_dir {folder}: {path} is not a folder; name another in data.cache_dir"
            ) from error
        except OSError as error:
            if not path.is_dir():
                raise type(error)(
                    error.errno, f"data.cache_dir {folder} cannot be made; name another in data.cache_dir", str(path)
                ) from error


@contextlib.contextmanager
def locked(file: Path, root: Path | None = None) -> Iterator[None]:
    """Hold an exclusive lock on `file` across processes and threads of this machine; create the file and its folder.

    `root` is the cache folder that contains the file; None: the file's folder.
    """
    root = root or file.parent
    private_folder(file.parent, root)
    try:
        import fcntl
    except ImportError:  # Windows has no fcntl; atomic replacement alone keeps files whole
        yield
        return
    handle = opened(file, root, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@dataclass(frozen=True)
class BlockCache:
    """Blocks, stored under keys. The least recently used ones are evicted if a new block would exceed the `limit`.

    A block's file is renamed into place when complete. A block with a wrong checksum counts as missing.

    Args:
        folder: folder of the blocks; created with the first block.
        limit: maximum total size of the blocks in bytes; 0 stores nothing. Each process applies its own limit.
    """

    folder: str
    limit: int

    def get(self, key: str) -> bytes | None:
        """Return the block of a key, or None if it is not stored, and mark the block as just used."""
        path = self._path(key)
        try:
            stored = read_bytes(path, Path(self.folder))
        except OSError:
            return None
        data, checksum = stored[:-_CHECKSUM], stored[-_CHECKSUM:]
        if zlib.crc32(data).to_bytes(_CHECKSUM, "big") != checksum:
            with contextlib.suppress(OSError):
                path.unlink()  # the file is damaged, for example by a power failure
            return None
        with contextlib.suppress(OSError):  # another process may have removed it
            os.utime(path, follow_symlinks=False)
        return data

    def has(self, key: str) -> bool:
        path = self._path(key)
        try:
            return self.limit > 0 and within(path, Path(self.folder)).is_file()
        except OSError:
            return False

    def put(self, key: str, data: bytes) -> None:
        """Store a block. If the disk cannot store it, warn once and store nothing."""
        if len(data) + _CHECKSUM > self.limit:
            return
        target, root, part = self._path(key), Path(self.folder), None
        private_folder(root)
        try:
            private_folder(target.parent, root)
            part = write_part(target, root, data + zlib.crc32(data).to_bytes(_CHECKSUM, "big"))
            with locked(root / "lock", root):
                self._place(part, target)
        except OSError as error:
            warnings.warn(
                f"{self.folder} cannot keep blocks of remote files ({error}), so they are fetched again each time: free "
                "space there, or name another folder in data.cache_dir",
                stacklevel=2,
            )
        finally:
            if part is not None:
                part.unlink(missing_ok=True)

    @contextlib.contextmanager
    def fetching(self, key: str) -> Iterator[None]:
        """Hold a lock while fetching a block, so that other processes wait for the block and do not fetch it again."""
        if self.limit == 0:
            yield
            return
        number = int(hashlib.blake2b(key.encode(), digest_size=4).hexdigest(), 16) % _LOCKS
        with locked(Path(self.folder) / "locks" / str(number), Path(self.folder)):
            yield

    def _path(self, key: str) -> Path:
        return Path(self.folder) / "blocks" / key[:2] / key

    def _place(self, part: Path, target: Path) -> None:
        """Evict other blocks if needed, and move a written block into place; called while the folder's lock is held."""
        if self.has(target.name):
            return
        counter, size = Path(self.folder) / "bytes", part.stat().st_size
        try:
            total = int(read_bytes(counter, Path(self.folder)))
        except (OSError, ValueError):
            total = self._shrink(self.limit - size)
        if total + size > self.limit:
            total = self._shrink(min(int(self.limit * STAYS), self.limit - size))
        # update the counter first: if the process dies in between, the counter is too high, never too low
        os.replace(write_part(counter, Path(self.folder), str(total + size).encode()), counter)
        os.replace(part, target)

    def _shrink(self, most: int) -> int:
        """Remove the least recently used blocks until at most `most` bytes remain; return the bytes that remain."""
        files, now = [], time.time()
        blocks = within(Path(self.folder) / "blocks", Path(self.folder))
        for folder in (x for x in os.scandir(blocks) if x.is_dir(follow_symlinks=False)):
            for entry in os.scandir(folder.path):
                with contextlib.suppress(FileNotFoundError):  # another process may have moved or removed the file
                    state = entry.stat(follow_symlinks=False)
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
