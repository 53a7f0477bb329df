"""Consensus: the ranks of a group check that all make the same call, by control messages between their CPUs.

Each rank sends a digest of its call and compares the digests of all ranks. A check may be deferred: the digest is sent
now, and the digests are compared later, so that no host waits for another. Control messages never wait for a GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dilated._compat.torch import gloo_backend


# -- control messages --------------------------------------------------------------------------------------------------
@dataclass
class PendingGather:
    """A gather of every rank's tensor, in transit; `work` is None on one rank."""

    tensors: list[Tensor]
    work: dist.Work | None = None

    def done(self) -> bool:
        """Return True if `wait` would return immediately."""
        return self.work is None or self.work.is_completed()

    def wait(self) -> list[Tensor]:
        """Return every rank's tensor, in the order of ranks."""
        if self.work is not None:
            self.work.wait()
        return self.tensors


class NamedGloo:
    """A named gloo backend that can be closed."""

    def __init__(self, backend: dist.ProcessGroupGloo, name: str) -> None:
        self.backend: dist.ProcessGroupGloo | None = backend
        self.name = name

    def allgather(self, tensors: list[Tensor], own: Tensor) -> dist.Work:
        """Start to gather every rank's `own` into `tensors`."""
        if self.backend is None:
            raise RuntimeError(f"the connection {self.name} ended with the run of its Trainer.")
        return self.backend.allgather([tensors], [own])

    def close(self) -> None:
        """Close the connection; wait for gathers that other ranks have not joined."""
        self.backend = None


Connection: TypeAlias = tuple[dist.ProcessGroup, timedelta | None, str]
#: the open connections, which are kept because closing a connection waits for gathers that other ranks have not joined
_connections: dict[Connection, NamedGloo] = {}
#: number of times that each connection was made, so that no rank reads the addresses of an earlier connection
_times: Counter[tuple[str, timedelta | None, str]] = Counter()
#: channel of a sequence's group; other channels belong to a run
OF_SEQUENCE = ""


def _named_gloo(group: dist.ProcessGroup, timeout: timedelta | None, channel: str) -> NamedGloo:
    """Return the backend of a group's channel; the first call creates it."""
    key = group, timeout, channel
    if key not in _connections:
        times = group.group_name, timeout, channel
        name = channel if not _times[times] else f"{channel}/{_times[times]}"
        _times[times] += 1
        _connections[key] = NamedGloo(gloo_backend(group, name, timeout), f"{group.group_name}/{name}")
    return _connections[key]


def connections() -> set[Connection]:
    """Return the connections that are open now."""
    return set(_connections)


def forget_connections(before: set[Connection], groups: Iterable[dist.ProcessGroup]) -> list[NamedGloo]:
    """Forget and return the connections of `groups`, and all connections of runs' channels except `before`.

    The caller closes them. The next run makes new connections.
    """
    ended = set(groups)
    ending = [k for k in _connections if k[0] in ended or (k not in before and k[2] != OF_SEQUENCE)]
    return [_connections.pop(key) for key in ending]


