"""Padding: the positions of the real tokens in padded samples; each sample has one contiguous run.

Attention takes rows that begin with their first real token: `aligned` rotates rows, `restored` rotates outputs back.

Shape letters: B batch, L tokens of this rank, N tokens of the sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dilated.sequence.collectives import sequence_gather
from lightning_dilated.sequence.group import SequenceGroup


class Padding:
    """Padding of samples.

    Attributes:
        lengths: (B,) int32 on the CPU, number of real tokens of each sample.
        left: (B,) int64 on the CPU, padding before the real tokens; 0 for samples without real tokens.
        columns: N.
    """

    def __init__(self, lengths: Tensor, left: Tensor, columns: int, device: torch.device) -> None:
        self.lengths, self.left, self.columns = lengths, left, columns
        self.has_left = bool(left.any())
        # built once here, because a compiled layer needs the indices as constants
        self._aligned, self._restored = (self._rows(x).to(device) for x in (left, -left))

    @classmethod
    def of(cls, mask: Tensor, group: SequenceGroup | None = None) -> Padding | None:
        """Return the padding of a mask (B, L) of real tokens, or None if all tokens are real. Collective in a group.

        Raises: ValueError for padding between real tokens, and for left padding of a sequence that ranks share.
        """
        whole = mask.to(torch.bool)
        if group is not None:
            whole = sequence_gather(whole.to(torch.int32), 1, group).to(torch.bool)
        lengths, left = whole.sum(1), whole.to(torch.uint8).argmax(1) if whole.shape[1] else whole.sum(1)
        at = torch.arange(whole.shape[1], device=whole.device)[None] - left[:, None]
        wrong = ((at >= 0) & (at < lengths[:, None])) != whole
        _refuse(wrong.any(1).cpu(), left.cpu(), group)
        lengths = lengths.to("cpu", torch.int32)
        return (
            None if bool((lengths == whole.shape[1]).all()) else cls(lengths, left.cpu(), whole.shape[1], mask.device)
        )

    @property
    def right(self) -> Tensor:
        """Padding after the real tokens, (B,) int64 on the CPU."""
        return self.columns - self.left - self.lengths

    def real(self) -> Tensor:
        """Return a mask of the real tokens, (B, N) bool on the CPU."""
        at = torch.arange(self.columns)[None] - self.left[:, None]
        return (at >= 0) & (at < self.lengths[:, None])

    def check_prompts(self) -> None:
        """Raise ValueError unless samples can be continued: each has a real token and padding on the left only."""
        if not bool(self.right.any()):
            return
        row = int(self.right.bool().int().argmax())
        if not self.lengths[row]:
            raise ValueError(
                f"attention_mask of sample {row} has no real token among the first {self.columns}, so generation has no "
                "prompt. Give each prompt at least one token, and leave prefill_chunk_size out."
            )
        raise ValueError(
            f"attention_mask of sample {row} has padding on the right, so new tokens would follow padding. To generate, "
            'pad on the left: tokenizer.padding_side = "left".'
        )

    def aligned(self, x: Tensor) -> Tensor:
        """Rotate rows of `x` (B, N, ...) to begin with their first real token; left padding moves to the end."""
        return self._moved(x, self._aligned)

    def restored(self, x: Tensor) -> Tensor:
        """Undo `aligned`."""
        return self._moved(x, self._restored)

    def _moved(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.flatten(0, 1).index_select(0, rows.to(x.device)).view(x.shape) if self.has_left else x

    def _rows(self, by: Tensor) -> Tensor:
        """Return source indices (B N,) into a flat (B N, ...) that roll each sample to the left by `by` (B,) tokens."""
        at = (torch.arange(self.columns) + by[:, None]) % max(1, self.columns)
        return (at + self.columns * torch.arange(len(by))[:, None]).flatten()


def _refuse(wrong: Tensor, left: Tensor, group: SequenceGroup | None) -> None:
    """Raise if samples have holes (`wrong` (B,) bool), or if ranks share samples with padding on the `left` (B,)."""
    if bool(wrong.any()):
        raise ValueError(
            f"attention_mask of sample {int(wrong.int().argmax())} has holes: ring_dilated takes real tokens in one run, "
            "with padding before or after them. Remove the padding in between, or pass samples one by one."
        )
    if group is not None and group.ranks > 1 and bool(left.any()):
        raise ValueError(
            f"attention_mask of sample {int(left.bool().int().argmax())} has padding on the left, but ranks that share a "
            'sequence support padding on the right only. Set tokenizer.padding_side = "right".'
        )
