"""Peers: the ranks that save and load together; a failure of one is raised on all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")


@dataclass(frozen=True)
class Peers:
    """`size` ranks, of which this is `rank`; one alone needs no process group.

    Args:
        group: of these ranks; None is the default group.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def any(self, value: bool) -> bool:
        """Whether it is true on any rank; the same on every rank."""
        return any(self.gather(value))

    def together(self, what: str, call: Callable[..., T], *args: Any) -> T:
        """`call(*args)` on every rank; where it fails on one, every rank raises.

        Raises:
            OSError: `what`, with the ranks that failed and why; the cause is this rank's own error.
        """
        value, error, local_reason = None, None, None
        try:
            value = call(*args)
        except (Exception, CheckpointException) as raised:  # the latter is no Exception
            error, local_reason = raised, reason(raised)
        failed: dict[str, list[int]] = {}
        for rank, why in enumerate(self.gather(local_reason)):
            if why is not None:
                failed.setdefault(why, []).append(rank)
        if failed:
            each = [why if len(ranks) == self.size else f"rank {ranks[0]}: {why}" for why, ranks in failed.items()]
            raise OSError(f"{what}: {'; '.join(each)}") from error
        return value  # type: ignore[return-value]


def reason(error: BaseException) -> str:
    """What went wrong, in one line; of a failure that torch.distributed.checkpoint gathered, the ranks' own reasons."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        return "; ".join(f"rank {rank}: {reason(failure)}" for rank, (failure, _) in sorted(failures.items()))
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
