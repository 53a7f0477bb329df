"""What a stream adds to the plan of one chunk: rows that layers carry from chunk to chunk, and seconds of the other chunks.

Shape letters: N tokens of the sequence, C tokens of a chunk, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_dilated.attention.stream import ON_GPU
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import pairs
from lightning_dilated.planning.counting.workspace import OpCall
from lightning_dilated.sequence.chunks import chunk_problem, leaving_rows, live_count
from lightning_dilated.sequence.requirements import Document
from lightning_dilated.sequence.shard import ChunkShard

#: most chunks whose rows are counted, and the last ones that are counted besides
SAMPLED, LAST = 96, 4


def in_chunks(settings: MemorySettings, tokens: int) -> bool:
    """Whether N tokens are computed chunk by chunk."""
    return settings.stream is not None and tokens > settings.stream


@functools.lru_cache(maxsize=256)
def carried_rows(pattern: DilatedPattern, heads: int, kv_heads: int, tokens: int, chunk: int) -> tuple[int, int]:
    """(rows stored over all chunks, most rows at a time) of one layer and sample.

    Kv heads whose query heads are in the same branches have as many, but for the ends of segments: one of them is counted.
    Of more than `SAMPLED` chunks so many are counted, drawn at random, and the last ones, which have most rows behind them.
    """
    shard, stored, live = ChunkShard(0, tokens, chunk), 0.0, 0
    inner = range(chunk, tokens, chunk)
    counted: Sequence[int] = inner
    if len(inner) > SAMPLED:
        counted = sorted({*random.Random(0).sample(inner, SAMPLED), *inner[-LAST:]})
    for first, count in _classes(pattern, heads, kv_heads):
        window = first * heads // kv_heads, (first + 1) * heads // kv_heads
        problem = chunk_problem(pattern, heads, kv_heads, [Document(0, 1, 0, tokens)], shard, window)
        rows = [sum(x.count for x in leaving_rows(problem, range(at - chunk, at), at)) for at in counted]
        stored += count * sum(rows) * len(inner) / max(1, len(rows))
        live += count * max((live_count(problem, at) for at in counted), default=0)
    return round(stored), live


def _classes(pattern: DilatedPattern, heads: int, kv_heads: int) -> Iterator[tuple[int, int]]:
    """(a kv head, how many are like it)."""
    group = heads // kv_heads
    kinds = [
        tuple(tuple(b.serves(h) for h in range(k * group, (k + 1) * group)) for b in pattern.branches)
        for k in range(kv_heads)
    ]
    for kind, count in Counter(kinds).items():
        yield kinds.index(kind), count


@dataclass(frozen=True)
class Carried:
    """Bytes that all layers carry: on the GPU rows of a chunk, their gradients and stored rows; on the host stored rows."""

    on_gpu: int
    on_host: int

    @classmethod
    def of(cls, call: OpCall, depth: int, tokens: int, settings: MemorySettings, gpu_memory: float) -> Carried:
        """Of `depth` layers; without a descent (`truncate`) nothing is stored, and gradients are one layer's."""
        size, wide = call.dtype.itemsize, max(4, call.dtype.itemsize)
        row, chunk = 2 * call.head_dim * call.batch, settings.stream or tokens
        layers = [
            (carried_rows(x.pattern, x.heads, x.kv_heads, tokens, chunk), count) for x, count in call.layers(depth)
        ]
        live = sum(count * at_a_time for (_, at_a_time), count in layers) * row
        one = max(at_a_time for (_, at_a_time), _ in layers) * row
        if settings.truncate:
            return cls((live + one) * size + one * wide, 0)
        stored = sum(count * rows for (rows, _), count in layers) * row * size
        here = min(stored, int(gpu_memory * ON_GPU))
        # as a layer goes on to the next chunk, it has both chunks' rows, or gradients
        return cls(live * (size + wide) + one * (size + wide) + here, stored - here)


def further_pairs(call: OpCall, depth: int, tokens: int, chunk: int) -> tuple[float, float]:
    """(pairs of all layers in N tokens beyond those in N / C separate chunks; pairs of one chunk alone)."""
    whole = sum(count * pairs(x.pattern, tokens, x.heads, x.kv_heads, True) for x, count in call.layers(depth))
    alone = sum(count * pairs(x.pattern, chunk, x.heads, x.kv_heads, True) for x, count in call.layers(depth))
    return whole - alone * tokens / chunk, alone
