"""Shards: every layout assigns each position to exactly one rank, as its docstring says."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dilated.ext.streams.shard import ChunkShard
from lightning_dilated.sequence.shard import LAYOUTS, Shard, check_layout

from ..examples import examples
from .cases import member_of, shards


def positions(shard: Shard, rank: int) -> list[int]:
    """Return the positions of a rank in local order by brute force: member by member, in ascending order."""
    members = range(rank * shard.members, (rank + 1) * shard.members)
    return [p for m in members for p in range(shard.seq_len) if member_of(shard, p) == m]


@given(shards(longest=60, ranks=9))
@settings(max_examples=examples(100))
def test_ranges_are_the_layout(shard):
    covered = []
    for rank in range(shard.ranks):
        held = shard.ranges(rank)
        assert all(held)  # no range is empty
        assert [p for piece in held for p in piece] == positions(shard, rank)
        assert shard.length(rank) == len(positions(shard, rank))
        covered += positions(shard, rank)
    assert sorted(covered) == list(range(shard.seq_len))
    assert shard.longest == max(shard.length(rank) for rank in range(shard.ranks))


@given(shards(longest=60, ranks=9))
@settings(max_examples=examples(50))
def test_pieces_are_runs(shard):
    # adjacent ranges are joined: a contiguous shard is one piece, and so is the middle of a zigzag
    for rank in range(shard.ranks):
        held = shard.ranges(rank)
        if shard.layout == "contiguous":
            assert len(held) <= 1
        if shard.layout == "zigzag":
            assert len(held) <= 2 * shard.members and (rank < shard.ranks - 1 or shard.members > 1 or len(held) <= 1)
        assert not any(a.step == b.step and a[-1] + a.step == b[0] for a, b in pairwise(held))


@given(shards(longest=60, ranks=9))
@settings(max_examples=examples(50))
def test_owner_and_local(shard):
    for rank in range(shard.ranks):
        for index, position in enumerate(positions(shard, rank)):
            assert shard.owner(position) == (rank, index)
            assert shard.local(rank, position) == index
            if shard.ranks > 1:
                with pytest.raises(IndexError, match=f"position {position} lies on rank {rank}"):
                    shard.local((rank + 1) % shard.ranks, position)


@given(shards(longest=60, ranks=9), st.data())
@settings(max_examples=examples(150))
def test_holders(shard, data):
    start, stop = data.draw(st.integers(-5, shard.seq_len + 5)), data.draw(st.integers(-5, shard.seq_len + 5))
    inside = range(max(start, 0), min(stop, shard.seq_len))
    assert shard.holders(start, stop) == sorted({member_of(shard, p) // shard.members for p in inside})


@given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 20), st.integers(1, 5))
@settings(max_examples=examples(100))
def test_pieces_of_chunks(start, seq_len, stream, ranks):
    """A rank's pieces are its positions in the chunked layout, and the exchange of a chunk uses the chunk's pieces."""
    chunks, whole = ChunkShard(start, start + seq_len, stream, ranks), Shard(seq_len, ranks, "chunked", stream=stream)
    held = [positions(whole, rank) for rank in range(ranks)]
    assert chunks.ranks == ranks * chunks.chunks
    rank_pieces = [[] for _ in range(ranks)]
    for number in range(chunks.ranks):
        chunk, rank = divmod(number, ranks)
        piece = chunks.piece(number)
        assert all(p // stream == chunk for p in range(piece.start - start, piece.stop - start))
        assert held[rank][chunks.local(number)] == [p - start for p in piece]
        assert list(chunks.peers(number)) == [chunk * ranks + r for r in range(ranks)]
        assert chunks.ranges(number) == ((piece,) if piece else ())
        rank_pieces[rank] += piece
        assert [p for x in chunks.held(number) for p in x] == rank_pieces[rank]
        for position in range(start, chunks.positions(chunk).stop):
            owner, _ = whole.owner(position - start)
            peer, index = chunks.carrier(number, position)
            assert peer == chunk * ranks + owner
            assert held[owner][chunks.local(peer).start + index] == position - start
    assert [[p - start for p in x] for x in rank_pieces] == held
    numbers = [u for u in range(chunks.ranks) for _ in chunks.piece(u)]
    around = range(start - 2, start + seq_len + 2)
    assert [chunks.number(p) for p in around] == [-1, -1, *numbers, chunks.ranks, chunks.ranks]


def test_empty_ranks():
    nine = Shard(9, 4)
    assert [nine.length(rank) for rank in range(4)] == [3, 3, 3, 0]
    assert nine.ranges(3) == () and nine.longest == 3
    assert nine.holders(0, 9) == [0, 1, 2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_tokens(layout):
    shard = Shard(0, 3, layout, stream=4 if layout == "chunked" else None)
    assert [shard.ranges(rank) for rank in range(3)] == [(), (), ()]
    assert shard.longest == 0 and shard.holders(0, 5) == []
    with pytest.raises(IndexError, match="position 0"):
        shard.owner(0)


@pytest.mark.parametrize("layout, want", [("contiguous", (0, 0)), ("zigzag", (0, 0)), ("strided", (0, 0))])
def test_the_first_position_is_on_rank_0(layout, want):
    assert Shard(1 << 40, 4096, layout).owner(0) == want


def test_a_long_sequence_costs_nothing():
    # 10^12 tokens as ranges, because lists would not fit
    shard = Shard(10**12, 4096, "zigzag")
    assert sum(shard.length(rank) for rank in range(4096)) == 10**12
    rank, index = shard.owner(10**12 - 1)
    assert rank == 0 and index == shard.length(0) - 1


ERRORS = {
    "layout": (
        lambda: Shard(8, 2, "spiral"),
        ValueError,
        "layout must be one of contiguous, zigzag, strided.*'spiral'",
    ),
    "check_layout": (lambda: check_layout(None), ValueError, "layout must be one of.*None"),
    "seq_len negative": (lambda: Shard(-1, 2), ValueError, "seq_len.*at least 0.*-1"),
    "seq_len bool": (lambda: Shard(True, 2), TypeError, "seq_len.*bool True"),
    "seq_len float": (lambda: Shard(8.0, 2), TypeError, r"seq_len.*8\.0"),
    "ranks 0": (lambda: Shard(8, 0), ValueError, "ranks.*at least 1.*0"),
    "ranks bool": (lambda: Shard(8, True), TypeError, "ranks.*bool True"),
    "members 0": (lambda: Shard(8, 2, members=0), ValueError, "members.*at least 1"),
    "members bool": (lambda: Shard(8, 2, members=True), TypeError, "members.*bool True"),
    "rank beyond": (lambda: Shard(8, 2).ranges(2), IndexError, "rank 2.*2 ranks"),
    "rank negative": (lambda: Shard(8, 2).ranges(-1), IndexError, "rank -1.*2 ranks"),
    "length of a rank beyond": (lambda: Shard(8, 2).length(5), IndexError, "rank 5"),
    "position beyond": (lambda: Shard(8, 2).owner(8), IndexError, "position 8.*8 tokens"),
    "position negative": (lambda: Shard(8, 2).owner(-1), IndexError, "position -1"),
    "chunked without chunks": (
        lambda: Shard(8, 2, "chunked"),
        ValueError,
        "stream must be at least 1.*layout='chunked'",
    ),
    "chunks of another layout": (lambda: Shard(8, 2, stream=4), ValueError, "stream=4 goes with layout='chunked', not"),
    "not its position": (lambda: Shard(8, 2).local(1, 3), IndexError, "position 3 lies on rank 0, not on rank 1"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, error, text = ERRORS[name]
    with pytest.raises(error, match=text):
        call()
