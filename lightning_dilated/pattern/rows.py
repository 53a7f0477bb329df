"""Geometry of a pattern: the positions that a head uses in each segment, by the definition and as strided blocks.

All other code takes segments, rows and padded keys from here. `counts` and `pads` state the definition and are never
optimised: everything else is tested against them.
Shape letters: H query heads, N tokens of a document, w segment length, r dilation rate, t shift, o offset.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_dilated._validation import flag, integer

if TYPE_CHECKING:
    from lightning_dilated.pattern.branch import AnyBranch
    from lightning_dilated.pattern.pattern import DilatedPattern


def cycle_to(patterns: Sequence[Any], depth: int) -> tuple[Any, ...]:
    """Repeat a list of patterns over `depth` layers."""
    return tuple(patterns[i % len(patterns)] for i in range(depth))


def shortest_cycle(patterns: Sequence[Any]) -> tuple[Any, ...]:
    """Return the shortest prefix that gives the list when it is repeated."""
    lengths = (n for n in range(1, len(patterns)) if all(x == patterns[i % n] for i, x in enumerate(patterns)))
    return tuple(patterns[: next(lengths, len(patterns))])


# -- segments and rows -------------------------------------------------------------------------------------------------
class Segment(NamedTuple):
    """Positions [start, stop) of a segment in its document; `first` is the position of index 0, negative if a shift
    cuts the segment."""

    start: int
    stop: int
    first: int


def segment_width(branch: AnyBranch, seq_len: int) -> int:
    """Return w of a branch, limited to N + t, because a longer segment would contain no more positions."""
    longest = seq_len + branch.shift
    return longest if branch.segment_length is None else min(branch.segment_length, longest)


def window_reach(branch: AnyBranch) -> int | None:
    """Return width * r for a window, which sees only keys at smaller distances; None for other branches."""
    return None if branch.width is None else branch.width * branch.dilation_rate


def window_band(branch: AnyBranch, causal: bool) -> tuple[int, int] | None:
    """Return (lower, upper) of a window: query row i sees key rows i + lower to i + upper. None for other branches."""
    return None if branch.width is None else (1 - branch.width, 0 if causal else branch.width - 1)


def windowed(pattern: DilatedPattern) -> list[AnyBranch]:
    """Return the windows in the user's list of branches."""
    return list(dict.fromkeys(pattern.listed(i)[1] for i, b in enumerate(pattern.branches) if b.width is not None))


def global_tokens(pattern: DilatedPattern) -> list[AnyBranch]:
    """Return the branches with global tokens."""
    return [b for b in pattern.branches if b.tokens is not None]


def without_global(pattern: DilatedPattern) -> DilatedPattern | None:
    """Return the pattern without branches of global tokens; None if it has no other branches."""
    branches = tuple(b for b in pattern.branches if b.tokens is None)
    return None if not branches else pattern if branches == pattern.branches else replace(pattern, branches=branches)


def dense_branches(pattern: DilatedPattern) -> list[AnyBranch]:
    """Return the undilated branches over the whole sequence if no other branch serves their heads."""
    uses = Counter(head for b in pattern.branches for head in b.heads or ())
    if len(pattern.branches) > 1 and any(b.heads is None for b in pattern.branches):
        return []
    whole = [b for b in pattern.branches if not (b.segment_length or b.width or b.tokens or b.dilation_rate > 1)]
    return [b for b in whole if all(uses[head] == 1 for head in b.heads or ())]


