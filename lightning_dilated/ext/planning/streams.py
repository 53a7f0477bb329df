"""Add a stream's costs to the plan of one chunk: rows that layers carry from chunk to chunk, exchanges between ranks
that share chunks, and (query, key) pairs that cross chunk bounds.

Shape letters: N tokens of the sequence, C tokens of a chunk, R ranks.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_dilated.ext.planning.counting.footprint import Exchanged
from lightning_dilated.ext.planning.counting.hashed import CarriedBytes
from lightning_dilated.ext.planning.counting.workspace import OpCall
from lightning_dilated.ext.streams.carried_rows import chunk_problem, leaving_rows, live_count, received_count
from lightning_dilated.ext.streams.shard import ChunkShard
from lightning_dilated.ext.streams.stream import ON_GPU
from lightning_dilated.memory.settings import MemorySettings
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.pattern.rows import cycle_to, pairs, query_rows
from lightning_dilated.sequence.links import Links
from lightning_dilated.sequence.requirements import Document, Problem

#: the received rows of every kv head are counted if (kv heads) x (chunks) x (ranks) is at most this number
EXACT = 1024
#: maximum number of chunks in a sample, number of last chunks added to the sample, maximum number of counted ranks
SAMPLED, LAST, RANKS = 96, 4, 8


def in_chunks(settings: MemorySettings, tokens: int) -> bool:
    """Return whether N tokens are computed chunk by chunk."""
    return settings.stream is not None and tokens > settings.stream


@functools.lru_cache(maxsize=256)
def carried_rows(
    pattern: DilatedPattern, heads: int, kv_heads: int, tokens: int, chunk: int, ranks: int = 1
) -> tuple[int, int]:
    """Return (rows stored over all chunks, peak of carried rows) of one layer and sample, on the rank with most rows.

    Kv heads with query heads in the same branches differ only at the ends of segments, so one of them is counted. Of
    many chunks, `SAMPLED` random ones and the last ones, which carry the most rows, are counted.
    """
    shard, chosen, live = ChunkShard(0, tokens, chunk, ranks), _ranks(ranks), 0
    stored = dict.fromkeys(chosen, 0.0)
    inner = range(shard.chunks - 1)
    counted = _sampled(inner, SAMPLED)
    for first, count in _classes(pattern, heads, kv_heads):
        problem = _problem(pattern, heads, kv_heads, shard, (first, first + 1))
        for rank in chosen:
            rows = [_leaving(problem, i, rank) for i in counted]
            stored[rank] += count * sum(rows) * len(inner) / max(1, len(rows))
        lived = max(((live_count(problem, shard.begin(i + 1)), i) for i in counted), default=(0, 0))
        if ranks > 1 and lived[0]:
            at = shard.begin(lived[1] + 1)
            lived = max((live_count(problem, at, shard.held(lived[1] * ranks + r)), r) for r in chosen)
        live += count * lived[0]
    return round(max(stored.values())), live


def _problem(pattern: DilatedPattern, heads: int, kv_heads: int, shard: ChunkShard, window: tuple[int, int]) -> Problem:
    """Return the problem of one document in chunks; `window`: (first, stop) of the kv heads."""
    group = heads // kv_heads
    document = [Document(0, 1, 0, shard.stop)]
    return chunk_problem(pattern, heads, kv_heads, document, shard, (window[0] * group, window[1] * group))


def _leaving(problem: Problem, chunk: int, rank: int) -> int:
    """Count the rows of a rank's piece of a chunk that are carried to later chunks."""
    shard = problem.shard
    piece = shard.piece(chunk * shard.each + rank)
    return sum(x.count for x in leaving_rows(problem, piece, shard.begin(chunk + 1)))


