"""After a collective failed: which ranks ended too and why, and which gave no sign, so that an error names who died.

gloo says "Connection reset by peer", and of whom only a port. Here every rank that ends with an error leaves its reason in
the job's store, and a rank whose connection broke reads what the others left.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

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