def dense_kv_heads(pattern: DilatedPattern, num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
    """Return the kv heads of the query heads that `dense_branches` serve.

    Raises:
        ValueError: if other query heads share these kv heads.
    """
    dense = {head for b in dense_branches(pattern) for head in (range(num_heads) if b.heads is None else b.heads)}
    group = num_heads // num_kv_heads
    kv_heads = sorted({head // group for head in dense})
    if len(dense) < group * len(kv_heads):
        raise ValueError(
            f"global_rotary=False needs whole groups of dense heads: query heads {sorted(dense)} are dense, and some share "
            f"their kv head ({group} query heads each) with other heads. Name whole groups, or set global_rotary=True."
        )
    return tuple(kv_heads)


def segment_at(branch: AnyBranch, seq_len: int, position: int) -> Segment:
    """Return the segment of a branch that contains a position."""
    width = segment_width(branch, seq_len)
    first = (position + branch.shift) // width * width - branch.shift
    return Segment(max(first, 0), min(first + width, seq_len), first)


def segment_classes(width: int, shift: int, length: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start, number, tokens, first index) of a cut first segment, full segments and a cut last segment."""
    start = 0
    if shift:
        start = min(width - shift, length)
        yield 0, 1, start, shift
    whole = (length - start) // width
    if whole:
        yield start, whole, width, 0
    tail = start + whole * width
    if tail < length:
        yield tail, 1, length - tail, 0


def head_rows(start: int, stop: int, first: int, rate: int, offset: int) -> range:
    """Return the positions p in [start, stop) that a head with this offset uses: (p - first) mod r == o."""
    return range(start + (first + offset - start) % rate, stop, rate)


def padded_keys(pattern: DilatedPattern, branch: AnyBranch, seq_len: int, keys: int) -> int:
    """Return n_pad, the number of zero keys of a head with `keys` keys in a segment: ceil(min(w, N) / r) - keys.

    It is 0 unless padding="attended". Callers omit pads from causal attention, because all pads follow the queries.
    """
    if pattern.padding != "attended":
        return 0
    return -(-segment_width(branch, seq_len) // branch.dilation_rate) - keys


def check_padding(pattern: DilatedPattern, seq_len: int) -> None:
    """Raise ValueError for padding="attended" with several segments if r does not divide their length."""
    if pattern.padding != "attended":
        return
    for i, branch in enumerate(pattern.branches):
        width = segment_width(branch, seq_len)
        if width % branch.dilation_rate and seq_len > width:
            raise ValueError(
                f"branches[{i}] of padding='attended': segment_length={branch.segment_length} is not a multiple of "
                f"dilation_rate={branch.dilation_rate} and the sequence of {seq_len} tokens needs more than one segment; "
                "the released code returns shifted positions there. Use padding='masked', or a rate that divides."
            )


# -- the definition ----------------------------------------------------------------------------------------------------
def segment_index(branch: AnyBranch, seq_len: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (segment number, index in the segment) of int64 positions."""
    width = seq_len + branch.shift if branch.segment_length is None else branch.segment_length
    return (positions + branch.shift) // max(width, 1), (positions + branch.shift) % max(width, 1)


def used_index(pattern: DilatedPattern, branch_index: int, seq_len: int, num_heads: int, num_kv_heads: int | None):
    """Return segment[p], (N,) int64, and used[h, p], (H, N) bool, for one branch over one document."""
    branch = pattern.branches[branch_index]
    segment, index = segment_index(branch, seq_len, torch.arange(seq_len))
    used = torch.zeros(num_heads, seq_len, dtype=torch.bool)
    for head in filter(branch.serves, range(num_heads)):
        used[head] = index % branch.dilation_rate == pattern.offset(branch, head, num_heads, num_kv_heads)
    return segment, used


def seen_within(branch: AnyBranch, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | bool:
    """Return whether each query position sees each key position of its segment; True if all do."""
    if (reach := window_reach(branch)) is not None:
        return (query - key).abs() < reach
    return True if branch.tokens is None else (query < branch.tokens) | (key < branch.tokens)


def check_bounds(bounds: list[int], seq_len: int) -> list[int]:
    """Return `bounds` of packed documents; raise ValueError unless they rise from 0 to the number of tokens."""
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != seq_len or any(b < a for a, b in itertools.pairwise(bounds)):
        shown = str(bounds) if len(bounds) <= 8 else f"[{', '.join(map(str, bounds[:4]))}, ..., {bounds[-1]}]"
        raise ValueError(
            f"cu_seqlens must rise from 0 to the number of tokens ({seq_len}) and list every document's end; got {shown}."
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
    """Return c(p, j, h) as (H, N, N) int64; see `DilatedPattern.counts`."""
    seq_len = integer(seq_len, "seq_len", 0)
    pattern.check_heads(num_heads, num_kv_heads)
    flag(causal, "causal")
    bounds = [0, seq_len] if cu_seqlens is None else check_bounds([int(x) for x in cu_seqlens], seq_len)
    total = torch.zeros(num_heads, seq_len, seq_len, dtype=torch.int64)
    for start, stop in itertools.pairwise(bounds):
        for i in range(len(pattern.branches)):
            segment, used = used_index(pattern, i, stop - start, num_heads, num_kv_heads)
            together = (segment[:, None] == segment[None, :]) & used[:, :, None] & used[:, None, :]
            position = torch.arange(stop - start)
            together &= seen_within(pattern.branches[i], position[:, None], position[None, :])
            total[:, start:stop, start:stop] += together
    return total.tril() if causal else total


def pads(
    pattern: DilatedPattern, seq_len: int, num_heads: int, causal: bool, num_kv_heads: int | None = None
) -> torch.Tensor:
    """Return (H, N) int64: the number of zero keys that query p of head h sees in a released checkpoint.

    It is 0 unless `padding="attended"` and attention is not causal. Each branch in which head h uses position p adds
    ceil(w'/r) minus the number of keys of h in p's segment, where w' = min(w, N).
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


def row_pairs(rows: int, width: int | None, causal: bool) -> int:
    """Return the number of (query, key) pairs among `rows` rows of a head; `width` limits them to a window."""
    width = rows if width is None else min(width, rows)
    causal_pairs = width * (width + 1) // 2 + (rows - width) * width
    return causal_pairs if causal else 2 * causal_pairs - rows


# -- blocks ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Block:
    """`segments` x `heads` x `rows` positions that one kernel call serves.

    Row i of head j in segment s is position first + s * segment_stride + j * position_step + i * row_stride. In a
    strided view of (B, N, H, D) the next head may be at another position, so heads with different offsets share a call.
    Each row also sees `pads` zero keys (padding="attended"). With a `width`, row i sees row j only if |i - j| < width.
    With `keys` = (first, n), each row sees the n positions from `first` instead of the block's rows, or no key if
    attention is causal and the keys follow the block's rows.
    """

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
    width: int | None = None
    keys: tuple[int, int] | None = None

    @property
    def key_rows(self) -> int:
        """Return the number of key rows of a head in a segment."""
        return self.rows if self.keys is None else self.keys[1]

    @property
    def query_rows(self) -> int:
        """Return the number of query rows of all heads and segments."""
        return self.segments * self.heads * self.rows

    def pairs(self, causal: bool) -> int:
        """Return the number of (query, key) pairs."""
        if self.keys is not None:
            unseen = causal and self.keys[0] > self.first
            return 0 if unseen else self.segments * self.heads * self.rows * self.keys[1]
        return self.segments * self.heads * row_pairs(self.rows, self.width, causal)


@dataclass(frozen=True)
class _HeadRows:
    """Rows of one head in a class of equal segments; heads are joined into blocks later."""

    head: int
    kv_head: int
    first: int
    rows: int
    pads: int


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
    """Return all blocks of one document of `seq_len` tokens, branch by branch. No block is empty.

    `part` = (start, stop) limits the blocks to these positions: segments are cut at its ends, and rows are counted from
    its start. `whole` omits the cut segments; otherwise a cut segment has as much padding as the whole segment. `heads`
    = (first, stop) limits the blocks to these query heads, and counts heads from `first` and kv heads from its kv head.
    """
    check_padding(pattern, seq_len)
    start, stop = part or (0, seq_len)
    window = range(*(heads or (0, num_heads)))
    if start == stop or not window:
        return ()
    group = num_heads // num_kv_heads
    out: list[Block] = []
    for i, branch in enumerate(pattern.branches):
        if branch.tokens is not None:
            numbers = [(h - window.start, h // group - window.start // group) for h in window if branch.serves(h)]
            cut = whole and (start, stop) != (0, seq_len)
            out += () if cut else _global_blocks(i, branch.tokens, (start, stop), numbers, num_heads, num_kv_heads)
            continue
        width, rate = segment_width(branch, seq_len), branch.dilation_rate
        offsets = [(h, pattern.offset(branch, h, num_heads, num_kv_heads)) for h in window if branch.serves(h)]
        strides, attended = _head_strides(num_heads, num_kv_heads, rate), pattern.padding == "attended"
        for begin, segments, length, _ in segment_classes(width, (start + branch.shift) % width, stop - start):
            segment = segment_at(branch, seq_len, start + begin)
            if whole and (segment.start < start or segment.stop > stop):
                continue
            all_rows = []
            for h, offset in offsets:
                rows = head_rows(start + begin, start + begin + length, segment.first, rate, offset)
                if rows:
                    keys = head_rows(*segment, rate, offset)
                    zero_keys = padded_keys(pattern, branch, seq_len, len(keys)) if attended else 0
                    number, kv_number = h - window.start, h // group - window.start // group
                    all_rows.append(_HeadRows(number, kv_number, rows.start - start, len(rows), zero_keys))
            runs = _runs(tuple(all_rows), strides)
            out += (_block(i, run, segments, width, rate, branch.width) for run in runs)
    return tuple(out)


def _global_blocks(
    branch: int, tokens: int, part: tuple[int, int], heads: list[tuple[int, int]], num_heads: int, num_kv_heads: int
) -> Iterator[Block]:
    """Yield blocks of the (head, kv head) pairs in `heads`: global rows with global keys, local rows with global keys,
    and global rows with local keys."""
    length, edge = part[1] - part[0], min(max(tokens - part[0], 0), part[1] - part[0])
    global_rows, local_rows = (0, edge), (edge, length - edge)
    for rows, keys in ((global_rows, None), (local_rows, global_rows), (global_rows, local_rows)):
        if rows[1] and (keys is None or keys[1]):
            all_rows = tuple(_HeadRows(h, kv_head, rows[0], rows[1], 0) for h, kv_head in heads)
            for run in _runs(all_rows, _head_strides(num_heads, num_kv_heads, 1)):
                yield replace(_block(branch, run, 1, length, 1, None), keys=keys)


def pairs(
    pattern: DilatedPattern,
    seq_len: int,
    num_heads: int,
    num_kv_heads: int | None,
    causal: bool,
    heads: tuple[int, int] | None = None,
) -> int:
    """Return the number of (query, key) pairs over all branches and over `heads` = (first, stop), or all heads if None.
    A pair takes 4 D FLOPs in the forward and 10 D in the backward."""
    return sum(b.pairs(causal) for b in blocks(pattern, seq_len, num_heads, num_kv_heads or num_heads, heads=heads))


def query_rows(pattern: DilatedPattern, seq_len: int, num_heads: int, num_kv_heads: int | None) -> int:
    """Return the number of query rows over all branches and heads."""
    return sum(b.query_rows for b in blocks(pattern, seq_len, num_heads, num_kv_heads or num_heads))


def pairs_of_part(
    pattern: DilatedPattern, part: range, num_heads: int, num_kv_heads: int | None = None
) -> tuple[int, int]:
    """Return two counts of causal pairs for the queries in a part of a document, over all branches and heads: pairs
    with keys in the part, and pairs with earlier keys."""
    kv_heads = num_kv_heads or num_heads
    local = sum(b.pairs(True) for b in blocks(pattern, part.stop, num_heads, kv_heads, (part.start, part.stop)))
    # no query sees a later key, so queries before a position have the same pairs as in a document that ends there
    before = [pairs(pattern, at, num_heads, kv_heads, True) if at else 0 for at in (part.start, part.stop)]
    return local, before[1] - before[0] - local


def _block(branch: int, run: list[_HeadRows], segments: int, segment: int, rate: int, width: int | None) -> Block:
    a, b = run[0], run[1] if len(run) > 1 else run[0]
    return Block(
        branch=branch,
        first=a.first,
        segments=segments,
        segment_stride=segment,
        rows=a.rows,
        row_stride=rate,
        heads=len(run),
        head=a.head,
        head_step=b.head - a.head,
        kv_head=a.kv_head,
        kv_head_step=b.kv_head - a.kv_head,
        position_step=b.first - a.first,
        pads=a.pads,
        width=width if width is not None and width < a.rows else None,
    )


def _head_strides(num_heads: int, num_kv_heads: int, rate: int) -> tuple[int, ...]:
    """Return the head strides to try: adjacent heads, heads with equal offsets under either rule, and kv groups."""
    group = num_heads // num_kv_heads
    tries = {1, rate, group, group * rate, -(-num_heads // rate), group * -(-num_kv_heads // rate)}
    return tuple(sorted(t for t in tries if 1 <= t <= num_heads))


@functools.lru_cache(maxsize=16384)
def _runs(all_rows: tuple[_HeadRows, ...], strides: tuple[int, ...]) -> tuple[list[_HeadRows], ...]:
    """Group heads into the fewest runs with equal steps of head, kv head and first position, for strided views."""
    best: list[list[_HeadRows]] | None = None
    for stride in strides:
        runs: list[list[_HeadRows]] = []
        for residue in range(stride):
            runs.extend(_split([rows for rows in all_rows if rows.head % stride == residue], stride))
        if best is None or len(runs) < len(best):
            best = runs
    return tuple(best or ())


def _split(all_rows: list[_HeadRows], stride: int) -> list[list[_HeadRows]]:
    """Split heads that are equal modulo `stride` into arithmetic runs, from the left."""
    runs: list[list[_HeadRows]] = []
    for rows in all_rows:
        if runs and _continues(runs[-1], rows, stride):
            runs[-1].append(rows)
        else:
            runs.append([rows])
    return runs


def _continues(run: list[_HeadRows], rows: _HeadRows, stride: int) -> bool:
    last = run[-1]
    step = (rows.kv_head - last.kv_head, rows.first - last.first)
    if rows.head - last.head != stride or (rows.rows, rows.pads) != (last.rows, last.pads) or step[1] < 0:
        return False  # torch has no negative strides, so positions may only grow along a run
    return len(run) == 1 or step == (last.kv_head - run[-2].kv_head, last.first - run[-2].first)
