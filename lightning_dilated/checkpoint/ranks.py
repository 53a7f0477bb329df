"""RankGroup: ranks that save and load together; if one rank fails, all ranks raise an error."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lightning_dilated._compat.torch import default_store

T = TypeVar("T")
#: seconds between two checks for a failure of another rank
POLL = 1.0


@dataclass(frozen=True)
class RankGroup:
    """A group of `size` ranks with this process as `rank`; `group` is None for the default group or a single rank."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def gather(self, value: T) -> list[T]:
        """Return, on every rank, the values of all ranks in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def any(self, value: bool) -> bool:
        """Return True on every rank if `value` is True on any rank."""
        return any(self.gather(value))

    def together(self, what: str, call: Callable[..., T], *args: Any) -> T:
        """Return `call(*args)`. If any rank's call fails, raise OSError on all ranks, naming `what`, ranks and reasons."""
        value, error, local_reason = None, None, None
        try:
            value = call(*args)
        except (Exception, CheckpointException) as raised:  # CheckpointException is not an Exception
            error, local_reason = raised, reason(raised)
        failed: dict[str, list[int]] = {}
        for rank, why in enumerate(self.gather(local_reason)):
            if why is not None:
                failed.setdefault(why, []).append(rank)
        if failed:
            lines = [why if len(ranks) == self.size else f"rank {ranks[0]}: {why}" for why, ranks in failed.items()]
            raise failure(f"{what}: {'; '.join(lines)}") from error
        return value  # type: ignore[return-value]

    def watched(self, what: str, call: Callable[..., object], *args: Any) -> None:
        """Run a call in which ranks wait for each other; if any rank fails, all raise. Every rank must call this.

        Raises:
            OSError: an error that `call` raised on all ranks (`known_to_all`), or on one rank only. In the second case
                the group must not be used any more.
        """
        if self.size == 1:
            call(*args)
            return
        name = "" if self.group is None else self.group.group_name
        _calls[name] += 1
        store = dist.PrefixStore(f"lightning-dilated/watched/{name}/{_calls[name]}", default_store())
        ended: list[BaseException | None] = []
        run = partial(_run, partial(call, *args), self.rank, store, ended)
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        # a daemon thread, because it may wait forever for another rank
        thread = threading.Thread(target=run, args=(device,), name="checkpoint-files", daemon=True)
        thread.start()
        try:
            while thread.is_alive() and not ended and not store.check(["failed"]):
                thread.join(POLL)
            if not ended:
                raise failure(f"{what}: {store.get('failed').decode()}", False)
        except RuntimeError:  # the store is lost, perhaps with ranks that the call needs
            thread.join(POLL)
            if not ended:
                raise
        thread.join(POLL)  # the thread may still be reporting its error to the other ranks
        if (error := ended[0]) is not None:
            if known_to_all(error):
                raise error
            raise failure(f"{what}: rank {self.rank}: {reason(error)}", False) from error


def _run(
    call: Callable[[], object], rank: int, store: dist.Store, ended: list[BaseException | None], device: int | None
) -> None:
    """Run `call`, and append its error or None to `ended`; report the error to other ranks if only this rank failed."""
    try:
        if device is not None:
            torch.cuda.set_device(device)  # a new thread uses the first GPU
        call()
        ended.append(None)
    except BaseException as raised:
        ended.append(raised)  # append before the store is used, because a lost store must not hide the error
        if not known_to_all(raised):
            with suppress(RuntimeError):
                store.set("failed", f"rank {rank}: {reason(raised)}")


def failure(text: str, known_to_all: bool = True) -> OSError:
    """Return a checkpoint's error. If it is not `known_to_all`, the other ranks may still wait in the group."""
    error = OSError(text)
    error.known_to_all = known_to_all  # type: ignore[attr-defined]
    return error


def known_to_all(error: BaseException) -> bool:
    """Return True if all ranks raise this error; see `failure`."""
    return getattr(error, "known_to_all", False)


#: {group name: number of calls of `RankGroup.watched`}; equal on all ranks of the group
_calls: Counter[str] = Counter()


def reason(error: BaseException) -> str:
    """Return an error's reason in one line, or each rank's reason if the error contains failures of several ranks."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        return "; ".join(f"rank {rank}: {reason(failure)}" for rank, (failure, _) in sorted(failures.items()))
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
