"""torch's cache of cuDNN graphs ignores the strides of gradients. Results must be right after any earlier calls."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from lightning_dilated.attention import resolve
from lightning_dilated.attention.backends import ENGINES, sdpa
from lightning_dilated.pattern import DilatedPattern

from ..examples import examples
from .reference import GRADIENTS, close, error, gradients, leaves
from .strategies import Case, cases


class Forgetful:
    """Imitates torch's cuDNN backward: it reads grad and out with the strides of the first call that has equal q, k, v."""

    def __init__(self, monkeypatch, mended: bool):
        self.first, self.copies, self.handed_on, self.mended = {}, 0, 0, mended
        base, copy = ENGINES["math"], sdpa._copy
        resolve.forget()
        monkeypatch.setattr(sdpa, "_READ", {})
        monkeypatch.setattr(sdpa, "_copy", lambda *args: (setattr(self, "copies", self.copies + 1), copy(*args))[1])
        engine = replace(base, backward=lambda *call_args: self.backward(base, *call_args))
        monkeypatch.setitem(ENGINES, "cpu_flash", replace(engine, name="cpu_flash"))

    def backward(self, base, grad, q, k, v, out, *args):
        read = sdpa._with_first_strides((q, k, v), grad, out) if self.mended else (grad, out)
        if read is None:  # in the package, flash attention runs instead
            self.handed_on += 1
            return base.backward(grad, q, k, v, out, *args)
        key = tuple((x.shape, x.stride()) for x in (q, k, v))
        strides = self.first.setdefault(key, tuple(x.stride() for x in read))
        grad, out = (x.as_strided(x.shape, s) for x, s in zip(read, strides, strict=True))
        return base.backward(grad, q, k, v, out, *args)

    def worst(self, case: Case) -> float:
        q, k, v, grad = case.tensors()
        exact = leaves(q, k, v)
        got = gradients(case.run(q, k, v, engine="cpu_flash"), (q, k, v), grad)
        return max(map(error, got, gradients(case.oracle(*exact)[0], exact, grad)))


GROWS = Case(DilatedPattern([(32, 1), (128, 4)]), 1, 256, 4, 4, 8, causal=True)  # N changes strides of grad, not of q


@pytest.mark.parametrize("lengths", [(256, 320), (320, 256, 384), (256, 256)])
def test_gradients_laid_out_otherwise_than_in_the_first_call(monkeypatch, lengths):
    engine = Forgetful(monkeypatch, mended=True)
    assert max(engine.worst(GROWS.but(seq_len=n)) for n in lengths) < 1e-10
    assert (engine.copies > 0) == (len(set(lengths)) > 1)


def test_the_forgetful_engine_forgets(monkeypatch):
    engine = Forgetful(monkeypatch, mended=False)
    assert [engine.worst(GROWS.but(seq_len=n)) > 0.1 for n in (256, 320)] == [False, True]


@settings(max_examples=examples(60))
@given(cases(longest=40), cases(longest=40))
def test_random_calls_one_after_another(first, then):
    with pytest.MonkeyPatch.context() as patch:
        engine = Forgetful(patch, mended=True)
        for case in (first, then, first.but(layout=then.layout), first):
            if not case.refused():
                assert engine.worst(case) < 1e-10, case


def test_an_expanded_gradient_is_not_the_layout_of_others(monkeypatch):
    monkeypatch.setattr(sdpa, "_READ", {})
    q, whole = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    grad, out = sdpa._with_first_strides((q, q, q), torch.ones(1, 1, 1, 8).expand(2, 3, 5, 8), whole)
    assert grad.stride() == whole.stride() and torch.equal(grad, torch.ones_like(q)) and out is whole
    assert sdpa._with_first_strides((q, q, q), whole, whole) == [whole, whole]  # equal strides need no copy


@pytest.mark.parametrize("flash", [True, False])
def test_short_calls_after_a_long_one(monkeypatch, flash):
    """If flash attention is available, it runs instead of copying a gradient into a much longer gradient's layout."""
    monkeypatch.setattr(sdpa, "_flash_available", lambda device: None if flash else "not here")
    engine, long = Forgetful(monkeypatch, mended=True), GROWS.but(pattern=DilatedPattern([(16, 1)]))
    assert (
        engine.worst(long.but(seq_len=500, documents=(0, 32, 500))) < 1e-10
    )  # a gradient's heads are 500 tokens apart
    assert engine.worst(long.but(seq_len=32)) < 1e-10
    assert (engine.handed_on > 0) == flash and (engine.copies > 0) == (not flash)


