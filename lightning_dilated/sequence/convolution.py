"""SequenceConv1d: a convolution along a sequence that many ranks share.

Shape letters: B batch, L tokens of this rank, E channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_dilated.sequence.halo import sequence_halo


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
