"""Ranks that disagree, and impossible calls: every rank raises before any row is sent, and later calls work."""

import os
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_dilated.attention import dilated_attention
from lightning_dilated.attention.executors.blockwise import Blockwise
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence import SequenceGroup, active_sequence, sequence_gather, sequence_sum
from lightning_dilated.sequence.exchange import run

from .calls import positions, sequence
from .pool import Pool

NESTED = DilatedPattern.geometric(4, 32)
OTHER = DilatedPattern.geometric(4, 16)
BLOCKED = DilatedPattern.geometric(4, 32, offsets="blocked")


def call(group, length=8, pattern=NESTED, dtype=torch.float64, batch=1, k_heads=4, **options):
    """Return (error or None, bytes sent) of one call."""
    q = torch.ones(batch, length, 4, 2, dtype=dtype)
    k = torch.ones(batch, length, k_heads, 2, dtype=dtype)
    before = group.forward_traffic.sent
    try:
        dilated_attention(q, k, k, pattern, sequence=group, **options)
    except (ValueError, TypeError, OverflowError) as error:
        return f"{type(error).__name__}: {error}", group.forward_traffic.sent - before
    return None, group.forward_traffic.sent - before


def odd_one(rank, group, settings, usual, odd):
    """On the last rank make a different call, then a valid call on all ranks. Return both results."""
    with sequence(group, **settings) as ours:
        own_options = {**usual, **(odd if rank == ours.ranks - 1 else {})}
        return call(ours, **own_options), call(ours, **usual) if not settings else None


ODD = {
    "pattern": ({"pattern": OTHER}, "pattern: rank 2 has"),
    "dtype": ({"dtype": torch.float32}, "dtype: rank 2 has torch.float32"),
    "causal": ({"causal": True}, "causal: rank 2 has True"),
    "batch": ({"batch": 2}, "batch: rank 2 has 2"),
    "length": ({"length": 9}, "rank 0 of the sequence holds 8 tokens"),
    "invalid pattern": ({"pattern": "x"}, "pattern must be a DilatedPattern"),
    "invalid k": ({"k_heads": 3}, "must divide"),
    "lengths": ({"lengths": [3]}, "lengths: rank 2 has [3]"),
    "scale": ({"scale": 10**400}, "OverflowError: int too large"),
}


@pytest.mark.parametrize("name", ODD)
def test_a_rank_that_differs(pool, name):
    odd, words = ODD[name]
    for rank, ((error, sent), after) in enumerate(pool.run(3, odd_one, {}, {}, odd)):
        assert error and words in error, (rank, error)
        assert sent == 0
        assert after[0] is None and after[1] > 0


def gradients(rank, group, odd):
    """Make a call in which q requires a gradient on the last rank only."""
    with sequence(group) as ours:
        x = torch.ones(1, 8, 4, 2, dtype=torch.float64, requires_grad=(rank == ours.ranks - 1) == odd)
        dilated_attention(x, x, x, NESTED, sequence=ours)


def test_a_rank_without_a_gradient(pool):
    # other ranks would run no backward, so the last rank would wait forever
    errors = pool.errors(ValueError, 3, gradients, True)
    assert all("requires grad: rank 2 has True; the others have False" in error for error in errors), errors


def crossed(rank, group, kind):
    """Run two backwards with equal shapes, rank 0 in reverse order."""
    with sequence(group) as ours:
        x = torch.randn(2, 1, 8, 4, 2, dtype=torch.float64, requires_grad=True)
        if kind == "attention":
            parts = [dilated_attention(y, y, y, NESTED, sequence=ours).sum() for y in x]
        else:
            function = {"sum": sequence_sum, "gather": sequence_gather}[kind]
            parts = [function(y, sequence=ours).sum() for y in x]
        for part in parts if rank else parts[::-1]:
            part.backward()


@pytest.mark.parametrize("kind", ["attention", "sum", "gather"])
def test_backwards_in_another_order(pool, kind):
    errors = pool.errors(ValueError, 3, crossed, kind)
    assert all("rank 0 has backward of" in error for error in errors), errors


def nested_activation(rank, group):
    with sequence(group) as a, sequence(group) as b, a.active(), b.active():
        with a.active():
            inner = active_sequence() is a
        return inner, active_sequence() is b


def test_active_groups_nest(pool):
    assert pool.run(1, nested_activation) == [(True, True)]


def with_nccl(rank, group):
    """Open, use, refuse and close five groups over NCCL. Their control messages use gloo."""
    errors = []
    with mock.patch.object(dist, "get_backend", return_value="nccl"):
        for timeout in (None, timedelta(seconds=20), None, None, None):
            with sequence(group, timeout=timeout) as ours:
                assert call(ours)[0] is None
                errors.append(call(ours, causal=rank == 1)[0])
    return errors, len(os.listdir("/proc/self/fd"))


