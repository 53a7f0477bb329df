"""SequenceGroup: the ranks that share one sequence, their agreement on each call, and the active group.

Shape letters: N tokens of the sequence, R ranks, L tokens of a rank.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist

from lightning_dilated._compat.torch import ThreadStack, in_backward
from lightning_dilated._validation import integer
from lightning_dilated.sequence.consensus import Agreement, ComparedCall, Consensus, Facts
from lightning_dilated.sequence.exchange.transport import Traffic, TrafficLog
from lightning_dilated.sequence.links import Links
from lightning_dilated.sequence.shard import (
    Place,
    Shard,
    check_chunked,
    check_exchange,
    check_exchange_memory,
    check_head_size,
    check_layout,
    check_stream,
)

if TYPE_CHECKING:
    from lightning_dilated.sequence.planner import Plan

_groups: dict[str, SequenceGroup] = {}
_active = ThreadStack("active sequences")
_numbers = itertools.count()
#: maximum number of calls for which a group caches routes; enough for several layers of a step, forward and backward
REMEMBERED = 32


class SequenceGroup:
    """One sequence on the ranks of a process group. Pass it to `dilated_attention(sequence=...)`, or make it `active`.

    Args:
        group: a torch.distributed process group; None is the world.
        layout: "contiguous", "zigzag", "strided" or "chunked": which positions a rank holds (see `Shard`).
        stream: number of tokens per chunk in the chunked layout; all ranks share each chunk (`MemorySettings.stream`).
        exchange: "auto", or one of `sequence.exchange.EXCHANGES`.
        head_size: number of ranks in a head-parallel group. They exchange tokens for heads, and `exchange` runs between
            groups. "auto" is the cheapest size for each call (see `sequence.head_size`), or 1 in the chunked layout.
        ranks_per_node: ranks that share fast links; None means all ranks.
        loss_group: the ranks that add their losses, including data-parallel ranks; None means the sequence's ranks.
        timeout: timeout of control messages between ranks; None means torch's default.
        links: the link speeds that "auto" uses, the same on all ranks; None means `Links.of_this_machine()`.
        exchange_memory_gib: the most GiB that the exchange of a call may use on a rank for other ranks' rows and fp32
            sums of their gradients. "auto" chooses an exchange within this limit. None means no limit.

    Attributes:
        forward_traffic, backward_traffic: bytes and messages of this rank since their last `clear()`.
        agreed, plan: the latest call's agreement and plan; `print(group.plan)` lists all exchanges with reasons.

    Raises:
        RuntimeError: without torch.distributed, or if this process is not in the group.
        TypeError, ValueError: if an argument is invalid. The message names it.
        OSError, ValueError: if this machine's file of links cannot be read, see `Links.of_this_machine`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        layout: str = "contiguous",
        stream: int | None = None,
        exchange: str = "auto",
        head_size: int | Literal["auto"] = 1,
        ranks_per_node: int | None = None,
        loss_group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        links: Links | None = None,
        exchange_memory_gib: float | None = None,
    ) -> None:
        self.group = _checked_group(group)
        self.ranks, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.layout, self.exchange = check_layout(layout), check_exchange(exchange)
        check_stream(layout, stream)
        self.stream, self.head_size = stream, check_head_size(head_size)
        check_chunked(layout, exchange, head_size, exchange_memory_gib)
        self.exchange_memory = check_exchange_memory(exchange_memory_gib)
        if isinstance(self.head_size, int) and self.ranks % self.head_size:
            raise ValueError(
                f"head_size={head_size} must divide the {self.ranks} ranks of the group; "
                f"allowed: {[n for n in range(1, self.ranks + 1) if self.ranks % n == 0]}."
            )
        self.ranks_per_node = self.ranks if ranks_per_node is None else integer(ranks_per_node, "ranks_per_node", 1)
        if links is not None and not isinstance(links, Links):
            raise TypeError(f"links must be a Links or None, got {links!r}; Links.load(path) reads a file.")
        self.links = Links.of_this_machine() if links is None else links
        self.forward_traffic, self.backward_traffic = Traffic("forward"), Traffic("backward")
        self.agreed: Agreement | None = None
        self.plan: Plan | None = None
        self.was_active = False
        self.loss_group = self.group if loss_group is None else loss_group
        self.shares = 0  # number of calls of `loss_share`
        self.unshared: str | None = None  # the reason why losses cannot be added now
        self._remembered: OrderedDict[Any, Any] = OrderedDict()
        self.timeout = timeout
        settings = {"layout": layout, "stream": stream, "exchange": exchange, "head_size": head_size}
        # link speeds matter only if "auto" uses them
        settings["links"] = self.links.numbers if "auto" in (exchange, head_size) else None
        settings |= {"ranks_per_node": self.ranks_per_node, "exchange_memory": self.exchange_memory}
        self._consensus: Consensus | None = Consensus(self.group, timeout, settings)
        self._trusted = False
        self.name = f"sequence-{next(_numbers)}"
        _groups[self.name] = self

    def shard(self, seq_len: int, members: int = 1) -> Shard:
        """Return the shard of a sequence of N tokens; `members`: see `Shard`."""
        if self.stream is not None and seq_len <= self.stream:  # a single chunk needs no chunked layout
            return Shard(seq_len, self.ranks // members, members=members)
        return Shard(seq_len, self.ranks // members, self.layout, members, self.stream)

    @property
    def place(self) -> Place:
        """This rank's place among the ranks of the sequence."""
        return Place(self.ranks, self.rank, self.layout, self.stream)

    def positions(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """Return the positions (L,) int64 of this rank's `length` tokens, on the CPU by default; a collective call.

        Raises:
            ValueError: on every rank, if a rank does not have the tokens of its shard.
        """
        agreed = self.agree({"call": "positions"}, length)
        ranges = self.shard(agreed.seq_len).ranges(self.rank)
        runs = [torch.arange(x.start, x.stop, x.step, device=device) for x in ranges]
        return torch.cat([torch.empty(0, dtype=torch.int64, device=device), *runs])

    @contextlib.contextmanager
    def active(self) -> Iterator[SequenceGroup]:
        """Make `dilated_attention` without `sequence=` use this group inside the context, in this thread only.

        If activations are recomputed, run the backward in the same context, because it calls `dilated_attention` again.
        """
        self.was_active = True
        with _active.with_top(self):
            yield self

    def close(self) -> None:
        """Free everything that the group stores. The op and later backwards can no longer find the group by name."""
        _groups.pop(self.name, None)
        self.forget()
        self._consensus = None  # the consensus refers to the process groups
        self.group = self.loss_group = None  # type: ignore[assignment]

    def _open(self) -> Consensus:
        if self._consensus is None:
            raise RuntimeError(
                f"{self.name} was closed, by close() or at the end of the Trainer's run that made it: make another "
                "SequenceGroup, or call within the run."
            )
        return self._consensus

    def forget(self) -> None:
        """Free the routes of earlier calls, which use device memory. Later calls compute their routes again."""
        self._remembered.clear()

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return make(), cached by `key`. The cache has the latest `REMEMBERED` keys; a key of None is not cached.

        The cache is small because values use device memory, and the documents of a batch may never occur again.
        """
        if key is None:
            return make()
        if key not in self._remembered:
            self._remembered[key] = make()
            if len(self._remembered) > REMEMBERED:
                self._remembered.popitem(last=False)
        self._remembered.move_to_end(key)
        return self._remembered[key]

    # -- agreement --------------------------------------------------------------------------------------------------
    def agree(
        self,
        what: Mapping[str, Any],
        length: int | None = None,
        seed: int = 0,
        call_id: Any = None,
        later: bool = False,
        chunk: int | None = None,
    ) -> Agreement:
        """Compare a call on all ranks; every rank raises if the call of one rank differs.

        Args:
            what: facts of the call by name; they must be the same on all ranks. `Facts` need less time on the host.
            length: this rank's tokens; None for a call without tokens.
            seed: this rank's dropout seed; the agreement has the seed of rank 0.
            call_id: a further fact, which must be the same on all ranks, but changes with every call.
            later: inside `trusting`, defer the check to `settle` if an equal call (except for `call_id`) was agreed on.
            chunk: tokens of a chunk on all ranks together, if the call is on one chunk; `agreed` is then not updated.

        Raises:
            ValueError: on every rank, if a fact differs or a length is wrong. The message names the rank and the fact.
            RuntimeError: if a CUDA graph is being recorded, or if other ranks do not answer.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph cannot record calls of several ranks: they compare each call through their hosts, and a "
                "replay would skip that. Leave attention over a sequence out of the graph."
            )
        begin = time.perf_counter()
        # a short last chunk may give some ranks the same number of tokens as a full one, so `chunk` is compared, too
        call = ComparedCall(what if isinstance(what, Facts) else Facts(what), chunk, call_id)
        check = functools.partial(self._checked, length is not None)
        agreed = self._open().agree(call, length or 0, seed, later and self._trusted, check)
        if length is not None and chunk is None:
            self.agreed = agreed
        if self.forward_traffic.log is not None:
            self.forward_traffic.log.agreeing += time.perf_counter() - begin
        return agreed

    @contextlib.contextmanager
    def trusting(self) -> Iterator[None]:
        """On GPUs, defer the checks of calls that equal earlier calls. Call `settle` before using results.

        Without this context, a rank waits in each call for the hosts of all other ranks.
        """
        before, self._trusted = self._trusted, True
        try:
            yield
        finally:
            self._trusted = before

    def settle(self) -> None:
        """Do the deferred checks.

        Raises:
            ValueError: as `agree`.
        """
        begin = time.perf_counter()
        self._open().flush()
        if self.forward_traffic.log is not None:
            self.forward_traffic.log.agreeing += time.perf_counter() - begin

    def refuse(self, error: BaseException) -> None:
        """Report to the ranks that wait to agree that this rank cannot continue. The caller must then raise `error`."""
        self._open().refuse(error)

    def guard(self, check: Callable[..., Any], *args: Any) -> Any:
        """Return check(*args). If `check` raises on this rank, all other ranks raise an error instead of waiting."""
        try:
            return check(*args)
        except Exception as error:
            self.refuse(error)
            raise

    def watch(self, log: TrafficLog | None) -> None:
        """Make `log` record when rows are in transit and when ranks wait for them; None ends the record."""
        self.forward_traffic.log = self.backward_traffic.log = log

    def _checked(self, with_tokens: bool, agreed: Agreement) -> None:
        """Raise ValueError unless every rank has the tokens of its shard."""
        if not with_tokens:
            return
        shard = self.shard(agreed.seq_len)
        for rank, length in enumerate(agreed.lengths):
            if length != shard.length(rank):
                raise ValueError(
                    f"rank {rank} of the sequence holds {length} tokens; of {agreed.seq_len} tokens in the {self.layout} "
                    f"layout it must hold {shard.length(rank)}. Got {list(agreed.lengths)}, "
                    f"expected {[shard.length(r) for r in range(self.ranks)]}."
                )

    def __repr__(self) -> str:
        return (
            f"SequenceGroup(rank {self.rank} of {self.ranks}, layout={self.layout!r}, exchange={self.exchange!r}, "
            f"head_size={self.head_size!r}, ranks_per_node={self.ranks_per_node})"
        )


def _checked_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the process group; None means the world."""
    outside = dist.GroupMember.NON_GROUP_MEMBER
    if group is not None and not isinstance(group, dist.ProcessGroup) and group is not outside:
        raise TypeError(f"group must be a torch.distributed process group or None (the world), got {group!r}.")
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("SequenceGroup needs torch.distributed: call torch.distributed.init_process_group first.")
    group = cast(dist.ProcessGroup, dist.group.WORLD) if group is None else group
    if group is outside or dist.get_rank(group) < 0:
        raise RuntimeError(f"rank {dist.get_rank()} of the world is not in the given process group.")
    return group


def active_sequence() -> SequenceGroup | None:
    """Return this thread's innermost active group, or None. In a backward, return the group of the calling thread.

    Raises:
        RuntimeError: in a backward that recomputes activations outside of `active()`, if a group that was active is
            still open, because the forward may have used that group.
    """
    stack = _active.values
    if not stack and not torch.compiler.is_compiling() and in_backward():
        stack = _active.of_backward()
        for group in list(_groups.values()) if not stack else ():
            if group.was_active:
                raise RuntimeError(
                    "activations are recomputed outside of SequenceGroup.active(), so the sequence they belong to is not "
                    "known. Call forward and backward within active(), or pass sequence= to dilated_attention; a group that "
                    "is no longer used has to be closed with close(). In a thread whose model shares no sequence, call "
                    "forward and backward within lightning_dilated.sequence.no_sequence()."
                )
    return stack[-1] if stack else None


def present_sequence() -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes contexts in which the currently active sequence is active again, in any thread."""
    values = _active.values if torch.compiler.is_compiling() else _active.of_backward()
    return functools.partial(_active.set_to, values)


@contextlib.contextmanager
def no_sequence() -> Iterator[None]:
    """Make no sequence active in this thread inside the context, so that the rank computes alone."""
    with _active.with_top(None):
        yield


def find_sequence(name: str) -> SequenceGroup:
    """Return the group with this name; raise ValueError if no open group has it."""
    if name not in _groups:
        raise ValueError(
            f"sequence={name!r} names no group of this process (known: {', '.join(_groups) or 'none'}). Close a "
            "SequenceGroup only after the last backward of its calls, on every rank."
        )
    return _groups[name]
