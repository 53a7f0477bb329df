"""A lock file: one run at a time uses a folder, and a dead run does not block it.

The file names the process that holds the folder. On the same host, the holder is alive if the operating system has a
process with the same number and start time. For a holder on another host, a new run can only watch the file. It takes
the folder over if the file does not change for 60 s by the new run's clock; clocks of different hosts are not compared.
So a run waits for a minute only if a run on another host died without removing its file.
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
#: seconds between two signs of life; seconds without a sign of life after which a holder on another host counts as dead
_BEAT, _DEAD = 10.0, 60.0


class FolderInUse(OSError):
    """The error if another run holds the folder, or has taken it over."""


class FolderLock:
    """A lock of an existing folder, which a process holds from `acquire` to `release`; forks do not release it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._token, self._process = uuid.uuid4().hex, os.getpid()
        self._over, self._one = threading.Event(), threading.Lock()
        self._lost: str | None = None

    def acquire(self) -> None:
        """Lock the folder; take it over if its holder is dead.

        Raises:
            FolderInUse: if another run holds it; the message names the process and its host.
            OSError: if the folder cannot be written.
        """
        waits_since = time.monotonic()
        while not self._create():
            holder = _read(self.path)
            if holder is None:  # the holder released it meanwhile
                continue
            token = holder.get("token")
            if _is_dead(holder, self.path):
                if self._end(token, successor=True):
                    break
                time.sleep(0.01)  # another run is taking it over, unless it died while doing so
                if time.monotonic() - waits_since > 2 * _DEAD:
                    self._claim(token).unlink(missing_ok=True)
            elif self.path.exists():  # otherwise the holder released it while this run watched
                raise FolderInUse(
                    f"it is in use by {_described(holder)}. Wait until that run ends, stop it, or name another"
                )
        threading.Thread(target=self._beat, name="folder in use", daemon=True).start()

    def check(self) -> None:
        """Raise FolderInUse if another run took the folder over because this run had given no sign of life."""
        if self._lost is not None:
            raise FolderInUse(f"it was taken over by {self._lost}, as this run gave no sign of life for {_DEAD:.0f} s")

    def release(self) -> None:
        """Unlock the folder; do nothing in a fork, or if it is already unlocked."""
        if os.getpid() != self._process or self._over.is_set():
            return
        with self._one:
            self._over.set()
            with contextlib.suppress(OSError):  # if this fails, the next run detects that this process has ended
                self._end(self._token)

    def _create(self) -> bool:
        """Create the file together with its contents; return False if it exists."""
        draft = self._draft()
        try:
            os.link(draft, self.path)
        except FileExistsError:
            return False
        except OSError:  # the file system has no links
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
        """Remove the file of the holder with this token, or replace it with this run's; return False if it was gone.

        Only the run that creates the claim file of this token may do so, because another run's new file must stay.
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
            # a file server may be unreachable for a while
            with self._one, contextlib.suppress(OSError):
                if not self._over.is_set():
                    self._show_life()

    def _show_life(self) -> None:
        holder = _read(self.path)
        if holder is None:
            self._create()  # someone deleted the file
        elif holder.get("token") == self._token:
            os.utime(self.path)
        else:
            self._lost = _described(holder)


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return {"host": socket.gethostname(), "pid": pid, "since": since, "table": _process_table(), "began": _began(pid)}


def _process_table() -> str | None:
    """Return an identifier of the host, boot and container in which process numbers are unique; None if unknown."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _exists(pid: int) -> bool:
    """Return True if a process of any user has this number."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _began(pid: int) -> str | None:
    """Return the start of a process in ticks since boot, or "ended"; None if the process is gone or not visible.

    The start distinguishes processes if the operating system reuses a number.
    """
    try:
        # the program's name, in parentheses, may contain any character
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return "ended" if state in "ZX" else fields[18]


def _read(path: Path) -> dict[str, Any] | None:
    """Return the holder that the file names; None if the file does not exist, {} if it cannot be read."""
    if path.is_symlink():  # a run never creates a link
        return {}
    try:
        holder = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, IsADirectoryError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _is_dead(holder: dict[str, Any], path: Path) -> bool:
    """Return True if the holder has ended, or if it runs elsewhere and gives no sign of life for `_DEAD` seconds."""
    table = _process_table()
    if table is not None and holder.get("table") == table:
        pid = holder.get("pid")
        if not isinstance(pid, int):
            return True
        if (began := _began(pid)) is not None:
            return began != holder.get("began")
        if not _exists(pid):
            return True
        # the process belongs to another user and is hidden: watch its file
    begin, last = time.monotonic(), _contents(path)
    rank_zero_info(
        f"{path.parent} is held by {_described(holder)}. Watching it for up to {_DEAD:g} seconds: without a sign of life in "
        "that time this run takes the folder over."
    )
    while time.monotonic() - begin < _DEAD:
        time.sleep(min(1.0, _DEAD / 10))
        if _contents(path) != last:
            return False
    return True


def _contents(path: Path) -> Any:
    """Return a value that changes with each sign of life; opening the file refreshes a network file system's cache."""
    if path.is_symlink():
        return "a link"
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns, file.read()
    except OSError as error:
        return type(error).__name__


def _described(holder: dict[str, Any]) -> str:
    if "pid" not in holder:
        return "a run that cannot be read"
    return f"process {holder['pid']} on {holder.get('host')} (since {holder.get('since')})"
