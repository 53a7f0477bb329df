"""Gradients equal finite differences, for any subset of inputs and when recomputed. Second order is refused."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lightning_dilated as ld
from lightning_dilated.attention import dilated_attention, op
from lightning_dilated.pattern import Branch, DilatedPattern

from .reference import GRADIENTS, close, gradients
from .strategies import Case

PATTERN = DilatedPattern([(4, 1), Branch(6, 2, shift=3), (None, 3)])
TINY = Case(PATTERN, 1, 7, 4, 4, 2)
CHECKED = {
    "no keys at all": TINY.but(pattern=DilatedPattern([Branch(4, 3, offset=2, heads=[1])]), seq_len=2),
    "one token": TINY.but(seq_len=1),
    "full": TINY,
    "causal": TINY.but(causal=True),
    "gqa": TINY.but(kv_heads=2, causal=True),
    "gqa, kv offsets": TINY.but(kv_heads=2, pattern=DilatedPattern([(4, 1), (8, 2)], offset_heads="kv")),
    "lengths": TINY.but(batch=2, seq_len=5, lengths=(0, 4), causal=True),
    "documents": TINY.but(documents=(0, 3, 3, 7)),
    "attended": TINY.but(pattern=DilatedPattern([(4, 2), (16, 4)], padding="attended")),
    "attended, lengths": TINY.but(
        pattern=DilatedPattern([(4, 2), (16, 4)], padding="attended"), batch=2, lengths=(5, 7)
    ),
}


#: cpu_flash gets few cases in CI: test_equals_oracle.py compares the gradients of all engines
FLASH = ("causal", "gqa", "attended, lengths")


@pytest.mark.parametrize(
    "name, engine",
    [
        *((name, "math") for name in CHECKED),
        *(pytest.param(x, "cpu_flash", marks=[] if x in FLASH else pytest.mark.slow) for x in CHECKED),
    ],
)
def test_gradcheck(name, engine):
    q, k, v, _ = CHECKED[name].tensors()
    assert torch.autograd.gradcheck(lambda *x: CHECKED[name].run(*x, engine=engine), (q, k, v), nondet_tol=0.0)


@pytest.mark.parametrize(
    "name", ["gqa", *(pytest.param(x, marks=pytest.mark.slow) for x in ("full", "causal", "lengths", "documents"))]
)
@pytest.mark.full
def test_gradcheck_dropout(name):
    q, k, v, _ = CHECKED[name].tensors()

    def run(*x):
        torch.manual_seed(5)  # every evaluation has to draw the same mask
        return CHECKED[name].run(*x, dropout=0.4)

    assert torch.autograd.gradcheck(run, (q, k, v), nondet_tol=0.0)


def test_lse_has_no_gradient():
    q, k, v, _ = TINY.tensors()
    out, lse = TINY.run(q, k, v, return_lse=True)
    assert out.requires_grad and not lse.requires_grad and lse.grad_fn is None
    again = TINY.run(q, k, v)
    for a, b in zip(gradients(out, (q, k, v), out), gradients(again, (q, k, v), again), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("engine", ["math", "cpu_flash"])
def test_double_backward(engine):
    q, k, v, _ = TINY.tensors()
    out = TINY.run(q, k, v, engine=engine)
    (dq,) = torch.autograd.grad((out**2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no double backward.*create_graph=True.*oracle"):
        dq.sum().backward()


@pytest.mark.parametrize("needed", ["q", "k", "v", "qk", "qv", "kv"])
def test_some_inputs(needed):
    q, k, v, grad = TINY.tensors()
    want = dict(zip("qkv", gradients(TINY.run(q, k, v), (q, k, v), grad), strict=True))
    inputs = {name: x.detach().requires_grad_(name in needed) for name, x in zip("qkv", (q, k, v), strict=True)}
    TINY.run(*inputs.values()).backward(grad)
    for name, x in inputs.items():
        assert x.grad is None if name not in needed else torch.equal(x.grad, want[name])


def test_one_tensor_for_all_three():
    # the gradients of q, k and v must add up, as in self-attention without projections
    x = torch.randn(1, 7, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: dilated_attention(x, x, x, PATTERN), (x,))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    q, k, v, _ = TINY.tensors()
    with mode():
        out = TINY.run(q, k, v)
    assert not out.requires_grad and torch.equal(out, TINY.run(q, k, v))


def test_inputs_and_gradient_are_left_alone():
    tensors = TINY.tensors()
    before = [x.detach().clone() for x in tensors]
    gradients(TINY.run(*tensors[:3]), tensors[:3], tensors[3])
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_backward_twice():
    q, k, v, grad = TINY.tensors()
    out = TINY.run(q, k, v, dropout=0.5)
    out.backward(grad, retain_graph=True)
    first = [x.grad.clone() for x in (q, k, v)]
    out.backward(grad)
    assert all(torch.equal(x.grad, 2 * one) for x, one in zip((q, k, v), first, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_checkpoint(dropout):
    """Activation recomputation draws the same dropout mask again."""
    q, k, v, grad = TINY.tensors()
    run = lambda *x: TINY.run(*x, dropout=dropout)  # noqa: E731
    torch.manual_seed(3)
    want = gradients(run(q, k, v), (q, k, v), grad)
    torch.manual_seed(3)
    out = checkpoint(run, q, k, v, use_reentrant=False)
    torch.randn(7)  # other random numbers are drawn before the backward
    for a, b in zip(gradients(out, (q, k, v), grad), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "given, want",
    [(torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16), (torch.float64, torch.float64)],
    ids=["float32", "float16", "float64"],
)
def test_autocast(given, want):
    """Autocast treats the op like torch's own attention: it casts floating-point inputs, except float64."""
    q, k, v, grad = TINY.tensors(given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = TINY.run(q, k, v, return_lse=True)
        torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert out.dtype == torchs.dtype == want
    assert lse.dtype == torch.promote_types(want, torch.float32)
    got = gradients(out, (q, k, v), grad.to(want))
    assert all(g.dtype == given for g in got)
    plain = [x.detach().to(want).requires_grad_() for x in (q, k, v)]
    want_out = TINY.run(*plain)
    assert torch.equal(out, want_out)
    for name, a, b in zip(GRADIENTS, got, gradients(want_out, tuple(plain), grad.to(want)), strict=True):
        close(name, a, b, 0.0)


def test_autocast_mixes_dtypes():
    # q comes from an fp32 norm, k and v from a bf16 projection: autocast casts them to one dtype
    q, k, v, _ = TINY.tensors(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert TINY.run(q, k.bfloat16(), v.bfloat16()).dtype == torch.bfloat16


# -- activation recomputation ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("keep", "runs"), [(False, 3), (True, 2)], ids=["recompute-all", "keep-the-op"])
def test_recomputed_block(keep: bool, runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = ld.DilatedPattern.longnet([8, 32], [1, 2])
    project = torch.nn.Linear(16, 48)
    x = torch.randn(1, 40, 16, requires_grad=True)
    calls = []
    for name in ("run_forward", "run_backward"):
        run = getattr(op, name)
        monkeypatch.setattr(op, name, lambda *args, run=run: calls.append(args) or run(*args))

    def block(x: torch.Tensor) -> torch.Tensor:
        q, k, v = project(x).unflatten(-1, (3, 2, 8)).unbind(2)
        return ld.dilated_attention(q, k, v, pattern, causal=True, dropout=0.1).flatten(2).sin()

    torch.manual_seed(3)
    want = torch.autograd.grad(block(x).sum(), x)[0]
    calls.clear()
    saved = [torch.ops.lightning_dilated.attention.default]
    options = {"context_fn": partial(create_selective_checkpoint_contexts, saved)} if keep else {}
    torch.manual_seed(3)  # the recomputation has to use the same dropout seed
    got = torch.autograd.grad(checkpoint(block, x, use_reentrant=False, **options).sum(), x)[0]
    assert torch.equal(got, want)
    assert len(calls) == runs  # forward, then the forward again if it is recomputed, then backward
