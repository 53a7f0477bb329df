"""Compute the state before each piece of a sequence on many ranks, with an exclusive scan of affine maps S -> A S + B.

Shape letters: P pieces in the order of the sequence, p pieces of this rank, B batch, K kv heads, D head dim, E columns,
R ranks, F numbers of a map.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_dilated.ext.convolution.halo import halo_wire
from lightning_dilated.sequence.group import SequenceGroup

#: one round of the exchange: pairs (sending piece, receiving piece)
Round = tuple[tuple[int, int], ...]
#: maximum number of pieces for `all_to_later`
MOST = 32


def all_to_later(pieces: int) -> tuple[Round, ...]:
    """Return one round, in which each piece receives the maps of all earlier pieces."""
    return (tuple((source, target) for target in range(pieces) for source in range(target)),)


def doubling(pieces: int) -> tuple[Round, ...]:
    """Return 1 + ceil(log2(P - 1)) rounds: a piece gets the map 1 piece back, then composed maps 1, 2, 4, ... back."""
    rounds: list[Round] = [tuple((target - 1, target) for target in range(1, pieces))]
    step = 1
    while step + 1 < pieces:
        rounds.append(tuple((target - step, target) for target in range(step + 1, pieces)))
        step *= 2
    return tuple(rounds)


def received(rounds: tuple[Round, ...], owners: tuple[int, ...]) -> int:
    """Return the largest number of maps that a rank receives from other ranks."""
    moved = Counter(owners[b] for pairs in rounds for a, b in pairs if owners[a] != owners[b])
    return max(moved.values(), default=0)


@functools.lru_cache(maxsize=256)
def choose(owners: tuple[int, ...]) -> tuple[Round, ...]:
    """Return one round, or several for more than `MOST` pieces or if the busiest rank then receives fewer maps."""
    if len(owners) > MOST:
        return doubling(len(owners))
    return min((all_to_later(len(owners)), doubling(len(owners))), key=lambda rounds: received(rounds, owners))


def maps_received(ranks: int) -> int:
    """Return the largest number of maps that a rank receives in a forward, if each rank has one piece."""
    owners = tuple(range(ranks))
    return received(choose(owners), owners)


class Scan:
    """The scans of one call.

    Args:
        owners: the rank of each piece.
        number: the call's number, for error messages.
        inputs: the call's inputs. If they require gradients, the results on every rank do, even on an empty shard.
    """

    def __init__(
        self, group: SequenceGroup, owners: tuple[int, ...], number: int, inputs: tuple[Tensor, ...], dtype: torch.dtype
    ) -> None:
        self.group, self.owners, self.number = group, owners, number
        self.own = [piece for piece, owner in enumerate(owners) if owner == group.rank]
        self.anchor = torch.cat([x.reshape(-1)[:0].to(dtype) for x in inputs])
        self.rows: list[Tensor] = []

    def before(self, maps: Tensor, columns: int) -> Tensor:
        """Return the state before each own piece, (p, B, K, D, E); the state before the first piece is 0.

        Args:
            maps: (p, B, K, D, a + E), [A | B] of each own piece. A has a = D columns. If the state changes only by
                sums, A has one column (a = 1): 1 if the state is kept, 0 if it restarts at 0.
            columns: E.
        """
        shape = maps.shape[1:]
        zeros = maps.new_zeros(*shape[:-1], columns)
        rounds = choose(self.owners)
        if rounds == all_to_later(len(self.owners)):
            arrived = self._move(maps, rounds[0])
            results = []
            for target in self.own:
                state = zeros
                for source in range(target):
                    state = advance(arrived[source, target], state)
                results.append(state)
            return torch.stack(results) if results else maps.new_zeros(0, *zeros.shape)
        # the first piece receives nothing, and sends nothing after the first round
        prefix = self._move(maps, rounds[0])
        current = {target: prefix[source, target] for source, target in rounds[0] if target in self.own}
        for pairs in rounds[1:]:
            rows = [current.get(piece, maps[i]) for i, piece in enumerate(self.own)]
            arrived = self._move(torch.stack(rows) if rows else maps, pairs)
            taken = {target: source for source, target in pairs if target in self.own}
            current |= {b: compose(current[b], arrived[a, b], columns) for b, a in taken.items()}
        results = [advance(current[piece], zeros) if piece in current else zeros for piece in self.own]
        return torch.stack(results) if results else maps.new_zeros(0, *zeros.shape)

    def _move(self, maps: Tensor, pairs: Round) -> dict[tuple[int, int], Tensor]:
        """Return the maps (B, K, D, a + E) that own pieces receive in one round, by (source, target)."""
        rows = maps.reshape(len(maps), math.prod(maps.shape[1:]))
        route = find_route(self.owners, self.group.rank, pairs)
        moved = _Move.apply(rows, self.anchor, self.group, route, self.number)
        self.rows.append(moved)
        return {pair: row.view(maps.shape[1:]) for pair, row in zip(route.arriving, moved, strict=True)}

    def tie(self, x: Tensor) -> Tensor:
        """Return x, and let its backward run the backward of all scans, even if x uses no received map."""
        return _Tie.apply(x, *self.rows) if self.rows else x


def advance(pair: Tensor, state: Tensor) -> Tensor:
    """Return A S + B for a map [A | B]; see `Scan.before`."""
    a, b = split(pair, state.shape[-1])
    return (a * state if a.shape[-1] == 1 else a @ state) + b


def compose(second: Tensor, first: Tensor, columns: int) -> Tensor:
    """Return the map `first` followed by the map `second`."""
    (a, b), (c, d) = split(second, columns), split(first, columns)
    if a.shape[-1] == 1 and second.shape[-1] == columns + 1:
        return torch.cat([a * c, a * d + b], -1)
    return torch.cat([a @ c, a @ d + b], -1)


def split(pair: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Split a map into (A, B)."""
    return pair.split([pair.shape[-1] - columns, columns], -1)  # type: ignore[return-value]


