"""A training run on many ranks equals a run on one rank: losses, gradient norms, validation, and every parameter."""

import pytest
import torch

from lightning_dilated import DilatedPattern

from .runs import Run, fit

pytestmark = pytest.mark.full

RUNS = {
    "plain": Run(),
    "accumulate and clip": Run(steps=3, accumulate=2, clip=0.1),
    "masked labels": Run(masked=0.4, batch_size=2),
    "ragged": Run(seq_len=37),
    "documents": Run(kind="documents"),
    "lengths": Run(kind="lengths", batch_size=2),
    "fewer tokens than ranks": Run(seq_len=3),
    "workers": Run(workers=2, steps=2),
    "hybrid": Run(model={"pattern": {"hybrid": {"local": 5, "global_every": 2}}, "depth": 3}, steps=2),
    "recurrence": Run(kind="documents", model={"recurrence": {"gate_init": 0.5}, "num_kv_heads": 2}, steps=2),
    "hashed": Run(
        model={"hashed": {"groups": 2, "codes": 2, "latest": 3, "soft_until": 0}}, masked=0.3, batch_size=2, steps=2
    ),
    "hashed, soft": Run(
        seq_len=37, model={"hashed": {"groups": 2, "codes": 2, "soft_until": 37}}, masked=0.3, batch_size=2, steps=2
    ),  # two ranks have 17 and 20 tokens
    "compiled": Run(model={"compile_blocks": True, "depth": 1}, steps=2),
}
#: (ranks, settings of the strategy)
WAYS = {
    "2": (2, {}),
    "4": (4, {}),
    "4, data 2": (4, {"sequence_size": 2}),
    "4, head 2": (4, {"head_size": 2}),
    "4, head 4": (4, {"head_size": 4}),
    "2, head auto": (2, {"head_size": "auto"}),
    "2, zigzag": (2, {"layout": "zigzag"}),
    "2, strided": (2, {"layout": "strided"}),
    "2, ring": (2, {"exchange": "ring"}),
    "2, switch": (2, {"exchange": "switch"}),
    "4, nodes of 2": (4, {"exchange": "hierarchical_gather", "ranks_per_node": 2}),
}
PLAIN = ("2", "4", "4, data 2")


@pytest.fixture(scope="module")
def alone(pools):
    """Run on one rank. Results are cached for equal runs."""
    cache = {}

    def get(run):
        if repr(run) not in cache:
            cache[repr(run)] = pools(1).run(1, fit, run)[0]
        return cache[repr(run)]

    return get


def check(results, want, tol, logged=None):
    """Compare within `tol`, and logged values within `logged`, because Lightning logs in fp32 by default."""
    for rank, got in enumerate(results):
        for name in ("losses", "norms", "val_loss"):
            within = tol if name == "norms" else logged or tol
            a, b = torch.tensor(got[name], dtype=torch.float64), torch.tensor(want[name], dtype=torch.float64)
            torch.testing.assert_close(a, b, rtol=within, atol=0, msg=lambda m, n=name, r=rank: f"{n} of rank {r}: {m}")
        for name, p in want["parameters"].items():
            torch.testing.assert_close(
                got["parameters"][name], p, rtol=tol, atol=tol, msg=lambda m, n=name: f"{n}: {m}"
            )


#: one sequence on four ranks for cases that need it, two sequences on two ranks each for the others
CASES = [("plain", way) for way in (*PLAIN, "4, head 2", "4, head 4", "2, head auto")]
CASES += [(run, "4, data 2") for run in ("accumulate and clip", "masked labels", "lengths")]
CASES += [(run, "4") for run in ("ragged", "documents", "fewer tokens than ranks", "hybrid")]
CASES += [("recurrence", "2, zigzag"), ("hashed", "4, data 2"), ("hashed, soft", "2, zigzag")]
#: slow tests; test_every_exchange_and_layout covers the same layouts and exchanges
SLOW = [("plain", way) for way in ("2, zigzag", "2, strided", "2, ring", "2, switch", "4, nodes of 2")]
SLOW += [("workers", "2"), ("compiled", "2")]
SLOW += [
    (run, way)
    for run in RUNS
    for way in PLAIN
    if run not in ("workers", "compiled", "recurrence", "hashed, soft") and (run, way) not in CASES
]
SLOW.remove(("documents", "4, data 2"))  # packed documents are one sample, but two data ranks need two samples
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize("run, way", CASES)
def test_float64(pools, alone, run, way):
    ranks, settings = WAYS[way]
    chosen = RUNS[run].but(strategy=settings)
    if settings.get("sequence_size") == 2:
        chosen = chosen.but(batch_size=2 * chosen.batch_size)
    want = alone(RUNS[run].but(batch_size=chosen.batch_size))
    assert min(want["norms"]) > 0 and len(set(want["losses"])) > 1
    check(pools(ranks).run(ranks, fit, chosen), want, 1e-9)


