"""avoid_frame_chunk_edge: calls in a loop allocate no new chunk of Python's stack, at any depth of the caller."""

import resource
import sys

import pytest

from lightning_dilated._compat.cpython import avoid_frame_chunk_edge
from lightning_dilated.attention.executors.blockwise import Blockwise
from lightning_dilated.attention.executors.fused import Fused
from lightning_dilated.attention.executors.remote import AllToAll, HeadParallel, RowExchange
from lightning_dilated.ext.streams.chunk_call import Chunked

CALLS = 300


def leaf(x):
    return x


def faults(_=None):
    """Count the page faults of repeated calls of a function. Each new stack chunk is at least one fault."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for i in range(CALLS):
        leaf(i)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def at(depth, function):
    return at(depth - 1, function) if depth else function()


def most(function):
    """Return the maximum of page faults over call depths that span several stack chunks of 16 KiB."""
    return max(at(depth, function) for depth in range(350))


def test_loops_do_not_ask_for_memory():
    assert most(lambda: avoid_frame_chunk_edge(faults)(None)) < CALLS // 3


@pytest.mark.skipif(not (3, 11) <= sys.version_info < (3, 13), reason="no release of these versions has the fix")
def test_without_room_they_do():
    assert most(faults) >= CALLS


def test_results_and_errors_pass():
    assert avoid_frame_chunk_edge(divmod)(7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        avoid_frame_chunk_edge(divmod)(1, 0)


@pytest.mark.parametrize("executor", [Blockwise, Fused, RowExchange, AllToAll, HeadParallel, Chunked])
def test_executors_with_loops_have_room(executor):
    """Forward and backward reserve a large stack frame; an ordinary function's frame has a few entries."""
    assert min(f.__code__.co_stacksize for f in (executor.forward, executor.backward)) > 2048
