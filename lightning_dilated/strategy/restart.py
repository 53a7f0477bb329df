"""After a collective failed: which ranks ended too and why, and which gave no sign, so that an error names who died.

gloo says "Connection reset by peer", and of whom only a port. Here every rank that ends with an error leaves its reason in
the job's store, and a rank whose connection broke reads what the others left.

The process group of a job that torchrun started, under a name that all ranks of one attempt share and no other has.

torchrun's store may outlive its workers, with the addresses of the dead: under torch's usual names ranks of a later attempt
read those, and wait for nobody. No variable of the environment tells attempts apart: each node's agent counts its own
restarts, and a node that joins later counts from 0. So rank 0 makes a token, and hands it to every other rank under a name
that this rank made up for the purpose. An answer of an earlier attempt has another name, and nobody reads it.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_dilated.checkpoint.ranks import reason

#: seconds in which the others, whose connections break at about the same time, are to leave their reasons
PATIENCE = 5.0


#: numbers of the runs of this process, which are the same on all ranks
_runs = itertools.count()


class CallsTheRoll:
    """To be inherited by a strategy, before Lightning's."""

    _run = -1

    def _number_run(self) -> None:
        """As a run begins, on every rank: reasons of an earlier one, from which a script went on, are none of this one's."""
        self._run = next(_runs)

    def on_exception(self, exception: BaseException) -> None:
        """Lightning's; leaves this rank's reason, and adds to the words of a broken connection who is lost."""
        super().on_exception(exception)  # type: ignore[misc]
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        broken = connection_broke(exception)
        try:
            reasons = dist.PrefixStore(
                f"lightning-dilated/reasons/{self._run}", dist.distributed_c10d._get_default_store()
            )
            reasons.set(str(dist.get_rank()), "" if broken else reason(exception))
            words = call_the_roll(reasons, dist.get_rank(), dist.get_world_size()) if broken else ""
        except RuntimeError:
            words = "Rank 0 of the job, or the node that serves the job's store, died or ended: the store is gone."
        if broken:
            exception.args = (f"{words}\n{exception}", *exception.args[1:])


def connection_broke(error: BaseException | None) -> bool:
    """Whether an error, or the one behind it, is that of a collective that lost another rank."""
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error)):
            return True
        error = error.__cause__
    return False


def call_the_roll(reasons: Any, rank: int, world: int, patience: float = PATIENCE) -> str:
    """Who raised and what, and who gave no sign within `patience` seconds, in one line.

    Args:
        reasons: a store in which each rank that ended left its reason under its number, "" for a broken connection.
        rank: of this process, of `world` ranks of the job.
        patience: seconds to wait for the other ranks.

    Raises:
        RuntimeError: where the store is gone.
    """
    silent, end = [x for x in range(world) if x != rank], time.monotonic() + patience
    ended: list[int] = []
    while silent and time.monotonic() < end:
        ended += [x for x in silent if reasons.check([str(x)])]
        silent = [x for x in silent if x not in ended]
        time.sleep(0.1 if silent else 0)
    raised = {x: words for x in sorted(ended) if (words := reasons.get(str(x)).decode())}
    told = [f"Rank {x} of the job raised {words}." for x, words in raised.items()]
    if silent:
        told.append(
            f"Ranks {silent} of the job gave no sign within {patience:g} seconds after it: they died (look at their output, "
            "and whether the system ended them for memory), or hang."
        )
    others = [x for x in range(world) if x != rank]
    if not told:
        told.append(f"Ranks {others} of the job lost a connection, too: look at the network between their nodes.")
    return f"Rank {rank} of the job lost the connection to another rank. {' '.join(told)}"


#: seconds between two looks of rank 0 at who came
PAUSE = 0.05
#: torch's agents remember the address of a store that died with its node
SHARED = (
    "If the first node was lost: the others go on only if TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set for every agent."
)
#: for which the others wait longer than rank 0, which is to say who is missing
MARGIN = timedelta(seconds=10)


