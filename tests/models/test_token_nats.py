"""The cross-entropy of each token and its gradient, with torch's passes and with passes that are compiled for GPUs."""

import contextlib
import functools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_dilated import LongNetLM, LongNetMLM
from lightning_dilated.memory import chunked_loss
from lightning_dilated.memory.chunked_loss import token_nats
from lightning_dilated.memory.settings import MemorySettings

from ..examples import examples
from . import SIZES, batch
from .test_memory_settings import PATTERN, same
from .test_token_loss import sums


@contextlib.contextmanager
def way(fused, compiled=lambda run: run):
    """Use compiled passes, as on a GPU, or torch's passes."""
    with (
        mock.patch.object(chunked_loss, "_fuses", lambda logits, requested: fused and requested),
        mock.patch.object(chunked_loss, "_compiled", compiled),
    ):
        yield


@given(st.integers(0, 9), st.integers(1, 40), st.integers(0, 2**32), st.sampled_from([1.0, 30.0]), st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_nats_are_cross_entropy(tokens, vocab, seed, scale, fused):
    """Losses equal cross_entropy with ignored labels, nearly certain tokens, and a weight for each token."""
    rng = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(tokens, vocab, dtype=torch.float64, generator=rng)).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=rng)
    labels = labels.masked_fill(torch.rand(tokens, generator=rng) < 0.3, -100)
    weights = torch.randn(tokens, dtype=torch.float64, generator=rng)
    want = nn.functional.cross_entropy(logits, labels, reduction="none")
    with way(fused):
        losses = token_nats(logits, labels, compiled=True)
        nats_grad = torch.autograd.grad((losses * weights).sum(), logits)
    same([losses, *nats_grad], [want, *torch.autograd.grad((want * weights).sum(), logits)])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype, tol", [(torch.bfloat16, 2**-7), (torch.float16, 2**-10.5)])
def test_narrow_logits(dtype, tol, fused):
    """The loss is fp32. Each gradient entry is the fp32 gradient, rounded, even 1 - p of a nearly certain token."""
    logits = (8 * torch.randn(64, 300)).to(dtype).requires_grad_()
    labels = logits.detach().argmax(-1)
    wide = logits.detach().float().requires_grad_()
    scale = 20000.0  # a loss scale, since gradients this small would be 0 in fp16
    with way(fused):
        losses, want = token_nats(logits, labels, True), nn.functional.cross_entropy(wide, labels, reduction="none")
        torch.testing.assert_close(losses, want)
        (a,), (b,) = (torch.autograd.grad(scale * x.sum(), y) for x, y in ((losses, logits), (want, wide)))
    assert a.dtype == dtype
    last = scale * 2**-22 if fused else 1e-7  # rounding of fp32 sums in a different order
    torch.testing.assert_close(a.float(), b, rtol=tol, atol=last)


@pytest.mark.parametrize("fused", [False, True])
def test_large_logits_keep_their_digits(fused):
    """The loss depends only on differences of logits, so a large offset must not cost digits."""
    logits, labels = torch.randn(20, 30), torch.randint(0, 30, (20,))
    with way(fused):
        torch.testing.assert_close(
            token_nats(logits + 1024, labels, True),
            token_nats((logits + 1024).double(), labels).float(),
            rtol=1e-6,
            atol=1e-7,
        )


@pytest.mark.parametrize("fused", [False, True])
def test_words_that_are_ruled_out(fused):
    """Logits of minus infinity exclude words: at the beginning, at the end, or every other word."""
    masks = [range(9), range(20, 30), range(0, 30, 2), range(29)]
    logits, labels = torch.randn(4, 30, dtype=torch.float64), torch.tensor([12, 3, 5, 29])
    for row, out in zip(logits, masks, strict=True):
        row[list(out)] = -torch.inf
    logits.requires_grad_()
    want = nn.functional.cross_entropy(logits, labels, reduction="none")
    with way(fused):
        losses = token_nats(logits, labels, True)
        (a,), (b,) = (torch.autograd.grad(x.sum(), logits) for x in (losses, want))
    same([losses, a], [want, b])


def test_where_passes_are_compiled():
    gpu = lambda words, on_gpu=True: SimpleNamespace(shape=(8, words), is_cuda=on_gpu)  # noqa: E731
    assert chunked_loss._fuses(gpu(1024), True)
    assert not any(chunked_loss._fuses(*x) for x in ((gpu(1024), False), (gpu(1023), True), (gpu(1024, False), True)))
    # compiled code of a user can fuse more operations itself
    with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
        assert not chunked_loss._fuses(gpu(1024), True)


