"""A folder is used by one run at a time: a file in it names the process that holds it, and shows that it lives.

Whether a holder lives is asked of the operating system where it runs on this host: a process of that number that began at
that time. Of a holder on another host only the file is seen. Its clock is not compared with ours, nor with the file
server's: whoever comes second watches the file, and takes the folder over when nothing was written to it for 60 s of their
own clock. So a run waits for a minute only where one on another host died and left its file behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

NAME = ".in-use"
#: seconds between two signs of life, and without one after which a holder on another host counts as dead
_BEAT, _DEAD = 10.0, 60.0


class FolderInUse(OSError):
    """Another run holds the folder, or took it over."""


class FolderLock:
    """Held from `acquire` to `release` by one process: neither its forks nor other processes release it.

    Args:
        folder: which exists.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._token, self._process = uuid.uuid4().hex, os.getpid()
        self._over, self._one = threading.Event(), threading.Lock()
        self._lost: str | None = None

    def acquire(self) -> None:
        """Take the folder, also from a holder that is dead.

        Raises:
            FolderInUse: naming the process that holds it, and its host.
            OSError: where the folder cannot be written.
        """
        waits_since = time.monotonic()
        while not self._create():
            holder = _read(self.path)
            if holder is None:  # released meanwhile
                continue
            token = holder.get("token")
            if _is_dead(holder, self.path):
                if self._end(token, successor=True):
                    break
                time.sleep(0.01)  # another one takes it over, and will be seen, unless it died just then
                if time.monotonic() - waits_since > 2 * _DEAD:
                    self._claim(token).unlink(missing_ok=True)
            elif self.path.exists():  # else it was released while we watched it
                raise FolderInUse(
                    f"it is in use by {_words(holder)}. Wait until that run ends, stop it, or name another"
                )
        threading.Thread(target=self._beat, name="folder in use", daemon=True).start()

    def check(self) -> None:
        """See that the folder is still ours.

        Raises:
            FolderInUse: where another run took it over, as this one had shown no life.
        """
        if self._lost is not None:
            raise FolderInUse(f"it was taken over by {self._lost}, as this run showed no life for {_DEAD:.0f} s")

    def release(self) -> None:
        """Let others have the folder; of no effect in a fork, and a second time."""
        if os.getpid() != self._process or self._over.is_set():
            return
        with self._one:
            self._over.set()
            with contextlib.suppress(OSError):  # whoever comes next sees that this process is gone
                self._end(self._token)

    def _create(self) -> bool:
        """Whether the file could be made, with all its words at once; False where there is one."""
        draft = self._draft()
        try:
            os.link(draft, self.path)
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            try:
                with self.path.open("x") as file:
                    file.write(draft.read_text())
            except FileExistsError:
                return False
        finally:
            draft.unlink(missing_ok=True)
        return True

    def _draft(self) -> Path:
        draft = self.path.with_name(f"{NAME}-{self._token}")
        draft.write_text(json.dumps({"token": self._token, **_this_process()}))
        return draft

    def _claim(self, token: Any) -> Path:
        return self.path.with_name(f"{NAME}-end-{hashlib.blake2b(repr(token).encode(), digest_size=8).hexdigest()}")

    def _end(self, token: Any, successor: bool = False) -> bool:
        """Remove the file of the holder with this token, or put our own in its place; whether it was still there.

        Of several only the one that could make a further file, named after that holder, does so: the others would remove
        the file of its successor.
        """
        claim = self._claim(token)
        try:
            claim.open("x").close()
        except FileExistsError:
            return False
        try:
            holder = _read(self.path)
            if holder is None or holder.get("token") != token:
                return False
            if successor:
                self._draft().replace(self.path)
            else:
                self.path.unlink()
            return True
        finally:
            claim.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._over.wait(_BEAT) and self._lost is None:
            # a file server that is away may come back
            with self._one, contextlib.suppress(OSError):
                if not self._over.is_set():
                    self._show_life()

    def _show_life(self) -> None:
        holder = _read(self.path)
        if holder is None:
            self._create()  # somebody cleaned up
        elif holder.get("token") == self._token:
            os.utime(self.path)
        else:
            self._lost = _words(holder)


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return {"host": socket.gethostname(), "pid": pid, "since": since, "table": _table(), "began": _began(pid)}


def _table() -> str | None:
    """What tells this host's process numbers from those of other hosts, containers and boots; None if unknown."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _exists(pid: int) -> bool:
    """Whether there is a process of that number, also one that cannot be looked at."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _began(pid: int) -> str | None:
    """When a process began, in ticks since boot, or that it ended; None if it is gone or may not be looked at.

    A number that is used again differs in it.
    """
    try:
        # the name, in parentheses, may hold anything
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return "ended" if state in "ZX" else rest[18]


def _read(path: Path) -> dict[str, Any] | None:
    """What the file says of the holder; None where there is no file, nothing where it cannot be understood."""
    if path.is_symlink():  # nobody made it here
        return {}
    try:
        holder = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, IsADirectoryError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _is_dead(holder: dict[str, Any], path: Path) -> bool:
    """Whether the holder is gone; for one on another host this takes as long as it takes to see it."""
    table = _table()
    if table is not None and holder.get("table") == table:
        pid = holder.get("pid")
        if not isinstance(pid, int):
            return True
        if (began := _began(pid)) is not None:
            return began != holder.get("began")
        if not _exists(pid):
            return True
        # another user's process, of which this host shows nothing
    begin, last = time.monotonic(), _seen(path)
    rank_zero_info(
        f"{path.parent} is held by {_words(holder)}. Watching it for up to {_DEAD:g} seconds: without a sign of life in "
        "that time this run takes the folder over."
    )
    while time.monotonic() - begin < _DEAD:
        time.sleep(min(1.0, _DEAD / 10))
        if _seen(path) != last:
            return False
    return True


def _seen(path: Path) -> Any:
    """What changes with each sign of life; the file is opened, as network file systems ask the server only then."""
    if path.is_symlink():
        return "a link"
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns, file.read()
    except OSError as error:
        return type(error).__name__


def _words(holder: dict[str, Any]) -> str:
    if "pid" not in holder:
        return "a run that cannot be read"
    return f"process {holder['pid']} on {holder.get('host')} (since {holder.get('since')})"
