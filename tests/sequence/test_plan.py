"""The plan: the published table of bytes, exact counts, choices of "auto" in ten cases, and large scales."""

import pytest

from lightning_dilated.ext.profiling.planned import moved
from lightning_dilated.pattern import Branch, DilatedPattern, Window
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.planner import Links, make_problem, plan, price

from ..distributed.forked import run_ranks

GIGAPATH = DilatedPattern.longnet([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16], offsets="blocked")


def geometric(seq_len, ranks, **options):
    return make_problem(DilatedPattern.geometric(2048, seq_len), seq_len, 12, ranks=ranks, **options)


# research/sequence_parallel.md 4b, width 768: ranks, megabytes received in a layer's forward, and the part from other
# nodes
TABLE = [(8, 9.4, 0.0), (64, 18.9, 1.2), (512, 28.3, 2.4), (4096, 37.7, 3.5)]


@pytest.mark.parametrize("ranks, union, far", TABLE)
@pytest.mark.parametrize("local", [32768, 262144])
def test_table_4b(ranks, union, far, local):
    problem = geometric(ranks * local, ranks)
    flat = price(problem, "butterfly", 8, 64, 2, Links())
    assert round(flat.forward / 1e6, 1) == union and flat.backward == 2 * flat.forward
    assert round(price(problem, "gather", 8, 64, 2, Links()).forward / 1e6, 1) == union
    if ranks > 8:
        nodes = price(problem, "hierarchical_butterfly", 8, 64, 2, Links())
        assert round(nodes.far / 3 / 1e6, 1) == far  # a third of both passes, because gradients are fp32


def test_bytes_are_flat_in_n_and_logarithmic_in_r():
    got = [
        [price(geometric(r * n, r), "gather", r, 64, 2, Links()).forward for n in (4096, 65536)] for r in (2, 4, 8, 16)
    ]
    step = 2048 // 2 * 2 * 768 * 2  # S/2 rows each of K and V
    assert got == [[step * level] * 2 for level in (1, 2, 3, 4)]