def test_copies_are_said_once(monkeypatch, caplog):
    caplog.set_level("INFO", "lightning_dilated")
    sdpa._log_copies.cache_clear()
    engine = Forgetful(monkeypatch, mended=True)
    assert engine.worst(GROWS) < 1e-10 and not caplog.messages
    assert max(engine.worst(GROWS.but(seq_len=n)) for n in (320, 448, 576)) < 1e-10
    assert len(caplog.messages) == 1 and "than in an earlier call" in caplog.messages[0]


def model_gradients(model, tokens):
    """Return the gradients of the model's loss for all its parameters."""
    loss = model.token_losses({"tokens": tokens, "labels": tokens}).sum()
    return torch.autograd.grad(loss, list(model.parameters()))


def test_windows_of_heads_after_another_model(monkeypatch):
    """In head chunks, q has the strides of a narrower model's q, but the gradients have other strides."""
    from lightning_dilated import LongNetLM
    from lightning_dilated.callbacks import ActivationRecompute  # noqa: F401 - the settings are its own
    from lightning_dilated.memory.settings import MemorySettings

    torch.manual_seed(0)
    narrow, wide = (LongNetLM(GROWS.pattern, dim=8 * h, depth=1, num_heads=h, engine="cpu_flash") for h in (4, 8))
    tokens = torch.randint(0, 256, (1, 256))
    for model in (narrow, wide):
        model.configure_model()
        model.double()
    want = model_gradients(wide, tokens)
    wide.transformer.memory = replace(MemorySettings(), head_chunks=2)
    engine = Forgetful(monkeypatch, mended=True)
    model_gradients(narrow, tokens)
    for a, b in zip(model_gradients(wide, tokens), want, strict=True):
        close("a gradient of windows", a, b, 1e-9)
    assert engine.copies > 0


def agrees(case, engine="cudnn"):
    """Compare with float64 on the GPU. test_oracle_wide compares that with the oracle."""
    q, k, v, grad = case.tensors(torch.bfloat16, device="cuda")
    out, exact = case.run(q, k, v, engine=engine), leaves(q, k, v, dtype=torch.float64)
    want = case.run(*exact, engine="math")
    rows = zip(
        ("out", *GRADIENTS),
        (out, *gradients(out, (q, k, v), grad)),
        (want, *gradients(want, exact, grad.double())),
        strict=True,
    )
    for name, a, b in rows:
        close(f"{name} of {case} by {engine}", a, b, 5e-2, 1.0)


@pytest.mark.gpu
def test_gradients_laid_out_otherwise_than_before():
    """torch's own attention caches graphs of cuDNN by the strides of q, k and v, and ignores the strides of the gradient."""
    case = Case(DilatedPattern([(128, 4)]), 1, 256, 4, 4, 64, causal=True)
    for n in (256, 320, 257, 300, 310):
        agrees(case.but(seq_len=n))
    short = Case(DilatedPattern([(16, 1)]), 1, 32, 4, 4, 64, causal=True)
    agrees(short.but(seq_len=500, documents=(0, 32, 500)))
    agrees(short)  # falls back to flash attention
    case = Case(DilatedPattern([(None, 1)]), 1, 320, 4, 4, 64, causal=True)  # as in torch's own call below
    q, k, v, _ = case.tensors(torch.bfloat16, device="cuda")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        theirs = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
        theirs.backward(torch.randn(1, 320, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2))
    for x in (q, k, v):
        x.grad = None
    agrees(case)
    q, k, v, _ = case.tensors(torch.bfloat16, device="cuda")
    exact = leaves(q, k, v, dtype=torch.float64)
    got, want = case.run(q, k, v, engine="cudnn").sum(), case.run(*exact, engine="math").sum()
    rows = zip(GRADIENTS, gradients(got, (q, k, v), None), gradients(want, exact, None), strict=True)
    for name, a, b in rows:
        close(f"{name} of a sum", a, b, 2e-2, 1.0)
    agrees(case)


@pytest.mark.gpu
@settings(max_examples=examples(80), deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(longest=500), st.sampled_from(["cudnn", "flash", "triton"]), st.sampled_from([64, 48, 128]))
def test_random_calls(case, engine, head_dim):
    case = case.but(head_dim=head_dim)
    assume(not case.refused())
    agrees(case, engine)
