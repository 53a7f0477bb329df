"""What an exchange asks of every rank, as arrays: against the programs, the wants and the compiled runs themselves."""

import numpy as np
import pytest
import torch

from lightning_dilated.ext.planning.simulating.rounds import bounds, exact, many, reached, reaches
from lightning_dilated.pattern import DilatedPattern, Window
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.exchange.run import compile_program
from lightning_dilated.sequence.exchange.switch import compile_switch
from lightning_dilated.sequence.planner import make_problem
from lightning_dilated.sequence.requirements import row_requests

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
PATTERNS = {
    "nested": (DilatedPattern.geometric(16, 512), 512, 8),
    "rates above a shard": (DilatedPattern.geometric(4, 512), 512, 16),
    "not nested": (DilatedPattern.longnet([24, 100, 300], [2, 3, 7]), 500, 6),
    "shifted": (DilatedPattern.geometric(16, 256).shifted(0.5), 512, 4),
    "empty ranks": (DilatedPattern.longnet([4, 9], [1, 2]), 9, 4),
    "dense": (DilatedPattern.dense(), 96, 3),
    "head groups": (DilatedPattern.head_groups([32, 512], [1, 4], 4), 512, 4),
}


@CAUSAL
@pytest.mark.parametrize("name", PATTERNS)
def test_pairs_are_those_of_the_wants(name, causal):
    pattern, length, ranks = PATTERNS[name]
    problem = make_problem(pattern, length, 4, 2, ranks=ranks, causal=causal)
    found, queries = list(reaches(problem)), reached(problem)
    for rank in range(ranks):
        want = sorted((w.branch, w.head, len(w.queries), sum(map(len, w.keys))) for w in row_requests(problem, rank))
        have = sorted((x.branch, x.head, x.queries[rank], x.keys[rank]) for x in found if x.keys[rank])
        assert have == want
        rows = len({(w.head, position) for w in row_requests(problem, rank) for position in w.queries})
        nested = name in ("nested", "rates above a shard", "dense", "head groups")
        assert queries[rank] == rows if nested else min(rows, 1) <= queries[rank] <= rows


@CAUSAL
@pytest.mark.parametrize("width, rate, ranks", [(5, 1, 4), (3, 4, 4), (40, 1, 8), (1, 1, 4), (4, 30, 6)])
def test_pairs_of_windows(width, rate, ranks, causal):
    problem = make_problem(DilatedPattern([Window(width, rate)]), 100, 4, 2, ranks=ranks, causal=causal)
    estimates = list(reaches(problem))
    for rank in range(ranks):
        requests = list(row_requests(problem, rank))
        assert sum(x.pairs[rank] for x in estimates) == pytest.approx(sum(w.pairs for w in requests))
        assert sum(x.keys[rank] for x in estimates) == sum(len(keys) for w in requests for keys in w.keys)
        rows = len({(w.branch, w.head, position) for w in requests for position in w.queries})
        assert sum(x.queries[rank] for x in estimates) == rows


@CAUSAL
@pytest.mark.parametrize("exchange, per_node", [
    ("gather", 4), ("butterfly", 4), ("hierarchical_butterfly", 2), ("hierarchical_butterfly", 4),
    ("hierarchical_gather", 2), ("ring", 4),
])  # fmt: skip
@pytest.mark.parametrize("name", ["nested", "rates above a shard"])
def test_work_comes_with_its_round(name, exchange, per_node, causal):
    """Each rank's pairs and calls after each round are those of the run that the op drives.

    In the hierarchical forms a rank may have a branch's rows one round sooner, where all of them are in its own share.
    """
    pattern, length, ranks = PATTERNS[name]
    problem = make_problem(pattern, length, 4, ranks=ranks, causal=causal)
    moves = exact(problem, exchange, per_node)
    for rank in range(ranks):
        program = EXCHANGES[exchange].program(problem, rank, per_node)
        steps = compile_program(problem, rank, program, torch.device("cpu")).rounds
        pairs = np.array([sum(w.pairs for b in s.batches for w in b.requests) for s in steps]).cumsum()
        batches = np.array([len(s.batches) for s in steps]).cumsum()
        for want, have in ((pairs, moves.pairs[:, rank].cumsum()), (batches, moves.batches[:, rank].cumsum())):
            if exchange.startswith("hierarchical"):
                assert (have <= want).all() and (have[1:] >= want[:-1]).all() and have[-1] == want[-1]
            else:
                assert have.tolist() == want.tolist()


@CAUSAL
def test_work_of_a_switch(causal):
    problem = make_problem(DilatedPattern.geometric(16, 512), 512, 4, ranks=8, causal=causal)
    moves = exact(problem, "switch", 4)
    for rank in range(8):
        program = EXCHANGES["switch"].program(problem, rank, 4)
        assert moves.batches[:, rank].tolist() == [
            0,
            len(compile_switch(problem, rank, program, torch.device("cpu")).batches),
        ]
        assert moves.pairs[:, rank].tolist() == [0, sum(task.pairs for task in program.tasks)]


@CAUSAL
@pytest.mark.parametrize("per_node", [2, 8])
@pytest.mark.parametrize("exchange", ["gather", "butterfly", "hierarchical_gather", "hierarchical_butterfly"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
def test_many_ranks_without_their_programs(heads, exchange, per_node, causal):
    pattern = DilatedPattern.geometric(16, 16 * 32, offset_heads="kv")
    problem = make_problem(pattern, 16 * 32, *heads, ranks=16, causal=causal)
    want, have = exact(problem, exchange, per_node), many(problem, exchange, per_node)
    assert (want.pairs == have.pairs).all() and (want.batches == have.batches).all()
    for number, (a, b) in enumerate(zip(want.rounds, have.rounds, strict=True)):
        assert b.received.tolist() == a.received.tolist() and b.sent.sum() == b.received.sum()
        spread = causal and exchange == "hierarchical_gather"  # who sends is approximate there, and messages are
        if not spread:
            assert b.sent.tolist() == a.sent.tolist() and b.messages.tolist() == a.messages.tolist()
        times = np.arange(16.0)[::-1].copy()
        if not causal:
            assert b.latest(times).tolist() == a.latest(times).tolist(), number


@CAUSAL
def test_rows_that_do_not_nest_are_set_to_the_samples(causal):
    pattern = DilatedPattern.longnet([32, 100, 300, 512], [1, 3, 5, 6])
    problem = make_problem(pattern, 512, 4, ranks=16, causal=causal)
    want, have = (f(problem, "gather", 4).rounds[0] for f in (exact, many))
    assert have.received.sum() == pytest.approx(want.received.sum(), rel=0.1)
    assert have.received.sum(0).max() == pytest.approx(want.received.sum(0).max(), rel=0.25)


@pytest.mark.parametrize("exchange", ["ring", "switch"])
def test_exchanges_of_few_ranks(exchange):
    problem = make_problem(DilatedPattern.geometric(16, 2048), 2048, 4, ranks=64)
    with pytest.raises(
        ValueError, match=f"exchange='{exchange}' is simulated for few ranks only, not for 64. Use gather"
    ):
        many(problem, exchange, 8)


@pytest.mark.parametrize("options, message", [
    ({"layout": "zigzag"}, "layout='zigzag'"),
    ({"head_size": 2}, "head_size=2"),
    ({"cu_seqlens": [0, 40, 512]}, "packed or padded"),
])  # fmt: skip
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        bounds(make_problem(DilatedPattern.geometric(16, 512), 512, 4, ranks=4, **options))