def test_groups_with_nccl(pool):
    before = pool.run(3, with_nccl)
    for (errors, descriptors), (_, after) in zip(before, pool.run(3, with_nccl), strict=True):
        assert all("causal: rank 1 has True; the others have False" in text for text in errors)
        assert after == descriptors  # one gloo backend per process group, however often a sequence group is opened


def after_close(rank, group):
    """Run a backward after all ranks have closed its group."""
    with sequence(group) as ours:
        x = torch.ones(1, 8, 4, 2, requires_grad=True)
        out = dilated_attention(x, x, x, NESTED, sequence=ours)
    out.sum().backward()


def test_closed_before_its_backward(pool):
    assert all("only after the last backward" in error for error in pool.errors(ValueError, 2, after_close))


def other_call(rank, group):
    """Make different calls of one layer and chunk."""
    with sequence(group) as ours:
        ours.agree({"call": ("kv_conv", "recurrent_attention")[rank]}, 4, call_id="layer 2, chunk 1")


def test_an_identified_call_is_named_in_the_error(pool):
    for error in pool.errors(ValueError, 2, other_call):
        assert "call: rank 0 has kv_conv, rank 1 has recurrent_attention" in error


def waiting(rank, group):
    """Let rank 0 make a call, and no other rank."""
    short = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    dist.barrier(group)  # rank 1 ends its connections when it returns, and rank 0 may still be making them
    if rank == 0:
        with sequence(short) as ours:
            try:
                ours.agree({"call": "here"})
            except RuntimeError as error:
                return str(error)


@pytest.mark.full
def test_a_rank_that_does_not_come():
    pool = Pool(2)
    try:
        error = pool.run(2, waiting)[0]
    finally:
        pool.close()
    assert "rank 0 of the sequence (rank 0 of the job) waited in vain for the others, ranks [1] of the job" in error


UNSERVED = {
    "three ranks": (3, {"exchange": "butterfly"}, {}, "needs a power of two of ranks, not 3"),
    "blocked": (4, {"exchange": "butterfly"}, {"pattern": BLOCKED, "length": 4}, "needs offsets that nest"),
    "layout": (2, {"exchange": "butterfly", "layout": "strided"}, {}, "needs the contiguous layout"),
    "padded": (2, {"exchange": "butterfly"}, {"lengths": [9]}, "not packed or padded ones"),
    "one node": (2, {"exchange": "hierarchical_gather"}, {}, "needs several nodes"),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_an_exchange_that_cannot_serve(pool, name):
    ranks, settings, options, words = UNSERVED[name]
    for (error, sent), _ in pool.run(ranks, odd_one, settings, options, {}):
        assert error and words in error and sent == 0, error


def make(rank, group, settings):
    SequenceGroup(group, **settings).close()


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"head_size": 2}, "head_size=2 must divide the 3 ranks"),
        ({"exchange": "rings"}, "exchange must be one of auto, gather"),
        ({"layout": "blocked"}, "layout must be one of contiguous, zigzag, strided"),
    ],
)
def test_settings(pool, settings, words):
    assert all(words in error for error in pool.errors(ValueError, 3, make, settings))


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group first"):
        SequenceGroup()
    with pytest.raises(TypeError, match="sequence must be a SequenceGroup"):
        dilated_attention(*torch.ones(3, 1, 4, 1, 2), NESTED, sequence="x")


# -- errors with rows in transit ---------------------------------------------------------------------------------------
def out_of_memory(rank, group, backward):
    """Run out of memory in the local blocks of a call. Return how often each posted round was waited for."""
    waited = []

    def no_memory(*args):
        raise torch.OutOfMemoryError("none left")

    with sequence(group) as ours:
        x = torch.randn(1, 8, 1, 2)[:, positions(ours, 8)].requires_grad_()
        pattern = DilatedPattern.dense()
        out = dilated_attention(x, x, x, pattern, sequence=ours) if backward else None
        with (
            mock.patch.object(Blockwise, "backward" if backward else "forward", no_memory),
            mock.patch.object(run, "abandon", lambda *about: waited.append(len(about[1]))),
        ):
            try:
                out.sum().backward() if backward else dilated_attention(x, x, x, pattern, sequence=ours)
            except torch.OutOfMemoryError:
                return waited


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.full
def test_rows_land_before_their_memory_is_free(backward):
    """If the memory of rows in transit were freed, the rows could arrive in tensors of a retry with fewer tokens."""
    own = Pool(2)
    try:
        assert own.run(2, out_of_memory, backward) == [[1], [1]]  # the round in transit is waited for once
    finally:
        own.close()
