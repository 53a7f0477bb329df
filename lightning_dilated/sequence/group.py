"""SequenceGroup: the ranks that hold one sequence, and what they agreed on before any row moves.

Shape letters: N tokens of the sequence, R ranks, L tokens of a rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_dilated.pattern.branch import integer
from lightning_dilated.sequence.exchange.wire import Traffic
from lightning_dilated.sequence.plan import Plan, check_exchange
from lightning_dilated.sequence.quiet import Quiet
from lightning_dilated.sequence.shard import Shard, check_layout

_groups: dict[str, SequenceGroup] = {}
_active: list[SequenceGroup] = []  # of the process, not of a thread: the backward runs in threads of its own
_numbers = itertools.count()
_REFUSED = -1
#: routes of the latest calls that a group keeps: several layers' of a step, forward and backward
REMEMBERED = 16


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


class SequenceGroup:
    """One sequence on the ranks of a process group; give it to `dilated_attention(sequence=...)`, or make it `active`.

    Args:
        group: a torch.distributed process group; None is the world.
        layout: "contiguous", "zigzag" or "strided": which positions a rank holds (see `Shard`).
        exchange: "auto", or one of `plan.EXCHANGES`.
        head_size: ranks of a head-parallel group; neighbours trade tokens for heads, the exchange runs between groups.
        ranks_per_node: ranks that share fast links; None: all of them.
        loss_group: the ranks whose losses are added (data parallel ones, too); None: those of the sequence.
        timeout: after which agreeing gives up on a rank; None is torch's own.

    Attributes:
        forward_traffic, backward_traffic: bytes and messages of this rank so far; `clear()` them at will.
        agreed, plan: what the latest call agreed on, and its exchange; `print(group.plan)` lists the others with reasons.

    Raises:
        RuntimeError: without torch.distributed, or where this process is not in the group.
        TypeError, ValueError: naming the argument.
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
        self.group = dist.group.WORLD if group is None else group
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
        self.forward_traffic, self.backward_traffic = Traffic(), Traffic()
        self.agreed: Agreement | None = None
        self.plan: Plan | None = None
        self.was_active = False
        self.loss_group = self.group if loss_group is None else loss_group
        self.shares = 0  # how often `loss_share` was asked for one
        self.unshared: str | None = None  # why losses cannot be added now
        self._calls = itertools.count()
        self._remembered: OrderedDict[Any, Any] = OrderedDict()
        self._quiet = Quiet(self.group, timeout)
        self.name = f"sequence-{next(_numbers)}"
        _groups[self.name] = self

    def shard(self, seq_len: int) -> Shard:
        """Where the positions of a sequence of N tokens lie."""
        return Shard(seq_len, self.ranks, self.layout)

    def positions(self, length: int) -> torch.Tensor:
        """(L,) int64: the global positions of this rank's `length` tokens; every rank has to ask.

        Raises:
            ValueError: on every rank, if some rank's tokens are not those of its shard.
        """
        agreed = self.agree({"call": "positions"}, length)
        held = self.shard(agreed.seq_len).ranges(self.rank)
        return torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(x.start, x.stop, x.step) for x in held)])

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
        self._remembered.clear()

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """make(), kept while it is one of the last few: routes of documents that never come back hold device memory."""
        if key not in self._remembered:
            self._remembered[key] = make()
            if len(self._remembered) > REMEMBERED:
                self._remembered.popitem(last=False)
        self._remembered.move_to_end(key)
        return self._remembered[key]

    # -- agreeing ---------------------------------------------------------------------------------------------------
    def agree(self, what: Mapping[str, Any], length: int | None = None, seed: int = 0) -> Agreement:
        """Compare a call on all ranks; every rank raises if one differs.

        Args:
            what: the call, by names; equal on all ranks.
            length: this rank's tokens; None where the call has none.
            seed: of dropout; rank 0's is taken.

        Raises:
            ValueError: on every rank, naming the rank and what differs; or the rank whose shard has the wrong length.
        """
        facts = {**what, "layout": self.layout, "exchange": self.exchange, "head_size": self.head_size}
        facts["ranks_per_node"] = self.ranks_per_node
        digest = int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=8).digest(), "big") >> 1
        try:
            rows = self._exchange_words(digest, 0 if length is None else length, seed)
        except RuntimeError as error:
            raise RuntimeError(self._alone(what)) from error
        if len({row[0] for row in rows}) > 1:
            raise ValueError(self._difference({k: str(v) for k, v in facts.items()}))
        agreed = Agreement(tuple(row[1] for row in rows), rows[0][2], next(self._calls))
        if length is not None:
            self._check_lengths(agreed)
            self.agreed = agreed
        return agreed

    def refuse(self, error: BaseException) -> None:
        """Tell the other ranks, who wait to agree, that this one cannot go on; the caller then raises `error`."""
        self._exchange_words(_REFUSED, 0, 0)
        self._difference({"error": f"{type(error).__name__}: {error}"})

    def guard(self, check: Callable[..., Any], *args: Any) -> Any:
        """check(*args); if it raises on this rank, the other ranks raise too instead of waiting."""
        try:
            return check(*args)
        except Exception as error:
            self.refuse(error)
            raise

    def _exchange_words(self, *words: int) -> list[list[int]]:
        return [x.tolist() for x in self._quiet.gather(torch.tensor(words, dtype=torch.int64))]

    def _alone(self, what: Mapping[str, Any]) -> str:
        """That other ranks did not come to agree."""
        job = dist.get_process_group_ranks(self.group)
        others = [r for r in job if r != job[self.rank]]
        return (
            f"rank {self.rank} of the sequence (rank {job[self.rank]} of the job) waited in vain for the others, ranks "
            f"{others} of the job, to agree on {dict(what)}. One of them died, raised, or made fewer calls: every rank has "
            "to run every forward and every backward, also where its own tokens have no loss (add 0 * out.sum())."
        )

    def _difference(self, facts: dict[str, str]) -> str:
        """Which rank differs in what, told to all."""
        everyone = self._quiet.gather_words(facts)
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
        return "the ranks of the sequence disagree, so nothing was computed. " + ". ".join(lines)

    def _check_lengths(self, agreed: Agreement) -> None:
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
