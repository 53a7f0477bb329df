"""Consensus: the ranks of a group check that all make the same call, by control messages between their CPUs.

Each rank sends a digest of its call and compares the digests of all ranks. A check may be deferred: the digest is sent
now, and the digests are compared later, so that no host waits for another. Control messages never wait for a GPU.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dilated._compat.torch import gloo_backend


# -- control messages --------------------------------------------------------------------------------------------------
@dataclass
class PendingGather:
    """A gather of every rank's tensor, in transit; `posted` is the future of torch's `Work`, or None on one rank."""

    tensors: list[Tensor]
    posted: Future[Any] | None = None

    def done(self) -> bool:
        """Return True if `wait` would return immediately."""
        if self.posted is None:
            return True
        return self.posted.done() and (self.posted.exception() is not None or self.posted.result().is_completed())

    def wait(self) -> list[Tensor]:
        """Return every rank's tensor, in the order of ranks."""
        if self.posted is not None:
            self.posted.result().wait()
        return self.tensors


class ThreadedGloo:
    """A gloo backend that starts its collectives in another thread, in the order of the calls.

    torch's `Work` keeps the state of the thread that started it, including autograd's current hooks. In a recomputed
    block these hooks refer to the block's input, so each deferred check would keep an input alive.
    """

    def __init__(self, backend: dist.ProcessGroupGloo, name: str) -> None:
        self.backend: dist.ProcessGroupGloo | None = backend
        self.name = name

    def allgather(self, tensors: list[Tensor], own: Tensor) -> Future[Any]:
        """Start a gather; return the future of torch's `Work`."""
        if self.backend is None:
            raise RuntimeError(f"the connection {self.name} ended with the run of its Trainer.")
        return _thread(os.getpid()).submit(self.backend.allgather, [tensors], [own])

    def close(self) -> None:
        """Close the connection; wait for gathers that other ranks have not joined."""
        self.backend = None


@functools.cache
def _thread(process: int) -> ThreadPoolExecutor:
    """Return a process's thread for control messages. A forked process needs a new thread."""
    return ThreadPoolExecutor(1, "control-messages")


Connection: TypeAlias = tuple[dist.ProcessGroup, timedelta | None, str]
#: the open connections, which are kept because closing a connection waits for gathers that other ranks have not joined
_connections: dict[Connection, ThreadedGloo] = {}
#: number of times that each connection was made, so that no rank reads the addresses of an earlier connection
_times: Counter[tuple[str, timedelta | None, str]] = Counter()
#: channels of a sequence's group; other channels belong to a run
OF_SEQUENCE = ("", "differences")


def _threaded_gloo(group: dist.ProcessGroup, timeout: timedelta | None, channel: str) -> ThreadedGloo:
    """Return the backend of a group's channel; the first call creates it."""
    key = group, timeout, channel
    if key not in _connections:
        times = group.group_name, timeout, channel
        name = channel if not _times[times] else f"{channel}/{_times[times]}"
        _times[times] += 1
        _connections[key] = ThreadedGloo(gloo_backend(group, name, timeout), f"{group.group_name}/{name}")
    return _connections[key]


def connections() -> set[Connection]:
    """Return the connections that are open now."""
    return set(_connections)


def forget_connections(before: set[Connection], groups: Iterable[dist.ProcessGroup]) -> list[ThreadedGloo]:
    """Forget and return the connections of `groups`, and all channels of runs except the ones in `before`.

    The caller closes them. The next run makes new connections. The control thread ends with the last connection.
    """
    ended = set(groups)
    ending = [k for k in _connections if k[0] in ended or (k not in before and k[2] not in OF_SEQUENCE)]
    forgotten = [_connections.pop(key) for key in ending]
    if not _connections and _thread.cache_info().currsize:
        _thread(os.getpid()).shutdown()
        _thread.cache_clear()
    return forgotten


