"""`layout="auto"`: the layout in which causal attention of all layers costs least, according to the planner's prices.

Shape letters: N tokens, H query heads, K kv heads, R ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import pairs
from lightning_dilated.sequence.planner import FLOPS, make_problem, plan

#: zigzag must save this share of attention's time, because two runs of tokens on a rank need more launches
SAVED = 0.1
#: features of a head that the prices assume
HEAD_DIM = 64


def cheapest_layout(
    patterns: Iterable[DilatedPattern],
    seq_len: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    *,
    ranks: int,
    head_size: int = 1,
    **prices: Any,
) -> str:
    """Return "contiguous" or "zigzag" for the causal attention of a model.

    The cost of a layout, in whole femtoseconds, is the sum of the mean computation of a rank, the time of each layer's
    cheapest exchange, and the wait for the busiest rank. "zigzag" is chosen only if it saves more than a tenth.

    Args:
        patterns: the pattern of each layer.
        seq_len: N, the longest sequence.
        num_heads, num_kv_heads: H and K.
        ranks: R, the ranks that share a sequence.
        head_size: number of ranks in a head-parallel group.
        prices: `ranks_per_node` and `links` of `planner.plan`; heads have 64 features of 16 bits.

    Raises:
        TypeError, ValueError: if an argument is invalid. The message names it.
    """
    layers = Counter(patterns)
    if ranks == head_size or not layers:
        return "contiguous"

    def cost(layout: str) -> int:
        total = 0
        for pattern, count in layers.items():
            problem = make_problem(
                pattern, seq_len, num_heads, num_kv_heads, ranks=ranks, layout=layout, causal=True, head_size=head_size
            )
            choice = plan(problem, head_dim=HEAD_DIM, **prices)
            computed = pairs(pattern, seq_len, num_heads, num_kv_heads, True) * 14 * HEAD_DIM / FLOPS / ranks
            exchanged = sum(x.seconds + x.waiting for x in choice.prices if x.exchange == choice.exchange)
            total += count * round(1e15 * (computed + exchanged))
        return total

    return "zigzag" if cost("zigzag") < (1 - SAVED) * cost("contiguous") else "contiguous"
