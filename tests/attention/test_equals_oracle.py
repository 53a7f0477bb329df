"""Random calls of dilated_attention against the oracle: every CPU engine and dtype, forward and gradients."""

import pytest
import torch
from hypothesis import assume, given, seed, settings

from lightning_dilated.attention import dilated_attention
from lightning_dilated.attention.backends import ENGINES as registry
from lightning_dilated.attention.backends.base import Request
from lightning_dilated.pattern import DilatedPattern

from ..examples import examples, scale
from .reference import GRADIENTS, close, close_lse, error, gradients, leaves, oracle, plain
from .strategies import LAYOUTS, Case, cases

CALL = Request.of(torch.zeros(1, 1, 1, 8))
ENGINES = (*(name for name, engine in registry.items() if engine.why_not(CALL) is None), "auto")


def check(case: Case, engine: str, dtype: torch.dtype, tol: float) -> torch.Tensor:
    """Compare all results of one call with the oracle. Return the rows without a key, (B, H, N)."""
    q, k, v, grad = case.tensors(dtype)
    out, lse = case.run(q, k, v, engine=engine, return_lse=True)
    got = gradients(out, (q, k, v), grad)

    exact = leaves(q, k, v, dtype=torch.float64)
    want_out, want_lse = case.oracle(*exact)
    want = gradients(want_out, exact, grad.double())

    assert out.dtype == dtype and lse.dtype == torch.promote_types(dtype, torch.float32)
    close(f"out of {case}", out, want_out, tol)
    close_lse(f"lse of {case}", lse, want_lse, tol)
    for name, a, b in zip(GRADIENTS, got, want, strict=True):
        # dq with few keys is a difference of products of size 1, and has the rounding errors of these products
        close(f"{name} of {case}", a, b, tol, floor=1e-2 if dtype == torch.float64 else 1.0)

    bare = lse == -torch.inf
    assert (out.transpose(1, 2)[bare] == 0).all() and (got[0].transpose(1, 2)[bare] == 0).all()
    return bare


@pytest.mark.parametrize(
    "dtype, tol, number", [(torch.float64, 1e-10, 300), (torch.float32, 1e-5, 150)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("share", [0.5, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", ENGINES)
def test_random(engine, dtype, tol, number, share):
    bare_rows, covered_rows = [], []

    @seed(ENGINES.index(engine))  # each engine draws its own examples
    @settings(max_examples=examples(share * number))
    @given(cases())
    def random(case):
        bare = check(case, engine, dtype, tol)
        bare_rows.append(int(bare.sum()))
        covered_rows.append(int((~bare).sum()))

    random()
    enough = 1000 * min(1, scale())
    assert sum(bare_rows) > enough and sum(covered_rows) > enough


@pytest.mark.parametrize("share", [0.5, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", ENGINES)
def test_random_attended(engine, share):
    refused, with_pads = [], []

    @seed(ENGINES.index(engine))
    @settings(max_examples=max(60, examples(share * 150)))  # fewer examples could contain no pads
    @given(cases(padding="attended"))
    def random(case):
        refused.append(case.refused())
        if case.refused():
            q, k, v, _ = case.tensors()
            with pytest.raises(ValueError, match=r"branches\[\d\].*not a multiple of.*Use padding='masked'"):
                case.run(q, k, v, engine=engine)
        else:
            check(case, engine, torch.float64, 1e-10)
            with_pads.append(bool(case.counts()[1].any()))

    random()
    assert any(refused) and any(with_pads)


@pytest.mark.parametrize("share", [0.5, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("engine", ENGINES)
def test_random_low_precision(engine, dtype, share):
    """The error is at most twice a plain softmax's in the same dtype, plus the rounding of the result.

    Gradients may have two roundings: an engine's backward reads the rounded output, and the backward of a softmax does
    not.
    """

    @seed(ENGINES.index(engine))
    @settings(max_examples=examples(share * 80))
    @given(cases())
    def random(case):
        # with a single key, q and k have no gradient, and the plain softmax has the exact weight 1, so its error is 0
        assume(all(b.width != 1 for b in case.pattern.branches))
        q, k, v, grad = case.tensors(dtype)
        out = case.run(q, k, v, engine=engine)
        exact, rough = leaves(q, k, v, dtype=torch.float64), leaves(q, k, v)
        want, _ = case.oracle(*exact)
        scale = case.head_dim**-0.5 if case.scale is None else case.scale
        rounded = plain(*rough, *case.counts(), scale)
        names = ("out", *GRADIENTS)
        ours = (out, *gradients(out, (q, k, v), grad))
        truth = (want, *gradients(want, exact, grad.double()))
        theirs = (rounded, *gradients(rounded, rough, grad))
        for name, a, b, c in zip(names, ours, truth, theirs, strict=True):
            allowed = 2 * error(c, b, 1.0) + (1 if name == "out" else 2) * torch.finfo(dtype).eps
            close(f"{name} of {case}", a, b, allowed, 1.0)

    random()


@pytest.mark.parametrize("engine", ["math", "cpu_flash"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True, "kv_heads": 2},
        {"batch": 3, "seq_len": 48, "kv_heads": 3},
        {"batch": 3, "lengths": (50, 0, 31), "causal": True},
        {"documents": (0, 0, 7, 7, 31, 50)},
    ],
    ids=["plain", "causal gqa", "fold", "lengths", "documents"],
)
def test_layout(layout, changes, engine):
    # combine every layout with every kind of call; random cases cover the combinations only by chance
    case = Case(DilatedPattern.longnet([8, 24, 48], [1, 2, 3]), 1, 50, 6, 6, 8, layout=layout).but(**changes)
    check(case, engine, torch.float64, 1e-10)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("scale", [0, -0.7, 1e-30, 30.0], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_any_finite_scale(engine, scale, causal):
    """With scale <= 0, kernels that mask before they scale turn -inf into NaN or +inf, so they must refuse."""
    case = Case(DilatedPattern.longnet([8, 32], [1, 2]), 1, 32, 2, 2, 8, causal=causal, scale=scale)
    if scale <= 0 and engine != "auto" and not registry[engine].any_scale:
        with pytest.raises(ValueError, match=f"{engine} takes a scale above 0, not {scale}.*Use engine='math'"):
            check(case, engine, torch.float64, 1e-10)
    else:
        check(case, engine, torch.float64, 1e-10)


@pytest.mark.parametrize("engine", ENGINES)
def test_scores_far_beyond_exp(engine):
    """Scores in the thousands overflow exp in every dtype, so each merge must subtract its maximum first."""
    case = Case(DilatedPattern.longnet([8, 32], [1, 2]), 1, 32, 2, 2, 8, scale=1000.0)
    check(case, engine, torch.float64, 1e-7)  # large scores make weights imprecise; gradients scale up


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_branches_are_summed_in_fp32(dtype):
    """With twelve branches the result is rounded once: sums over branches are never rounded to the inputs' dtype."""
    pattern = DilatedPattern([(w, 1) for w in range(20, 32)])
    q, k, v, grad = Case(pattern, 1, 64, 2, 1, 16).tensors(dtype)
    exact = leaves(q, k, v, dtype=torch.float64)
    out = dilated_attention(q, k, v, pattern, engine="math")
    want, _ = oracle(*exact, pattern)
    half_a_step = 0.51 * torch.finfo(dtype).eps
    close("out", out, want, half_a_step)
    close("dv", gradients(out, (q, k, v), grad)[2], gradients(want, exact, grad.double())[2], half_a_step)
