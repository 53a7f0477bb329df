"""SequenceGroup: the ranks that hold one sequence, and what they agreed on before any row moves.

Shape letters: N tokens of the sequence, R ranks, L tokens of a rank.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from lightning_dilated._validation import integer
from lightning_dilated.sequence.consensus import Agreement, Table
from lightning_dilated.sequence.exchange.transport import Clock, Traffic
from lightning_dilated.sequence.links import Links
from lightning_dilated.sequence.planner import Plan, check_exchange
from lightning_dilated.sequence.shard import Shard, check_layout

_groups: dict[str, SequenceGroup] = {}
_active: list[SequenceGroup] = []  # of the process, not of a thread: the backward runs in threads of its own
_numbers = itertools.count()
#: routes and places of the latest calls that a group keeps: several layers' of a step, forward and backward
REMEMBERED = 32


class SequenceGroup:
    """One sequence on the ranks of a process group; give it to `dilated_attention(sequence=...)`, or make it `active`.

    Args:
        group: a torch.distributed process group; None is the world.
        layout: "contiguous", "zigzag" or "strided": which positions a rank holds (see `Shard`).
        exchange: "auto", or one of `plan.EXCHANGES`.
        head_size: ranks of a head-parallel group; neighbours trade tokens for heads, the exchange runs between groups.
        ranks_per_node: ranks that share fast links; None: all of them.
        loss_group: the ranks whose losses are added (data parallel ones, too); None: those of the sequence.
        timeout: after which agreeing gives up on a rank, and what else ranks tell each other; None is torch's own.
        links: the speeds that "auto" reckons with, equal on all ranks; None: `Links.of_this_machine()`.

    Attributes:
        forward_traffic, backward_traffic: bytes and messages of this rank so far; `clear()` them at will.
        agreed, plan: what the latest call agreed on, and its exchange; `print(group.plan)` lists the others with reasons.

    Raises:
        RuntimeError: without torch.distributed, or where this process is not in the group.
        TypeError, ValueError: naming the argument.
        OSError, ValueError: for this machine's file of links, see `Links.of_this_machine`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        layout: str = "contiguous",
        exchange: str = "auto",
        head_size: int = 1,
        ranks_per_node: int | None = None,
        loss_group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        links: Links | None = None,
    ) -> None:
        if (
            group is not None
            and not isinstance(group, dist.ProcessGroup)
            and group is not dist.GroupMember.NON_GROUP_MEMBER
        ):
            raise TypeError(f"group must be a torch.distributed process group or None (the world), got {group!r}.")
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "SequenceGroup needs torch.distributed: call torch.distributed.init_process_group first."
            )
        self.group = cast(dist.ProcessGroup, dist.group.WORLD) if group is None else group
        if self.group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(self.group) < 0:
            raise RuntimeError(f"rank {dist.get_rank()} of the world is not in the given process group.")
        self.ranks, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.layout, self.exchange = check_layout(layout), check_exchange(exchange)
        self.head_size = integer(head_size, "head_size", 1)
        if self.ranks % self.head_size:
            raise ValueError(
                f"head_size={head_size} must divide the {self.ranks} ranks of the group; "
                f"allowed: {[n for n in range(1, self.ranks + 1) if self.ranks % n == 0]}."
            )
        self.ranks_per_node = self.ranks if ranks_per_node is None else integer(ranks_per_node, "ranks_per_node", 1)
        if links is not None and not isinstance(links, Links):
            raise TypeError(f"links must be a Links or None, got {links!r}; Links.load(path) reads a file.")
        self.links = Links.of_this_machine() if links is None else links
        # a named exchange is the same whatever the links
        self._reckons = self.links.numbers if self.exchange == "auto" else None
        self.forward_traffic, self.backward_traffic = Traffic("forward"), Traffic("backward")
        self.agreed: Agreement | None = None
        self.plan: Plan | None = None
        self.was_active = False
        self.loss_group = self.group if loss_group is None else loss_group
        self.shares = 0  # how often `loss_share` was asked for one
        self.unshared: str | None = None  # why losses cannot be added now
        self._remembered: OrderedDict[Any, Any] = OrderedDict()
        self.timeout, self._table = timeout, Table(self.group, timeout)
        self._trusted = False
        self.name = f"sequence-{next(_numbers)}"
        _groups[self.name] = self

    def shard(self, seq_len: int) -> Shard:
        """Where the positions of a sequence of N tokens lie."""
        return Shard(seq_len, self.ranks, self.layout)

    def positions(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """(L,) int64: the global positions of this rank's `length` tokens, on the CPU by default; every rank has to ask.

        Raises:
            ValueError: on every rank, if some rank's tokens are not those of its shard.
        """
        agreed = self.agree({"call": "positions"}, length)
        held = self.shard(agreed.seq_len).ranges(self.rank)
        runs = [torch.arange(x.start, x.stop, x.step, device=device) for x in held]
        return torch.cat([torch.empty(0, dtype=torch.int64, device=device), *runs])

    @contextlib.contextmanager
    def active(self) -> Iterator[SequenceGroup]:
        """Within, `dilated_attention` without `sequence=` computes over this group.

        Keep the backward within where activations are recomputed, since that calls `dilated_attention` again.
        """
        self.was_active = True
        _active.append(self)
        try:
            yield self
        finally:
            _active.pop()

    def close(self) -> None:
        """Forget the group, and all that it holds: its name is no longer known to the op, nor to backwards still to come."""
        _groups.pop(self.name, None)
        self.forget()

    def forget(self) -> None:
        """Let go of routes and places of earlier calls, which hold device memory; later calls make theirs anew."""
        self._remembered.clear()

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """make(), kept while it is one of the last few: routes of documents that never come back hold device memory.

        Without a key it is not kept.
        """
        if key is None:
            return make()
        if key not in self._remembered:
            self._remembered[key] = make()
            if len(self._remembered) > REMEMBERED:
                self._remembered.popitem(last=False)
        self._remembered.move_to_end(key)
        return self._remembered[key]

    # -- agreeing ---------------------------------------------------------------------------------------------------
    def agree(
        self, what: Mapping[str, Any], length: int | None = None, seed: int = 0, turn: Any = None, later: bool = False
    ) -> Agreement:
        """Compare a call on all ranks; every rank raises if one differs.

        Args:
            what: the call, by names; equal on all ranks.
            length: this rank's tokens; None where the call has none.
            seed: of dropout; rank 0's is taken.
            turn: what else has to be equal, and is another in every call.
            later: within `trusting`, a call that was agreed on before (but for its turn) goes on; `settle` compares it.

        Raises:
            ValueError: on every rank, naming the rank and what differs; or the rank whose shard has the wrong length.
            RuntimeError: where a CUDA graph is recorded; where the others do not come.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph cannot record calls of several ranks: they compare each call through their hosts, which a "
                "replay would pass over. Leave attention over a sequence out of the graph."
            )
        begin = time.perf_counter()
        facts = {**what, "layout": self.layout, "exchange": self.exchange, "head_size": self.head_size}
        facts |= {"ranks_per_node": self.ranks_per_node, "links": self._reckons}
        check = functools.partial(self._checked, length is not None)
        agreed = self._table.agree(facts, length or 0, seed, turn, later and self._trusted, check)
        if length is not None:
            self.agreed = agreed
        if self.forward_traffic.clock is not None:
            self.forward_traffic.clock.agreeing += time.perf_counter() - begin
        return agreed

    @contextlib.contextmanager
    def trusting(self) -> Iterator[None]:
        """Within, calls on GPUs that are like earlier ones are compared beside the work; `settle` before results are used.

        Without, a rank waits in each call for the hosts of all others.
        """
        before, self._trusted = self._trusted, True
        try:
            yield
        finally:
            self._trusted = before

    def settle(self) -> None:
        """Compare what was put off.

        Raises:
            ValueError: as `agree`.
        """
        begin = time.perf_counter()
        self._table.settle()
        if self.forward_traffic.clock is not None:
            self.forward_traffic.clock.agreeing += time.perf_counter() - begin

    def refuse(self, error: BaseException) -> None:
        """Tell the other ranks, who wait to agree, that this one cannot go on; the caller then raises `error`."""
        self._table.refuse(error)

    def guard(self, check: Callable[..., Any], *args: Any) -> Any:
        """check(*args); if it raises on this rank, the other ranks raise too instead of waiting."""
        try:
            return check(*args)
        except Exception as error:
            self.refuse(error)
            raise

    def watch(self, clock: Clock | None) -> None:
        """Have a clock note when rows fly and when ranks wait for them; None: nothing does."""
        self.forward_traffic.clock = self.backward_traffic.clock = clock

    def _checked(self, with_tokens: bool, agreed: Agreement) -> None:
        """Whether every rank holds its shard."""
        if not with_tokens:
            return
        shard = self.shard(agreed.seq_len)
        for rank, length in enumerate(agreed.lengths):
            if length != shard.length(rank):
                raise ValueError(
                    f"rank {rank} of the sequence holds {length} tokens; of {agreed.seq_len} tokens in the {self.layout} "
                    f"layout it has to hold {shard.length(rank)}. Got {list(agreed.lengths)}, "
                    f"wanted {[shard.length(r) for r in range(self.ranks)]}."
                )

    def __repr__(self) -> str:
        return (
            f"SequenceGroup(rank {self.rank} of {self.ranks}, layout={self.layout!r}, exchange={self.exchange!r}, "
            f"head_size={self.head_size}, ranks_per_node={self.ranks_per_node})"
        )


def active_sequence() -> SequenceGroup | None:
    """The innermost `SequenceGroup.active()`, None outside of one.

    Raises:
        RuntimeError: in a backward (that recomputes activations) outside of `active()`, while a group that was active is
            still open: the forward may have been that group's.
    """
    if not _active and not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
        for group in _groups.values():
            if group.was_active:
                raise RuntimeError(
                    "activations are recomputed outside of SequenceGroup.active(), so the sequence they belong to is not "
                    "known. Call backward within active(), or pass sequence= to dilated_attention; a group that is no "
                    "longer used has to be closed with close()."
                )
    return _active[-1] if _active else None


def find_sequence(name: str) -> SequenceGroup:
    """The group of a name.

    Raises:
        ValueError: if it was closed, or never was.
    """
    if name not in _groups:
        raise ValueError(
            f"sequence={name!r} names no group of this process (known: {', '.join(_groups) or 'none'}). Close a "
            "SequenceGroup only after the last backward of its calls, on every rank."
        )
    return _groups[name]
