"""Prompts that ranks share while they are continued: which rows a rank keeps, and how the ranks' parts are merged.

Shape letters: B batch, N tokens of a prompt with its padding, L of them on this rank, n new tokens, H query heads, D head
dim, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dilated._validation import integer
from lightning_dilated.sequence.collectives import sequence_sum, stack_ranks
from lightning_dilated.sequence.group import SequenceGroup
from lightning_dilated.sequence.ranges import clip, intersect, size
from lightning_dilated.sequence.shard import Shard


@dataclass(frozen=True)
class DecodedShard:
    """Which rows a rank keeps while a sequence is decoded: those of its shard of the prompt, and every R-th later one.

    Later rows are counted for each residue, within the segment: so ranks have equally many, whatever the dilation rate.

    Attributes:
        shard: of the prompts, N tokens with padding.
        rank: of the R.
    """

    shard: Shard
    rank: int

    def of(self, rows: range, prompt: int) -> list[range]:
        """The positions, rising, that the rank keeps of a head's rows in a segment, from the segment's first on.

        `prompt`: tokens of the sample's prompt, at most N.
        """
        known = len(clip(rows, rows.start, prompt))
        held = [intersect(rows[:known], x) for x in self.shard.ranges(self.rank)]
        return [x for x in (*held, rows[known + self.rank :: self.shard.ranks]) if x]

    def count(self, rows: range, prompt: int) -> int:
        """How many."""
        return size(self.of(rows, prompt))

    def local(self, rows: range) -> range:
        """Local numbers of the rank's tokens at these positions, which lie in one piece of its shard."""
        start, step = self.shard.local(self.rank, rows.start), 1
        if len(rows) > 1:
            step = self.shard.local(self.rank, rows.start + rows.step) - start
        return range(start, start + step * len(rows), step)


class SharedPrompts:
    """Prompts that the ranks of a group read, each its shard; the tokens that follow are computed by all of them.

    Args:
        group: the ranks.
        seq_len: N, the tokens of a prompt with its padding.
        lengths: (B,) tokens of each prompt without.

    Raises:
        ValueError: for a layout that is not offered.

    Attributes:
        kept: the rows that this rank keeps.
        positions: of this rank's tokens.
    """

    def __init__(self, group: SequenceGroup, seq_len: int, lengths: Sequence[int]) -> None:
        if group.layout == "chunked":
            raise ValueError(
                "prompts that ranks share are read at once, so layout='chunked' is not offered for them: set "
                "layout='contiguous' or 'zigzag'."
            )
        shard = group.shard(integer(seq_len, "seq_len", 1))
        self.group, self.lengths, self.kept = group, tuple(lengths), DecodedShard(shard, group.rank)
        self.positions = shard.ranges(group.rank)

    @property
    def tokens(self) -> int:
        """Of the prompts, on this rank."""
        return size(self.positions)

    def new(self, rows: range, begin: int, sample: int) -> tuple[int, Tensor]:
        """Of a residue's rows in a segment: (how many before `begin` are kept, the tokens of the others in this call)."""
        prompt = self.lengths[sample]
        kept = self.kept.of(rows, prompt)
        old = size(clip(x, x.start, begin) for x in kept)
        if begin >= prompt:  # one token, which all ranks have
            return old, torch.zeros(size(kept) - old, dtype=torch.int64)
        return old, torch.cat([torch.zeros(0, dtype=torch.int64), *(numbers(self.kept.local(x)) for x in kept)])

    def last_rows(self, x: Tensor, count: int) -> Tensor:
        """(B, count, C): each prompt's last rows, on every rank, of x (B, L, C) of this rank's tokens. All ranks call it."""
        last = x.new_zeros(len(x), count, x.shape[2])
        for sample, length in enumerate(self.lengths):
            for held in self.positions:
                for position in clip(held, max(length - count, held.start), length):
                    last[sample, position - length + count] = x[
                        sample, self.kept.shard.local(self.group.rank, position)
                    ]
        return sequence_sum(last, self.group)

    def merged(self, out: Tensor, lse: Tensor) -> Tensor:
        """Attention to all ranks' rows, of that to this rank's (B, n, H, D) and its lse (B, n, H). All ranks call it."""
        parts = stack_ranks(torch.cat([out, lse[..., None]], -1), self.group)
        outs, lses = parts[..., :-1], parts[..., -1]
        largest = lses.amax(0).clamp(min=torch.finfo(lses.dtype).min)  # -inf minus -inf would be NaN
        weights = torch.exp(lses - largest)
        return (outs * weights[..., None]).sum(0) / weights.sum(0).clamp(min=1)[..., None]  # 0 without any key


def numbers(of: range) -> Tensor:
    """A range as int64."""
    return torch.arange(of.start, of.stop, of.step)