FSDP = [
    pytest.param("plain", "2", marks=pytest.mark.slow),
    ("plain", "4, head 2"),
    ("accumulate and clip", "4, data 2"),
]
FSDP += [
    pytest.param("accumulate and clip", "2", marks=pytest.mark.slow),
    pytest.param("compiled", "2", marks=pytest.mark.slow),
    pytest.param("masked labels", "4", marks=pytest.mark.slow),
    ("masked labels", "2"),
    ("documents", "2"),
    ("fewer tokens than ranks", "4"),
    pytest.param("hashed", "2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("run, way", FSDP)
def test_sharded_parameters(pools, alone, run, way):
    ranks, settings = WAYS[way]
    rows = 2 if settings.get("sequence_size") == 2 else 1
    chosen = RUNS[run].but(double=True, batch_size=rows * RUNS[run].batch_size)
    want = alone(chosen)
    check(pools(ranks).run(ranks, fit, chosen.but(fsdp=True, strategy=settings)), want, 1e-9, 3e-7)
    assert all(n > 0 for n in want["norms"])


@pytest.mark.parametrize("way", ["4, data 2", *(pytest.param(w, marks=pytest.mark.slow) for w in PLAIN[:2])])
def test_float32(pools, alone, way):
    ranks, settings = WAYS[way]
    run = Run(steps=8, precision="32-true", batch_size=2, clip=1.0, masked=0.2)
    want = alone(run)
    for got in pools(ranks).run(ranks, fit, run.but(strategy=settings)):
        for name in ("losses", "norms", "val_loss"):
            torch.testing.assert_close(torch.tensor(got[name]), torch.tensor(want[name]), rtol=1e-6, atol=0)


LAYOUTS = ("contiguous", "zigzag", "strided")
EXCHANGES = {name: LAYOUTS for name in ("gather", "ring", "switch", "hierarchical_gather")}
EXCHANGES |= {"butterfly": LAYOUTS[:1], "hierarchical_butterfly": LAYOUTS[:1]}  # the butterflies refuse other layouts
#: a pattern for the butterflies: segments and rates double from a shard of ten tokens on
DOUBLING = {"pattern": DilatedPattern.longnet([10, 20, 40], [1, 2, 4]), "num_heads": 4}


#: all exchanges, and all layouts with gather; tests/distributed/test_equals_one_rank.py tests all pairs in the op
PAIRS = {("ring", "zigzag"), ("switch", "strided"), ("hierarchical_gather", "zigzag")}
PAIRS |= {("gather", x) for x in LAYOUTS} | {(x, "contiguous") for x in ("butterfly", "hierarchical_butterfly")}


@pytest.mark.parametrize(
    "exchange, layout",
    [
        pytest.param(e, x, marks=[] if (e, x) in PAIRS else pytest.mark.slow)
        for e, layouts in EXCHANGES.items()
        for x in layouts
    ],
)
def test_every_exchange_and_layout(pools, alone, exchange, layout):
    settings = {"exchange": exchange, "layout": layout, "ranks_per_node": 2 if "hierarchical" in exchange else None}
    run = Run(model=DOUBLING, accumulate=2, clip=0.1, masked=0.4, steps=2)
    check(pools(4).run(4, fit, run.but(strategy=settings)), alone(run), 1e-9)


@pytest.mark.parametrize("way", ("2", *(pytest.param(w, marks=pytest.mark.slow) for w in ("4", "4, data 2"))))
@pytest.mark.parametrize(
    "precision, fsdp", [("bf16-mixed", False), ("bf16-mixed", True), ("bf16-true", False), ("bf16-true", True)]
)
def test_bfloat16(pools, alone, precision, fsdp, way):
    """Ranks differ only by rounding: at most twice the difference between bfloat16 and float32."""
    ranks, settings = WAYS[way]
    run = Run(steps=5, precision=precision, batch_size=2, clip=1.0, masked=0.2)
    want = alone(run.but(precision=precision))
    rounding = 2e-3
    if precision == "bf16-mixed" or draws_alike():
        rounding = distance(want, alone(run.but(precision="32-true")))
    assert 1e-5 < rounding < 5e-2
    for got in pools(ranks).run(ranks, fit, run.but(fsdp=fsdp, strategy=settings)):
        assert distance(got, want) < 2 * rounding + 1e-3


def draws_alike():
    """Return whether random bfloat16 numbers are rounded float32 numbers, which they are not in torch 2.11."""
    drawn = [
        torch.empty(64, dtype=d).normal_(generator=torch.Generator().manual_seed(0))
        for d in (torch.bfloat16, torch.float)
    ]
    return torch.allclose(drawn[0].float(), drawn[1], rtol=1e-2, atol=1e-2)


def distance(a, b):
    """Return the largest relative difference between the losses."""
    return max(
        abs(x - y) / y for x, y in zip(a["losses"] + [a["val_loss"]], b["losses"] + [b["val_loss"]], strict=True)
    )
