"""The exchanges: ways to bring the rows of other ranks to where they are needed, each exact or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_dilated.sequence.exchange import butterfly, gather, hierarchical, ring, switch
from lightning_dilated.sequence.exchange.program import Count, Program
from lightning_dilated.sequence.requirements import Problem

__all__ = ["EXCHANGES", "Exchange"]


@dataclass(frozen=True)
class Exchange:
    """One way to move rows; all functions take (problem, rank, ranks per node), `why_not` without the rank.

    Attributes:
        why_not: None, or the condition that fails.
        program: what a rank sends and receives.
        count: how much a rank receives, without the messages one by one.
    """

    name: str
    why_not: Callable[[Problem, int], str | None]
    program: Callable[[Problem, int, int], Program | switch.Switched]
    count: Callable[[Problem, int, int], Count]


#: every exchange by its name; of equally cheap ones "auto" takes the first
EXCHANGES: dict[str, Exchange] = {
    x.name: x
    for x in (
        Exchange("gather", gather.why_not, gather.program, gather.rows),
        Exchange("butterfly", butterfly.why_not, butterfly.program, butterfly.rows),
        Exchange("switch", switch.why_not, switch.program, switch.rows),
        Exchange("ring", ring.why_not, ring.program, ring.rows),
        Exchange("hierarchical_gather", hierarchical.gather_why_not, hierarchical.gather, hierarchical.gather_rows),
        Exchange(
            "hierarchical_butterfly",
            hierarchical.butterfly_why_not,
            hierarchical.butterfly,
            hierarchical.butterfly_rows,
        ),
    )
}
