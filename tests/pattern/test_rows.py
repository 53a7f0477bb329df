"""Blocks: every covered position is in exactly one row of one block, with its segment, residue and kv head."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.pattern import Branch, DilatedPattern
from lightning_dilated.pattern.rows import Block, blocks, pairs, pairs_of_part

from ..examples import examples
from . import naive
from .strategies import head_counts, patterns


def cells(block: Block):
    """Return (head, kv head, [positions]) of every segment of a block, following the docstring of Block."""
    for s in range(block.segments):
        for j in range(block.heads):
            first = block.first + s * block.segment_stride + j * block.position_step
            yield (
                block.head + j * block.head_step,
                block.kv_head + j * block.kv_head_step,
                [first + i * block.row_stride for i in range(block.rows)],
            )


@given(st.data())
@settings(max_examples=examples(75))
def test_blocks_cover_the_definition_once(data):
    heads, kv = data.draw(head_counts())
    pattern = data.draw(patterns(heads, kv))
    n = data.draw(st.integers(0, 64))
    cell_counts = Counter()
    for block in blocks(pattern, n, heads, kv):
        branch = pattern.branches[block.branch]
        if branch.tokens is not None:  # a segment of global tokens spans several blocks, so pairs are compared below
            continue
        assert block.rows > 0 and block.position_step >= 0
        for head, kv_head, positions in cells(block):
            assert kv_head == head // (heads // kv)
            places = {naive.segment_of(pattern, branch, head, p, n, heads, kv) for p in positions}
            assert len(places) == 1 and None not in places  # in one segment, and with the head's residue
            for p in positions:
                assert 0 <= p < n
                cell_counts[block.branch, head, p] += 1
    assert set(cell_counts.values()) <= {1}
    assert set(cell_counts) == {
        (i, h, p)
        for i, branch in enumerate(pattern.branches)
        for h in range(heads)
        for p in range(n)
        if branch.tokens is None
        if naive.segment_of(pattern, branch, h, p, n, heads, kv) is not None
    }


@given(st.data())
@settings(max_examples=examples(40))
def test_a_cell_holds_the_whole_segment(data):
    # if positions of one (branch, head, segment) were in two cells, their pairs would be missing
    heads, kv = data.draw(head_counts(7))
    pattern = data.draw(patterns(heads, kv))
    n = data.draw(st.integers(1, 64))
    cells_of = Counter()
    for block in (b for b in blocks(pattern, n, heads, kv) if pattern.branches[b.branch].tokens is None):
        for head, _, positions in cells(block):
            at = naive.segment_of(pattern, pattern.branches[block.branch], head, positions[0], n, heads, kv)
            cells_of[block.branch, head, at] += 1
    assert set(cells_of.values()) <= {1}


@given(st.data())
@settings(max_examples=examples(40))
def test_blocks_hold_every_pair_once(data):
    heads, kv = data.draw(head_counts(7))
    pattern, causal = data.draw(patterns(heads, kv)), data.draw(st.booleans())
    n = data.draw(st.integers(1, 40))
    counts = torch.zeros(heads, n, n, dtype=torch.int64)
    for block in blocks(pattern, n, heads, kv):
        pairs_of_block = 0
        for head, _, rows in cells(block):
            keys = rows if block.keys is None else [block.keys[0] + i for i in range(block.keys[1])]
            for i, p in enumerate(rows):
                for m, j in enumerate(keys):
                    if (j <= p or not causal) and (block.width is None or abs(i - m) < block.width):
                        counts[head, p, j] += 1
                        pairs_of_block += 1
        assert block.pairs(causal) == pairs_of_block
    assert torch.equal(counts, pattern.counts(n, heads, causal, kv))


@given(st.data())
@settings(max_examples=examples(40))
def test_pads(data):
    heads, kv = data.draw(head_counts(7))
    pattern = data.draw(patterns(heads, kv, padding="attended", widest=20))
    n = data.draw(st.integers(1, 24))
    widths = [min(b.segment_length or n, n) for b in pattern.branches]
    if any(w % b.dilation_rate and n > w for w, b in zip(widths, pattern.branches, strict=True)):
        with pytest.raises(ValueError, match=r"multiple of dilation_rate.*padding='masked'"):
            blocks(pattern, n, heads, kv)
        return
    for block in blocks(pattern, n, heads, kv):
        want = naive.pads(pattern, n, heads, kv, block.branch)
        for head, _, positions in cells(block):
            assert {want[head][p] for p in positions} == {block.pads}


@given(st.data())
@settings(max_examples=examples(40))
def test_pairs_are_the_counts(data):
    heads, kv = data.draw(head_counts())
    pattern = data.draw(patterns(heads, kv))
    n, causal = data.draw(st.integers(0, 40)), data.draw(st.booleans())
    assert pairs(pattern, n, heads, kv, causal) == pattern.counts(n, heads, causal, kv).sum()


@given(st.data())
@settings(max_examples=examples(75))
def test_pairs_of_a_part_are_the_counts(data):
    heads, kv = data.draw(head_counts())
    pattern = data.draw(patterns(heads, kv))
    start = data.draw(st.integers(0, 60))
    stop = data.draw(st.integers(start + 1, 64))
    counts = pattern.counts(stop, heads, True, kv)[:, start:]
    want = int(counts[:, :, start:].sum()), int(counts[:, :, :start].sum())
    assert pairs_of_part(pattern, range(start, stop), heads, kv) == want


def ladder(first: int, branches: int):
    """Return segment lengths and rates that double from branch to branch."""
    return [first << i for i in range(branches)], [1 << i for i in range(branches)]


# A block is one kernel call, and strided views are fast only in few calls. If r divides H, a branch needs min(r, H / r)
# calls, because one view serves heads with offsets that are equal or rise by one.
CALLS = {
    "one branch": (DilatedPattern.dense(2048), 12, 1),
    "12 heads": (DilatedPattern.longnet(*ladder(2048, 5)), 12, 9),
    "12 heads, blocked": (DilatedPattern.longnet(*ladder(2048, 5), offsets="blocked"), 12, 9),
    "12 heads, ten branches": (DilatedPattern.longnet(*ladder(1024, 10)), 12, 14),
    "16 heads": (DilatedPattern.longnet(*ladder(2048, 5)), 16, 1 + 2 + 4 + 2 + 1),
    "16 heads, blocked": (DilatedPattern.longnet(*ladder(2048, 5), offsets="blocked"), 16, 1 + 2 + 4 + 2 + 1),
    "head groups": (DilatedPattern.head_groups(*ladder(2048, 5), 12), 12, 5),
}


@pytest.mark.parametrize("name", CALLS)
def test_number_of_calls(name):
    pattern, heads, want = CALLS[name]
    assert len(blocks(pattern, 1 << 20, heads, heads)) == want


def test_kv_offsets_take_few_calls():
    # each kv head has three query heads, so 12 query heads over 4 kv heads need at most three times the calls of 4
    pattern = DilatedPattern.longnet(*ladder(2048, 5), offset_heads="kv")
    assert len(blocks(pattern, 1 << 20, 12, 4)) <= 3 * len(blocks(pattern, 1 << 20, 4, 4))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_a_segment_far_beyond_the_sequence(causal):
    # 3 tokens end the first segment and 6 begin the next; their indices are odd, even, odd and 0..5
    wide = DilatedPattern([Branch(1 << 60, 2, shift=(1 << 60) - 3)])
    assert pairs(wide, 9, 2, 2, causal) == (1 + 3 + 6 + 6 if causal else 1 + 4 + 9 + 9)
