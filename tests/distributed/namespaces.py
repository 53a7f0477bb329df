"""Two nodes on one machine: network namespaces with their own addresses, connected by a link of limited speed.

They are created with iproute2's `ip` and `tc`, which requires root's network privileges.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

#: runs this interpreter, in which torch is installed
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def _run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True)


@functools.cache
def why_not() -> str | None:
    """Return the reason why this machine cannot create namespaces, or None."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "no ip and tc: Debian's package iproute2 has them"
    try:
        with Nodes(1.0):
            return None
    except RuntimeError as error:
        return str(error)


class Nodes:
    """Two namespaces, connected by a link that transfers `megabytes` MB/s in each direction.

    Raises:
        RuntimeError: if a command fails, with the command and its output.
    """

    INTERFACE = "between"

    def __init__(self, megabytes: float) -> None:
        name = uuid.uuid4().hex[:6]
        self.names = [f"ld{name}{i}" for i in range(2)]
        self.addresses = ["10.213.7.1", "10.213.7.2"]
        self._rate = f"{round(8 * megabytes * 1000)}kbit"

    def __enter__(self) -> Nodes:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *about: object) -> None:
        self._remove()

    def _make(self) -> None:
        for name in self.names:
            self._do("ip", "netns", "add", name)
        first, second = self.names
        of_second = ("peer", "name", self.INTERFACE, "netns", second)
        self._do("ip", "-n", first, "link", "add", self.INTERFACE, "type", "veth", *of_second)
        for name, address in zip(self.names, self.addresses, strict=True):
            self._do("ip", "-n", name, "address", "add", f"{address}/24", "dev", self.INTERFACE)
            for device in ("lo", self.INTERFACE):
                self._do("ip", "-n", name, "link", "set", device, "up")
            bucket = ("rate", self._rate, "burst", "64kb", "limit", "16mb")
            self._do("tc", "-n", name, "qdisc", "add", "dev", self.INTERFACE, "root", "tbf", *bucket)

    def _do(self, *command: str) -> None:
        done = _run(*command)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")

    def _remove(self) -> None:
        for name in self.names:
            _run("ip", "netns", "del", name)  # also deletes the link

    def sent(self) -> list[int]:
        """Return the bytes that each node has sent over the link so far, headers included."""
        file = f"/sys/class/net/{self.INTERFACE}/statistics/tx_bytes"
        return [int(_run("ip", "netns", "exec", name, "cat", file).stdout) for name in self.names]

    def torchrun(self, ranks: int, words: Sequence[str], cwd: Path, timeout: float) -> list[tuple[int, str]]:
        """Run `torchrun` with `ranks` ranks on each node. Return [(status, output)] by node."""
        env = {**os.environ, "GLOO_SOCKET_IFNAME": self.INTERFACE}
        place = [f"--nnodes={len(self.names)}", f"--nproc-per-node={ranks}", f"--master-addr={self.addresses[0]}"]
        processes, texts = [], [cwd / f"{name}.txt" for name in self.names]
        for number, (name, text) in enumerate(zip(self.names, texts, strict=True)):
            command = ["ip", "netns", "exec", name, *TORCHRUN, *place, "--master-port=29555", f"--node-rank={number}"]
            with text.open("w") as file:
                process = subprocess.Popen([*command, *words], cwd=cwd, env=env, stdout=file, stderr=subprocess.STDOUT)
            processes.append(process)
        end = time.monotonic() + timeout
        try:
            for process in processes:
                process.wait(max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in processes:
                if process.poll() is None:
                    process.terminate()
                    process.wait(30)
        return [(process.returncode, text.read_text()) for process, text in zip(processes, texts, strict=True)]
