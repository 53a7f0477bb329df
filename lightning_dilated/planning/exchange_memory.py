"""What a call that exchanges rows holds beside its own: rows received and kept, sends in flight, gradients on their way home.

Shape letters: N tokens of the sequence, L of a rank, H query heads, K kv heads, D head dim, R ranks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.planning.rounds import Moves
from lightning_dilated.planning.simulation import moves_of
from lightning_dilated.planning.workspace import OpCall
from lightning_dilated.sequence.exchange.rows import FEW
from lightning_dilated.sequence.plan import DEFAULTS, Links, Plan, make_problem, plan


@dataclass(frozen=True)
class Exchanged:
    """Bytes on the rank with most of each.

    Attributes:
        plan: the exchange taken; None where one rank works alone, or nothing crosses a cut.
        kept: rows that stay for the backward, a layer.
        forward, backward: what a call holds for a while, in all.
        queries: rows of q that other ranks' keys reach, over heads.
    """

    plan: Plan | None = None
    kept: int = 0
    forward: int = 0
    backward: int = 0
    queries: int = 0

    @property
    def name(self) -> str | None:
        """Of the exchange."""
        return None if self.plan is None else self.plan.exchange


@functools.lru_cache(maxsize=4096)
def exchanged(
    pattern: DilatedPattern,
    tokens: int,
    heads: tuple[int, int, int],
    causal: bool,
    ranks: int,
    per_node: int,
    element_size: int,
    exchange: str = "auto",
    links: Links = DEFAULTS,
) -> Exchanged:
    """Of N tokens on R ranks; `heads` = (H, K, D).

    Raises:
        ValueError: for an exchange that does not serve, and of many ranks for one that is not simulated.
    """
    if ranks == 1:
        return Exchanged()
    problem = make_problem(pattern, tokens, *heads[:2], ranks=ranks, causal=causal)
    found = plan(problem, exchange, ranks_per_node=per_node, head_dim=heads[2], element_size=element_size, links=links)
    if found.exchange is None:
        return Exchanged(found)
    return _of(found, moves_of(problem, found.exchange, per_node), heads[2], element_size)


def _of(found: Plan, moves: Moves, dim: int, size: int) -> Exchanged:
    wide = max(4, size)
    landed, packed = (sum(getattr(r, side) for r in moves.rounds) for side in ("landed", "packed"))
    row, wide_row = 2 * dim * size, 2 * dim * wide
    queries = moves.queries
    # a row of q, of out and of the running sum in the forward; of grad, q and out, and of the sum of dq in the backward
    few = queries * dim * (2 * size + wide), queries * dim * (3 * size + wide)
    if moves.style == "kept":
        forward = landed * row + packed * row + few[0]
        backward = landed * wide_row + packed * wide_row * 2 + few[1]
        kept = landed * row
    else:  # a ring holds two rounds at a time, a switch all of it
        most = lambda rounds, x: max((getattr(r, x) for r in rounds), key=lambda y: float(y.max()))  # noqa: E731
        ring = moves.style == "ring"
        rounds = 2 * (most(moves.rounds, "landed") + most(moves.rounds, "packed")) if ring else landed + packed
        forward, backward = rounds * row + few[0], rounds * (row + wide_row) + few[1]
        kept = 0 * landed if ring else landed * row
    top = lambda x: round(float(x.max()))  # noqa: E731
    return Exchanged(found, top(kept), top(forward), top(backward), top(queries))


def sharded(call: OpCall, tokens: int, ranks: int, found: Exchanged) -> OpCall:
    """A call of one rank as the rank in the middle of a sequence of N tokens makes it."""
    own = -(-tokens // ranks)
    if ranks == 1:
        return replace(call, tokens=tokens)
    rank = ranks // 2
    own = min(own, tokens - rank * own) if tokens > rank * own else own
    final = found.queries <= FEW * own * call.heads
    return replace(call, tokens=own, whole=tokens, offset=rank * own, final=final)
