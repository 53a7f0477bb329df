"""An exchange uses as much memory as planned, and all ranks must have the same limit."""

import weakref

import pytest
import torch

from lightning_dilated.attention import dilated_attention
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence.exchange.all_to_all import SwitchRun
from lightning_dilated.sequence.exchange.run import BackwardRun, Run
from lightning_dilated.sequence.exchange.transport import Wire
from lightning_dilated.sequence.planner import GIB, held, make_problem, most_held

from .calls import sequence

HEADS, KV_HEADS, DIM, N = 4, 2, 8, 61
DENSE, GEOMETRIC = DilatedPattern.dense(), DilatedPattern.longnet([8, 24, 64], [1, 2, 3])


class Holdings:
    """Counts bytes of live tensors: each tensor from `add` until it is freed."""

    def __init__(self):
        self.now = self.peak = 0

    def add(self, x):
        size = x.numel() * x.element_size()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(x, self._drop, size)
        return x

    def _drop(self, size):
        self.now -= size


def counted(rank, group, exchange, pattern, layout, causal):
    """Return the peak bytes of received rows, and of gradient sums, in the backward of a call."""
    holdings = Holdings()

    def adding(function, when=lambda *_: True):
        def call(self, *args, **options):
            result = function(self, *args, **options)
            for x in (result if isinstance(result, tuple) else (result,)) if when(self, *args) else ():
                holdings.add(x)
            return result

        return call

    with sequence(group, exchange=exchange, layout=layout, ranks_per_node=2) as ours:
        at = ours.shard(N).length(rank)
        q, k, v = (torch.randn(1, at, heads, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
        out = dilated_attention(q, k, v, pattern, causal=causal, sequence=ours)
        post, make = Wire.post, SwitchRun.__init__

        def init(self, compiled, wire, kept=None):
            make(self, compiled, wire, kept)
            holdings.add(kept)

        def post_rows(self, rows, sends, receives, into=None, what="rows"):
            posted = post(self, rows, sends, receives, into, what)
            if into is None and what == "rows":
                holdings.add(posted.rows)
            return posted

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Wire, "post", post_rows)
            patch.setattr(Run, "_store", adding(Run._store, lambda self, *_: self.compiled.keep))
            patch.setattr(BackwardRun, "_zeros", adding(BackwardRun._zeros))
            patch.setattr(SwitchRun, "sums", adding(SwitchRun.sums))
            patch.setattr(SwitchRun, "at_owner", staticmethod(adding(SwitchRun.at_owner)))
            patch.setattr(SwitchRun, "__init__", init)
            out.sum().backward()
        return holdings.peak


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("exchange", ["gather", "ring", "switch", "hierarchical_gather"])
def test_holds_what_was_planned(pool, exchange, layout, causal):
    for pattern in (DENSE, GEOMETRIC):
        problem = make_problem(pattern, N, HEADS, KV_HEADS, ranks=4, layout=layout, causal=causal)
        planned = [held(problem, exchange, rank, 2, DIM, 4) for rank in range(4)]
        assert pool.run(4, counted, exchange, pattern, layout, causal) == planned
        assert most_held(problem, exchange, 2, DIM, 4) == max(planned)


def bounded(rank, group, gib, exchange):
    """Return the exchange that a call with a memory limit used, or its error."""
    with sequence(group, exchange=exchange, exchange_memory_gib=gib) as ours:
        x = torch.ones(1, ours.shard(N).length(rank), HEADS, DIM)
        try:
            dilated_attention(x, x, x, DENSE, sequence=ours)
        except ValueError as error:
            return str(error)
        return ours.plan.exchange


def test_every_rank_keeps_to_it(pool):
    problem = make_problem(DENSE, N, HEADS, ranks=3)
    sizes = {x: most_held(problem, x, 3, DIM, 4) / GIB for x in ("gather", "ring")}
    assert pool.run(3, bounded, sizes["gather"] + 1e-6, "gather") == ["gather"] * 3
    assert pool.run(3, bounded, (sizes["ring"] + sizes["gather"]) / 2, "auto") == ["ring"] * 3
    for error in pool.run(3, bounded, sizes["gather"] / 2, "gather"):
        assert "exchange='gather' does not hold as little as exchange_memory_gib=" in error
    for error in pool.run(3, bounded, sizes["ring"] / 2, "auto"):
        assert "no exchange of this call holds as little as exchange_memory_gib=" in error


def different(rank, group):
    """Return the error of a call in which the ranks have different limits."""
    with sequence(group, exchange_memory_gib=1.0 + rank) as ours:
        x = torch.ones(1, ours.shard(N).length(rank), HEADS, DIM)
        with pytest.raises(ValueError, match="exchange_memory"):
            dilated_attention(x, x, x, DENSE, sequence=ours)
        return True


def test_different_bounds(pool):
    assert pool.run(2, different) == [True, True]
