"""Fetch the rows before a chunk of a stream, for a convolution, from the previous chunk or from other ranks.

Shape letters: B batch, L tokens of this rank, C channels, W taps.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_dilated._device import send
from lightning_dilated.ext.convolution.convolution import Seen, call_facts, flat, unflat
from lightning_dilated.ext.convolution.halo import HaloRoute, slices_by_rank, slices_of
from lightning_dilated.ext.streams.shard import ChunkShard
from lightning_dilated.sequence.exchange.transport import Traffic, Wire
from lightning_dilated.sequence.group import SequenceGroup

if TYPE_CHECKING:
    from lightning_dilated.ext.streams.stream import Stream


@functools.lru_cache(maxsize=256)
def chunk_halo_route(shard: ChunkShard, number: int, left: int) -> HaloRoute:
    """Return the route of a piece of a chunk that needs the `left` rows before it.

    Indices in `sends` refer to the rank's last `left` rows before the chunk (0 if missing), then the piece's rows.
    """
    receives = slices_by_rank((peer, slot) for slot, peer, _ in _rows_before(shard, number, left))
    sends = {}
    for peer in shard.peers(number):
        rows = [left + index for _, owner, index in _rows_before(shard, peer, left) if owner == number]
        if rows:
            sends[peer] = slices_of(rows)
    return HaloRoute((shard.piece(number),), left, 0, sends, receives)


def _rows_before(shard: ChunkShard, number: int, left: int) -> Iterator[tuple[int, int, int]]:
    """Yield (a row's index in the halo, the piece that has it, its index in that piece); see `ChunkShard.carrier`."""
    piece = shard.piece(number)
    for slot, position in enumerate(range(piece.start - left, piece.start)):
        if piece and position >= shard.start:
            yield slot, *shard.carrier(number, position)


def chunk_wire(group: SequenceGroup, shard: ChunkShard, number: int, traffic: Traffic) -> Wire:
    """Return the wire that moves rows between the pieces of a chunk."""
    return Wire(group.group, tuple(range(group.ranks)) * shard.chunks, number, traffic)


class ChunkNeighbours:
    """The rows before a chunk x (B, L, C) of a stream, or before a rank's piece of it, for a causal convolution."""

    def __init__(
        self, stream: Stream, x: Tensor, weight: Tensor, documents: tuple[Tensor | None, ...], place: Tensor,
        backward: bool,
    ) -> None:  # fmt: skip
        (layer, self.chunk), self.left, self.number = place.tolist(), len(weight) - 1, 0
        self.stream = stream
        self.tails, self.documents, self.route = self.stream.tails_of(layer), documents, None
        if (group := self.stream.group) is not None:
            shard, call_id = self.stream.shard, f"layer {layer}, chunk {self.chunk}"
            tokens = len(shard.positions(self.chunk))
            group.agree(call_facts(x, weight, backward), x.shape[1], call_id=call_id, later=True, chunk=tokens)
            self.route = chunk_halo_route(shard, self.stream.number(self.chunk), self.left)

    def _wire(self, traffic: str) -> Any:
        stream = self.stream
        return chunk_wire(stream.group, stream.shard, stream.number(self.chunk), getattr(stream.group, traffic))

    def read(self, x: Tensor) -> Tensor:
        """Return the rows before x, (B, W - 1, C), and store the last rows of x for the next chunk."""
        carried = self.tails.before(self.chunk)
        before = x.new_zeros(len(x), self.left, x.shape[2]) if carried is None else carried.to(x.device, x.dtype)
        if self.stream.rising:
            last = torch.cat([before, x[:, -self.left :]], 1)[:, -self.left :]  # x may have fewer than W - 1 rows
            self.tails.leave(self.chunk, last.clone())
        if self.route is not None:
            computed = torch.cat([before, x], 1)  # all rows that this rank computed
            before = unflat(self.route.fetch(flat(computed), self._wire("forward_traffic")), x).movedim(1, 0)
        return before.clone(memory_format=torch.contiguous_format)

    def runs(self, x: Tensor, before: Tensor) -> Iterator[tuple[Tensor, Seen, slice]]:
        """Yield one run: the rows before the chunk, followed by the chunk."""
        yield torch.cat([before, x], 1), self._seen(x.device), slice(0, x.shape[1])

    def _seen(self, device: torch.device) -> Seen:
        """Return which rows belong to the same document, according to the stream's documents or `cu_seqlens`."""
        piece = self.stream.tokens(self.chunk)
        positions = range(piece.start - self.left, piece.stop)
        if self.stream.documents is None:
            return Seen.of(positions, None, self.documents[1], device)
        starts: dict[int, list[int]] = {}
        for document in self.stream.documents:
            starts.setdefault(document.sample, []).append(document.start)
        if all(x == [0] for x in starts.values()):
            return Seen()
        at = torch.arange(positions.start, positions.stop)
        numbers = [torch.searchsorted(torch.tensor(x), at, right=True, out_int32=True) for x in starts.values()]
        return Seen(send(torch.stack(numbers), device))

    def give_back(self, gradients: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return x's gradient, including later chunks' part; store earlier rows' gradients for the previous chunk."""
        (d_rows,) = gradients
        if self.route is not None:  # other ranks computed some of the rows before x
            d_before, d_x = d_rows.split([self.left, x.shape[1]], 1)
            total = flat(torch.cat([torch.zeros_like(d_before), d_x], 1))
            self.route.give_back(flat(d_before), total, self._wire("backward_traffic"))
            d_rows = unflat(total, x).movedim(0, 1)
        if self.stream.exact:
            if (later := self.tails.pop_grad(self.chunk)) is not None:
                d_rows[:, x.shape[1] :] += later
            self.tails.store_grad(self.chunk, d_rows[:, : self.left].clone())
        return d_rows[:, self.left :]
