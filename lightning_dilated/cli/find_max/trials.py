"""One trial: ranks of a job train two steps of so many tokens, and say whether that fitted, what it took and how long.

Each trial has processes of its own, so that a rank which runs out of memory leaves no others waiting for it, and the next
trial finds memory as it was.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_dilated._device import expandable_segments

GIB = 2**30
#: what a recipe says of a length
LINE = "data.init_args.seq_len: {}"
#: lines of a failed rank's output that are shown
SHOWN = 15


@dataclass(frozen=True)
class Outcome:
    """Of a trial: whether it fitted; the most bytes that a rank had allocated and reserved (0 where unknown); seconds of the
    second step; who ran out of memory and how, if one did; what a recipe says of a length, {} standing for it; the most
    bytes of the host that a rank had resident, libraries' with them; those page-locked in the end."""

    tokens: int
    fits: bool
    allocated: int = 0
    reserved: int = 0
    seconds: float = 0.0
    message: str = ""
    line: str = LINE
    host: int = 0
    pinned: int = 0

    def __str__(self) -> str:
        if not self.fits:
            return f"{self.tokens:>14,} tokens: out of memory ({self.message[:100]})"
        peak = (
            f", {self.allocated / GIB:.1f} GiB allocated, {self.reserved / GIB:.1f} reserved" if self.allocated else ""
        )
        peak += f", {self.host / GIB:.1f} GiB of the host a rank" if self.host else ""
        peak += f" ({self.pinned / GIB:.1f} page-locked)" if self.host and self.pinned else ""
        rate = f", {self.tokens / self.seconds:,.0f} tokens/s" if self.seconds else ""
        return f"{self.tokens:>14,} tokens: fits{peak}, {self.seconds:.2f} s a step{rate}"


@dataclass
class Trials:
    """Trials of a recipe.

    Args:
        arguments: of `fit`: --config and options.
        ranks: processes, each with a device of its own.
        timeout: seconds that a trial may take.
        limit: GiB of memory that each process may have (of the host's; for a CPU); None: all.
    """

    arguments: Sequence[str]
    ranks: int
    timeout: float = 600.0
    limit: float | None = None

    def __call__(self, tokens: int) -> Outcome:
        """Train two steps.

        Raises:
            RuntimeError: where a rank ends with anything else than success or lack of memory, with its last lines.
            TimeoutError: where the ranks take too long.
        """
        with tempfile.TemporaryDirectory() as folder:
            ranks: list[subprocess.Popen] = []
            try:
                port = _free_port()
                for rank in range(self.ranks):  # one may fail to start, or be interrupted, with others there already
                    ranks.append(self._start(Path(folder), tokens, rank, port))
                return self._watch(Path(folder), tokens, ranks)
            finally:
                for process in ranks:
                    process.kill()
                for process in ranks:
                    process.wait()

    def _start(self, folder: Path, tokens: int, rank: int, port: int) -> subprocess.Popen:
        told = {
            "folder": str(folder),
            "tokens": tokens,
            "limit": self.limit,
            "ranks": self.ranks,
            "parent": os.getpid(),
        }
        env = dict(os.environ)
        expandable_segments(env)
        if self.ranks > 1:  # as torchrun sets them, so that Lightning starts no further processes
            own = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": self.ranks}
            own |= {"LOCAL_WORLD_SIZE": self.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            env |= {name: str(value) for name, value in own.items()} | {"TORCHELASTIC_RUN_ID": "find-max"}
        out = (folder / f"{rank}.txt").open("w")
        command = [sys.executable, "-m", "lightning_dilated.cli.find_max.worker", json.dumps(told), *self.arguments]
        return subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def _watch(self, folder: Path, tokens: int, ranks: list[subprocess.Popen]) -> Outcome:
        end = time.monotonic() + self.timeout
        while time.monotonic() < end:
            found = [_read(folder / f"{rank}.json") for rank in range(self.ranks)]
            for rank, said in enumerate(found):
                if said and "missing" in said:
                    return Outcome(tokens, False, message=f"rank {rank}: {said['missing']}")
            if all(found):
                names = ("allocated", "reserved", "seconds", "host", "pinned")
                most = {name: max(said[name] for said in found) for name in names}
                return Outcome(tokens, True, **most, line=found[0]["line"])
            # a killed rank's connections end the others with errors of their own: it is looked for before these
            gone = [process.poll() for process in ranks]
            silent = [rank for rank, code in enumerate(gone) if code is not None and not _read(folder / f"{rank}.json")]
            killed = [rank for rank in silent if gone[rank] == -signal.SIGKILL]
            if killed:
                return Outcome(tokens, False, message=f"rank {killed[0]}: killed, as by a host without memory left")
            if silent and not any("missing" in (_read(folder / f"{rank}.json") or {}) for rank in range(self.ranks)):
                raise RuntimeError(self._failed(folder, tokens, silent[0], gone[silent[0]]))
            time.sleep(0.1)
        raise TimeoutError(
            f"a trial of {tokens:,} tokens took more than {self.timeout:g} s. Allow more by --timeout, or begin with fewer."
        )

    def _failed(self, folder: Path, tokens: int, rank: int, code: int) -> str:
        lines = (folder / f"{rank}.txt").read_text().splitlines()[-SHOWN:]
        return (
            f"rank {rank} ended with exit code {code} in a trial of {tokens:,} tokens, and not for want of memory. Its last "
            "lines:\n  " + "\n  ".join(lines)
        )


def _read(path: Path) -> dict | None:
    """What a rank said; it renames the file into its place."""
    return json.loads(path.read_text()) if path.is_file() else None


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
