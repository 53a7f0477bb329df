"""sequence_halo: a rank's tokens with their neighbours on other ranks; SequenceConv1d, a convolution over all of them.

Shape letters: B batch, L tokens of this rank, E channels, S stretches (runs of consecutive positions) of a rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_dilated._validation import integer
from lightning_dilated.sequence.exchange.transport import Traffic, Wire
from lightning_dilated.sequence.group import SequenceGroup, active_sequence
from lightning_dilated.sequence.shard import Shard


@dataclass(frozen=True)
class HaloRoute:
    """Which rows stand around each stretch of a rank, and who holds them.

    Attributes:
        stretches: positions of the rank, in local order: none on an empty shard, one if contiguous, at most two in zigzag.
        left, right: rows before and after each stretch.
        sends: local rows, by the rank that gets them.
        receives: rows of the halo, by the rank that sends them; what no rank sends lies beyond the sequence.
    """

    stretches: tuple[range, ...]
    left: int
    right: int
    sends: dict[int, tuple[slice, ...]]
    receives: dict[int, tuple[slice, ...]]

    @property
    def rows(self) -> int:
        """Rows of the halo: `left` and `right` of each stretch after another."""
        return len(self.stretches) * (self.left + self.right)

    def fetch(self, rows: Tensor, wire: Wire) -> Tensor:
        """The halo (S (left + right), F) of this rank's rows (L, F); 0 beyond the sequence. Every rank has to ask."""
        received = wire.post(_taken(rows, self.sends), _counts(self.sends), _counts(self.receives), what="halo").wait()
        halo = rows.new_zeros(self.rows, rows.shape[1])
        for part, cut in _parts(received, self.receives):
            halo[cut] = part
        return halo

    def give_back(self, grad: Tensor, into: Tensor, wire: Wire) -> None:
        """Add the gradient of every rank's halo, `grad` (S (left + right), F) on this one, to the rows' owners' (L, F)."""
        back = wire.post(_taken(grad, self.receives), _counts(self.receives), _counts(self.sends), what="halo").wait()
        for part, cut in _parts(back, self.sends):
            into[cut] += part

    def surround(self, x: Tensor, halo: Tensor) -> Iterator[Tensor]:
        """Each stretch of x (B, L, ...) with its rows of the halo (S (left + right), B, ...): (B, left + n + right, ...)."""
        start, width = 0, self.left + self.right
        for number, held in enumerate(self.stretches):
            around = halo[number * width : (number + 1) * width].movedim(0, 1)
            part = x[:, start : start + len(held)]
            yield torch.cat([around[:, : self.left], part, around[:, self.left :]], 1)
            start += len(held)


def _counts(cuts: dict[int, tuple[slice, ...]]) -> dict[int, int]:
    return {peer: sum(c.stop - c.start for c in mine) for peer, mine in cuts.items()}


def _taken(rows: Tensor, cuts: dict[int, tuple[slice, ...]]) -> Tensor:
    return torch.cat([rows[:0], *(rows[c] for mine in cuts.values() for c in mine)])


def _parts(rows: Tensor, cuts: dict[int, tuple[slice, ...]]) -> Iterator[tuple[Tensor, slice]]:
    flat = [c for mine in cuts.values() for c in mine]
    return zip(rows.split([c.stop - c.start for c in flat]), flat, strict=True)


@functools.lru_cache(maxsize=256)
def halo_route(shard: Shard, rank: int, left: int, right: int) -> HaloRoute:
    """The route of one rank.

    Raises:
        ValueError: for the strided layout, where every token's neighbours lie on other ranks.
    """
    if shard.layout == "strided" and shard.ranks > 1:
        raise ValueError(
            "layout='strided' has no halo: all neighbours of a token lie on other ranks. Set layout='contiguous' or "
            "'zigzag' for models with convolutions (kv_conv, SequenceConv1d, sequence_halo)."
        )
    receives = _by_rank((owner, slot) for slot, owner, _ in _wanted(shard, rank, left, right))
    peers = {p for held in shard.ranges(rank) for p in shard.holders(held.start - right, held.stop + left)}
    sends = {}
    for peer in sorted(peers):
        wanted = [local for _, owner, local in _wanted(shard, peer, left, right) if owner == rank]
        if wanted:
            sends[peer] = _slices(wanted)
    return HaloRoute(shard.ranges(rank), left, right, sends, receives)


def _wanted(shard: Shard, rank: int, left: int, right: int) -> Iterator[tuple[int, int, int]]:
    """(row of the halo, rank that holds it, its local row there) of all rows that lie in the sequence, rising."""
    for number, held in enumerate(shard.ranges(rank)):
        around = [*range(held.start - left, held.start), *range(held.stop, held.stop + right)]
        for slot, position in enumerate(around, number * (left + right)):
            if 0 <= position < shard.seq_len:
                yield slot, *shard.owner(position)


def _by_rank(pairs: Iterable[tuple[int, int]]) -> dict[int, tuple[slice, ...]]:
    slots: dict[int, list[int]] = {}
    for owner, slot in pairs:
        slots.setdefault(owner, []).append(slot)
    return {owner: _slices(slots[owner]) for owner in sorted(slots)}


def _slices(numbers: list[int]) -> tuple[slice, ...]:
    """The same numbers in the same order, as slices."""
    slices: list[slice] = []
    for n in numbers:
        if slices and slices[-1].stop == n:
            slices[-1] = slice(slices[-1].start, n + 1)
        else:
            slices.append(slice(n, n + 1))
    return tuple(slices)


def halo_wire(group: SequenceGroup, traffic: Traffic) -> Wire:
    """What moves rows between all ranks of a sequence."""
    return Wire(group.group, tuple(range(group.ranks)), group.rank, traffic)


