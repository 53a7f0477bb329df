"""A SLURM cluster with one node on this machine, in a folder: munge, the controller and the node's daemon, as root."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
CONF = """
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} State=UP
PartitionName=high Nodes={host} PriorityTier=10 PreemptMode=OFF State=UP
"""


def why_not() -> str | None:
    """Return the reason why this machine cannot run SLURM, or None."""
    missing = [x for x in TOOLS if shutil.which(x) is None]
    if missing:
        return f"no {', '.join(missing)}: Debian's packages munge, slurmctld, slurmd and slurm-client have them"
    return None if os.geteuid() == 0 else "the daemons start jobs as root"


def _free_port() -> int:
    with socket.socket() as x:
        x.bind(("127.0.0.1", 0))
        return x.getsockname()[1]


class Slurm:
    """Daemons for two CPUs. Jobs in partition "high" preempt jobs in "low", which then have `grace` seconds to end."""

    def __init__(self, folder: Path, grace: int = 120) -> None:
        self.folder, self.env = folder, {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.env.pop("OMP_NUM_THREADS", None)
        for name in ("munge", "state", "spool"):
            (folder / name).mkdir(mode=0o700)
        sizes = {"host": socket.gethostname(), "port": _free_port(), "node_port": _free_port()}
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, grace=grace, **sizes))
        munge = folder / "munge"
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o400)
        places = [f"--{x}-file={munge / x}" for x in ("key", "pid", "log", "seed")]
        self._start("munged", "--force", f"--socket={munge / 'socket'}", *places)
        self._start("slurmctld")
        self._start("slurmd")
        self.until(lambda: "idle" in self.ask("sinfo", "-h", "-o", "%t"), "the node is idle", 60)

    def _start(self, *command: str) -> None:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stdout, done.stderr)

    def ask(self, *command: str, cwd: Path | None = None) -> str:
        return subprocess.run(command, env=self.env, capture_output=True, text=True, cwd=cwd).stdout

    def submit(self, *arguments: str, cwd: Path) -> str:
        """Submit a job. Return its number."""
        done = subprocess.run(
            ["sbatch", "--parsable", *arguments], env=self.env, capture_output=True, text=True, cwd=cwd
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return the fields that `scontrol show job` prints."""
        words = self.ask("scontrol", "show", "job", number).split()
        return dict(x.split("=", 1) for x in words if "=" in x)

    def until(self, holds, what: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not holds():
            logs = [x.read_text()[-2000:] for x in sorted(self.folder.glob("*.log"))]
            assert time.monotonic() < end, (f"in vain until {what}", *logs, self.ask("squeue"))
            time.sleep(0.5)

    def close(self) -> None:
        """Cancel all jobs and stop the daemons."""
        self.ask("scancel", "--user=root", "--full", "--signal=KILL")
        self.ask("scancel", "--user=root")
        for pid in (self.folder / "slurmd.pid", self.folder / "slurmctld.pid", self.folder / "munge" / "pid"):
            if pid.exists():
                os.kill(int(pid.read_text()), signal.SIGTERM)
        time.sleep(1)
