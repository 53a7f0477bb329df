"""butterfly: log2 R pairwise steps; after step j a rank holds the rows of every branch that are 2^j shards wide.

Step j pairs a rank with rank XOR 2^(j-1): each sends the rows it holds of its half of the segment that the next wider branch
uses, so that (S/2) log2 R rows a head suffice (S = w/r rows of a segment). It needs offsets that nest: each wide branch's
rows lie among those of the one before.
"""

from __future__ import annotations

import itertools

from lightning_dilated.pattern.rows import place
from lightning_dilated.sequence.exchange.program import Count, Message, Piece, Program, Round, count, node_of
from lightning_dilated.sequence.ranges import union
from lightning_dilated.sequence.requirements import Problem


def why_not(problem: Problem, per_node: int) -> str | None:
    """None, or the condition that fails."""
    shard = problem.shard
    if shard.ranks & (shard.ranks - 1):
        return f"needs a power of two of ranks, not {shard.ranks}"
    if shard.layout != "contiguous":
        return f"needs the contiguous layout, not {shard.layout}"
    if shard.seq_len % (shard.ranks * shard.members):
        return f"needs equal shards, and {shard.ranks * shard.members} ranks do not divide {shard.seq_len} tokens"
    if any((d.start, d.stop) != (0, shard.seq_len) for d in problem.documents):
        return "needs documents as long as the sequence, not packed or padded ones"
    local = shard.seq_len // shard.ranks
    for i, branch in enumerate(problem.pattern.branches):
        width, _ = place(branch, shard.seq_len)
        if branch.shift:
            return f"needs branches without a shift, and branches[{i}] has shift={branch.shift}"
        if width <= local:
            if local % width:
                return f"branches[{i}]: its segments of {width} tokens do not divide the {local} tokens of a rank"
            continue
        if width % local or (width // local) & (width // local - 1):
            return f"branches[{i}]: segments of {width} tokens are no power of two of the {local} tokens of a rank"
        if width % branch.dilation_rate and width < shard.seq_len:
            return f"branches[{i}]: dilation_rate={branch.dilation_rate} does not divide segment_length={width}"
    return _not_nested(problem)


def _not_nested(problem: Problem) -> str | None:
    """Whether some head's wide branches do not nest."""
    for head in range(*problem.heads):
        chain = wide_branches(problem, head)
        for (_, rate, offset, i), (_, wider_rate, wider_offset, j) in itertools.pairwise(chain):
            if wider_rate % rate or (wider_offset - offset) % rate:
                return (
                    f"needs offsets that nest, and head {head} uses index {wider_offset} mod {wider_rate} in branches[{j}] "
                    f"but {offset} mod {rate} in branches[{i}]"
                )
    return None


def wide_branches(problem: Problem, head: int) -> list[tuple[int, int, int, int]]:
    """(w, r, o, number) of the branches of a head that are wider than a shard, from the narrowest."""
    length = problem.shard.seq_len
    local = length // problem.shard.ranks
    found = []
    for i, branch in enumerate(problem.pattern.branches):
        width, _ = place(branch, length)
        if width > local and (branch.heads is None or head in branch.heads):
            offset = problem.pattern.offset(branch, head, problem.num_heads, problem.num_kv_heads)
            found.append((width, branch.dilation_rate, offset, i))
    return sorted(found)


def program(problem: Problem, rank: int, per_node: int) -> Program:
    """log2 R rounds."""
    rounds = []
    for level in range(1, problem.shard.ranks.bit_length()):
        partner = rank ^ (1 << (level - 1))
        step = Round()
        step.send(partner, half(problem, rank, level))
        step.receive(partner, half(problem, partner, level))
        rounds.append(step)
    return Program(rounds)


def half(problem: Problem, rank: int, level: int, share: tuple[int, int] = (0, 1)) -> Message:
    """The rows of a rank's half of its segment of 2^level shards that any branch so wide uses.

    `share` = (i, m) takes every m-th of them from the i-th on.
    """
    local = problem.shard.seq_len // problem.shard.ranks
    start = (rank >> (level - 1) << (level - 1)) * local
    stop = start + (local << (level - 1))
    out: Message = []
    for document in problem.documents:
        for kv_head in range(*problem.kv_heads):
            rows = {_rows(problem, head, level, start, stop) for head in _readers(problem, kv_head)}
            out += [Piece(document, kv_head, x[share[0] :: share[1]]) for x in union(rows)]
    return [piece for piece in out if piece.rows]


def _readers(problem: Problem, kv_head: int) -> list[int]:
    first, stop = problem.heads
    return [h for h in range(kv_head * problem.group, (kv_head + 1) * problem.group) if first <= h < stop]


def _rows(problem: Problem, head: int, level: int, start: int, stop: int) -> range:
    """The rows in [start, stop) of a head's narrowest branch that is at least 2^level shards wide; the wider ones nest."""
    local = problem.shard.seq_len // problem.shard.ranks
    for width, rate, offset, _ in wide_branches(problem, head):
        if width >= local << level:
            low = start // width * width + offset
            return range(low + -((low - start) // rate) * rate, stop, rate)
    return range(0)


def rows(problem: Problem, rank: int, per_node: int) -> Count:
    """What a rank receives."""
    levels = problem.shard.ranks.bit_length() - 1
    found = Count(rounds=2 * levels, messages=2 * levels)
    for level in range(1, levels + 1):
        partner = rank ^ (1 << (level - 1))
        found.add_rows(
            partner not in node_of(rank, per_node, problem.shard.ranks), count(half(problem, partner, level))
        )
    return found