class _Halo(torch.autograd.Function):
    """The halo (S (left + right), ...) of rows (L, ...)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup, route: HaloRoute, number: int) -> Tensor:
        ctx.group, ctx.route, ctx.number, ctx.shape = group, route, number, x.shape
        rows = x.reshape(len(x), math.prod(x.shape[1:]))
        return route.fetch(rows, halo_wire(group, group.forward_traffic)).view(route.rows, *x.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.group.agree({"call": f"backward of sequence_halo, call {ctx.number}"})
        wide, features = torch.promote_types(grad.dtype, torch.float32), math.prod(ctx.shape[1:])
        total = grad.new_zeros(ctx.shape[0], features, dtype=wide)
        wire = halo_wire(ctx.group, ctx.group.backward_traffic)
        ctx.route.give_back(grad.reshape(len(grad), features).to(wide), total, wire)
        return total.view(ctx.shape).to(grad.dtype), None, None, None


def sequence_halo(
    x: Tensor, left: int, right: int = 0, dim: int = 1, sequence: SequenceGroup | None = None
) -> list[Tensor]:
    """This rank's stretches of consecutive tokens, each with the `left` tokens before it and the `right` after it.

    A function of near tokens gives the same on any number of ranks if it is applied to each stretch:
    `torch.cat([f(stretch) for stretch in sequence_halo(x, 3)], 1)`, where f takes (B, 3 + n, E) to (B, n, E). Each rank
    receives `left + right` rows a stretch; the gradient of such a row is added to its owner's. For convolutions see
    `SequenceConv1d`.

    Args:
        x: (B, L, ...) or any shape with this rank's tokens along `dim`.
        left, right: tokens before and after; they may lie on several ranks.
        sequence: the ranks; None: the active group, or one rank where none is.

    Returns:
        of each stretch x's shape with left + n + right along `dim`, 0 beyond the sequence. One rank and the contiguous
        layout have one stretch, zigzag up to two. An empty shard has one of n = 0: its loss must use it, for the gradient
        of what other ranks hold passes through all ranks.

    Raises:
        TypeError, ValueError: for numbers below 0, a `dim` that x has not, and the strided layout; on every rank, if
            shapes or dtypes differ or a rank's tokens are not those of its shard.
    """
    group = active_sequence() if sequence is None else sequence
    if group is None:
        dim = _arguments(x, left, right, dim)
        return [_between_zeros(x, left, right, dim)]
    dim = group.guard(_arguments, x, left, right, dim)
    facts = {"shape": (*x.shape[:dim], *x.shape[dim + 1 :]), "dtype": x.dtype, "dim": dim, "left": left, "right": right}
    grad = torch.is_grad_enabled() and x.requires_grad
    agreed = group.agree({"call": "sequence_halo", **facts, "requires grad": grad}, x.shape[dim])
    route = halo_route(group.shard(agreed.seq_len), group.rank, left, right)
    rows = x.movedim(dim, 0).contiguous()
    halo = _Halo.apply(rows, group, route, agreed.number)
    if not route.stretches:
        return [_between_zeros(torch.cat([halo, rows]).movedim(0, dim), left, right, dim)]
    return [part.movedim(1, dim + 1)[0] for part in route.surround(rows[None], halo[:, None])]


def _between_zeros(x: Tensor, left: int, right: int, dim: int) -> Tensor:
    before, after = (x.new_zeros(*x.shape[:dim], n, *x.shape[dim + 1 :]) for n in (left, right))
    return torch.cat([before, x, after], dim)


def _arguments(x: Tensor, left: int, right: int, dim: int) -> int:
    """`dim` from 0."""
    integer(left, "left", 0)
    integer(right, "right", 0)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim={dim} lies outside the {x.ndim} dimensions of x, {tuple(x.shape)}.")
    return dim % x.ndim


class SequenceConv1d(nn.Conv1d):
    """nn.Conv1d along the tokens of (B, L, E), with as many tokens out as in, equal on any number of ranks.

    A rank receives the few tokens that its neighbours hold (`sequence_halo`); layouts contiguous and zigzag. Parameters and
    their names are nn.Conv1d's.

    Args:
        in_channels, out_channels, kernel_size, dilation, groups, bias, device, dtype: as in nn.Conv1d; kernel_size and
            dilation are whole numbers.
        causal: a token sees itself and those before it; else the kernel is centred as by nn.Conv1d(padding="same").

    Raises:
        ValueError: for a stride or padding: every token gives one.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, *, causal: bool = False, **options: Any
    ) -> None:
        refused = sorted(options.keys() - {"dilation", "groups", "bias", "device", "dtype"})
        if refused:
            raise ValueError(
                f"SequenceConv1d takes no {', '.join(refused)}: every token gives one, and beyond the sequence stand zeros. "
                "Leave it out; causal=True shifts the kernel to the past."
            )
        super().__init__(in_channels, out_channels, kernel_size, **options)
        reach = self.dilation[0] * (self.kernel_size[0] - 1)
        #: tokens before and after that a token sees
        self.reach = (reach, 0) if causal else (reach // 2, reach - reach // 2)

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, in_channels) to (B, L, out_channels)."""
        outputs = []
        for stretch in sequence_halo(x, *self.reach):
            empty = stretch.shape[1] == sum(self.reach)  # a convolution of torch refuses to give no token
            rows = nn.functional.pad(stretch, (0, 0, 0, 1)) if empty else stretch
            y = super().forward(rows.transpose(1, 2)).transpose(1, 2)
            outputs.append(y[:, :0] if empty else y)
        return torch.cat(outputs, 1)
