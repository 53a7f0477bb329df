"""Halos: neighbouring tokens that are stored on other ranks, and convolutions over a sharded sequence.

Shape letters: B batch, L tokens of this rank, E channels, S chunks (runs of positions) of a rank, F features.
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
from lightning_dilated.sequence.collectives import axis
from lightning_dilated.sequence.exchange.transport import Traffic, Wire
from lightning_dilated.sequence.group import SequenceGroup, active_sequence
from lightning_dilated.sequence.shard import Shard

#: rank -> slices of the local rows that it receives, or of the halo rows that it sends
Slices = dict[int, tuple[slice, ...]]


@dataclass(frozen=True)
class HaloRoute:
    """The rows around each chunk of a rank, and the ranks that hold them.

    Attributes:
        chunks: the rank's ranges of positions, in local order: none on an empty shard, up to two in zigzag, else one.
        left, right: number of rows before and after each chunk.
        sends: local rows, by the rank that receives them.
        receives: halo rows, by the rank that sends them; rows without a sender are outside the sequence.
    """

    chunks: tuple[range, ...]
    left: int
    right: int
    sends: Slices
    receives: Slices

    @property
    def rows(self) -> int:
        """Number of rows in the halo: `left` and `right` rows for each chunk."""
        return len(self.chunks) * (self.left + self.right)

    def fetch(self, rows: Tensor, wire: Wire) -> Tensor:
        """Return the halo (S (left + right), F) of this rank's rows (L, F), 0 outside the sequence. Collective."""
        taken = _take(rows, self.sends)
        received = wire.post(taken, _counts(self.sends), _counts(self.receives), what="halo").wait()
        halo = rows.new_zeros(self.rows, rows.shape[1])
        for part, cut in _split(received, self.receives):
            halo[cut] = part
        return halo

    def give_back(self, grad: Tensor, into: Tensor, wire: Wire) -> None:
        """Send the halo's gradient (S (left + right), F) to the rows' owners; add received rows to `into` (L, F)."""
        taken = _take(grad, self.receives)
        received = wire.post(taken, _counts(self.receives), _counts(self.sends), what="halo").wait()
        for part, cut in _split(received, self.sends):
            into[cut] += part

    def surround(self, x: Tensor, halo: Tensor) -> Iterator[Tensor]:
        """Yield the chunks of x (B, L, ...), each joined with its rows of the halo (S (left + right), B, ...)."""
        start, width = 0, self.left + self.right
        for number, chunk in enumerate(self.chunks):
            around = halo[number * width : (number + 1) * width].movedim(0, 1)
            part = x[:, start : start + len(chunk)]
            yield torch.cat([around[:, : self.left], part, around[:, self.left :]], 1)
            start += len(chunk)


def _counts(cuts: Slices) -> dict[int, int]:
    return {peer: sum(c.stop - c.start for c in slices) for peer, slices in cuts.items()}


def _take(rows: Tensor, cuts: Slices) -> Tensor:
    return torch.cat([rows[:0], *(rows[c] for slices in cuts.values() for c in slices)])


def _split(rows: Tensor, cuts: Slices) -> Iterator[tuple[Tensor, slice]]:
    flat = [c for slices in cuts.values() for c in slices]
    return zip(rows.split([c.stop - c.start for c in flat]), flat, strict=True)


@functools.lru_cache(maxsize=256)
def halo_route(shard: Shard, rank: int, left: int, right: int) -> HaloRoute:
    """Return the route of one rank.

    Raises:
        ValueError: for the strided layout, because all neighbours of a token are on other ranks.
    """
    if shard.layout == "strided" and shard.ranks > 1:
        raise ValueError(
            "layout='strided' has no halo: all neighbours of a token are on other ranks. Set layout='contiguous' or "
            "'zigzag' for models with convolutions (kv_conv, SequenceConv1d, sequence_halo)."
        )
    receives = slices_by_rank((owner, slot) for slot, owner, _ in _halo_rows(shard, rank, left, right))
    peers = {p for chunk in shard.ranges(rank) for p in shard.holders(chunk.start - right, chunk.stop + left)}
    sends = {}
    for peer in sorted(peers):
        rows = [local for _, owner, local in _halo_rows(shard, peer, left, right) if owner == rank]
        if rows:
            sends[peer] = slices_of(rows)
    return HaloRoute(shard.ranges(rank), left, right, sends, receives)


def _halo_rows(shard: Shard, rank: int, left: int, right: int) -> Iterator[tuple[int, int, int]]:
    """Yield each halo row that is inside the sequence, in order, with the rank that owns it and its local row there."""
    for number, chunk in enumerate(shard.ranges(rank)):
        around = [*range(chunk.start - left, chunk.start), *range(chunk.stop, chunk.stop + right)]
        for slot, position in enumerate(around, number * (left + right)):
            if 0 <= position < shard.seq_len:
                yield slot, *shard.owner(position)


