"""The one collective of every exchange, an all-to-all of rows, and the count of what it moved.

One collective that all ranks enter, in the order of the program, cannot deadlock; ranks without a message for each other
exchange nothing inside it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Traffic:
    """Bytes and messages of this rank to and from others (a copy to itself is not counted).

    `sent_to` and `received_from` are bytes by the other's rank in the process group.
    """

    messages: int = 0
    sent_to: Counter[int] = field(default_factory=Counter)
    received_from: Counter[int] = field(default_factory=Counter)

    @property
    def sent(self) -> int:
        """Bytes sent to others."""
        return self.sent_to.total()

    @property
    def received(self) -> int:
        """Bytes received from others."""
        return self.received_from.total()

    def far(self, rank: int, ranks_per_node: int) -> tuple[int, int]:
        """(sent, received) bytes that leave or enter the node of `rank`."""
        inside = lambda peer: peer // ranks_per_node == rank // ranks_per_node  # noqa: E731
        sides = (self.sent_to, self.received_from)
        return tuple(sum(n for peer, n in side.items() if not inside(peer)) for side in sides)

    def clear(self) -> None:
        """Count from 0."""
        self.messages = 0
        self.sent_to.clear()
        self.received_from.clear()


@dataclass
class Posted:
    """Rows under way."""

    rows: Tensor
    work: dist.Work | None
    sent: Tensor  # alive until the rows have left

    def wait(self) -> Tensor:
        """The rows, once they are here (on a GPU: once the stream that asks reaches this point)."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.rows


@dataclass
class Wire:
    """Moves rows between the ranks of a call. `ranks` are their numbers in the process group."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    rank: int
    traffic: Traffic = field(default_factory=Traffic)

    def post(
        self, rows: Tensor, sends: Mapping[int, int], receives: Mapping[int, int], into: Tensor | None = None
    ) -> Posted:
        """Send the leading rows to the first peer of `sends`, the next to the second, ...; {peer: number of rows}."""
        shape = (sum(receives.values()), *rows.shape[1:])
        out = rows.new_empty(shape) if into is None else into
        row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
        for counts, side in ((sends, self.traffic.sent_to), (receives, self.traffic.received_from)):
            side.update({self.ranks[peer]: n * row_bytes for peer, n in counts.items() if peer != self.rank})
        self.traffic.messages += sum(1 for peer in sends if peer != self.rank)
        splits = [[0] * dist.get_world_size(self.group) for _ in range(2)]
        for at, counts in zip(splits, (receives, sends), strict=True):
            for peer, n in counts.items():
                at[self.ranks[peer]] = n
        rows = rows.contiguous()
        work = dist.all_to_all_single(_bytes(out), _bytes(rows), *splits, group=self.group, async_op=True)
        return Posted(out, work, rows)


def _bytes(x: Tensor) -> Tensor:
    """(rows, bytes of a row): every backend moves bytes, not every one each dtype."""
    return x.flatten(1).view(torch.uint8)
