"""Words between ranks through their CPUs, beside a process group that may live on GPUs: agreeing never waits for a GPU.

How ranks find out, through their hosts, that all make the same call: each says a digest of it, and all hear all.

A call may be put off: its digest is sent, and what the others say is looked at later, so that no host waits for another.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
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


_REFUSED = -1
#: calls whose agreements are remembered, and calls that may be put off
REMEMBERED, PUT_OFF = 64, 256
#: what to do where ranks would choose exchanges by unlike speeds
ONE_FILE = (
    "Measure them once with `lightning-dilated bench links --output FILE` and give every rank that file by links= or "
    "LIGHTNING_DILATED_LINKS, or all of them links=Links()"
)


@dataclass(frozen=True)
class Agreement:
    """What all ranks of a call found out together: N and each rank's tokens, rank 0's seed of the dropout masks, and the
    number of the call, which tells two calls of equal shapes apart."""

    lengths: tuple[int, ...]
    seed: int
    number: int = 0

    @property
    def seq_len(self) -> int:
        """N."""
        return sum(self.lengths)


@dataclass
class Owed:
    """A call that was put off."""

    facts: dict[str, Any]
    asked: Asked
    expected: Agreement


class Table:
    """The ranks of a process group, where they agree.

    Attributes:
        may_trust: whether calls may be put off; equal on all ranks. Not where collectives wait on the host: a rank would
            wait in one, maybe for good, before it heard that another rank makes a different call.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta | None) -> None:
        self.group, self._timeout, self._quiet = group, timeout, Quiet(group, timeout)
        self.rank, self.may_trust = dist.get_rank(group), dist.get_backend(group) != "gloo"
        self._calls = 0
        self._latest: tuple[
            int, ...
        ] = ()  # tokens of each rank, as last compared; a rank's own say nothing of the others'
        self._known: OrderedDict[tuple, tuple[int, ...]] = OrderedDict()
        self._owed: deque[Owed] = deque()

    def agree(
        self,
        facts: dict[str, Any],
        length: int,
        seed: int,
        turn: Any,
        later: bool,
        check: Callable[[Agreement], None],
    ) -> Agreement:
        """The agreement, or what it has to become where it is put off; `check` raises for lengths that cannot be."""
        key = (repr(facts), length)
        digest = int.from_bytes(hashlib.blake2b(repr((key[0], turn)).encode(), digest_size=8).digest(), "big") >> 1
        facts = facts if turn is None else {**facts, "turn": turn}
        if later and self.may_trust and not seed and self._known.get(key) == self._latest:
            expected = Agreement(self._latest, 0, self._number())
            self._owed.append(Owed(facts, self._ask(digest, length, seed), expected))
            if len(self._owed) > PUT_OFF:
                self._pay()
            return expected
        self._pay_all()
        rows = self._compare(facts, self._ask(digest, length, seed))
        agreed = Agreement(tuple(row[1] for row in rows), rows[0][2], self._number())
        check(agreed)
        self._known[key] = agreed.lengths
        if sum(agreed.lengths):
            self._latest = agreed.lengths
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return agreed

    def settle(self) -> None:
        """Compare what was put off; the next call is not, since the next batch may have other tokens on other ranks."""
        self._latest = ()
        self._pay_all()

    def _pay_all(self) -> None:
        while self._owed:
            self._pay()

    def _number(self) -> int:
        self._calls += 1
        return self._calls - 1

    def _pay(self) -> None:
        owed = self._owed.popleft()
        found = tuple(row[1] for row in self._compare(owed.facts, owed.asked, "used"))
        if found != owed.expected.lengths:  # the same call with other tokens elsewhere
            raise ValueError(
                f"the ranks of the sequence hold {list(found)} tokens in a call, but {list(owed.expected.lengths)} in the "
                "one before it in the same step. Give all calls of a step sequences of one length, or leave `trusting`."
            )

    def _ask(self, *words: int) -> Asked:
        return self._quiet.ask(torch.tensor(words, dtype=torch.int64))

    def _compare(self, facts: Mapping[str, Any], asked: Asked, done: str = "computed") -> list[list[int]]:
        """What every rank said: digest, tokens, seed."""
        try:
            rows = [x.tolist() for x in asked.wait()]
        except RuntimeError as error:
            raise RuntimeError(self._alone(facts)) from error
        if len({row[0] for row in rows}) > 1:
            raise ValueError(self._difference({k: str(v) for k, v in facts.items()}, done))
        return rows

    def refuse(self, error: BaseException) -> None:
        """Tell the other ranks that this one cannot go on."""
        self._pay_all()
        self._ask(_REFUSED, 0, 0).wait()
        self._difference({"error": f"{type(error).__name__}: {error}"})

    def _alone(self, what: Mapping[str, Any]) -> str:
        """That other ranks did not come to agree."""
        job = dist.get_process_group_ranks(self.group)
        others = [r for r in job if r != job[self.rank]]
        return (
            f"rank {self.rank} of the sequence (rank {job[self.rank]} of the job) waited in vain for the others, ranks "
            f"{others} of the job, to agree on {dict(what)}. One of them died, raised, or made fewer calls: every rank has "
            "to run every forward and every backward, also where its own tokens have no loss (add 0 * out.sum())."
        )

    def _even_out(self, quiet: Quiet) -> None:
        """Have every rank ask, and count, as often as the one that put most off; what came after has no sense any more."""
        if self.may_trust:
            mine = len(self._owed)
            most, self._calls = torch.stack(quiet.gather(torch.tensor([mine, self._calls]))).amax(0).tolist()
            self._unheard = [owed.asked for owed in self._owed] + [self._ask(0, 0, 0) for _ in range(most - mine)]
            self._owed.clear()

    def _difference(self, facts: dict[str, str], done: str = "computed") -> str:
        """Which rank differs in what, told to all."""
        # a rank that put calls off may have sent words of later ones by the usual way
        quiet = Quiet(self.group, self._timeout, "differences") if self.may_trust else self._quiet
        everyone = quiet.gather_words(facts)
        self._even_out(quiet)
        refused = {rank: x["error"] for rank, x in enumerate(everyone) if "error" in x}
        if refused:
            return "; ".join(f"rank {rank} of the sequence refused the call with {e}" for rank, e in refused.items())
        lines = []
        for name in everyone[0]:
            values = [x.get(name) for x in everyone]
            usual = max(values, key=values.count)
            most = 2 * values.count(usual) > len(values)
            odd = [f"rank {rank} has {v}" for rank, v in enumerate(values) if v != usual or not most]
            if len(set(values)) > 1:
                lines.append(f"{name}: {', '.join(odd)}" + (f"; the others have {usual}" if most else ""))
            if name == "links" and len(set(values)) > 1:
                lines.append(ONE_FILE)
        return f"the ranks of the sequence disagree, so nothing was {done}. " + ". ".join(lines)
