"""Ranks in processes of their own for one job: what each gives comes back as it is made, and a rank that dies ends the job.

Shape letters: R ranks.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

#: seconds that the other ranks get, after one failed, to say what happened to them
GRACE = 3.0
_DONE = "done"


class RanksFailed(RuntimeError):
    """Some ranks raised, died or did not answer in time; the message says which, and after how many results."""


@dataclass
class _Rank:
    process: Any
    pipe: Connection
    found: list[Any] = field(default_factory=list)
    trouble: str | None = None
    done: bool = False


def run_ranks(
    ranks: int, job: Callable[..., Iterator[Any]], *args: Any, device: str = "cpu", timeout: float = 300.0
) -> list[list[Any]]:
    """What job(rank, device, *args) yields on each of R ranks, which are the world of torch.distributed meanwhile.

    Args:
        ranks: R.
        job: a function of a module, so that processes can import it; its results have to be picklable.
        device: "cpu", with gloo, or "cuda", with NCCL and a GPU for each rank.
        timeout: seconds for all of it.

    Raises:
        RanksFailed: after every process was ended.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        started: list[_Rank] = []
        try:
            for rank in range(ranks):
                here, there = context.Pipe(duplex=False)
                given = (rank, ranks, device, str(Path(folder) / "store"), timeout, there, job, args)
                process = context.Process(target=_work, args=given, daemon=True)
                process.start()
                there.close()
                started.append(_Rank(process, here))
            _collect(started, time.monotonic() + timeout, timeout)
        finally:
            for one in started:
                if not one.done:
                    one.process.kill()
                one.process.join()
                one.pipe.close()
    return [one.found for one in started]


def _collect(ranks: list[_Rank], end: float, timeout: float) -> None:
    """Read until every rank is done; raise where one is not going to be."""
    late = False
    while waiting := [one for one in ranks if not one.done and one.trouble is None]:
        ready = wait([one.pipe for one in waiting], max(0.0, end - time.monotonic()))
        if not ready:
            late = True
            break
        for one in waiting:
            if one.pipe in ready:
                _read(one)
                if one.trouble:
                    end = min(end, time.monotonic() + GRACE)
    wrong = {i: one for i, one in enumerate(ranks) if one.trouble}
    if not wrong and not late:
        return
    told = [f"rank {i} {one.trouble} (after {len(one.found)} results)" for i, one in wrong.items()]
    silent = [i for i, one in enumerate(ranks) if not one.done and not one.trouble]
    if silent:
        after = "then" if wrong else f"within {timeout:g} s"
        given = ", ".join(str(len(ranks[i].found)) for i in silent)
        told.append(f"ranks {silent} did not finish {after} (after {given} results)")
    raise RanksFailed("; ".join(told))


def _read(one: _Rank) -> None:
    try:
        kind, value = pickle.loads(one.pipe.recv_bytes())
    except (EOFError, ConnectionError):
        one.process.join(GRACE)
        one.trouble = f"died with exit code {one.process.exitcode}"
        return
    if kind == _DONE:
        one.done = True
    elif kind == "error":
        one.trouble = f"raised {value}"
    else:
        one.found.append(value)


def _work(
    rank: int, ranks: int, device: str, store: str, timeout: float, pipe: Connection, job: Callable[..., Any], args: Any
) -> None:
    """A rank: join the others, run the job, send what it yields."""
    send = lambda *message: pipe.send_bytes(pickle.dumps(message))  # noqa: E731
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        else:
            os.environ["OMP_NUM_THREADS"] = "1"
            torch.set_num_threads(1)
        joined = {"store": dist.FileStore(store, ranks), "rank": rank, "world_size": ranks}
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=timeout), **joined)
        for value in job(rank, device, *args):
            send("value", value)
        dist.barrier()
        send(_DONE, None)
        dist.destroy_process_group()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        send("error", f"{type(error).__name__}: {error} [{last.filename}:{last.lineno}]")
