"""Exchanges: an exchange moves rows to the ranks that need them, or states the reason why it cannot serve a problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_dilated.sequence.exchange import all_to_all, butterfly, gather, ring
from lightning_dilated.sequence.exchange.program import Program, Volume
from lightning_dilated.sequence.requirements import Problem

__all__ = ["EXCHANGES", "Exchange"]


def serves_everything(problem: Problem, per_node: int) -> str | None:
    """Return None, because the exchange serves every problem."""
    return None


@dataclass(frozen=True)
class Exchange:
    """One exchange. Its functions take (problem, rank, ranks per node), except that `why_not` takes no rank.

    Attributes:
        program: returns the messages that a rank sends and receives.
        volume: returns the amounts that a rank receives, without listing messages.
        why_not: returns the condition that fails, or None.
    """

    name: str
    program: Callable[[Problem, int, int], Program | all_to_all.AllToAllProgram]
    volume: Callable[[Problem, int, int], Volume]
    why_not: Callable[[Problem, int], str | None] = serves_everything


#: exchanges by name; if several are equally cheap, "auto" chooses the first
EXCHANGES: dict[str, Exchange] = {
    x.name: x
    for x in (
        Exchange("gather", gather.program, gather.volume),
        Exchange("butterfly", butterfly.program, butterfly.volume, butterfly.why_not),
        Exchange("switch", all_to_all.program, all_to_all.volume),
        Exchange("ring", ring.program, ring.volume),
        Exchange(
            "hierarchical_gather", gather.hierarchical_program, gather.hierarchical_volume, gather.hierarchical_why_not
        ),
        Exchange(
            "hierarchical_butterfly",
            butterfly.hierarchical_program,
            butterfly.hierarchical_volume,
            butterfly.hierarchical_why_not,
        ),
    )
}
