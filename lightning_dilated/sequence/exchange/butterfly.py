"""butterfly: log2 R pairwise steps; after step j a rank holds the rows that branches with segments of 2^j shards read.

Step j pairs a rank with rank XOR 2^(j-1). The two ranks are in different halves of 2^j shards. Each sends the rows of its
half that branches with segments of 2^j or more shards read. A head moves (S/2) log2 R rows (S = w/r rows of a segment).
Offsets must nest: a wide branch must read a subset of the rows of the next narrower branch. In the hierarchical form, a
rank receives a part of the rows that its node needs, and the ranks of the node exchange them over faster links.
"""

from __future__ import annotations

import itertools

from lightning_dilated.pattern.rows import head_rows, segment_width
from lightning_dilated.sequence.exchange.program import Message, Program, Round, RowSet, Volume, count, node_of
from lightning_dilated.sequence.ranges import union
from lightning_dilated.sequence.requirements import Problem


def why_not(problem: Problem, per_node: int) -> str | None:
    shard = problem.shard
    if shard.ranks & (shard.ranks - 1):
        return f"needs a power of two of ranks, not {shard.ranks}"
    if shard.layout != "contiguous":
        return f"needs the contiguous layout, not {shard.layout}"
    if shard.seq_len % shard.total:
        return f"needs equal shards, and {shard.total} ranks do not divide {shard.seq_len} tokens"
    if any((d.start, d.stop) != (0, shard.seq_len) for d in problem.documents):
        return "needs documents as long as the sequence, not packed or padded ones"
    reasons = (_unfit_branch(problem, i) for i in range(len(problem.pattern.branches)))
    return next(filter(None, reasons), None) or _not_nested(problem)


