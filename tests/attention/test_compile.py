"""torch.compile in one graph, forward and backward, and torch's own checks of the registered op."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_dilated.attention import dilated_attention
from lightning_dilated.attention.backends import engine_names
from lightning_dilated.attention.spec import encode
from lightning_dilated.pattern import Branch, DilatedPattern

from .reference import GRADIENTS, close, gradients
from .strategies import Case

pytestmark = pytest.mark.full

CASE = Case(DilatedPattern([(4, 1), Branch(8, 2, shift=3)]), 2, 21, 4, 4, 8)
CASES = {
    "full": CASE,
    "causal gqa": CASE.but(causal=True, kv_heads=2),
    "fused": CASE.but(layout="fused"),
    "lengths": CASE.but(lengths=(21, 5)),
    "documents": CASE.but(batch=1, documents=(0, 9, 9, 21), causal=True),
    "attended": CASE.but(pattern=DilatedPattern([(4, 2), (32, 4)], padding="attended", offsets="blocked")),
}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CASES)
def test_one_graph(name):
    case = CASES[name]
    q, k, v, grad = case.tensors(torch.float32)
    options = case.options()

    def run(q, k, v):
        out, lse = dilated_attention(q * 1.0, k, v, case.pattern, return_lse=True, **options)
        return out * 2.0, lse

    want, want_lse = run(q, k, v)
    out, lse = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.equal(out, want) and torch.equal(lse, want_lse) and not lse.requires_grad
    for a, b in zip(gradients(out, (q, k, v), grad), gradients(want, (q, k, v), grad), strict=True):
        assert torch.equal(a, b)


def test_inductor():
    case = CASES["causal gqa"]
    q, k, v, grad = case.tensors(torch.float32)
    run = lambda q, k, v: case.run(q.sin(), k, v) * 2.0  # noqa: E731
    want = run(q, k, v)
    out = torch.compile(run, fullgraph=True)(q, k, v)
    close("out", out, want, 1e-6)
    for name, a, b in zip(GRADIENTS, gradients(out, (q, k, v), grad), gradients(want, (q, k, v), grad), strict=True):
        close(name, a, b, 1e-6)


def test_lengths_as_an_input():
    # each batch has other lengths: their values must not be constants of the graph, and must not cause recompilation
    case = CASE.but(lengths=(21, 5))
    q, k, v, _ = case.tensors(torch.float32)
    counter = torch._dynamo.testing.CompileCounter()
    run = torch.compile(
        lambda q, k, v, n: dilated_attention(q, k, v, case.pattern, lengths=n), fullgraph=True, backend=counter
    )
    for lengths in ((21, 5), (0, 21), (7, 7)):
        assert torch.equal(run(q, k, v, torch.tensor(lengths)), case.but(lengths=lengths).run(q, k, v))
    assert counter.frame_count == 1


def test_any_length_in_one_graph():
    run = torch.compile(
        lambda q, k, v: dilated_attention(q, k, v, CASE.pattern), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for n in (21, 8, 40):
        q, k, v, grad = CASE.but(seq_len=n).tensors(torch.float32)
        out, want = run(q, k, v), dilated_attention(q, k, v, CASE.pattern)
        assert torch.equal(out, want)
        for a, b in zip(gradients(out, (q, k, v), grad), gradients(want, (q, k, v), grad), strict=True):
            assert torch.equal(a, b)


# no case of backend="eager" with checkpoint, where even torch's own dropout draws a different mask
@pytest.mark.parametrize(
    "backend, recompute",
    [("eager", False), ("aot_eager", False), ("aot_eager", True), ("inductor", True)],
    ids=["eager", "aot_eager", "aot_eager, checkpoint", "inductor, checkpoint"],
)
def test_dropout(backend, recompute):
    """The output is linear in v, so (dv * v).sum() == (out * grad).sum() if both passes use the same mask."""
    q, k, v, grad = CASE.tensors()

    def block(q, k, v):
        return dilated_attention(q.sin(), k, v, CASE.pattern, dropout=0.5)

    run = (lambda *x: checkpoint(block, *x, use_reentrant=False)) if recompute else block
    run = torch.compile(run, fullgraph=True, backend=backend)
    outs = []
    for _ in range(2):
        out = run(q, k, v)
        _, _, dv = gradients(out, (q, k, v), grad)
        torch.testing.assert_close((dv * v).sum(), (out * grad).sum(), rtol=1e-10, atol=1e-10)
        outs.append(out)
    assert not torch.equal(*outs)  # the seed is drawn in every call, not once at compilation


def test_autocast():
    q, k, v, _ = CASE.tensors(torch.float32)

    def run(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return dilated_attention(q, k, v, CASE.pattern)

    out = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    assert out.dtype == torch.bfloat16 and torch.equal(out, run(q, k, v))


def opcheck(case, seed=None, dropout=0.0, engine="auto"):
    q, k, v, _ = case.tensors(torch.float32)
    documents = (case.options()["lengths"], case.options()["cu_seqlens"])
    args = (q, k, v, *documents, seed, encode(case.pattern, case.causal, 0.3, dropout, engine, needs_grad=True))
    torch.library.opcheck(torch.ops.lightning_dilated.attention, args)


@pytest.mark.parametrize("engine", ["math", "auto"])
@pytest.mark.parametrize("name", CASES)
def test_opcheck(name, engine):
    opcheck(CASES[name], engine=engine)


def test_opcheck_dropout():
    opcheck(CASE, seed=torch.tensor(7), dropout=0.5)


@pytest.mark.parametrize("engine", engine_names())
def test_meta(engine):
    """Any engine accepts meta tensors, even if its own device is missing."""
    q, k = torch.empty(2, 21, 4, 8, device="meta", dtype=torch.bfloat16), torch.empty(2, 21, 2, 8, device="meta")
    k = k.bfloat16().requires_grad_()
    out, lse = dilated_attention(q, k, k, CASE.pattern, return_lse=True, engine=engine)
    assert out.device.type == "meta" and out.shape == q.shape and out.dtype == q.dtype
    assert lse.shape == (2, 4, 21) and lse.dtype == torch.float32
    out.sum().backward()
    assert k.grad.shape == k.shape
