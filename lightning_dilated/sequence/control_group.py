"""Words between ranks through their CPUs, beside a process group that may live on GPUs: agreeing never waits for a GPU."""

from __future__ import annotations

import functools
import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Asked:
    """What every rank is to say, on its way."""

    found: list[Tensor]
    posted: Future[Any]

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self.posted.done() and (self.posted.exception() is not None or self.posted.result().is_completed())

    def wait(self) -> list[Tensor]:
        """Every rank's tensor, in the order of ranks."""
        self.posted.result().wait()
        return self.found


class _Said:
    """The `Work` of a rank that asks itself."""

    def is_completed(self) -> bool:
        """At once."""
        return True

    def wait(self) -> bool:
        """No longer than that."""
        return True


class _Beside:
    """A gloo backend whose collectives are begun by another thread, in the order they are asked for.

    torch's `Work` keeps the state of the thread that began it, and with it autograd's hooks of the moment: where activations
    are recomputed these hold a block's input, and calls that are put off would keep as many inputs as they reach back.
    """

    def __init__(self, backend: dist.ProcessGroupGloo) -> None:
        self._backend = backend

    def allgather(self, found: list[Tensor], mine: Tensor) -> Future[Any]:
        """Begin to gather; the future of torch's `Work`."""
        return _thread(os.getpid()).submit(self._backend.allgather, [found], [mine])


@functools.cache
def _thread(process: int) -> ThreadPoolExecutor:
    """The thread of a process, which a fork does not take along."""
    return ThreadPoolExecutor(1, "quiet")


class Quiet:
    """The ranks of a process group, over gloo; `channel` names a connection of their own, where others are in use."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta | None, channel: str = "") -> None:
        self.group, self.ranks = group, dist.get_world_size(group)
        self._own = None
        if self.ranks > 1 and (channel or dist.get_backend(group) != "gloo"):
            self._own = _beside(group, timeout, channel)

    def ask(self, mine: Tensor) -> Asked:
        """Begin to gather every rank's tensor; equal shapes and dtypes, on the CPU."""
        begun: Future[Any] = Future()
        if self.ranks == 1:
            begun.set_result(_Said())
            return Asked([mine], begun)
        with torch.inference_mode(False):  # in which the thread is that writes them
            found = [torch.empty_like(mine) for _ in range(self.ranks)]
        if self._own is not None:
            return Asked(found, self._own.allgather(found, mine))
        begun.set_result(dist.all_gather(found, mine, group=self.group, async_op=True))
        return Asked(found, begun)

    def gather(self, mine: Tensor) -> list[Tensor]:
        """Every rank's tensor, in the order of ranks."""
        return self.ask(mine).wait()

    def gather_words(self, mine: dict[str, str]) -> list[dict[str, Any]]:
        """Every rank's mapping of strings."""
        text = json.dumps(mine).encode()
        sizes = [int(x) for x in self.gather(torch.tensor([len(text)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return [json.loads(bytes(x[:n].tolist())) for x, n in zip(self.gather(padded), sizes, strict=True)]


@functools.cache
def _beside(group: dist.ProcessGroup, timeout: timedelta | None, channel: str) -> _Beside:
    """A gloo backend of the group's ranks; one for each channel, however often it is asked for.

    Not `dist.new_group`: all ranks of the job would have to call that, or (with local synchronization) to have made equally
    many groups before.
    """
    store = dist.PrefixStore(
        f"lightning-dilated/{group.group_name}/{timeout}/{channel}", dist.distributed_c10d._get_default_store()
    )
    options = {} if timeout is None else {"timeout": timeout}
    return _Beside(dist.ProcessGroupGloo(store, dist.get_rank(group), dist.get_world_size(group), **options))