class ControlGroup:
    """The ranks of a process group, connected by gloo; `backend`: a separate connection, None if not needed."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta | None, channel: str = "") -> None:
        self.group, self.ranks = group, dist.get_world_size(group)
        self.backend = None
        if self.ranks > 1 and (channel or dist.get_backend(group) != "gloo"):
            self.backend = _threaded_gloo(group, timeout, channel)

    def start_gather(self, own: Tensor) -> PendingGather:
        """Start to gather every rank's tensor. All must be on the CPU and have the same shape and dtype."""
        if self.ranks == 1:
            return PendingGather([own])
        with torch.inference_mode(False):  # the thread that writes to the tensors is not in inference mode
            tensors = [torch.empty_like(own) for _ in range(self.ranks)]
        if self.backend is not None:
            return PendingGather(tensors, self.backend.allgather(tensors, own))
        posted: Future[Any] = Future()
        posted.set_result(dist.all_gather(tensors, own, group=self.group, async_op=True))
        return PendingGather(tensors, posted)

    def gather(self, own: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in the order of ranks."""
        return self.start_gather(own).wait()

    def gather_text(self, own: dict[str, str]) -> list[dict[str, Any]]:
        """Return every rank's mapping of strings."""
        text = json.dumps(own).encode()
        sizes = [int(x) for x in self.gather(torch.tensor([len(text)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return [json.loads(bytes(x[:n].tolist())) for x, n in zip(self.gather(padded), sizes, strict=True)]


def differing(everyone: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Compare the mappings of all ranks; return {name: which rank has which value} for values that differ."""
    lines = {}
    for name in dict.fromkeys(name for each in everyone for name in each):
        values = [each.get(name) for each in everyone]
        usual = max(values, key=values.count)
        most = 2 * values.count(usual) > len(values)
        odd = [f"rank {rank} has {v}" for rank, v in enumerate(values) if v != usual or not most]
        if values.count(usual) < len(values):
            lines[name] = f"{name}: {', '.join(odd)}" + (f"; the others have {usual}" if most else "")
    return lines


# -- agreement ---------------------------------------------------------------------------------------------------------
_REFUSED = -1
#: maximum numbers of remembered agreements and of deferred checks
REMEMBERED, DEFERRED = 64, 256
#: the advice if ranks have different link speeds, and might therefore choose different exchanges
ONE_FILE = (
    "Measure them once with `lightning-dilated bench links --output FILE` and give every rank that file by links= or "
    "LIGHTNING_DILATED_LINKS, or all of them links=Links()"
)


@dataclass(frozen=True)
class Agreement:
    """Facts that all ranks agreed on: the tokens of each rank, rank 0's dropout seed, and the call's number."""

    lengths: tuple[int, ...]
    seed: int
    number: int = 0

    @property
    def seq_len(self) -> int:
        return sum(self.lengths)


@dataclass
class DeferredCheck:
    """A call and its digests, which are compared later."""

    facts: dict[str, Any]
    digests: PendingGather
    expected: Agreement


class Consensus:
    """The agreement of a process group's ranks on their calls.

    Attributes:
        may_defer: whether checks may be deferred, identical on all ranks. False if collectives block the host: a rank
            could then wait in a collective forever and never learn that others make a different call.
        deferred: the checks that are not done yet.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta | None) -> None:
        self.group, self.timeout, self.control = group, timeout, ControlGroup(group, timeout)
        self.rank, self.may_defer = dist.get_rank(group), dist.get_backend(group) != "gloo"
        self.deferred: deque[DeferredCheck] = deque()
        self._calls = 0
        # tokens of each rank at the last comparison, because a rank cannot infer them from its own tokens
        self._latest: tuple[int, ...] = ()
        self._agreed: OrderedDict[tuple, tuple[int, ...]] = OrderedDict()

    def agree(
        self, facts: dict[str, Any], length: int, seed: int, call: Any, later: bool, check: Callable[[Agreement], None]
    ) -> Agreement:
        """Return the agreement, or the expected agreement with a deferred check; `check` refuses impossible lengths."""
        if self.control.ranks == 1:
            agreed = Agreement((length,), seed, self._next_number())
            check(agreed)
            return agreed
        key = (repr(facts), length)
        digest = int.from_bytes(hashlib.blake2b(repr((key[0], call)).encode(), digest_size=8).digest(), "big") >> 1
        facts = facts if call is None else {**facts, "call id": call}
        if later and self.may_defer and not seed and self._agreed.get(key) == self._latest:
            expected = Agreement(self._latest, 0, self._next_number())
            self.deferred.append(DeferredCheck(facts, self._send(digest, length, seed), expected))
            if len(self.deferred) > DEFERRED:
                self._check_next()
            return expected
        self._check_all()
        rows = self._compare(facts, self._send(digest, length, seed))
        agreed = Agreement(tuple(row[1] for row in rows), rows[0][2], self._next_number())
        check(agreed)
        self._agreed[key] = agreed.lengths
        if sum(agreed.lengths):
            self._latest = agreed.lengths
        if len(self._agreed) > REMEMBERED:
            self._agreed.popitem(last=False)
        return agreed

    def flush(self) -> None:
        """Do the deferred checks. The next check is not deferred, because other ranks' lengths may differ by then."""
        self._latest = ()
        self._check_all()

    def refuse(self, error: BaseException) -> None:
        """Report to the other ranks that this rank cannot continue."""
        self._check_all()
        self._send(_REFUSED, 0, 0).wait()
        self._difference({"error": f"{type(error).__name__}: {error}"})

    def _next_number(self) -> int:
        self._calls += 1
        return self._calls - 1

    def _check_all(self) -> None:
        while self.deferred:
            self._check_next()

    def _check_next(self) -> None:
        deferred = self.deferred.popleft()
        expected = deferred.expected.lengths
        lengths = tuple(row[1] for row in self._compare(deferred.facts, deferred.digests, "used"))
        if lengths != expected:  # the same call, but other ranks have different numbers of tokens than before
            raise ValueError(
                f"the ranks of the sequence hold {list(lengths)} tokens in a call, but {list(expected)} in the call "
                "before it in the same step. Give all calls of a step sequences of one length, or leave `trusting`."
            )

    def _send(self, *numbers: int) -> PendingGather:
        return self.control.start_gather(torch.tensor(numbers, dtype=torch.int64))

    def _compare(self, facts: Mapping[str, Any], digests: PendingGather, done: str = "computed") -> list[list[int]]:
        """Return every rank's [digest, tokens, seed]; raise ValueError if digests differ."""
        try:
            rows = [x.tolist() for x in digests.wait()]
        except RuntimeError as error:
            raise RuntimeError(self._timed_out(facts)) from error
        if len({row[0] for row in rows}) > 1:
            raise ValueError(self._difference({k: str(v) for k, v in facts.items()}, done))
        return rows

    def _timed_out(self, facts: Mapping[str, Any]) -> str:
        job = dist.get_process_group_ranks(self.group)
        peers = [r for r in job if r != job[self.rank]]
        return (
            f"rank {self.rank} of the sequence (rank {job[self.rank]} of the job) waited in vain for the others, ranks "
            f"{peers} of the job, to agree on {dict(facts)}. One of them died, raised, or made fewer calls: every rank "
            "has to run every forward and every backward, also where its own tokens have no loss (add 0 * out.sum())."
        )

    def _difference(self, facts: dict[str, str], done: str = "computed") -> str:
        """Return a message that says which ranks differ, and in which facts. All ranks must call this."""
        # a rank that deferred checks may have sent digests of later calls on the usual connection
        control = ControlGroup(self.group, self.timeout, "differences") if self.may_defer else self.control
        everyone = control.gather_text(facts)
        self._even_out(control)
        refused = {rank: x["error"] for rank, x in enumerate(everyone) if "error" in x}
        if refused:
            return "; ".join(f"rank {rank} of the sequence refused the call with {e}" for rank, e in refused.items())
        lines = []
        for name, line in differing(everyone).items():
            lines += [line, ONE_FILE] if name == "links" else [line]
        return f"the ranks of the sequence disagree, so nothing was {done}. " + ". ".join(lines)

    def _even_out(self, control: ControlGroup) -> None:
        """Pad each rank's queue to the longest, so that all ranks issue the same number of collectives; clear it."""
        if self.may_defer:
            waiting = len(self.deferred)
            most, self._calls = torch.stack(control.gather(torch.tensor([waiting, self._calls]))).amax(0).tolist()
            padding = [self._send(0, 0, 0) for _ in range(most - waiting)]
            self._discarded = [x.digests for x in self.deferred] + padding  # kept until their messages have arrived
            self.deferred.clear()