def _unfit_branch(problem: Problem, number: int) -> str | None:
    """Return the reason why the segments of a branch do not fit the shards, or None."""
    branch = problem.pattern.branches[number]
    place, entry = problem.pattern.listed(number)
    local = problem.shard.seq_len // problem.shard.ranks
    width = segment_width(branch, problem.shard.seq_len)
    if branch.width is not None or branch.tokens is not None:
        return f"needs segments, and branches[{place}] is {entry}"
    if branch.shift:
        return f"needs branches without a shift, and branches[{place}] has shift={branch.shift}"
    if width <= local:
        if local % width:
            return f"branches[{place}]: its segments of {width} tokens do not divide the {local} tokens of a rank"
        return None
    if width % local or (width // local) & (width // local - 1):
        return f"branches[{place}]: segments of {width} tokens are not {local} (tokens of a rank) times a power of two"
    if width % branch.dilation_rate and width < problem.shard.seq_len:
        return f"branches[{place}]: dilation_rate={branch.dilation_rate} does not divide segment_length={width}"
    return None


def _not_nested(problem: Problem) -> str | None:
    for head in range(*problem.heads):
        chain = wide_branches(problem, head)
        for (_, rate, offset, i), (_, wider_rate, wider_offset, j) in itertools.pairwise(chain):
            if wider_rate % rate or (wider_offset - offset) % rate:
                i, j = (problem.pattern.listed(x)[0] for x in (i, j))
                return (
                    f"needs offsets that nest, and head {head} uses index {wider_offset} mod {wider_rate} in branches[{j}] "
                    f"but {offset} mod {rate} in branches[{i}]"
                )
    return None


def wide_branches(problem: Problem, head: int) -> list[tuple[int, int, int, int]]:
    """Return (w, r, o, number) of a head's branches that are wider than a shard, narrowest first."""
    length = problem.shard.seq_len
    local = length // problem.shard.ranks
    wide = []
    for i, branch in enumerate(problem.pattern.branches):
        width = segment_width(branch, length)
        if width > local and branch.serves(head):
            wide.append((width, branch.dilation_rate, problem.offset(i, head), i))
    return sorted(wide)


def program(problem: Problem, rank: int, per_node: int) -> Program:
    """Return a program of log2 R rounds."""
    levels = range(1, problem.shard.ranks.bit_length())
    return Program([_swap(problem, rank, rank ^ (1 << (level - 1)), level) for level in levels])


def _swap(problem: Problem, rank: int, partner: int, level: int, share: tuple[int, int] = (0, 1)) -> Round:
    step = Round()
    step.send(partner, half(problem, rank, level, share))
    step.receive(partner, half(problem, partner, level, share))
    return step


def half(problem: Problem, rank: int, level: int, share: tuple[int, int] = (0, 1)) -> Message:
    """Return the rows of a rank's half of 2^`level` shards; with `share` = (i, m) only every m-th row, from row i on."""
    local = problem.shard.seq_len // problem.shard.ranks
    start = (rank >> (level - 1) << (level - 1)) * local
    stop = start + (local << (level - 1))
    out: Message = []
    for document in problem.documents:
        for kv_head in range(*problem.kv_heads):
            rows = {_rows(problem, head, level, start, stop) for head in _query_heads(problem, kv_head)}
            out += [RowSet(document, kv_head, x[share[0] :: share[1]]) for x in union(rows)]
    return [rows for rows in out if rows.rows]


def _query_heads(problem: Problem, kv_head: int) -> list[int]:
    first, stop = problem.heads
    return [h for h in range(kv_head * problem.group, (kv_head + 1) * problem.group) if first <= h < stop]


def _rows(problem: Problem, head: int, level: int, start: int, stop: int) -> range:
    """Return the rows in [start, stop) of a head's narrowest branch with segments of at least 2^level shards."""
    local = problem.shard.seq_len // problem.shard.ranks
    for width, rate, offset, _ in wide_branches(problem, head):
        if width >= local << level:
            return head_rows(start, stop, start // width * width, rate, offset)
    return range(0)


def volume(problem: Problem, rank: int, per_node: int) -> Volume:
    levels = problem.shard.ranks.bit_length() - 1
    total = Volume(rounds=2 * levels, messages=2 * levels)
    node = node_of(rank, per_node, problem.shard.ranks)
    for level in range(1, levels + 1):
        partner = rank ^ (1 << (level - 1))
        total.add_rows(partner not in node, count(half(problem, partner, level)))
    return total


def hierarchical_why_not(problem: Problem, per_node: int) -> str | None:
    if per_node == 1 or problem.shard.ranks <= per_node:
        return f"needs several nodes of several ranks, and has {problem.shard.ranks} ranks, {per_node} a node"
    if per_node & (per_node - 1):
        return f"needs a power of two of ranks a node, not {per_node}"
    return why_not(problem, per_node)


def hierarchical_program(problem: Problem, rank: int, per_node: int) -> Program:
    """As `program`, but each rank of a node receives a part of another node's rows, and passes it on in its node."""
    rounds, inside = [], per_node.bit_length() - 1
    node, number = divmod(rank, per_node)
    for level in range(1, problem.shard.ranks.bit_length()):
        partner = rank ^ (1 << (level - 1))
        rounds.append(_swap(problem, rank, partner, level, (number, per_node) if level > inside else (0, 1)))
        if level > inside:
            rounds.append(_spread(problem, rank, partner, level, range(node * per_node, (node + 1) * per_node)))
    return Program(rounds)


def _spread(problem: Problem, rank: int, partner: int, level: int, mates: range) -> Round:
    """Pass the rows that each rank of a node just received to the other ranks of the node."""
    step = Round()
    for mate in mates:
        if mate != rank:
            step.send(mate, half(problem, partner, level, (rank % len(mates), len(mates))))
            step.receive(mate, half(problem, partner, level, (mate % len(mates), len(mates))))
    return step


def hierarchical_volume(problem: Problem, rank: int, per_node: int) -> Volume:
    levels, inside = problem.shard.ranks.bit_length() - 1, per_node.bit_length() - 1
    above = max(0, levels - inside)
    total = Volume(rounds=2 * (levels + above), messages=2 * (levels + above * (per_node - 1)))
    for level in range(1, levels + 1):
        partner = rank ^ (1 << (level - 1))
        everything = count(half(problem, partner, level))
        carried = count(half(problem, partner, level, (rank % per_node, per_node))) if level > inside else everything
        total.add_rows(level > inside, carried)
        total.add_rows(False, everything - carried)
    return total
