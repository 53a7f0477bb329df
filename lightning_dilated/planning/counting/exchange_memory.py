"""What a call that exchanges rows holds beside its own: rows received, sends in flight, gradients on their way home.

Shape letters: N tokens of the sequence, L of a rank, H query heads, K kv heads, D head dim, R ranks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.layers import in_turns
from lightning_dilated.pattern.rows import place
from lightning_dilated.planning.counting.footprint import Subject
from lightning_dilated.planning.counting.workspace import OpCall
from lightning_dilated.planning.simulating.rounds import EXACT, Moves
from lightning_dilated.planning.simulating.simulation import moves_of
from lightning_dilated.sequence.exchange.row_ops import FEW
from lightning_dilated.sequence.planner import DEFAULTS, Links, Plan, make_problem, plan, price

#: heads that are counted one by one on many ranks
HEADS = 16
#: exchanges that are counted for few ranks only
FEW_RANKS = ("switch", "ring")


@dataclass(frozen=True)
class Exchanged:
    """Bytes on the rank with most of each.

    Attributes:
        plan: what `sequence.plan` says; None where one rank works alone.
        name: of the exchange; None where nothing crosses a cut. Not the plan's where "auto" takes one that is counted for
            few ranks only: then the cheapest of the others.
        kept: rows that stay for the backward, a layer.
        forward, backward: what a call holds for a while, in all.
        queries: rows of q that other ranks' keys reach, over heads.
        decoder: of a second stack's call.
        others: of the calls of layers 1, 2, ..., where patterns differ; this one and they take turns.
    """

    plan: Plan | None = None
    name: str | None = None
    kept: int = 0
    forward: int = 0
    backward: int = 0
    queries: int = 0
    decoder: Exchanged | None = None
    others: tuple[Exchanged, ...] = ()

    @property
    def cycle(self) -> tuple[Exchanged, ...]:
        """Of the layers that take turns."""
        return self, *self.others

    def most(self, name: str) -> int:
        """The largest number of any layer."""
        return max(getattr(x, name) for x in self.cycle)

    def kept_by(self, layers: int) -> int:
        """Bytes of rows that the first so many layers keep."""
        return sum(x.kept for x in in_turns(self.cycle, layers))


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
    name = found.exchange
    if exchange == "auto" and ranks > EXACT and name in FEW_RANKS:
        others = [p for p in found.prices if p.exchange not in FEW_RANKS]
        name = min(others, key=lambda p: p.seconds + p.waiting).exchange if others else "gather"
    if ranks > EXACT:
        return _priced(found, name, per_node, heads[2], element_size, links)
    return _of(found, name, moves_of(problem, name, per_node), heads[2], element_size)


def _priced(found: Plan, name: str, per_node: int, dim: int, size: int, links: Links) -> Exchanged:
    """Of many ranks: a rank is taken to send as much as the one that receives most, and keys of other ranks to reach as many
    queries as the densest branch wider than a rank has."""
    problem = found.problem
    prices = found.prices or (price(problem, name, per_node, dim, size, links),)
    kept = next(p for p in prices if p.exchange == name).kept
    own, wide = problem.shard.longest, max(4, size)
    served = lambda b: problem.num_heads if b.heads is None else len(b.heads)  # noqa: E731
    rows = [
        own * served(b) // b.dilation_rate for b in problem.pattern.branches if place(b, problem.shard.seq_len)[0] > own
    ]
    queries = max(rows, default=0)
    few = queries * dim * (2 * size + wide), queries * dim * (3 * size + wide)
    return Exchanged(found, name, kept, 2 * kept + few[0], 3 * kept * wide // size + few[1], queries)


def _of(found: Plan, name: str, moves: Moves, dim: int, size: int) -> Exchanged:
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
    return Exchanged(found, name, top(kept), top(forward), top(backward), top(queries))


def of_call(
    call: OpCall, tokens: int, ranks: int, per_node: int, exchange: str = "auto", links: Links = DEFAULTS
) -> Exchanged:
    """`exchanged` of a model's calls over N tokens."""
    call = lighter(call, ranks)
    heads = call.heads, call.kv_heads, call.head_dim
    first, *others = (
        exchanged(pattern, tokens, heads, call.causal, ranks, per_node, call.dtype.itemsize, exchange, links)
        for pattern in call.cycle
    )
    return replace(first, others=tuple(others))


def of_subject(
    subject: Subject, tokens: int, ranks: int, per_node: int, exchange: str = "auto", links: Links = DEFAULTS
) -> Exchanged:
    """`exchanged` of the calls of both stacks of a model."""
    of = functools.partial(of_call, tokens=tokens, ranks=ranks, per_node=per_node, exchange=exchange, links=links)
    found = of(subject.call)
    return found if subject.decoder is None else replace(found, decoder=of(subject.decoder.call))


def lighter(call: OpCall, ranks: int) -> OpCall:
    """The call with fewer and wider heads on many ranks, where each head is counted by itself: as many bytes and FLOPs, with
    as many query heads for each kv head."""
    group = call.heads // call.kv_heads
    if ranks <= EXACT or call.heads <= HEADS or any(b.heads is not None for x in call.cycle for b in x.branches):
        return call
    kv = max((d for d in range(1, call.kv_heads + 1) if call.kv_heads % d == 0 and d * group <= HEADS), default=1)
    return replace(call, heads=kv * group, kv_heads=kv, head_dim=call.head_dim * call.kv_heads // kv)


def sharded(call: OpCall, tokens: int, ranks: int, found: Exchanged) -> OpCall:
    """A call of one rank as the rank in the middle of a sequence of N tokens makes it."""
    own = -(-tokens // ranks)
    if ranks == 1:
        return replace(call, tokens=tokens)
    rank = ranks // 2
    own = min(own, tokens - rank * own) if tokens > rank * own else own
    final = found.most("queries") <= FEW * own * call.heads
    return replace(call, tokens=own, whole=tokens, offset=rank * own, final=final)