def _ranks(ranks: int) -> list[int]:
    """Return the ranks that are counted: all ranks, or `RANKS` evenly spread ranks."""
    return list(range(ranks)) if ranks <= RANKS else sorted({i * (ranks - 1) // (RANKS - 1) for i in range(RANKS)})


def _sampled(chunks: range, most: int) -> Sequence[int]:
    """Return the chunks that are counted: all chunks, or `most` random chunks and the last chunks."""
    if len(chunks) <= most:
        return chunks
    return sorted({*random.Random(0).sample(chunks, most), *chunks[-LAST:]})


class Received(NamedTuple):
    """Rows of one layer and sample that a rank receives. `rows`: the mean over ranks, in one forward over all chunks;
    `last`: the mean over ranks, in the last chunk; `most`: the maximum over chunks and ranks."""

    rows: float
    last: float
    most: int


@functools.lru_cache(maxsize=256)
def received_rows(pattern: DilatedPattern, heads: int, kv_heads: int, tokens: int, chunk: int, ranks: int) -> Received:
    """Count the rows that ranks receive if R ranks share each chunk; see `carried_rows` for the sampling."""
    shard, chosen = ChunkShard(0, tokens, chunk, ranks), _ranks(ranks)
    counted = _sampled(range(shard.chunks), max(LAST, SAMPLED // len(chosen)))
    classes = [(first, first + 1, count) for first, count in _classes(pattern, heads, kv_heads)]
    if len(counted) == shard.chunks and kv_heads * shard.ranks <= EXACT:
        classes = [(0, kv_heads, 1)]
    total, last, most = 0.0, 0.0, 0
    for first, stop, count in classes:
        problem = _problem(pattern, heads, kv_heads, shard, (first, stop))
        rows = [[received_count(problem, i * ranks + r) for r in chosen] for i in counted]
        means = [count * sum(x) / len(x) for x in rows]
        total += sum(means) * shard.chunks / len(means)
        last += means[-1]
        most += count * max(map(max, rows))
    return Received(total, last, most)


@dataclass(frozen=True)
class Exchange:
    """Mean bytes that a rank receives in a step, in all layers, if ranks share the chunks.

    Attributes:
        forward, backward: bytes of keys and values in all forwards, and bytes of their gradients.
        carried: the part of `forward` and `backward` that belongs to rows of earlier chunks.
    """

    forward: float = 0.0
    backward: float = 0.0
    carried: float = 0.0

    @classmethod
    def of(cls, call: OpCall, depth: int, tokens: int, settings: MemorySettings, ranks: int) -> Exchange:
        """Sum over `depth` layers. Forwards run once in the last chunk and with `truncate`, twice in other chunks, and
        again if they are recomputed."""
        if ranks == 1:
            return cls()
        chunk = settings.stream or tokens
        again = (settings.policy == "block") + (settings.every > 1)
        forward = backward = carried = 0.0
        row = 2 * call.head_dim * call.batch * call.dtype.itemsize
        wide = 2 * call.head_dim * call.batch * max(4, call.dtype.itemsize)
        for x, count in call.layers(depth):
            heads = x.pattern, x.heads, x.kv_heads
            got, alone = received_rows(*heads, tokens, chunk, ranks), received_rows(*heads, chunk, chunk, ranks)
            passes = lambda rows, last: (1 + again) * rows + (rows - last) * (not settings.truncate)  # noqa: E731
            forward += count * passes(got.rows, got.last) * row
            backward += count * got.rows * wide
            earlier = max(0.0, got.rows - tokens / chunk * alone.rows)
            carried += count * (passes(earlier, max(0.0, got.last - alone.rows)) * row + earlier * wide)
        return cls(forward, backward, carried)

    def seconds(self, links: Links, ranks: int, per_node: int) -> float:
        """Return the seconds that the links need to transfer carried rows."""
        far = max(0.0, 1 - per_node / ranks)
        return self.carried * ((1 - far) / links.near + far / links.far)


def with_carried(rows: Exchanged, call: OpCall, tokens: int, chunk: int, ranks: int) -> Exchanged:
    """Add rows of earlier chunks to the memory of a chunk's exchange. Layers save received rows. A running call has
    received rows and the rank's carried rows in memory."""
    if ranks == 1:
        return rows
    size, wide = call.dtype.itemsize, max(4, call.dtype.itemsize)
    numbers = 2 * call.head_dim * call.batch
    layers = []
    for one, pattern in zip(cycle_to(rows.cycle, len(call.cycle)), call.cycle, strict=True):
        heads = pattern, call.heads, call.kv_heads
        extra = received_rows(*heads, tokens, chunk, ranks).most - received_rows(*heads, chunk, chunk, ranks).most
        extra, live = max(0, extra) * numbers, carried_rows(*heads, tokens, chunk, ranks)[1] * numbers
        kept, forward = one.kept + extra * size, one.forward + (2 * extra + live) * size
        backward = one.backward + (extra + live) * (size + wide)
        layers.append(replace(one, name="gather", kept=kept, forward=forward, backward=backward, others=()))
    return replace(layers[0], others=tuple(layers[1:]))


def _classes(pattern: DilatedPattern, heads: int, kv_heads: int) -> Iterator[tuple[int, int]]:
    """Yield (a kv head, the number of kv heads with the same branches), once for each set of branches."""
    group = heads // kv_heads
    kinds = [
        tuple(tuple(b.serves(h) for h in range(k * group, (k + 1) * group)) for b in pattern.branches)
        for k in range(kv_heads)
    ]
    for kind, count in Counter(kinds).items():
        yield kinds.index(kind), count


@dataclass(frozen=True)
class Carried:
    """Bytes that all layers carry on a rank. `on_gpu`: a chunk's rows, their gradients and stored rows; `on_host`:
    stored rows beyond the GPU's share."""

    on_gpu: int
    on_host: int

    @classmethod
    def of(
        cls, call: OpCall, depth: int, tokens: int, settings: MemorySettings, gpu_memory: float, ranks: int = 1,
        hashed: Sequence[CarriedBytes] = (),
    ) -> Carried:  # fmt: skip
        """Sum over `depth` layers, and over layers with hashed heads.

        With `truncate`, no rows are stored, and one layer's gradients are in memory.
        """
        size, wide = call.dtype.itemsize, max(4, call.dtype.itemsize)
        stored, live, one = _numbers(call, depth, tokens, settings.stream or tokens, ranks)
        by_code = sum(x.live for x in hashed) + max((x.moved for x in hashed), default=0)
        if settings.truncate:
            return cls((live + one) * size + one * wide + by_code, 0)
        stored = stored * size + sum(x.stored for x in hashed)
        by_code += sum(x.grads for x in hashed)
        stored_on_gpu = min(stored, int(gpu_memory * ON_GPU))
        # a layer that moves to the next chunk has the rows, or gradients, of both chunks in memory
        return cls(live * (size + wide) + one * (size + wide) + by_code + stored_on_gpu, stored - stored_on_gpu)

    @classmethod
    def of_steps(cls, call: OpCall, depth: int, tokens: int, step: int) -> Carried:
        """Sum over `depth` layers for steps on streams of N tokens; a step also keeps the states from before it."""
        size, wide = call.dtype.itemsize, max(4, call.dtype.itemsize)
        _, live, one = _numbers(call, depth, tokens, step)
        return cls((2 * live + one) * size + one * wide, 0)


def _numbers(call: OpCall, depth: int, tokens: int, chunk: int, ranks: int = 1) -> tuple[int, int, int]:
    """Return numbers of elements of carried rows: stored in all chunks, peak of all layers, peak of one layer."""
    row = 2 * call.head_dim * call.batch
    layers = [(carried_rows(x.pattern, x.heads, x.kv_heads, tokens, chunk, ranks), n) for x, n in call.layers(depth)]
    stored, live = (row * sum(n * rows[i] for rows, n in layers) for i in (0, 1))
    return stored, live, row * max(at_a_time for (_, at_a_time), _ in layers)


def further_work(call: OpCall, depth: int, tokens: int, chunk: int) -> tuple[float, float]:
    """Return the (pairs, query rows) of all layers that N tokens have in addition to N / C separate chunks."""
    further = [0.0, 0.0]
    for x, count in call.layers(depth):
        heads = x.heads, x.kv_heads
        for i, work in enumerate((functools.partial(pairs, causal=True), query_rows)):
            further[i] += count * (work(x.pattern, tokens, *heads) - work(x.pattern, chunk, *heads) * tokens / chunk)
    return further[0], further[1]
