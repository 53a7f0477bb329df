"""The definition of dilated attention as explicit counts over (head, query, key): short, slow, never optimised.

The rows of a branch as rectangular blocks: segments x heads x rows, each an arithmetic progression of positions.

A block is what one kernel call serves: in a strided view of (B, N, H, D) its head stride may move along the sequence too,
so that heads of different offsets share one call (row i of head j in segment s is position first + s*w + j*step + i*r).

Shape letters: H heads, N tokens. Everything else in the package is tested against what these functions say, w segment
length, r dilation rate, o offset.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lightning_dilated._validation import flag, integer

if TYPE_CHECKING:
    from lightning_dilated.pattern.pattern import Branch, DilatedPattern


def used_index(pattern: DilatedPattern, branch_index: int, seq_len: int, num_heads: int, num_kv_heads: int | None):
    """(segment of p, is p used by h): (N,) int64 and (H, N) bool for one branch over one document."""
    branch = pattern.branches[branch_index]
    position = torch.arange(seq_len) + branch.shift
    width = seq_len if branch.segment_length is None else branch.segment_length
    segment, index = position // max(width, 1), position % max(width, 1)
    used = torch.zeros(num_heads, seq_len, dtype=torch.bool)
    for head in range(num_heads):
        if branch.heads is None or head in branch.heads:
            offset = pattern.offset(branch, head, num_heads, num_kv_heads)
            used[head] = index % branch.dilation_rate == offset
    return segment, used


def check_bounds(bounds: list[int], seq_len: int) -> list[int]:
    """`bounds` of packed documents, or an error unless they rise from 0 to the number of tokens."""
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != seq_len or any(b < a for a, b in itertools.pairwise(bounds)):
        shown = str(bounds) if len(bounds) <= 8 else f"[{', '.join(map(str, bounds[:4]))}, ..., {bounds[-1]}]"
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens ({seq_len}), a bound a document and the end; got {shown}."
        )
    return bounds


def counts(
    pattern: DilatedPattern,
    seq_len: int,
    num_heads: int,
    causal: bool,
    num_kv_heads: int | None = None,
    cu_seqlens: Sequence[int] | torch.Tensor | None = None,
) -> torch.Tensor:
    """c(p, j, h) as (H, N, N) int64; see `DilatedPattern.counts`."""
    seq_len = integer(seq_len, "seq_len", 0)
    pattern.check_heads(num_heads, num_kv_heads)
    flag(causal, "causal")
    bounds = [0, seq_len] if cu_seqlens is None else check_bounds([int(x) for x in cu_seqlens], seq_len)
    total = torch.zeros(num_heads, seq_len, seq_len, dtype=torch.int64)
    for start, stop in itertools.pairwise(bounds):
        for i in range(len(pattern.branches)):
            segment, used = used_index(pattern, i, stop - start, num_heads, num_kv_heads)
            together = (segment[:, None] == segment[None, :]) & used[:, :, None] & used[:, None, :]
            total[:, start:stop, start:stop] += together
    return total.tril() if causal else total


def pads(
    pattern: DilatedPattern, seq_len: int, num_heads: int, causal: bool, num_kv_heads: int | None = None
) -> torch.Tensor:
    """(H, N) int64: the zero keys that a released checkpoint let query p of head h see, summed over branches.

    0 everywhere unless `padding="attended"` and not causal. In a branch that holds (p, h): ceil(w'/r) less the keys of h
    that are really in p's segment, w' = min(w, N).
    """
    total = torch.zeros(num_heads, seq_len, dtype=torch.int64)
    if pattern.padding != "attended" or causal:
        return total
    for i, branch in enumerate(pattern.branches):
        segment, used = used_index(pattern, i, seq_len, num_heads, num_kv_heads)
        width = seq_len if branch.segment_length is None else min(branch.segment_length, seq_len)
        slots = -(-width // branch.dilation_rate)
        for p in range(seq_len):
            keys = (used & (segment == segment[p])).sum(1)
            total[:, p] += torch.where(used[:, p], slots - keys, 0)
    return total


@dataclass(frozen=True)
class Block:
    """`segments` x `heads` x `rows` positions; `pads` zero keys are attended beside the rows (padding="attended")."""

    branch: int
    first: int
    segments: int
    segment_stride: int
    rows: int
    row_stride: int
    heads: int
    head: int
    head_step: int
    kv_head: int
    kv_head_step: int
    position_step: int
    pads: int

    def pairs(self, causal: bool) -> int:
        """(query, key) pairs of the block."""
        per_head = self.rows * (self.rows + 1) // 2 if causal else self.rows * self.rows
        return self.segments * self.heads * per_head


@dataclass(frozen=True)
class _HeadRows:
    """One head's rows in a class of equal segments, before heads are joined."""

    head: int
    kv_head: int
    first: int
    rows: int
    pads: int


def check_padding(pattern: DilatedPattern, seq_len: int) -> None:
    """Raise where padding="attended" is not defined: segments that r does not divide, and more than one of them."""
    if pattern.padding != "attended":
        return
    for i, branch in enumerate(pattern.branches):
        width = seq_len if branch.segment_length is None else min(branch.segment_length, seq_len)
        if width % branch.dilation_rate and seq_len > width:
            raise ValueError(
                f"branches[{i}] of padding='attended': segment_length={branch.segment_length} is not a multiple of "
                f"dilation_rate={branch.dilation_rate} and the sequence of {seq_len} tokens needs more than one segment; "
                "the released code returns shifted positions there. Use padding='masked', or a rate that divides."
            )


def segments_of(width: int, shift: int, seq_len: int) -> Iterator[tuple[int, int, int, int]]:
    """(start, count, length, first index) of each class of equal segments: a short first one, whole ones, the tail."""
    start = 0
    if shift:
        start = min(width - shift, seq_len)
        yield 0, 1, start, shift
    whole = (seq_len - start) // width
    if whole:
        yield start, whole, width, 0
    tail = start + whole * width
    if tail < seq_len:
        yield tail, 1, seq_len - tail, 0


def place(branch: Branch, seq_len: int) -> tuple[int, int]:
    """(segment length, shift) of a branch over a document, with a segment that reaches beyond it cut to its length."""
    # a segment longer than shift + N holds the same positions as one of exactly that length
    reach = seq_len + branch.shift
    return (reach if branch.segment_length is None else min(branch.segment_length, reach)), branch.shift


def segment_bounds(width: int, shift: int, seq_len: int, position: int) -> tuple[int, int, int]:
    """(start, stop, first) of the segment of `position`: its positions, and the position of its index 0 (may be below 0)."""
    first = (position + shift) // width * width - shift
    return max(first, 0), min(first + width, seq_len), first


def count_rows(start: int, stop: int, rate: int, residue: int) -> int:
    """How many p in [start, stop) have p mod rate == residue mod rate."""
    return max(0, (stop - 1 - residue) // rate - (start - 1 - residue) // rate)


@functools.lru_cache(maxsize=4096)
def blocks(
    pattern: DilatedPattern,
    seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    part: tuple[int, int] | None = None,
    heads: tuple[int, int] | None = None,
    whole: bool = False,
) -> tuple[Block, ...]:
    """All blocks of one document of `seq_len` tokens, branch by branch. No block is empty, no row is uncovered.

    `part` = (start, stop) takes only those positions, with segments cut at its ends and rows counted from its start; with
    `whole`, segments that it cuts are left out. `heads` = (first, stop) takes only those query heads, numbered from `first`
    (and kv heads from that of `first`). n_pad of a cut segment is that of the whole one.
    """
    check_padding(pattern, seq_len)
    start, stop = part or (0, seq_len)
    window = range(*(heads or (0, num_heads)))
    if start == stop or not window:
        return ()
    out: list[Block] = []
    group = num_heads // num_kv_heads
    kv_first = window.start // group
    for i, branch in enumerate(pattern.branches):
        width, shift = place(branch, seq_len)
        rate = branch.dilation_rate
        served = [h for h in window if branch.heads is None or h in branch.heads]
        offsets = [(h, pattern.offset(branch, h, num_heads, num_kv_heads)) for h in served]
        for begin, count, length, index in segments_of(width, (start + shift) % width, stop - start):
            low, high, first = segment_bounds(width, shift, seq_len, start + begin)
            if whole and (low < start or high > stop):
                continue
            rows = []
            for h, offset in offsets:
                skip = (offset - index) % rate
                n = -(-(length - skip) // rate) if skip < length else 0
                if n:
                    keys = count_rows(low, high, rate, first + offset)
                    pad = -(-min(width, seq_len) // rate) - keys if pattern.padding == "attended" else 0
                    rows.append(_HeadRows(h - window.start, h // group - kv_first, begin + skip, n, pad))
            for run in _runs(tuple(rows), _strides(num_heads, num_kv_heads, rate)):
                out.append(_block(i, run, count, width, rate))
    return tuple(out)


def pairs(
    pattern: DilatedPattern,
    seq_len: int,
    num_heads: int,
    num_kv_heads: int | None,
    causal: bool,
    heads: tuple[int, int] | None = None,
) -> int:
    """(query, key) pairs over all heads, or (first, stop) of them, and branches: 4*D of them are the forward FLOPs, 10*D the
    backward ones."""
    return sum(b.pairs(causal) for b in blocks(pattern, seq_len, num_heads, num_kv_heads or num_heads, heads=heads))


def _block(branch: int, run: list[_HeadRows], segments: int, width: int, rate: int) -> Block:
    a, b = run[0], run[1] if len(run) > 1 else run[0]
    return Block(
        branch=branch,
        first=a.first,
        segments=segments,
        segment_stride=width,
        rows=a.rows,
        row_stride=rate,
        heads=len(run),
        head=a.head,
        head_step=b.head - a.head,
        kv_head=a.kv_head,
        kv_head_step=b.kv_head - a.kv_head,
        position_step=b.first - a.first,
        pads=a.pads,
    )


def _strides(num_heads: int, num_kv_heads: int, rate: int) -> tuple[int, ...]:
    """Head strides worth trying: neighbours, equal offsets of either rule, and kv groups."""
    group = num_heads // num_kv_heads
    tries = {1, rate, group, group * rate, -(-num_heads // rate), group * -(-num_kv_heads // rate)}
    return tuple(sorted(t for t in tries if 1 <= t <= num_heads))


@functools.lru_cache(maxsize=16384)
def _runs(rows: tuple[_HeadRows, ...], strides: tuple[int, ...]) -> tuple[list[_HeadRows], ...]:
    """Fewest groups of heads that one strided view can hold: equal steps of head, kv head and first position."""
    best: list[list[_HeadRows]] | None = None
    for stride in strides:
        runs: list[list[_HeadRows]] = []
        for lane in range(stride):
            runs.extend(_lane(stride, [row for row in rows if row.head % stride == lane]))
        if best is None or len(runs) < len(best):
            best = runs
    return tuple(best or ())


def _lane(stride: int, rows: list[_HeadRows]) -> list[list[_HeadRows]]:
    """Split heads of one lane (head mod stride) into arithmetic runs, from the left."""
    runs: list[list[_HeadRows]] = []
    for row in rows:
        if runs and _continues(runs[-1], row, stride):
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _continues(run: list[_HeadRows], row: _HeadRows, stride: int) -> bool:
    last = run[-1]
    step = (row.kv_head - last.kv_head, row.first - last.first)
    if row.head - last.head != stride or (row.rows, row.pads) != (last.rows, last.pads) or step[1] < 0:
        return False  # torch has no negative strides, so positions may only grow along a run
    return len(run) == 1 or step == (last.kv_head - run[-2].kv_head, last.first - run[-2].first)