@dataclass(frozen=True)
class Route:
    """The rows that a rank sends and receives in one round.

    Attributes:
        leaving: indices of own pieces to send, in the order of `sends`.
        arriving: (source, target) of the received rows, in the order of `receives`.
        sends, receives: {rank: number of rows}.
    """

    leaving: tuple[int, ...]
    arriving: Round
    sends: dict[int, int]
    receives: dict[int, int]


@functools.lru_cache(maxsize=256)
def find_route(owners: tuple[int, ...], rank: int, pairs: Round) -> Route:
    pieces = [piece for piece, owner in enumerate(owners) if owner == rank]
    leaves = sorted((owners[b], a, b) for a, b in pairs if owners[a] == rank)
    arrives = sorted((owners[a], a, b) for a, b in pairs if owners[b] == rank)
    sends, receives = (dict(Counter(peer for peer, *_ in rows)) for rows in (leaves, arrives))
    return Route(tuple(pieces.index(a) for _, a, _ in leaves), tuple((a, b) for _, a, b in arrives), sends, receives)


class _Move(torch.autograd.Function):
    """Send own pieces' rows (p, F), and return the received rows. Forward and backward are collective calls."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor, group: SequenceGroup, route: Route, number: int) -> Tensor:
        ctx.group, ctx.route, ctx.number, ctx.pieces = group, route, number, len(rows)
        wire = halo_wire(group, group.forward_traffic)
        return wire.post(rows[list(route.leaving)], route.sends, route.receives, what="recurrent state").wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        route = ctx.route
        ctx.group.agree({"call": f"backward of recurrent_attention, call {ctx.number}"})
        wire = halo_wire(ctx.group, ctx.group.backward_traffic)
        back = wire.post(grad, route.receives, route.sends, what="recurrent state").wait()
        total = grad.new_zeros(ctx.pieces, grad.shape[1])
        index = torch.tensor(route.leaving, dtype=torch.int64, device=grad.device)
        return total.index_add_(0, index, back), None, None, None, None


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(o.shape, o.dtype, o.device) for o in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros(s, dtype=t, device=d) for s, t, d in ctx.others)
