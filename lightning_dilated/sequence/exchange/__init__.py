"""The exchanges: each brings other ranks' rows to where they are needed, exactly, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_dilated.sequence.exchange import butterfly, gather, ring, switch
from lightning_dilated.sequence.exchange.program import Program, Volume
from lightning_dilated.sequence.requirements import Problem

__all__ = ["EXCHANGES", "Exchange"]


@dataclass(frozen=True)
class Exchange:
    """One exchange; all functions take (problem, rank, ranks per node), `why_not` without the rank.

    Attributes:
        why_not: None, or the condition that fails.
        program: what a rank sends and receives.
        volume: how much a rank receives, without listing messages.
    """

    name: str
    why_not: Callable[[Problem, int], str | None]
    program: Callable[[Problem, int, int], Program | switch.Switched]
    volume: Callable[[Problem, int, int], Volume]


#: every exchange by its name; "auto" takes the first of equally cheap ones
EXCHANGES: dict[str, Exchange] = {
    x.name: x
    for x in (
        Exchange("gather", gather.why_not, gather.program, gather.volume),
        Exchange("butterfly", butterfly.why_not, butterfly.program, butterfly.volume),
        Exchange("switch", switch.why_not, switch.program, switch.volume),
        Exchange("ring", ring.why_not, ring.program, ring.volume),
        Exchange(
            "hierarchical_gather",
            gather.hierarchical_why_not,
            gather.hierarchical_program,
            gather.hierarchical_volume,
        ),
        Exchange(
            "hierarchical_butterfly",
            butterfly.hierarchical_why_not,
            butterfly.hierarchical_program,
            butterfly.hierarchical_volume,
        ),
    )
}