class ControlGroup:
    """The ranks of a process group, connected by gloo; `backend`: a separate connection, None if not needed."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta | None, channel: str = OF_SEQUENCE) -> None:
        self.group, self.ranks = group, dist.get_world_size(group)
        self.backend = None
        if self.ranks > 1 and (channel or dist.get_backend(group) != "gloo"):
            self.backend = _named_gloo(group, timeout, channel)

    def start_gather(self, own: Tensor) -> PendingGather:
        """Start to gather every rank's tensor. All must be on the CPU and have the same shape and dtype."""
        if self.ranks == 1:
            return PendingGather([own])
        with torch.inference_mode(False):  # the thread that writes to the tensors is not in inference mode
            tensors = [torch.empty_like(own) for _ in range(self.ranks)]
        if self.backend is not None:
            return PendingGather(tensors, self.backend.allgather(tensors, own))
        return PendingGather(tensors, dist.all_gather(tensors, own, group=self.group, async_op=True))

    def gather(self, own: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in the order of ranks."""
        return self.start_gather(own).wait()

    def gather_text(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Return every rank's mapping of strings to values that JSON can write."""
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
#: maximum numbers of remembered agreements and of deferred checks
REMEMBERED, DEFERRED = 64, 256
#: the advice if ranks have different link speeds, and might therefore choose different exchanges
ONE_FILE = (
    "Measure them once with `lightning-dilated bench links --output FILE` and give every rank that file by links= or "
    "LIGHTNING_DILATED_LINKS, or all of them links=Links()"
)


class Facts(dict[str, Any]):
    """Facts by name, with a digest of all. Calls that have the same facts share one object."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        super().__init__(facts)
        self.digest = hashlib.blake2b(repr(dict(self)).encode(), digest_size=16).hexdigest()


class ComparedCall(NamedTuple):
    """A call that ranks compare: `facts`, `chunk` and `call_id` must be equal; see `SequenceGroup.agree`."""

    facts: Facts
    chunk: int | None = None
    call_id: Any = None
    is_deferred: bool = False

    def all_facts(self, settings: Facts) -> dict[str, Any]:
        """Return all facts of the call, for messages."""
        more = {"tokens of the chunk": self.chunk, "call id": self.call_id}
        return {**self.facts, **settings, **{name: value for name, value in more.items() if value is not None}}


@dataclass(frozen=True)
class Agreement:
    """The result of a comparison: the number of tokens of each rank, rank 0's dropout seed, and the call's number."""

    lengths: tuple[int, ...]
    seed: int
    number: int = 0

    @property
    def seq_len(self) -> int:
        return sum(self.lengths)


class Consensus:
    """The agreement of a process group's ranks on their calls.

    A check is deferred if an equal call was agreed on with the lengths of the latest comparison. All ranks know these
    lengths, so they defer the same calls. The next comparison includes the deferred calls in its message.

    Attributes:
        may_defer: whether checks may be deferred, identical on all ranks. False if collectives block the host: a rank
            could then wait in a collective forever and never learn that others make a different call.
        deferred: the calls that are not compared yet.
        settings: facts that are the same in all calls.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta | None, settings: Mapping[str, Any]) -> None:
        self.group, self.control, self.settings = group, ControlGroup(group, timeout), Facts(settings)
        self.rank, self.may_defer = dist.get_rank(group), dist.get_backend(group) != "gloo"
        self.deferred: list[ComparedCall] = []
        self._calls = 0
        # tokens of each rank at the last comparison, because a rank cannot infer them from its own tokens
        self._latest: tuple[int, ...] = ()
        self._agreed: OrderedDict[tuple, None] = OrderedDict()

    def agree(
        self, call: ComparedCall, length: int, seed: int, later: bool, check: Callable[[Agreement], None]
    ) -> Agreement:
        """Return the agreement; with a deferred check, the expected agreement. `check` refuses impossible lengths."""
        if self.control.ranks == 1:
            agreed = Agreement((length,), seed, self._next_number())
            check(agreed)
            return agreed
        key = call.facts.digest, call.chunk
        known = later and self.may_defer and not seed and (*key, self._latest) in self._agreed
        if known and length == self._latest[self.rank]:
            agreed = Agreement(self._latest, 0, self._next_number())
            self.deferred.append(call._replace(is_deferred=True))
            if len(self.deferred) == DEFERRED:
                self._compare()
            return agreed
        rows = self._compare(call, length, seed)
        agreed = Agreement(tuple(row[1] for row in rows), rows[0][2], self._next_number())
        check(agreed)
        self._agreed[*key, agreed.lengths] = None
        if sum(agreed.lengths):
            self._latest = agreed.lengths
        if len(self._agreed) > REMEMBERED:
            self._agreed.popitem(last=False)
        return agreed

    def flush(self) -> None:
        """Do the deferred checks. The next check is not deferred, because ranks may then have other numbers of tokens."""
        try:
            self._compare()
        finally:
            self._latest = ()

    def refuse(self, error: BaseException) -> None:
        """Report to the other ranks that this rank cannot continue."""
        with contextlib.suppress(ValueError):
            self._compare(ComparedCall(Facts({"error": f"{type(error).__name__}: {error}"})))

    def _next_number(self) -> int:
        self._calls += 1
        return self._calls - 1

    def _compare(self, call: ComparedCall | None = None, length: int = 0, seed: int = 0) -> list[list[int]]:
        """Compare the deferred calls and `call`; return every rank's [digest, length, seed].

        Raises:
            ValueError: on every rank, if calls differ.
        """
        calls = self.deferred if call is None else [*self.deferred, call]
        self.deferred = []
        if not calls:
            return []
        text = repr((self.settings.digest, [(x.facts.digest, *x[1:]) for x in calls]))
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
        try:
            rows = [x.tolist() for x in self.control.gather(torch.tensor([digest, length, seed], device="cpu"))]
        except RuntimeError as error:
            raise RuntimeError(self._timed_out(calls[-1].all_facts(self.settings))) from error
        if len({row[0] for row in rows}) > 1:
            raise ValueError(self._difference(calls, length))
        return rows

    def _timed_out(self, facts: dict[str, Any]) -> str:
        job = dist.get_process_group_ranks(self.group)
        peers = [r for r in job if r != job[self.rank]]
        return (
            f"rank {self.rank} of the sequence (rank {job[self.rank]} of the job) waited in vain for the others, ranks "
            f"{peers} of the job, to agree on {facts}. One of them died, raised, or made fewer calls: every rank "
            "has to run every forward and every backward, also where its own tokens have no loss (add 0 * out.sum())."
        )

    def _difference(self, calls: list[ComparedCall], length: int) -> str:
        """Return a message that says which ranks differ, and in which facts, for the first call that differs.

        All ranks must call this. `length`: tokens of this rank in the last call, if its check was not deferred.
        """
        # a rank that has another number of tokens than before has no deferred check; the other ranks may have one
        lengths = [self._latest[self.rank] if x.is_deferred else length for x in calls]
        own = [[x.facts.digest, x.chunk, str(x.call_id), x.is_deferred, n] for x, n in zip(calls, lengths, strict=True)]
        ranks = self.control.gather_text({"calls": own, "number": self._calls})
        self._calls = max(x["number"] for x in ranks)
        at_once = list(itertools.zip_longest(*(x["calls"] for x in ranks)))
        number = next((i for i, x in enumerate(at_once) if len({repr(y and y[:4]) for y in x}) > 1), 0)
        first = at_once[number]
        if None not in first and len({repr(x[:3]) for x in first}) == 1 and any(x[3] for x in first):
            return (
                f"the ranks of the sequence hold {[x[4] for x in first]} tokens in a call, but {list(self._latest)} in the "
                "call before it in the same step. Give all calls of a step sequences of one length, or leave `trusting`."
            )
        call = calls[number] if number < len(calls) else None
        if call is not None and (None not in first or "error" in call.facts):
            facts = call.all_facts(self.settings)
        else:
            facts = {"number of calls": len(calls)}
        everyone = self.control.gather_text({name: str(value) for name, value in facts.items()})
        refused = {rank: x["error"] for rank, x in enumerate(everyone) if "error" in x}
        if refused:
            return "; ".join(f"rank {rank} of the sequence refused the call with {e}" for rank, e in refused.items())
        lines = []
        for name, line in differing(everyone).items():
            lines += [line, ONE_FILE] if name == "links" else [line]
        done = "used" if calls[0].is_deferred else "computed"
        return f"the ranks of the sequence disagree, so nothing was {done}. " + ". ".join(lines)
