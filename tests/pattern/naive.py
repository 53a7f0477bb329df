"""The definition as plain Python loops over integers. It shares no code with the package."""

from itertools import pairwise

from lightning_dilated.pattern import Branch, DilatedPattern
from lightning_dilated.pattern.branch import AnyBranch


def offset(pattern: DilatedPattern, branch: Branch, head: int, heads: int, kv_heads: int) -> int:
    """Return the residue of the positions that `head` uses."""
    if branch.offset is not None:
        return branch.offset
    if pattern.offset_heads == "kv":
        head, heads = head // (heads // kv_heads), kv_heads
    if pattern.offsets == "interleaved":
        return head % branch.dilation_rate
    block = (heads + branch.dilation_rate - 1) // branch.dilation_rate
    return head // block


def segment_of(
    pattern: DilatedPattern, branch: Branch, head: int, position: int, seq_len: int, heads: int, kv_heads: int
) -> int | None:
    """Return the segment in which `head` uses `position`, or None."""
    if branch.heads is not None and head not in branch.heads:
        return None
    if branch.segment_length is None:
        segment, index = 0, position
    else:
        segment, index = divmod(position + branch.shift, branch.segment_length)
    return segment if index % branch.dilation_rate == offset(pattern, branch, head, heads, kv_heads) else None


def global_pair(branch: AnyBranch, p: int, j: int) -> bool:
    """Return whether one of two positions is a global token; without global tokens, every pair is allowed."""
    return branch.tokens is None or p < branch.tokens or j < branch.tokens


def counts(pattern: DilatedPattern, bounds: list[int], heads: int, kv_heads: int, causal: bool) -> list:
    """Return the pair counts c[h][p][j] of packed documents."""
    n = bounds[-1]
    c = [[[0] * n for _ in range(n)] for _ in range(heads)]
    for start, stop in pairwise(bounds):
        for branch in pattern.branches:
            for h in range(heads):
                at = [segment_of(pattern, branch, h, p, stop - start, heads, kv_heads) for p in range(stop - start)]
                for p in range(stop - start):
                    for j in range(stop - start):
                        sees = at[p] is not None and at[p] == at[j] and (j <= p or not causal)
                        if branch.width is not None:
                            sees = sees and abs(p - j) < branch.width * branch.dilation_rate
                        sees = sees and global_pair(branch, p, j)
                        c[h][start + p][start + j] += sees
    return c


def pads(pattern: DilatedPattern, seq_len: int, heads: int, kv_heads: int, branch_index: int | None = None) -> list:
    """Return the numbers of pads n_pad[h][p] without a causal mask, over all branches or for one branch."""
    out = [[0] * seq_len for _ in range(heads)]
    for i, branch in enumerate(pattern.branches):
        if branch_index not in (None, i):
            continue
        width = seq_len if branch.segment_length is None else min(branch.segment_length, seq_len)
        slots = (width + branch.dilation_rate - 1) // branch.dilation_rate
        for h in range(heads):
            at = [segment_of(pattern, branch, h, p, seq_len, heads, kv_heads) for p in range(seq_len)]
            for p in range(seq_len):
                if at[p] is not None:
                    out[h][p] += slots - at.count(at[p])
    return out