@pytest.mark.parametrize("compiled", [False, True])
def test_models_say_whether_they_are_compiled(compiled, monkeypatch):
    requests, data = [], {**batch(1, 20), "index": torch.zeros(1, dtype=torch.int64)}
    monkeypatch.setattr(chunked_loss, "_fuses", lambda logits, requested: requests.append(requested))
    for kind in (LongNetLM, LongNetMLM):
        model = kind(PATTERN, **SIZES, **({"mask_fraction": 0.5} if kind is LongNetMLM else {}))
        model.configure_model()
        model.compile_blocks = compiled
        model.loss_terms(data)
    assert set(requests) == {compiled}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("label", [-1, 7, -101])
def test_labels_out_of_range(label, fused):
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"), way(fused):
        token_nats(torch.randn(2, 7), torch.tensor([0, label]), True)


@pytest.mark.parametrize("kind", [LongNetLM, LongNetMLM])
def test_models_whose_blocks_are_compiled(kind, monkeypatch):
    """If blocks are compiled, so is the loss, for every tile, also under autocast, and the results are equal."""
    torch._dynamo.reset()
    model = kind(PATTERN, **{**SIZES, "vocab_size": 300}, **({"mask_fraction": 0.5} if kind is LongNetMLM else {}))
    model.configure_model()
    data, runs = {**batch(1, 64, vocab_size=300), "index": torch.zeros(1, dtype=torch.int64)}, []

    @functools.cache
    def compiled(run):
        function = torch.compile(run, fullgraph=True, backend="aot_eager")
        return lambda *args: runs.append(run) or function(*args)

    for dtype, tol in ((None, 1e-6), (torch.bfloat16, 0.02)):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            want = sums(model, data, MemorySettings(tile=20))
            monkeypatch.setattr(model, "compile_blocks", True)
            with way(True, compiled):
                got = sums(model, data, MemorySettings(tile=20))
            monkeypatch.setattr(model, "compile_blocks", False)
        for a, b in zip(got, want, strict=True):
            assert (a - b).norm() <= tol * b.norm()
    assert {chunked_loss._sums, chunked_loss._softmax_times} == set(runs) and len(runs) % 2 == 0 and len(runs) >= 8


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tol", [(torch.float32, 2e-5), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_on_a_gpu(dtype, tol):
    """Test rows that span several blocks, new lengths, and ignored labels."""
    rng = torch.Generator("cuda").manual_seed(0)
    for tokens in (1, 64, 517, 4185):
        logits = (8 * torch.randn(tokens, 50304, device="cuda", generator=rng)).to(dtype).requires_grad_()
        labels = logits.detach().float().add(8 * torch.randn(50304, device="cuda", generator=rng)).argmax(-1)
        labels[::5] = -100
        with torch.no_grad():  # excluded words: at the beginning, at the end, or every other word
            for i, out in enumerate((slice(9000), slice(40000, None), slice(None, None, 2))):
                logits[7 + i :: 11, out] = -torch.inf
            labels = labels.where((labels < 0) | logits.gather(1, labels.clamp(min=0)[:, None])[:, 0].isfinite(), -100)
        wide = logits.detach().float().requires_grad_()
        want = nn.functional.cross_entropy(wide, labels, reduction="none")
        # the first call compiles, and its benchmarks allocate memory
        torch.autograd.grad(token_nats(logits, labels, True).sum(), logits)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        losses = token_nats(logits, labels, True)
        torch.testing.assert_close(losses, want, rtol=1e-6, atol=2e-6)
        (a,) = torch.autograd.grad(20000 * losses.sum(), logits)
        taken = torch.cuda.max_memory_allocated() - before
        (b,) = torch.autograd.grad(20000 * want.sum(), wide)
        torch.testing.assert_close(a.float(), b, rtol=tol, atol=20000 * 2**-21)  # fp32 sums in a different order
        print(f"{dtype}, {tokens} tokens: {taken / logits.nbytes:.3f} of the logits' bytes")
        assert taken < 1.02 * logits.nbytes + 2**22  # the gradient takes memory, but no second tensor of this size does


@pytest.mark.parametrize("fused", [False, True])
def test_a_double_backward_of_nats_is_refused(fused):
    logits = torch.randn(3, 7, requires_grad=True)
    with way(fused), pytest.raises(RuntimeError, match="no double backward"):
        torch.autograd.grad(token_nats(logits, torch.tensor([0, 1, 2]), True).sum(), logits, create_graph=True)
