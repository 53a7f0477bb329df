"""The exchanges: each brings other ranks' rows to where they are needed, exactly, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_dilated.sequence.exchange import butterfly, gather, ring, switch
from lightning_dilated.sequence.exchange.program import Program, Volume
from lightning_dilated.sequence.requirements import Problem

__all__ = ["EXCHANGES", "Exchange"]


def serves_everything(problem: Problem, per_node: int) -> str | None:
    """None: no condition fails."""
    return None


@dataclass(frozen=True)
class Exchange:
    """One exchange; all functions take (problem, rank, ranks per node), `why_not` without the rank.

    Attributes:
        program: what a rank sends and receives.
        volume: how much a rank receives, without listing messages.
        why_not: None, or the condition that fails.
    """

    name: str
    program: Callable[[Problem, int, int], Program | switch.Switched]
    volume: Callable[[Problem, int, int], Volume]
    why_not: Callable[[Problem, int], str | None] = serves_everything


#: every exchange by its name; "auto" takes the first of equally cheap ones
EXCHANGES: dict[str, Exchange] = {
    x.name: x
    for x in (
        Exchange("gather", gather.program, gather.volume),
        Exchange("butterfly", butterfly.program, butterfly.volume, butterfly.why_not),
        Exchange("switch", switch.program, switch.volume),
        Exchange("ring", ring.program, ring.volume),
        Exchange(
            "hierarchical_gather",
            gather.hierarchical_program,
            gather.hierarchical_volume,
            gather.hierarchical_why_not,
        ),
        Exchange(
            "hierarchical_butterfly",
            butterfly.hierarchical_program,
            butterfly.hierarchical_volume,
            butterfly.hierarchical_why_not,
        ),
    )
}
