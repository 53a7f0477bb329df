"""BlockCache: a folder of blocks of remote files, bounded, that all processes of a machine share.

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


def within(path: Path, root: Path) -> Path:
    """`path`, which is inside of `root` or is it.

    The folder `root` is the user's choice and may be reached through links. What is in it may be another user's.

    Raises: OSError where the path, or a folder between, is a symbolic link, or is there and is neither a file nor a folder.
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
    """The descriptor of a regular file in a cache folder. Raises: OSError, as `within`."""
    # a link or fifo that appears after the check is neither followed nor waited for
    extra = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    handle = os.open(within(path, root), flags | extra, 0o600)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(
            errno.EINVAL, "is no regular file: remove it, or name another folder in data.cache_dir", str(path)
        )
    return handle


def read_bytes(path: Path, root: Path) -> bytes:
    """The contents of a file in a cache folder. Raises: OSError, as `within`."""
    with open(opened(path, root), "rb") as file:
        return file.read()


def write_part(path: Path, root: Path, data: bytes) -> Path:
    """Write data next to where it belongs, under a name that nobody can foresee. Raises: OSError, as `within`."""
    part = within(path.parent, root) / f"{path.name}.{secrets.token_hex(8)}.part"
    with open(part, "xb") as file:  # which makes the file, and follows no link
        file.write(data)
    return part


def private_folder(folder: Path, root: Path | None = None) -> None:
    """Make a folder and its parents, those that are missing for this user only.

    Args:
        root: the cache folder that it is in, for `within`.

    Raises: OSError, naming it.
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
        except (PermissionError, OSError) as error:
            if not path.is_dir():
                raise type(error)(
                    error.errno, f"data.cache_dir {folder} cannot be made; name another in data.cache_dir", str(path)
                ) from error


@contextlib.contextmanager
def locked(file: Path, root: Path | None = None) -> Iterator[None]:
    """One process or thread of this machine at a time; `file` is made, in a folder that may be made too.

    Args:
        root: the cache folder that it is in; None: the file's folder.
    """
    root = root or file.parent
    private_folder(file.parent, root)
    try:
        import fcntl
    except ImportError:  # Windows: files are written whole and replaced atomically
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
            stored = read_bytes(path, Path(self.folder))
        except OSError:
            return None
        data, checksum = stored[:-_CHECKSUM], stored[-_CHECKSUM:]
        if zlib.crc32(data).to_bytes(_CHECKSUM, "big") != checksum:
            with contextlib.suppress(OSError):
                path.unlink()  # as after a power failure
            return None
        with contextlib.suppress(OSError):  # another process may just have removed it
            os.utime(path, follow_symlinks=False)
        return data

    def has(self, key: str) -> bool:
        path = self._path(key)
        try:
            return self.limit > 0 and within(path, Path(self.folder)).is_file()
        except OSError:
            return False

    def put(self, key: str, data: bytes) -> None:
        """Keep a block. Where the disk cannot take it, a warning says so once, and nothing is kept."""
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
        """Held by the process that fetches a block, so that others wait for it and do not fetch it too."""
        if self.limit == 0:
            yield
            return
        number = int(hashlib.blake2b(key.encode(), digest_size=4).hexdigest(), 16) % _LOCKS
        with locked(Path(self.folder) / "locks" / str(number), Path(self.folder)):
            yield

    def _path(self, key: str) -> Path:
        return Path(self.folder) / "blocks" / key[:2] / key

    def _place(self, part: Path, target: Path) -> None:
        """Move a written block into its place, after others have left; called under the folder's lock."""
        if self.has(target.name):
            return
        counter, size = Path(self.folder) / "bytes", part.stat().st_size
        try:
            total = int(read_bytes(counter, Path(self.folder)))
        except (OSError, ValueError):
            total = self._shrink(self.limit - size)
        if total + size > self.limit:
            total = self._shrink(min(int(self.limit * STAYS), self.limit - size))
        # counted before it is there: a process that ends in between leaves a count that is too high, never too low
        os.replace(write_part(counter, Path(self.folder), str(total + size).encode()), counter)
        os.replace(part, target)

    def _shrink(self, most: int) -> int:
        """Remove the blocks that were not used for longest, down to `most` bytes; the bytes that are left."""
        files, now = [], time.time()
        blocks = within(Path(self.folder) / "blocks", Path(self.folder))
        for folder in (x for x in os.scandir(blocks) if x.is_dir(follow_symlinks=False)):
            for entry in os.scandir(folder.path):
                with contextlib.suppress(FileNotFoundError):  # a part that its process has just moved or removed
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
