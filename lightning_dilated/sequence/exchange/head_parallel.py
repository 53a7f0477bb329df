"""Head-parallel groups: neighbouring ranks trade tokens for heads, so that each holds all their tokens for its own heads.

Windows of heads may be uneven. Where a window cuts a group of query heads that share a kv head, the kv head goes to both
ranks and its gradients are summed.

Shape letters: B samples, L tokens of a rank, G tokens of the group, H heads, D head dim, M ranks of the group.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dilated.sequence.exchange.transport import Wire

Windows = Sequence[tuple[int, int]]


def windows(num_heads: int, num_kv_heads: int, members: int) -> list[tuple[int, int]]:
    """(first, stop) query heads of each member, as equal as possible; whole kv groups where there are enough of them."""
    unit = num_heads // num_kv_heads if num_kv_heads >= members else 1
    share, more = divmod(num_heads // unit, members)
    cuts = itertools.accumulate((share + (i < more) for i in range(members)), initial=0)
    return [(a * unit, b * unit) for a, b in itertools.pairwise(cuts)]


@dataclass
class HeadGroup:
    """The ranks that trade tokens for heads, this one among them; `lengths` are the tokens of each."""

    wire: Wire
    lengths: tuple[int, ...]

    def to_heads(self, tensors: Sequence[Tensor], cuts: Sequence[Windows]) -> list[Tensor]:
        """(B, L, H, D) tensors of one dtype and D, cut at their windows, as (B, G, own window, D)."""
        batch, length, _, dim = tensors[0].shape
        rank, widths = self.wire.rank, [[b - a for a, b in cut] for cut in cuts]
        parts = [
            x[:, :, slice(*cut[peer])].reshape(-1, dim)
            for peer in range(len(self.lengths))
            for x, cut in zip(tensors, cuts, strict=True)
        ]
        sends = {i: batch * length * sum(w[i] for w in widths) for i in range(len(self.lengths))}
        receives = {i: batch * n * sum(w[rank] for w in widths) for i, n in enumerate(self.lengths)}
        rows = self.wire.post(torch.cat(parts), sends, receives, what="tokens for heads").wait()
        sizes = [batch * n * w[rank] for n in self.lengths for w in widths]
        pieces = rows.split(sizes)
        return [
            torch.cat(
                [p.view(batch, n, w[rank], dim) for p, n in zip(pieces[i :: len(widths)], self.lengths, strict=True)], 1
            )
            for i, w in enumerate(widths)
        ]

    def to_tokens(self, x: Tensor, cut: Windows, heads: int) -> Tensor:
        """(B, G, own window, D) back to (B, L, heads, D); heads that several ranks hold are summed."""
        batch, _, width, dim = x.shape
        parts = [part.reshape(-1, dim) for part in x.split(list(self.lengths), 1)]
        length, widths = self.lengths[self.wire.rank], [b - a for a, b in cut]
        sends = {i: batch * n * width for i, n in enumerate(self.lengths)}
        receives = {i: batch * length * w for i, w in enumerate(widths)}
        rows = self.wire.post(torch.cat(parts), sends, receives, what="heads for tokens").wait()
        out = x.new_zeros(batch, length, heads, dim)
        for part, (a, b) in zip(rows.split([batch * length * w for w in widths]), cut, strict=True):
            out[:, :, a:b] += part.view(batch, length, b - a, dim)
        return out
