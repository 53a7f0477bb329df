"""SequenceOptions: the checked options of both strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from lightning_dilated._validation import integer, one_of, real
from lightning_dilated.sequence.links import Links
from lightning_dilated.sequence.shard import LAYOUTS, check_chunked, check_exchange, check_exchange_memory
from lightning_dilated.strategy.mesh import HeadSize, SequenceSize
from lightning_dilated.strategy.outer import OuterSteps
from lightning_dilated.strategy.regions import Regions, check_regions


@dataclass(frozen=True)
class SequenceOptions:
    """Options of a strategy; see `RingDilatedStrategy` for their meaning and errors.

    Attributes:
        speeds: speeds of the links between ranks, from the file `links`, else from this machine's file or the defaults.
    """

    sequence_size: SequenceSize
    head_size: HeadSize
    exchange: str
    layout: str
    ranks_per_node: int | None
    timeout: int
    allow: Sequence[str] | None
    check_first_batch: bool
    links: str | None
    global_batch: int | None
    exchange_memory_gib: float | None
    regions: Regions = 1
    outer: OuterSteps | None = None
    check_replicas: int | None = None
    speeds: Links = field(init=False)

    def __post_init__(self) -> None:
        real(self.timeout, "timeout", above=0, hint=" It is in seconds.")
        check_chunked(self.layout, self.exchange, self.head_size, self.exchange_memory_gib)
        check_exchange_memory(self.exchange_memory_gib)
        check_regions(self.regions, self.outer)
        check_exchange(self.exchange)
        one_of(self.layout, "layout", ("auto", *LAYOUTS))
        for name in ("check_replicas", "global_batch"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, integer(getattr(self, name), name, 1))
        speeds = Links.of_this_machine() if self.links is None else Links.load(self.links)
        object.__setattr__(self, "speeds", speeds)
        object.__setattr__(self, "allow", tuple(self.allow or ()))

    @property
    def rank_timeout(self) -> timedelta:
        """The time that a rank waits for other ranks before it raises an error."""
        return timedelta(seconds=self.timeout)

    @property
    def exchange_settings(self) -> dict[str, Any]:
        """The settings of a `SequenceGroup`, except the speeds of links."""
        return {x: getattr(self, x) for x in ("exchange", "layout", "head_size", "exchange_memory_gib")}

    @property
    def compared(self) -> dict[str, Any]:
        """The settings that must be equal on all ranks; each attention call compares the speeds of links."""
        names = "outer", "global_batch", "check_first_batch", "check_replicas"
        sizes = [self.regions, self.sequence_size, self.head_size]
        return {"sizes": sizes, **{x: getattr(self, x) for x in names}, **self.exchange_settings}