def join_under_torchrun(backend: str, timeout: timedelta, device: torch.device) -> None:
    """Make the world's process group under torchrun; of no effect under other launchers, or where there is a group.

    Raises:
        RuntimeError: where ranks do not come within `timeout`, naming them.
    """
    if dist.is_initialized() or not dist.is_torchelastic_launched():
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _store(rank, timeout)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(agree_on_token(store, rank, world, timeout), store),
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    if device.type == "cuda":
        atexit.register(_leave)  # NCCL complains of groups that are left to the end of the process


def _store(rank: int, timeout: timedelta) -> dist.Store:
    """The store of the job: the agent's, else rank 0's own. Not `dist.rendezvous`, whose rank 0 would wait for clients
    without saying which."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    served = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return dist.TCPStore(host, port, is_master=served, timeout=timeout, wait_for_workers=False, multi_tenant=served)
    except dist.DistError as error:
        raise RuntimeError(
            f"rank {rank} of the job found no store at {host}:{port} within {timeout.total_seconds():g} seconds. "
            "torchrun's agent of the first node, or rank 0, serves it: look at its output for an earlier error, and check "
            f"that this host can reach that port. {SHARED}"
        ) from error


def agree_on_token(store: dist.Store, rank: int, world: int, timeout: timedelta) -> str:
    """A string that is the same on all ranks that call this together, and was never used before.

    Keys of earlier attempts in the store, also of such that ended here, do no harm.

    Args:
        store: shared by the ranks.
        rank: of this process, of `world` ranks.
        timeout: for which rank 0 waits for the others, and the others for rank 0.

    Raises:
        RuntimeError: on every rank that came, naming those that did not.
    """
    store = dist.PrefixStore(f"lightning-dilated/token/{world}", store)
    return _hand_out(store, world, timeout) if rank == 0 else _ask_for(store, rank, timeout)


def _hand_out(store: dist.Store, world: int, timeout: timedelta) -> str:
    """Rank 0's part: answers whoever says hello until all have taken the token, then tells them so."""
    token, end = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    missing = list(range(1, world))
    while missing:
        missing = [rank for rank in missing if not store.check([f"taken/{token}/{rank}"])]
        for rank in missing:
            if store.check([f"hello/{rank}"]):  # maybe of an earlier attempt: answered until this one's comes
                store.set(f"answer/{store.get(f'hello/{rank}').decode()}", token)
        if missing and time.monotonic() > end:
            break
        time.sleep(PAUSE if missing else 0)
    store.set(f"missing/{token}", json.dumps(missing))
    if missing:
        raise RuntimeError(_never_came(0, missing, timeout))
    return token


def _ask_for(store: dist.Store, rank: int, timeout: timedelta) -> str:
    """The other ranks' part."""
    me = uuid.uuid4().hex
    store.set(f"hello/{rank}", me)
    token = _hear(store, f"answer/{me}", rank, timeout).decode()
    store.set(f"taken/{token}/{rank}", "")
    missing = json.loads(_hear(store, f"missing/{token}", rank, timeout, MARGIN))
    if missing:
        raise RuntimeError(_never_came(rank, missing, timeout))
    return token


def _hear(store: dist.Store, key: str, rank: int, timeout: timedelta, margin: timedelta = timedelta(0)) -> bytes:
    """What rank 0 says."""
    try:
        store.wait([key], timeout + margin)
        return store.get(key)
    except dist.DistError as error:
        raise RuntimeError(_never_came(rank, [0], timeout)) from error


def _never_came(rank: int, missing: list[int], timeout: timedelta) -> str:
    return (
        f"rank {rank} of the job waited {timeout.total_seconds():g} seconds in vain for ranks {missing} of the job to say "
        "hello. They did not start, died, or are slower than the strategy's timeout: look at the output of their nodes for "
        f"an earlier error, or give the strategy a longer timeout. {SHARED}"
    )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