def slices_by_rank(pairs: Iterable[tuple[int, int]]) -> Slices:
    slots: dict[int, list[int]] = {}
    for owner, slot in pairs:
        slots.setdefault(owner, []).append(slot)
    return {owner: slices_of(slots[owner]) for owner in sorted(slots)}


def slices_of(numbers: list[int]) -> tuple[slice, ...]:
    """Return the numbers as slices, in the same order."""
    slices: list[slice] = []
    for n in numbers:
        if slices and slices[-1].stop == n:
            slices[-1] = slice(slices[-1].start, n + 1)
        else:
            slices.append(slice(n, n + 1))
    return tuple(slices)


def halo_wire(group: SequenceGroup, traffic: Traffic) -> Wire:
    """Return the wire that moves rows between all ranks of a sequence."""
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
    """Return this rank's chunks of consecutive tokens, each with `left` tokens before it and `right` tokens after it.

    A local function of tokens gives the same result on any number of ranks if it is applied to each chunk:
    `torch.cat([f(chunk) for chunk in sequence_halo(x, 3)], 1)`, where f maps (B, 3 + n, E) to (B, n, E). Each rank
    receives `left + right` rows per chunk, and in the backward returns their gradients. See also `SequenceConv1d`.

    Args:
        x: (B, L, ...) or any shape with this rank's tokens along `dim`.
        left, right: numbers of tokens before and after a chunk; several ranks may hold these tokens.
        sequence: the ranks; None: the active group, or one rank if there is none.

    Returns:
        for each chunk a tensor of x's shape with left + n + right along `dim`, 0 outside the sequence. One rank and the
        contiguous layout have one chunk, zigzag up to two. An empty shard has one chunk with n = 0; the rank's loss
        must use this chunk, because all ranks must run the backward, which exchanges gradients.

    Raises:
        TypeError, ValueError: for numbers below 0, a `dim` that x does not have, and the strided layout; on every rank,
            if shapes or dtypes differ between ranks, or the number of tokens of one rank is not its shard's.
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
    if not route.chunks:
        return [_between_zeros(torch.cat([halo, rows]).movedim(0, dim), left, right, dim)]
    return [part.movedim(1, dim + 1)[0] for part in route.surround(rows[None], halo[:, None])]


def _between_zeros(x: Tensor, left: int, right: int, dim: int) -> Tensor:
    before, after = (x.new_zeros(*x.shape[:dim], n, *x.shape[dim + 1 :]) for n in (left, right))
    return torch.cat([before, x, after], dim)


def _arguments(x: Tensor, left: int, right: int, dim: int) -> int:
    """Check the arguments; return `dim` counted from 0."""
    integer(left, "left", 0)
    integer(right, "right", 0)
    return axis(x, dim)


class SequenceConv1d(nn.Conv1d):
    """nn.Conv1d along the tokens of (B, L, E): one output per token, and the same outputs on any number of ranks.

    A rank receives neighbouring tokens from other ranks (`sequence_halo`), in the contiguous and zigzag layouts.
    Parameters have the names and shapes of nn.Conv1d's.

    Args:
        in_channels, out_channels, kernel_size, dilation, groups, bias, device, dtype: as in nn.Conv1d; kernel_size and
            dilation are integers.
        causal: a token reads itself and earlier tokens; otherwise the kernel is centred as in
            nn.Conv1d(padding="same").

    Raises:
        ValueError: for a stride or padding, because each token must have one output.
    """

    reads_neighbours = True  # the layer reads other ranks' tokens, so it may run on shards

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, *, causal: bool = False, **options: Any
    ) -> None:
        refused = sorted(options.keys() - {"dilation", "groups", "bias", "device", "dtype"})
        if refused:
            raise ValueError(
                f"SequenceConv1d takes no {', '.join(refused)}: every token has one output, and zeros pad the sequence. "
                "Leave it out; causal=True shifts the kernel to the past."
            )
        super().__init__(in_channels, out_channels, kernel_size, **options)
        reach = self.dilation[0] * (self.kernel_size[0] - 1)
        #: numbers of tokens that a token reads before and after itself
        self.reach = (reach, 0) if causal else (reach // 2, reach - reach // 2)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, L, in_channels) to (B, L, out_channels)."""
        outputs = []
        for chunk in sequence_halo(x, *self.reach):
            empty = chunk.shape[1] == sum(self.reach)  # torch's convolutions reject outputs without tokens
            rows = nn.functional.pad(chunk, (0, 0, 0, 1)) if empty else chunk
            y = super().forward(rows.transpose(1, 2)).transpose(1, 2)
            outputs.append(y[:, :0] if empty else y)
        return torch.cat(outputs, 1)
