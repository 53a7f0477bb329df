"""Planned bytes: what a call's exchange moves on one rank, message by message, from the rank's own program."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.exchange.all_to_all import AllToAllProgram
from lightning_dilated.sequence.exchange.program import Round, count
from lightning_dilated.sequence.requirements import Problem


@dataclass(frozen=True)
class Moved:
    """Bytes that one rank sends to and receives from others in a pass, and messages it sends."""

    sent: int
    received: int
    messages: int


@dataclass(frozen=True)
class Collective:
    """One all-to-all, named as `Wire.post` records it, with its rounds and the bytes of a row in each."""

    what: str
    parts: tuple[tuple[Round, int], ...]

    def bytes(self, side: str, rank: int) -> dict[int, int]:
        """Return {other rank: bytes} of "sends" or "receives"."""
        total: dict[int, int] = {}
        for step, size in self.parts:
            for peer, message in getattr(step, side).items():
                if peer != rank:
                    total[peer] = total.get(peer, 0) + size * count(message)
        return total


Collectives = list[Collective]


def moved(
    problem: Problem, exchange: str, rank: int, per_node: int, head_dim: int, element_size: int
) -> tuple[Moved, Moved]:
    """Return exactly what a call's exchange moves on one rank, (forward, backward), without head-parallel groups.

    Counted from the rank's own program, message by message; `Wire.traffic` shows the same numbers.
    """
    forward, backward = collectives(problem, exchange, rank, per_node, head_dim, element_size)
    return _moved(forward, rank), _moved(backward, rank)


def collectives(
    problem: Problem, exchange: str, rank: int, per_node: int, head_dim: int, element_size: int
) -> tuple[Collectives, Collectives]:
    """Return the collectives of a call on one rank, (forward, backward), in order."""
    wide = max(4, element_size)
    program = EXCHANGES[exchange].program(problem, rank, per_node)
    flip = lambda step: Round(step.receives, step.sends)  # noqa: E731
    one = lambda what, step, size: Collective(what, ((step, size),))  # noqa: E731
    row, wide_row = 2 * head_dim * element_size, 2 * head_dim * wide
    if isinstance(program, AllToAllProgram):
        keys, queries = program.keys, program.queries
        unit = head_dim * element_size
        forward = [
            Collective("rows", ((keys, row), (queries, unit))),
            one("outputs", flip(queries), (head_dim + 1) * wide),
        ]
        backward = [
            one("outputs", queries, 2 * unit + wide),
            Collective("gradients", ((flip(queries), head_dim * wide), (flip(keys), wide_row))),
        ]
    elif program.keep:
        forward = [one("rows", step, row) for step in program.rounds]
        backward = [one("gradients", flip(step), wide_row) for step in program.rounds]
    else:  # the first round and the first return copy a rank's own rows
        forward = [one("rows", step, row) for step in program.rounds[1:]]
        backward = forward + [one("gradients", step, wide_row) for step in program.returns[1:]]
    return forward, backward


def _moved(steps: Collectives, rank: int) -> Moved:
    total = lambda side: sum(sum(x.bytes(side, rank).values()) for x in steps)  # noqa: E731
    return Moved(total("sends"), total("receives"), sum(len(x.bytes("sends", rank)) for x in steps))
