"""head_size="auto" on several ranks: each call chooses a size, has one rank's results, and sends the planned bytes."""

import pytest
import torch

from lightning_dilated.attention import dilated_attention
from lightning_dilated.ext.profiling.planned import moved
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence import Links
from lightning_dilated.sequence.head_size import trade_bytes
from lightning_dilated.sequence.planner import make_problem

from .calls import sequence

DENSE = DilatedPattern.dense()
#: links on which rounds and messages are free, so that the bytes determine the choice
BYTES = Links(near=1e6, far=1e6, round=1e-12, message=1e-12)
DIM = 8


def tensors(seq_len, heads, kv_heads):
    generator = torch.Generator().manual_seed(0)
    make = lambda n: torch.randn(2, seq_len, n, DIM, generator=generator, dtype=torch.float64)  # noqa: E731
    return make(heads), make(kv_heads), make(kv_heads)


def results(rank, group, settings, pattern, seq_len, heads):
    """Return (head size, exchange, bytes received by pass, positions, [out and gradients]) of a causal call."""
    with sequence(group, links=BYTES, **settings) as ours:
        at = [p for x in ours.shard(seq_len).ranges(rank) for p in x]
        q, k, v = (x[:, at].requires_grad_() for x in tensors(seq_len, *heads))
        out = dilated_attention(q, k, v, pattern, causal=True, sequence=ours)
        out.square().sum().backward()
        size, received = ours.plan.head_size, (ours.forward_traffic.received, ours.backward_traffic.received)
        return size, ours.plan.exchange, received, at, [x.detach() for x in (out, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize(
    "ranks, settings, pattern, heads, want",
    [
        (4, {"head_size": "auto", "exchange": "gather", "layout": "zigzag"}, DENSE, (6, 6), 4),
        (4, {"head_size": "auto", "exchange": "gather", "layout": "zigzag", "ranks_per_node": 2}, DENSE, (6, 6), 2),
        (3, {"head_size": "auto", "exchange": "gather", "layout": "strided"}, DENSE, (6, 6), 3),
        (4, {"head_size": "auto"}, DilatedPattern.geometric(8, 64), (6, 3), 1),
        (4, {"head_size": 2, "exchange": "ring"}, DENSE, (5, 5), 2),
        (4, {"head_size": 4}, DENSE, (6, 2), 4),
        (3, {"head_size": 3}, DilatedPattern.geometric(8, 64), (2, 1), 3),
    ],
)
def test_equals_one_rank_and_the_plan(pool, ranks, settings, pattern, heads, want):
    n = 61
    q, k, v = (x.requires_grad_() for x in tensors(n, *heads))
    out = dilated_attention(q, k, v, pattern, causal=True)
    out.square().sum().backward()
    alone = [out, q.grad, k.grad, v.grad]
    layout = settings.get("layout", "contiguous")
    problem = make_problem(pattern, n, *heads, ranks=ranks, layout=layout, causal=True, batch=2)
    per_node = settings.get("ranks_per_node", ranks)
    for rank, (size, exchange, received, at, parts) in enumerate(pool.run(ranks, results, settings, pattern, n, heads)):
        assert size == want
        for part, whole in zip(parts, alone, strict=True):
            torch.testing.assert_close(part, whole[:, at], rtol=1e-12, atol=1e-12)
        planned = [0, 0]
        if size > 1:
            x = trade_bytes(problem, size, rank, 2, DIM, 8)
            planned = [x.forward, x.backward]
        if exchange is not None:
            options = {"ranks": ranks, "layout": layout, "causal": True, "batch": 2}
            grouped = make_problem(pattern, n, *heads, head_size=size, head_rank=rank % size, **options)
            passes = moved(grouped, exchange, rank // size, max(1, per_node // size), DIM, 8)
            planned = [a + b.received for a, b in zip(planned, passes, strict=True)]
        assert list(received) == planned


def two_lengths(rank, group):
    """Return the head sizes of a short and of a long call in one group."""
    links = Links(near=1e7, round=1e-3)
    with sequence(group, head_size="auto", exchange="gather", layout="zigzag", links=links) as ours:
        sizes = []
        for n in (64, 4096):
            x = torch.ones(1, ours.shard(n).length(rank), 4, 8)
            dilated_attention(x, x, x, DENSE, causal=True, sequence=ours)
            sizes.append(ours.plan.head_size)
        return sizes


def test_each_call_has_its_own(pool):
    """Rounds dominate the time of short calls, and head groups have the most rounds. Bytes dominate long calls."""
    assert pool.run(4, two_lengths) == [[1, 4]] * 4


def refused(rank, group, size):
    with (
        pytest.raises(ValueError, match="head_size must be \"auto\" or a number of ranks, got 'all'"),
        sequence(group, head_size=size),
    ):
        pass


def test_refused(pool):
    pool.run(2, refused, "all")
