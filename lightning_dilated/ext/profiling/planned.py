"""Compute the bytes that a call's exchange moves on one rank, message by message, from the rank's own program."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.exchange.all_to_all import AllToAllProgram
from lightning_dilated.sequence.exchange.program import Round, count
from lightning_dilated.sequence.requirements import Problem


@dataclass(frozen=True)
class Moved:
    """Bytes that one rank sends to other ranks and receives from them in a pass, and the messages that it sends."""

    sent: int
    received: int
    messages: int


@dataclass(frozen=True)
class Collective:
    """One all-to-all: its name in the records of `Wire.post`, and its parts (round, bytes of a row)."""

    what: str
    parts: tuple[tuple[Round, int], ...]

    def bytes(self, side: str, rank: int) -> dict[int, int]:
        """Return {other rank: bytes}; `side` is "sends" or "receives"."""
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
    """Return what a call's exchange moves on one rank, as (forward, backward), without head-parallel groups.

    The numbers are exact, like `Wire.traffic`; they are counted message by message from the rank's own program.
    """
    forward, backward = collectives(problem, exchange, rank, per_node, head_dim, element_size)
    return _moved(forward, rank), _moved(backward, rank)


def collectives(
    problem: Problem, exchange: str, rank: int, per_node: int, head_dim: int, element_size: int
) -> tuple[Collectives, Collectives]:
    """Return the collectives of a call on one rank, as (forward, backward), each in the order in which they run."""
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
    else:  # leave out the first round and the first return, which copy a rank's own rows
        forward = [one("rows", step, row) for step in program.rounds[1:]]
        backward = forward + [one("gradients", step, wide_row) for step in program.returns[1:]]
    return forward, backward


def _moved(steps: Collectives, rank: int) -> Moved:
    total = lambda side: sum(sum(x.bytes(side, rank).values()) for x in steps)  # noqa: E731
    return Moved(total("sends"), total("receives"), sum(len(x.bytes("sends", rank)) for x in steps))
