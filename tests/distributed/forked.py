"""Run scripts in processes that are forked from one that has imported the package, to save the time of imports."""

from __future__ import annotations

import gc
import os
import runpy
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

from .pool import PRELOADED


@dataclass(frozen=True)
class Ended:
    """Exit codes and outputs of the ranks, in the order of ranks."""

    codes: list[int | None]
    stdout: str
    stderr: str


def context() -> mp.context.BaseContext:
    """Return a context that forks processes from a server that has imported the package."""
    forking = mp.get_context("forkserver")
    forking.set_forkserver_preload(PRELOADED)
    return forking


def agent_store() -> dist.TCPStore:
    """Return a store for the ranks of all attempts, as an agent of torchrun keeps it."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def run_ranks(
    ranks: int,
    script: Path,
    *args: str,
    cwd: Path,
    timeout: float = 120,
    store: dist.TCPStore | None = None,
    restarts: tuple[int, ...] | None = None,
) -> Ended:
    """Imitate `torchrun --nproc-per-node RANKS SCRIPT ARGS` in a folder. An exit code of None means a timeout.

    Args:
        store: for a restart, the store of the earlier attempt; by default a new store.
        restarts: the restart count that each rank's agent reports; by default 0.
    """
    forks = context()
    store = agent_store() if store is None else store
    common = {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    common |= {"TORCHELASTIC_RUN_ID": "tests", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            own = {"RANK": rank, "LOCAL_RANK": rank}
            if restarts is not None:
                own["TORCHELASTIC_RESTART_COUNT"] = restarts[rank]
            environment = {**os.environ, **{k: str(v) for k, v in {**common, **own}.items()}}
            process = forks.Process(target=_run, args=(script, args, cwd, environment, Path(folder, str(rank))))
            process.start()
            processes.append(process)
        end = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        texts = [
            "".join(Path(folder, f"{rank}.{kind}").read_text() for rank in range(ranks)) for kind in ("out", "err")
        ]
    return Ended(codes, *texts)


def _run(script: Path, args: tuple[str, ...], cwd: Path, environment: dict[str, str], output: Path) -> None:
    gc.freeze()  # exclude imported objects from garbage collection, which would take 0.3 s
    for number, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{output}.{kind}", os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv, sys.path[0] = [str(script), *args], str(Path(script).parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
