"""An exchange counts exactly the bytes of its plan, including the bytes between (simulated) nodes."""

import contextlib
from dataclasses import replace

import pytest
import torch

from lightning_dilated.attention import dilated_attention, ranks, resolve
from lightning_dilated.ext.profiling.planned import collectives, moved
from lightning_dilated.ext.profiling.traffic import summary
from lightning_dilated.pattern import DilatedPattern
from lightning_dilated.sequence import Links
from lightning_dilated.sequence.exchange.transport import TrafficLog
from lightning_dilated.sequence.planner import make_problem, plan, price

from .calls import sequence

NESTED = DilatedPattern.geometric(4, 32)
BLOCKED = DilatedPattern.geometric(4, 32, offsets="blocked")
HEADS, KV_HEADS, DIM = 4, 2, 8


def traffic(rank, group, settings, causal, pattern, seq_len):
    """Return (forward, backward), each as (sent, received, messages)."""
    with sequence(group, **settings) as ours:
        tokens = ours.shard(seq_len).length(rank)
        q, k, v = (torch.randn(1, tokens, heads, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
        dilated_attention(q, k, v, pattern, causal=causal, sequence=ours).sum().backward()
        return [(t.sent, t.received, t.messages) for t in (ours.forward_traffic, ours.backward_traffic)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "exchange", ["gather", "ring", "switch", "butterfly", "hierarchical_gather", "hierarchical_butterfly"]
)
def test_bytes_are_those_of_the_plan(pool, exchange, causal):
    cases = [(NESTED, 32, "contiguous")]
    if "butterfly" not in exchange:
        cases += [
            (BLOCKED, 29, "zigzag"),
            (NESTED, 9, "contiguous"),
            (DilatedPattern([(7, 3), (None, 2)]), 30, "strided"),
        ]
    for pattern, n, layout in cases:
        settings = {"exchange": exchange, "ranks_per_node": 2, "layout": layout}
        problem = make_problem(pattern, n, HEADS, KV_HEADS, ranks=4, layout=layout, causal=causal)
        for rank, counts in enumerate(pool.run(4, traffic, settings, causal, pattern, n)):
            want = moved(problem, exchange, rank, 2, DIM, 4)
            assert counts == [(x.sent, x.received, x.messages) for x in want], (pattern, layout, rank)


def between_nodes(rank, group, exchange, pattern, seq_len):
    """Return the bytes between this rank and the other node: ((sent, received) forward, (sent, received) backward)."""
    with sequence(group, exchange=exchange, ranks_per_node=2) as ours:
        tokens = ours.shard(seq_len).length(rank)
        q, k, v = (torch.randn(1, tokens, HEADS, DIM, requires_grad=True) for _ in range(3))
        dilated_attention(q, k, v, pattern, sequence=ours).sum().backward()
        outside = lambda side: sum(n for peer, n in side.items() if peer // 2 != rank // 2)  # noqa: E731
        return [(outside(t.sent_to), outside(t.received_from)) for t in (ours.forward_traffic, ours.backward_traffic)]


#: rows per head that a node of two ranks receives in the forward, with S = 4 keys per segment and shards of 8 tokens: S
#: / 2 rows of the other node; a flat exchange sends them to both ranks
ENTERING = {"gather": 4, "butterfly": 4, "hierarchical_gather": 2, "hierarchical_butterfly": 2}


@pytest.mark.parametrize("exchange", ENTERING)
def test_nodes(pool, exchange):
    counts = torch.tensor(pool.run(4, between_nodes, exchange, NESTED, 32))  # axes (rank, pass, sent or received)
    row = HEADS * 2 * DIM * 4
    by_node = counts.view(2, 2, 2, 2).sum(1)
    assert (by_node == ENTERING[exchange] * row).all(), by_node  # the tensors are fp32, as gradients always are
    if exchange == "hierarchical_butterfly":
        assert (counts == ENTERING[exchange] // 2 * row).all()  # the ranks share the transfer equally
    problem = make_problem(NESTED, 32, HEADS, ranks=4)
    prices = plan(problem, ranks_per_node=2, head_dim=DIM, element_size=4).prices
    (price,) = (p for p in prices if p.exchange == exchange)
    assert price.far == ENTERING[exchange] // 2 * 2 * row


def test_a_ring_leaves_a_node_at_its_last_rank(pool):
    counts = torch.tensor(pool.run(4, between_nodes, "ring", NESTED, 32))
    assert (counts[1::2, 0, 0] > 0).all() and (counts[::2, 0, 0] == 0).all()


def flights(rank, group, exchange):
    """Return ([(pass, content, sent bytes)] of the collectives of a call, and its sums beside the plan)."""
    with sequence(group, exchange=exchange) as ours:
        log = TrafficLog()
        ours.watch(log)
        tokens = ours.shard(30).length(rank)
        q, k, v = (torch.randn(1, tokens, heads, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
        dilated_attention(q, k, v, BLOCKED, sequence=ours).sum().backward()
        return [(x.run, x.what, x.sent) for x in log.flights], summary(log)


def test_a_switch_takes_two_collectives_a_pass(pool):
    """q, k and v are sent in one collective, and their gradients in another."""
    problem = make_problem(BLOCKED, 30, HEADS, KV_HEADS, ranks=4)
    assert price(problem, "switch", 4, DIM, 4, Links()).rounds == 4
    for rank, (moves, sums) in enumerate(pool.run(4, flights, "switch")):
        forward, backward = collectives(problem, "switch", rank, 4, DIM, 4)
        planned = [("forward", x) for x in forward] + [("backward", x) for x in backward]
        assert moves == [(run, x.what, sum(x.bytes("sends", rank).values())) for run, x in planned]
        assert [x for _, x, _ in moves] == ["rows", "outputs", "outputs", "gradients"]
        assert all(x.as_planned for x in sums if x.what != "all")


def asked_of(rank, group, exchange, *branches):
    """Return the FLOPs of a block by which a GPU chooses the engine of a call with these branches."""
    asked, make = [], resolve.local_executor

    def local_executor(spec, request, *arguments):
        with patch.context() as inner, contextlib.suppress(InterruptedError):
            inner.setattr(resolve, "choose", choose)
            make(spec, replace(request, device=torch.device("cuda")), *arguments)
        return make(spec, request, *arguments)

    def choose(name, request):
        asked.append(request.block_flops)
        raise InterruptedError

    with pytest.MonkeyPatch.context() as patch, sequence(group, exchange=exchange) as ours:
        patch.setattr(ranks, "local_executor", local_executor)
        x = torch.ones(2, 8, 2, DIM)
        dilated_attention(x, x, x, DilatedPattern(branches), causal=True, sequence=ours)
    return asked


def test_owned_segments_help_to_choose_the_engine_of_a_rank(pool):
    own, owned = 2 * 2 * 8 * 9 / 2, 2 * 16 * 17 / 2  # two samples; two heads of its own tokens, one of all
    assert pool.run(2, asked_of, "switch", (None, 1)) == [[14 * DIM * owned]] * 2
    assert pool.run(2, asked_of, "gather", (None, 1)) == [[14 * DIM * own]] * 2
    assert pool.run(2, asked_of, "switch", (8, 1), (None, 1)) == [[14 * DIM * (own + owned) / 2]] * 2
    # a dilated segment of four rows has fewer pairs than the rank's own block
    assert pool.run(2, asked_of, "switch", (8, 1), (None, 4)) == [[14 * DIM * own]] * 2