@pytest.mark.parametrize("exchange", ["gather", "butterfly", "hierarchical_butterfly", "ring", "switch"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_fast_count_is_that_of_the_program(exchange, causal):
    problem = make_problem(DilatedPattern.geometric(16, 512), 512, 4, 2, ranks=8, causal=causal)
    for rank in range(8):
        units = EXCHANGES[exchange].volume(problem, rank, 2).units
        forward, _ = moved(problem, exchange, rank, 2, 8, 4)
        assert sum(u.bytes(8, 4) for (run, _), u in units.items() if run == "forward") == forward.received


CHOICES = {
    "4 GPUs, nested": (lambda: geometric(1 << 20, 4), 4, "gather"),
    "4 GPUs, nested, causal": (lambda: geometric(1 << 20, 4, causal=True), 4, "gather"),
    "64 ranks on nodes of 8": (lambda: geometric(1 << 21, 64), 8, "hierarchical_gather"),
    "64 ranks on one node": (lambda: geometric(1 << 21, 64), 64, "gather"),
    "4096 ranks, 1 billion tokens": (lambda: geometric(1 << 30, 4096), 8, "hierarchical_butterfly"),
    "GigaPath, 8 GPUs": (lambda: make_problem(GIGAPATH, 1 << 20, 16, ranks=8), 8, "gather"),
    "dense, 8 GPUs": (lambda: make_problem(DilatedPattern.dense(), 1 << 20, 16, ranks=8), 8, "switch"),
    "dense, heads that ranks do not divide": (
        lambda: make_problem(DilatedPattern.dense(), 1 << 20, 12, ranks=8),
        8,
        "ring",
    ),
    "dense, more ranks than heads": (lambda: make_problem(DilatedPattern.dense(), 1 << 20, 12, ranks=64), 8, "ring"),
    "segments inside shards": (lambda: make_problem(DilatedPattern.dense(1024), 1 << 20, 12, ranks=8), 8, None),
    "packed documents": (lambda: geometric(1 << 20, 8, cu_seqlens=[0, 300000, 1 << 20]), 8, "gather"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_auto(name):
    problem, per_node, want = CHOICES[name]
    chosen = plan(problem(), ranks_per_node=per_node)
    assert chosen.exchange == want
    assert want is None or {x for x, _ in chosen.rejected} == set(EXCHANGES) - {want}
    assert all(reason in str(chosen) for _, reason in chosen.rejected)


BILLION = """
import resource, time
from lightning_dilated.pattern import Branch, DilatedPattern
from lightning_dilated.sequence.exchange import EXCHANGES
from lightning_dilated.sequence.planner import make_problem, plan
begin = time.process_time()
problem = make_problem({pattern}, 1 << 30, 16, ranks=4096, causal={causal})
chosen = plan(problem, ranks_per_node=8)
EXCHANGES[chosen.exchange].program(problem, 1234, 8)
print(chosen.exchange, time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


BILLION_CASES = {
    "geometric": ("DilatedPattern.geometric(2048, 1 << 30)", "hierarchical_butterfly"),
    "gigapath": (
        "DilatedPattern.longnet([1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16], offsets='blocked')",
        "switch",
    ),
}


@pytest.mark.parametrize(
    "name, causal",
    [
        ("geometric", True),
        ("gigapath", False),
        pytest.param("geometric", False, marks=pytest.mark.slow),
        pytest.param("gigapath", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.full
def test_a_billion_tokens_on_4096_ranks(tmp_path, name, causal):
    """In a new process, planning and building a rank's program stay within limits of CPU time and memory."""
    pattern, want = BILLION_CASES[name]
    script = tmp_path / "billion.py"
    script.write_text(BILLION.format(pattern=pattern, causal=causal))
    run = run_ranks(1, script, cwd=tmp_path)
    assert run.codes == [0], run.stderr
    exchange, seconds, gibibytes = run.stdout.split()
    assert exchange == want and float(seconds) < 10 and float(gibibytes) < 2


UNLIKE = {
    "dense, 3 heads": (DilatedPattern.dense(), 3, 1 << 20),
    "dense, 5 heads": (DilatedPattern.dense(), 5, 1 << 16),
    "geometric, 3 heads": (DilatedPattern.geometric(1024, 65536), 3, 192),
    "head groups": (DilatedPattern.head_groups([2, 1 << 20], [1, 1], 4), 4, 192),
    "heads of its own": (DilatedPattern((Branch(None, 2, offset=0), Branch(None, 4, offset=1, heads=(2, 3)))), 4, 64),
}


SPLITS = [(4, 2), (8, 2), (12, 2), (16, 4), (64, 2), (12, 3)]
#: (name, ranks, head size): a head-parallel group has no more ranks than heads
WINDOWED = [(name, ranks, size) for name, (_, heads, _) in UNLIKE.items() for ranks, size in SPLITS if size <= heads]


@pytest.mark.parametrize("name, ranks, size", WINDOWED)
def test_one_choice_for_all_windows(name, ranks, size):
    # all ranks take part in the same collectives, whatever their heads, so they must choose the same exchange
    pattern, heads, n = UNLIKE[name]

    def chosen(exchange, window):
        problem = make_problem(pattern, n, heads, ranks=ranks, head_size=size, head_rank=window)
        try:
            return plan(problem, exchange).exchange
        except ValueError as error:
            return str(error)

    for exchange in ("auto", "butterfly"):
        assert len({chosen(exchange, window) for window in range(size)}) == 1


def test_an_exchange_that_cannot_serve():
    with pytest.raises(
        ValueError, match="exchange='butterfly' cannot serve this call: needs a power of two of ranks, not 3"
    ):
        plan(geometric(1 << 20, 3), "butterfly")
    with pytest.raises(ValueError, match="exchange must be one of auto, gather"):
        plan(geometric(1 << 20, 4), "rings")


@pytest.mark.parametrize("heads", [5, 12])
@pytest.mark.parametrize("tokens", [4096, 131072])
def test_every_window_takes_one_exchange(heads, tokens):
    """All members of a head-parallel group compute the same costs and choose the same exchange for any heads."""
    pattern = DilatedPattern([(2048, 1), (None, 8), *([(4096, 2)] if heads == 5 else [])])
    options = {"ranks": 4, "head_size": 2, "causal": True}
    plans = [plan(make_problem(pattern, tokens, heads, head_rank=r, **options)) for r in range(2)]
    assert plans[0].exchange == plans[1].exchange and plans[0].prices == plans[1].prices


def test_names_the_layout_that_balances_a_dense_head():
    pattern = DilatedPattern([Branch(64, 1, heads=range(3)), Branch(None, 1, heads=[3])])
    hint = "layout='zigzag' gives every rank an early and a late part"
    for causal, layout, expected in ((True, "contiguous", True), (True, "zigzag", False), (False, "contiguous", False)):
        problem = make_problem(pattern, 1 << 20, 4, ranks=8, causal=causal, layout=layout)
        assert (hint in str(plan(problem))) == expected


@pytest.mark.parametrize("ranks", [8, 9, 64, 1024])
def test_one_rank_that_owns_a_dense_head_is_waited_for(ranks):
    """All ranks wait for a rank that owns a dense head, even if the plan computes exact costs of other ranks only."""
    problem = make_problem(DilatedPattern([Branch(64, 1, heads=range(11)), Branch(None, 1, heads=[11])]), 1 << 20, 12,
                           ranks=ranks, layout="zigzag", causal=True)  # fmt: skip
    chosen = plan(problem)
    waits = {x.exchange: x.waiting for x in chosen.prices}
    assert chosen.exchange != "switch" and waits["switch"] > 0.9 > 1e-3 > waits["gather"]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width, rate", [(7, 1), (3, 4), (1, 1), (65, 1)])
def test_a_window_takes_a_halo(width, rate, causal):
    """A rank receives the (width - 1) * rate rows before its tokens, and also those after them if not causal."""
    problem = make_problem(DilatedPattern([Window(width, rate)]), 256, 4, 2, ranks=4, causal=causal)
    halo = (width - 1) * rate
    for rank in range(4):
        rows = min(halo, 64 * rank) + (0 if causal else min(halo, 64 * (3 - rank)))
        forward, backward = moved(problem, "gather", rank, 4, head_dim=8, element_size=2)
        assert forward.received == rows * 2 * 2 * 8 * 2 and backward.sent == rows * 2 * 2 * 8 * 4


def test_windows_are_refused_by_name():
    pattern = DilatedPattern([Window(7), (8, 1)])
    with pytest.raises(ValueError, match=r"layout='strided' does not serve Window\(7\).*Use layout='contiguous'"):
        plan(make_problem(pattern, 64, 2, ranks=4, layout="strided"))
    with pytest.raises(
        ValueError, match=r"butterfly.*needs segments, and branches\[0\] is Window\(7\).*Use auto, gather"
    ):
        plan(make_problem(pattern, 64, 2, ranks=4), "butterfly")
    chosen = plan(make_problem(pattern, 64, 2, ranks=4, causal=True))
    assert chosen.exchange == "gather" and "is Window(7)" in dict(chosen.rejected)["butterfly"]
