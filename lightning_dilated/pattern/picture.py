"""A plot of who attends to whom: queries downwards, keys to the right, a panel for all heads and some for single heads.

Shape letters: N tokens, H query heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_dilated._validation import integer
from lightning_dilated.pattern.rows import used_index

if TYPE_CHECKING:
    from lightning_dilated.pattern.pattern import DilatedPattern

#: longest side of a panel in pixels; longer sequences are binned
PIXELS = 256
#: longest sequence drawn: a panel looks at PIXELS x N pairs a head
LONGEST = 1 << 17


def plot(
    pattern: DilatedPattern,
    seq_len: int,
    num_heads: int,
    causal: bool,
    path: str | Path | None = None,
    head: int | None = None,
    num_kv_heads: int | None = None,
) -> Any:
    """See `DilatedPattern.plot`: all heads and up to three single ones, or only `head`."""
    from matplotlib.figure import Figure

    seq_len = integer(seq_len, "seq_len", 1)
    pattern.check_heads(num_heads, num_kv_heads)
    if seq_len > LONGEST:
        raise ValueError(
            f"a picture takes up to {LONGEST} tokens, got seq_len={seq_len}; the pattern repeats, so draw fewer."
        )
    if head is not None and not 0 <= head < num_heads:
        raise ValueError(f"head must lie in 0..{num_heads - 1}, got {head}.")
    panels = [None, *range(min(num_heads, 3))] if head is None else [head]
    figure = Figure(figsize=(3.4 * len(panels), 3.9), layout="constrained", dpi=120)
    for axes, which in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        heads = range(num_heads) if which is None else [which]
        image = picture(pattern, seq_len, num_heads, causal, list(heads), num_kv_heads)
        shade = (image / image.max().clamp(min=1e-9)).sqrt().numpy()
        axes.imshow(shade, cmap="Blues", extent=(0, seq_len, seq_len, 0), vmin=0)
        axes.set_title("all heads" if which is None else f"head {which}", fontsize=10)
        axes.set_xlabel("key")
        axes.set_ylabel("query")
        axes.tick_params(labelsize=7)
    branches = ", ".join(f"({b.segment_length}, {b.dilation_rate})" for b in pattern.branches)
    figure.suptitle(
        f"branches (segment, dilation): {branches}; {'causal' if causal else 'both directions'}", fontsize=9
    )
    if path is not None:
        figure.savefig(path)
    return figure


def picture(
    pattern: DilatedPattern,
    seq_len: int,
    num_heads: int,
    causal: bool,
    heads: list[int],
    num_kv_heads: int | None = None,
) -> torch.Tensor:
    """(side, side) fp32, side at most PIXELS: the mean count of (query, key) over heads."""
    side = min(seq_len, PIXELS)
    # one query per pixel row, moved by the golden ratio within the row so that no residue is favoured
    edges = torch.arange(side + 1) * seq_len // side
    width = edges[1:] - edges[:-1]
    query = edges[:-1] + ((torch.arange(side) * 0.618034) % 1 * width).long()
    seen = torch.zeros(side, seq_len)
    for i in range(len(pattern.branches)):
        segment, used = used_index(pattern, i, seq_len, num_heads, num_kv_heads)
        together = segment[query][:, None] == segment[None, :]
        for h in heads:
            seen += together & used[h][query][:, None] & used[h][None, :]
    if causal:
        seen *= torch.arange(seq_len)[None, :] <= query[:, None]
    column = torch.bucketize(torch.arange(seq_len), edges[1:], right=True)
    image = torch.zeros(side, side).index_add_(1, column, seen)
    return image / width / len(heads)
